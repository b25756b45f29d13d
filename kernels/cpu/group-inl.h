// One work item of the verify kernels, unpacked, and what brings its inputs to FP32: committed
// records, the drafts' tokens, which are appended to the ring on the way.
// (Included once per instruction set: Highway's toggling include guard.)
#if defined(SSMD_KERNELS_CPU_GROUP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SSMD_KERNELS_CPU_GROUP_INL_H_
#undef SSMD_KERNELS_CPU_GROUP_INL_H_
#else
#define SSMD_KERNELS_CPU_GROUP_INL_H_
#endif

#include <cmath>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/cpu/convert-inl.h"
#include "kernels/cpu/products-inl.h"
#include "kernels/cpu/verify_kernel.h"
#include "kernels/cpu/verify_scratch.h"

HWY_BEFORE_NAMESPACE();
namespace ssmd::cpu::HWY_NAMESPACE {

// One item, unpacked. Counts of tokens: T drafts, h committed records, n of them to fold.
struct Group {
  const GroupItem& item;
  VerifyScratch& scratch;
  const LayerShape& shape = *item.shape;
  const Formats& formats = *item.formats;
  const RingLayout& ring = *item.ring_layout;
  const size_t T = item.draft_tokens;
  const size_t h = item.tail - item.base;
  const size_t n = item.fold_to - item.base;  // of a fold or replay only
  const size_t d_k = shape.d_k;
  const size_t d_v = shape.d_v;
  const size_t d_v_padded = RoundUp(shape.d_v, 16);
  const bool delta_rule = shape.is_delta_rule();
  const bool channelwise = shape.family == Family::kKda;
  const size_t vectors = delta_rule ? 2 * T : T;  // q_1..q_T, k_1..k_T
  const size_t first_row = RingRow(item.base, ring.ring_records);
  const size_t record_stride = RoundUp(h + T, 16);  // of the [m][j] arrays
  const size_t square_stride = RoundUp(h, 16);      // of the [j][i] arrays
  const Dtype value_dtype = delta_rule ? formats.correction : formats.activation;
  const bool records_targets = delta_rule && formats.two_precision();
  bool rederives = false;  // committed u come from HP, not from their records
  uint32_t flags = kPoisonNone;

  // The row of one component that holds the record of `base + j`; h + T never passes the ring.
  std::byte* Row(const RingComponent& component, size_t j) const {
    const size_t row = first_row + j;
    const size_t wrapped = row < ring.ring_records ? row : row - ring.ring_records;
    return item.ring + component.offset_bytes + wrapped * component.row_bytes;
  }
  float* Floats(const RingComponent& component, size_t j, size_t index) const {
    return reinterpret_cast<float*>(Row(component, j)) + index;
  }
  void FlagUnless(bool good, PoisonFlags flag) {
    if (!good) flags |= flag;
  }
};

HWY_INLINE void LoadCommittedKeys(Group& g) {
  const size_t first = g.item.group * g.d_k * DtypeBytes(g.formats.activation);
  for (size_t j = 0; j < g.h; ++j) {
    Widen(g.formats.activation, g.Row(g.ring.key, j) + first, g.d_k, g.scratch.keys + j * g.d_k);
  }
}

HWY_INLINE void LoadGroup(Group& g) {
  VerifyScratch& scratch = g.scratch;
  LoadCommittedKeys(g);
  const size_t key_bytes = g.d_k * DtypeBytes(g.formats.activation);
  const size_t token_bytes = key_bytes * g.shape.key_group_count;
  for (size_t s = 0; s < g.T; ++s) {
    const size_t at = s * token_bytes + g.item.group * key_bytes;
    const auto* q = static_cast<const std::byte*>(g.item.inputs.q) + at;
    const auto* k = static_cast<const std::byte*>(g.item.inputs.k) + at;
    std::memcpy(g.Row(g.ring.key, g.h + s) + g.item.group * key_bytes, k, key_bytes);
    float* key = scratch.keys + (g.h + s) * g.d_k;
    Widen(g.formats.activation, q, g.d_k, scratch.x + s * g.d_k);
    Widen(g.formats.activation, k, g.d_k, key);
    if (g.delta_rule) std::memcpy(scratch.x + (g.T + s) * g.d_k, key, g.d_k * sizeof(float));
    g.FlagUnless(AllFinite(key, g.d_k), kPoisonInput);
  }
  g.FlagUnless(AllFinite(scratch.x, g.T * g.d_k), kPoisonInput);
  if (g.channelwise) return;  // their decays sit between k and x: per head
  for (size_t j = 0; j < g.h + g.T; j += kRowBlock) {
    DotRows(scratch.keys + j * g.d_k, scratch.x, g.vectors, g.d_k, scratch.dots + j,
            g.record_stride);
  }
}

// Committed u of one head to FP32 (unless re-derived), and for scalar decays the sums of their
// logs.
HWY_INLINE void LoadCommittedHead(Group& g, size_t head) {
  const size_t first = head * g.d_v * DtypeBytes(g.value_dtype);
  for (size_t j = 0; j < g.h && !g.rederives; ++j) {
    float* u = g.scratch.u + j * g.d_v_padded;
    Widen(g.value_dtype, g.Row(g.ring.value, j) + first, g.d_v, u);
    if (!g.delta_rule) Scale(*g.Floats(g.ring.value_scale, j, head), u, g.d_v_padded, u);
  }
  if (g.channelwise) return;
  double sum = 0;
  for (size_t j = 0; j < g.h; ++j)
    g.scratch.log_decay[j] = sum += *g.Floats(g.ring.log_alpha, j, head);
}

// Appends what is known of the drafts before the pass: decays, and Mamba-2's x and dt.
HWY_INLINE void AppendDrafts(Group& g, size_t head) {
  const VerifyInputs& inputs = g.item.inputs;
  const size_t decays = g.shape.decays_per_head();
  for (size_t s = 0; s < g.T; ++s) {
    const size_t token_head = s * g.shape.head_count + head;
    const float* log_alpha = inputs.log_alpha + token_head * decays;
    std::memcpy(g.Floats(g.ring.log_alpha, g.h + s, head * decays), log_alpha,
                decays * sizeof(float));
    for (size_t i = 0; i < decays; ++i) {
      g.FlagUnless(std::isfinite(log_alpha[i]), kPoisonInput);
      g.FlagUnless(!(log_alpha[i] > 0), kPoisonDecay);
    }
    if (g.delta_rule) {
      g.FlagUnless(std::isfinite(inputs.beta[token_head]), kPoisonInput);
      if (g.records_targets) {
        const size_t target_bytes = g.d_v * DtypeBytes(g.formats.activation);
        std::memcpy(g.Row(g.ring.target, g.h + s) + head * target_bytes,
                    static_cast<const std::byte*>(inputs.v) + token_head * target_bytes,
                    target_bytes);
        *g.Floats(g.ring.beta, g.h + s, head) = inputs.beta[token_head];
      }
      continue;
    }
    const float value_scale = inputs.value_scale ? inputs.value_scale[token_head] : 1.0f;
    *g.Floats(g.ring.value_scale, g.h + s, head) = value_scale;
    const size_t value_bytes = g.d_v * DtypeBytes(g.value_dtype);
    const auto* x = static_cast<const std::byte*>(inputs.v) + token_head * value_bytes;
    std::memcpy(g.Row(g.ring.value, g.h + s) + head * value_bytes, x, value_bytes);
    float* u = g.scratch.u + (g.h + s) * g.d_v_padded;
    Widen(g.value_dtype, x, g.d_v, u);
    g.FlagUnless(AllFinite(u, g.d_v) && std::isfinite(value_scale), kPoisonInput);
    Scale(value_scale, u, g.d_v_padded, u);
  }
}

}  // namespace ssmd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
