// The equations are in verify_kernel.h. Order of work for one key group:
//   LoadGroup        q, k to FP32; draft keys appended to the ring; k_j . x_m once for all heads
//   per head:
//     LoadHead       committed u (Mamba-2: dt x) to FP32; the drafts' decays appended
//     Weigh...       W, A and the decayed vectors x~ = (q~, k~), per decay kind
//     WeighRecords   A among the committed records, where their u is re-derived
//     PassOverState  S x~ for all x~, the re-derived u, and S' for a folding row, block by block
//     SolveDrafts    u of the drafts, rounded and appended (delta rules)
//     WriteOutputs
// The file is compiled once per instruction set (scalar, SSE4, AVX2, AVX-512); the best one is
// chosen at run time.
#include "kernels/cpu/verify_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "hwy/cache_control.h"
#include "kernels/check.h"
#include "kernels/cpu/flush_denormals.h"
#include "kernels/cpu/verify_scratch.h"

// Scalable vectors cannot be array elements (products-inl.h); such machines use their fixed sets.
// SSSE3 is left out because machines with it but without SSE4 are long gone.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/verify_kernel.cc"
#include "hwy/foreach_target.h"
// Highway wants foreach_target before highway.h.
#include "hwy/highway.h"
#include "kernels/cpu/convert-inl.h"
#include "kernels/cpu/products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ssmd::cpu::HWY_NAMESPACE {

// How far ahead of the dot products the checkpoint is fetched. At T = 1, 8 KiB is some 10 % faster
// than none, and 32 KiB or more gain less. Fetching records ahead as well was no faster.
inline constexpr size_t kPrefetchBytes = 8192;

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

// W and A of one head with a scalar decay: the group's dots times gamma_{j+1:h+s}.
HWY_INLINE void WeighScalar(Group& g, size_t head) {
  VerifyScratch& scratch = g.scratch;
  double sum = g.h == 0 ? 0.0 : scratch.log_decay[g.h - 1];
  for (size_t s = 0; s < g.T; ++s) {
    const size_t last = g.h + s;
    scratch.log_decay[last] = sum += g.item.inputs.log_alpha[s * g.shape.head_count + head];
    for (size_t j = 0; j <= last; ++j)
      scratch.exponent[j] = static_cast<float>(sum - scratch.log_decay[j]);
    ExpOfLogDecay(scratch.exponent, last + 1);
    for (size_t m = s; m < g.vectors; m += g.T) {
      const size_t row = m * g.record_stride;
      Multiply(scratch.dots + row, scratch.exponent, RoundUp(last + 1, 16), scratch.weight + row);
    }
  }
}

// decayed[j] := gamma_{j+1:end} * k_j for j < end, and gamma := gamma_{1:end}, channelwise.
HWY_INLINE void DecayKeys(Group& g, size_t head, size_t end, float* decayed, float* gamma) {
  VerifyScratch& scratch = g.scratch;
  std::fill_n(scratch.channel_sum, g.d_k, 0.0);
  for (size_t j = end; j-- > 0;) {
    ExpOfSum(scratch.channel_sum, g.d_k, scratch.decay);
    Multiply(scratch.keys + j * g.d_k, scratch.decay, g.d_k, decayed + j * g.d_k);
    AddLogDecay(g.Floats(g.ring.log_alpha, j, head * g.d_k), g.d_k, scratch.channel_sum);
  }
  ExpOfSum(scratch.channel_sum, g.d_k, gamma);
}

// W and A of one head with a channelwise decay. A committed key carries gamma_{j+1:h}, a vector
// gamma_{h+1:h+s}; among the drafts each vector walks back, one alpha at a time.
HWY_INLINE void WeighChannelwise(Group& g, size_t head) {
  VerifyScratch& scratch = g.scratch;
  const size_t d_k = g.d_k;
  std::fill_n(scratch.channel_sum, d_k, 0.0);
  for (size_t s = 0; s < g.T; ++s) {
    const float* log_alpha = g.item.inputs.log_alpha + (s * g.shape.head_count + head) * d_k;
    std::memcpy(scratch.draft_alpha + s * d_k, log_alpha, d_k * sizeof(float));
    ExpOfLogDecay(scratch.draft_alpha + s * d_k, d_k);
    AddLogDecay(log_alpha, d_k, scratch.channel_sum);
    ExpOfSum(scratch.channel_sum, d_k, scratch.decay);
    for (size_t m = s; m < 2 * g.T; m += g.T) {
      const float* x = scratch.x + m * d_k;
      Multiply(x, scratch.decay, d_k, scratch.decayed_x + m * d_k);
      std::memcpy(scratch.walked, x, d_k * sizeof(float));
      for (size_t j = s + 1; j-- > 0;) {
        scratch.weight[m * g.record_stride + g.h + j] =
            Dot(scratch.keys + (g.h + j) * d_k, scratch.walked, d_k);
        Multiply(scratch.walked, scratch.draft_alpha + j * d_k, d_k, scratch.walked);
      }
    }
  }
  // Whole blocks of four: what lies beyond h goes to `dots`, of which only j < h is copied.
  DecayKeys(g, head, g.h, scratch.decayed_keys, scratch.decay);
  for (size_t j = 0; j < g.h; j += kRowBlock) {
    DotRows(scratch.decayed_keys + j * d_k, scratch.decayed_x, g.vectors, d_k, scratch.dots + j,
            g.record_stride);
  }
  for (size_t m = 0; m < g.vectors; ++m) {
    const size_t row = m * g.record_stride;
    std::memcpy(scratch.weight + row, scratch.dots + row, g.h * sizeof(float));
    Multiply(scratch.decayed_x + m * d_k, scratch.decay, d_k, scratch.decayed_x + m * d_k);
  }
}

// k_i . k_j of the committed records, where scalar decays re-derive u; once for all heads.
HWY_NOINLINE void DotRecords(Group& g) {
  if (!g.rederives || g.channelwise) return;
  for (size_t i = 0; i < g.h; i += kRowBlock) {
    DotRows(g.scratch.keys + i * g.d_k, g.scratch.keys, g.h, g.d_k, g.scratch.record_dots + i,
            g.square_stride);
  }
}

// A_ij = k_i^T (gamma_{i+1:j} * k_j) for i < j < h, and what makes S k~_j of S x_j.
HWY_NOINLINE void WeighRecords(Group& g, size_t head) {
  VerifyScratch& scratch = g.scratch;
  if (!g.channelwise) {
    for (size_t j = 0; j < g.h; ++j) {
      const size_t row = j * g.square_stride;
      for (size_t i = 0; i <= j; ++i)
        scratch.exponent[i] = static_cast<float>(scratch.log_decay[j] - scratch.log_decay[i]);
      ExpOfLogDecay(scratch.exponent, j + 1);
      Multiply(scratch.record_dots + row, scratch.exponent, j, scratch.record_weight + row);
      scratch.read_scale[j] = static_cast<float>(scratch.log_decay[j]);
    }
    ExpOfLogDecay(scratch.read_scale, g.h);
    return;
  }
  const size_t d_k = g.d_k;
  std::fill_n(scratch.channel_sum, d_k, 0.0);
  for (size_t j = 0; j < g.h; ++j) {
    const float* log_alpha = g.Floats(g.ring.log_alpha, j, head * d_k);
    std::memcpy(scratch.record_alpha + j * d_k, log_alpha, d_k * sizeof(float));
    ExpOfLogDecay(scratch.record_alpha + j * d_k, d_k);
    AddLogDecay(log_alpha, d_k, scratch.channel_sum);
    ExpOfSum(scratch.channel_sum, d_k, scratch.decay);
    Multiply(scratch.keys + j * d_k, scratch.decay, d_k, scratch.record_x + j * d_k);
    std::memcpy(scratch.walked, scratch.keys + j * d_k, d_k * sizeof(float));
    for (size_t i = j; i-- > 0;) {
      Multiply(scratch.walked, scratch.record_alpha + (i + 1) * d_k, d_k, scratch.walked);
      scratch.record_weight[j * g.square_stride + i] =
          Dot(scratch.keys + i * d_k, scratch.walked, d_k);
    }
    scratch.read_scale[j] = 1;
  }
}

// u of all committed records for state rows [v, v + width), in place of S x_j.
HWY_NOINLINE void SolveRecords(Group& g, size_t head, size_t v, size_t width) {
  VerifyScratch& scratch = g.scratch;
  const Tag d;
  const size_t first = (head * g.d_v + v) * DtypeBytes(g.formats.activation);
  for (size_t j = 0; j < g.h; ++j) {
    Widen(g.formats.activation, g.Row(g.ring.target, j) + first, width, scratch.target);
    const auto beta = hn::Set(d, *g.Floats(g.ring.beta, j, head));
    const auto scale = hn::Set(d, scratch.read_scale[j]);
    const float* weight = scratch.record_weight + j * g.square_stride;
    for (size_t r = 0; r < kSolveRows; r += hn::Lanes(d)) {
      float* u = scratch.u + v + r;
      auto read = hn::Mul(scale, hn::LoadU(d, u + j * g.d_v_padded));
      for (size_t i = 0; i < j; ++i)
        read = hn::MulAdd(hn::Set(d, weight[i]), hn::LoadU(d, u + i * g.d_v_padded), read);
      hn::StoreU(hn::Mul(beta, hn::Sub(hn::LoadU(d, scratch.target + r), read)), d,
                 u + j * g.d_v_padded);
    }
  }
}

// S' = gamma S + sum_j u_j k_j^T with the decays of each record on its u (scalar) or key
// (channels).
struct FoldOperands {
  const float* gamma;
  const float* u;
  const float* keys;
};

HWY_INLINE FoldOperands PrepareFold(Group& g, size_t head) {
  VerifyScratch& scratch = g.scratch;
  if (g.channelwise) {
    DecayKeys(g, head, g.n, scratch.fold_keys, scratch.gamma);
    return {scratch.gamma, scratch.u, scratch.fold_keys};
  }
  const double total = g.n == 0 ? 0.0 : scratch.log_decay[g.n - 1];
  for (size_t j = 0; j < g.n; ++j)
    scratch.exponent[j] = static_cast<float>(total - scratch.log_decay[j]);
  ExpOfLogDecay(scratch.exponent, g.n);
  for (size_t j = 0; j < g.n && !g.rederives; ++j) {  // re-derived u are not there yet
    const size_t row = j * g.d_v_padded;
    Scale(scratch.exponent[j], scratch.u + row, g.d_v_padded, scratch.fold_u + row);
  }
  std::fill_n(scratch.gamma, 16, static_cast<float>(total));
  ExpOfLogDecay(scratch.gamma, 16);
  std::fill_n(scratch.gamma, g.d_k, scratch.gamma[0]);
  return {scratch.gamma, scratch.fold_u, scratch.keys};
}

// Where one head of S' goes.
struct Destination {
  std::byte* hp = nullptr;  // null: nowhere
  std::byte* lp = nullptr;
  Dtype hp_dtype = Dtype::kFp32;
  RoundingStream rounding = {};
  uint32_t head = 0;
  bool direct() const { return hp_dtype == Dtype::kFp32 && lp == nullptr; }
};

HWY_INLINE Destination TargetsOf(const Group& g, size_t head) {
  const size_t first = head * g.d_v * g.d_k;
  Destination to;
  if (g.item.target_hp == nullptr) return to;
  to.hp_dtype = g.formats.checkpoint_hp;
  to.hp = g.item.target_hp + first * DtypeBytes(to.hp_dtype);
  if (g.formats.two_precision())
    to.lp = g.item.target_lp + first * DtypeBytes(g.formats.checkpoint_lp);
  if (to.hp_dtype != Dtype::kFp32) to.rounding = MakeRoundingStream(g.item.rounding);
  to.head = static_cast<uint32_t>(head);
  return to;
}

// Writes `count` elements of S', from `element` of the head on: both copies from the same FP32
// values.
HWY_NOINLINE void StoreElements(Group& g, const Destination& to, const float* values,
                                size_t element, size_t count) {
  const Tag d;
  float finite_max = std::numeric_limits<float>::max();
  auto* hp = reinterpret_cast<float*>(to.hp) + element;
  if (to.hp_dtype == Dtype::kFp32 &&
      reinterpret_cast<uintptr_t>(hp) % (hn::Lanes(d) * sizeof(float)) == 0) {
    for (size_t i = 0; i < count; i += hn::Lanes(d))
      hn::Stream(hn::LoadU(d, values + i), d, hp + i);
  } else if (to.hp_dtype == Dtype::kFp32) {
    std::memcpy(hp, values, count * sizeof(float));
  } else {
    NarrowStochastic(values, count, to.rounding, to.head, element,
                     to.hp + element * sizeof(uint16_t));
    finite_max = 65504.0f;
  }
  if (to.lp != nullptr) {
    Narrow(g.formats.checkpoint_lp, values, count, to.lp + element * sizeof(uint16_t));
    finite_max = std::min(finite_max, 65519.996f);  // 65520 rounds to infinity
  }
  const auto limit = hn::Set(d, finite_max);
  auto good = hn::Eq(limit, limit);  // NaN is at most nothing
  for (size_t i = 0; i < count; i += hn::Lanes(d))
    good = hn::And(good, hn::Le(hn::Abs(hn::LoadU(d, values + i)), limit));
  g.FlagUnless(hn::AllTrue(d, good), kPoisonOverflow);
}

// Four rows of S', from row v on.
HWY_INLINE Vector FoldRows(Group& g, const FoldOperands& fold, const float* rows, size_t v,
                           const Destination& to, Vector probe) {
  const size_t lanes = hn::Lanes(Tag());
  float* target = to.direct() ? reinterpret_cast<float*>(to.hp) + v * g.d_k : g.scratch.folded;
  const bool aligned =
      to.direct() && reinterpret_cast<uintptr_t>(target) % (lanes * sizeof(float)) == 0;
  size_t i = 0;
  for (; i + kVectorBlock * lanes <= g.d_k; i += kVectorBlock * lanes) {
    probe = FoldBlock<kVectorBlock>(rows + i, fold.gamma + i, fold.u + v, g.d_v_padded,
                                    fold.keys + i, g.n, g.d_k, target + i, aligned, probe);
  }
  for (; i < g.d_k; i += lanes) {
    probe = FoldBlock<1>(rows + i, fold.gamma + i, fold.u + v, g.d_v_padded, fold.keys + i, g.n,
                         g.d_k, target + i, aligned, probe);
  }
  if (!to.direct()) StoreElements(g, to, target, v * g.d_k, kRowBlock * g.d_k);
  return probe;
}

HWY_INLINE void Prefetch(const std::byte* from, const std::byte* end, size_t bytes) {
  for (size_t i = 0; i < bytes && from + i < end; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// Four rows of the checkpoint in FP32; stay good while rows v .. v + kSolveRows - 1 are worked on.
HWY_INLINE const float* RowsAt(const Group& g, size_t head, size_t v) {
  if (g.item.source_dtype == Dtype::kFp32)
    return reinterpret_cast<const float*>(g.item.source) + (head * g.d_v + v) * g.d_k;
  return g.scratch.rows + v % kSolveRows * g.d_k;
}
HWY_INLINE const float* LoadRows(Group& g, size_t head, size_t v) {
  if (g.item.source_dtype != Dtype::kFp32) {
    Widen(g.item.source_dtype,
          g.item.source + (head * g.d_v + v) * g.d_k * DtypeBytes(g.item.source_dtype),
          kRowBlock * g.d_k, g.scratch.rows + v % kSolveRows * g.d_k);
  }
  return RowsAt(g, head, v);
}

// One read of the checkpoint: accumulator[m][v] := S x~_m, u of the committed records where they
// are re-derived, and S' where it goes somewhere.
HWY_INLINE void PassOverState(Group& g, size_t head, const Destination& to) {
  VerifyScratch& scratch = g.scratch;
  const size_t element_bytes = DtypeBytes(g.item.source_dtype);
  const std::byte* page_end = g.item.source + g.shape.state_elements() * element_bytes;
  const float* x = g.channelwise ? scratch.decayed_x : scratch.x;
  const float* record_x = g.channelwise ? scratch.record_x : scratch.keys;
  FoldOperands fold{};
  if (to.hp != nullptr) fold = PrepareFold(g, head);
  auto probe = hn::Zero(Tag());
  const size_t block = g.rederives ? kSolveRows : kRowBlock;
  for (size_t v = 0; v < g.d_v; v += block) {
    const size_t end = std::min(v + block, g.d_v);
    for (size_t r = v; r < end; r += kRowBlock) {
      const std::byte* from = g.item.source + (head * g.d_v + r) * g.d_k * element_bytes;
      Prefetch(from + kPrefetchBytes, page_end, kRowBlock * g.d_k * element_bytes);
      const float* rows = LoadRows(g, head, r);
      DotRows(rows, x, g.vectors, g.d_k, scratch.accumulator + r, g.d_v_padded);
      if (g.rederives) DotRows(rows, record_x, g.h, g.d_k, scratch.u + r, g.d_v_padded);
    }
    if (g.rederives) SolveRecords(g, head, v, end - v);
    if (to.hp == nullptr) continue;
    if (g.rederives && !g.channelwise) {
      for (size_t j = 0; j < g.n; ++j) {
        const size_t at = j * g.d_v_padded + v;
        Scale(scratch.exponent[j], scratch.u + at, kSolveRows, scratch.fold_u + at);
      }
    }
    for (size_t r = v; r < end; r += kRowBlock)
      probe = FoldRows(g, fold, RowsAt(g, head, r), r, to, probe);
  }
  if (to.hp != nullptr) hwy::FlushStream();
  g.FlagUnless(hn::AllTrue(Tag(), hn::Eq(probe, probe)), kPoisonOverflow);
  if (g.channelwise) return;
  for (size_t s = 0; s < g.T; ++s)
    scratch.exponent[s] = static_cast<float>(scratch.log_decay[g.h + s]);
  ExpOfLogDecay(scratch.exponent, g.T);
  for (size_t m = 0; m < g.vectors; ++m) {
    float* row = scratch.accumulator + m * g.d_v_padded;
    // NOLINTNEXTLINE(clang-analyzer-core.DivideZero): T > 0 is checked on entry.
    Scale(scratch.exponent[m % g.T], row, g.d_v_padded, row);
  }
}

// accumulator[m] += sum_{j in drafts before `end`} weight[m][j] u_j, for one m.
HWY_INLINE void AddDrafts(Group& g, size_t m, size_t end) {
  AccumulateBlock<1>(g.scratch.u + g.h * g.d_v_padded, g.scratch.weight + m * g.record_stride + g.h,
                     g.record_stride, end, g.d_v_padded, g.scratch.accumulator + m * g.d_v_padded);
}

// u_s = beta_s (v_s - S k~_s - sum_{j < h+s} A_js u_j), rounded as its record is.
HWY_INLINE void SolveDrafts(Group& g, size_t head) {
  VerifyScratch& scratch = g.scratch;
  const Tag d;
  const size_t value_bytes = g.d_v * DtypeBytes(g.formats.activation);
  for (size_t s = 0; s < g.T; ++s) {
    const size_t token_head = s * g.shape.head_count + head;
    const auto* v = static_cast<const std::byte*>(g.item.inputs.v) + token_head * value_bytes;
    Widen(g.formats.activation, v, g.d_v, scratch.target);
    g.FlagUnless(AllFinite(scratch.target, g.d_v), kPoisonInput);
    AddDrafts(g, g.T + s, s);
    const float* read = scratch.accumulator + (g.T + s) * g.d_v_padded;
    float* u = scratch.u + (g.h + s) * g.d_v_padded;
    const auto beta = hn::Set(d, g.item.inputs.beta[token_head]);
    for (size_t i = 0; i < g.d_v_padded; i += hn::Lanes(d)) {
      const auto error = hn::Sub(hn::LoadU(d, scratch.target + i), hn::LoadU(d, read + i));
      hn::StoreU(hn::Mul(beta, error), d, u + i);
    }
    std::byte* record =
        g.Row(g.ring.value, g.h + s) + head * g.d_v * DtypeBytes(g.formats.correction);
    Narrow(g.formats.correction, u, g.d_v, record);
    Widen(g.formats.correction, record, g.d_v, u);
    g.FlagUnless(AllFinite(u, g.d_v), kPoisonOverflow);
  }
}

HWY_INLINE void WriteOutputs(Group& g, size_t head) {
  const size_t output_bytes = g.d_v * DtypeBytes(g.formats.output);
  for (size_t s = 0; s < g.T; ++s) {
    AddDrafts(g, s, s + 1);
    float* sum = g.scratch.accumulator + s * g.d_v_padded;
    if (g.item.skip != nullptr) {
      const Tag d;
      const size_t value_bytes = g.d_v * DtypeBytes(g.formats.activation);
      Widen(g.formats.activation,
            static_cast<const std::byte*>(g.item.inputs.v) +
                (s * g.shape.head_count + head) * value_bytes,
            g.d_v, g.scratch.target);
      const auto skip = hn::Set(d, g.item.skip[head]);
      for (size_t i = 0; i < g.d_v_padded; i += hn::Lanes(d)) {
        hn::StoreU(hn::MulAdd(skip, hn::LoadU(d, g.scratch.target + i), hn::LoadU(d, sum + i)), d,
                   sum + i);
      }
    }
    const float* o = sum;
    auto* output =
        static_cast<std::byte*>(g.item.output) + (s * g.shape.head_count + head) * output_bytes;
    Narrow(g.formats.output, o, g.d_v, output);
    if (g.formats.output != Dtype::kFp32) {  // rounding may overflow
      Widen(g.formats.output, output, g.d_v, g.scratch.rounded);
      o = g.scratch.rounded;
    }
    g.FlagUnless(AllFinite(o, g.d_v), kPoisonOverflow);
  }
}

uint32_t VerifyGroupTarget(const GroupItem& item, VerifyScratch& scratch) {
  Group g{item, scratch};
  g.rederives = g.records_targets && item.target_hp != nullptr;
  LoadGroup(g);
  DotRecords(g);
  const size_t heads = g.shape.heads_per_group();
  for (size_t head = item.group * heads; head < (item.group + 1) * heads; ++head) {
    LoadCommittedHead(g, head);
    AppendDrafts(g, head);
    if (g.channelwise) {
      WeighChannelwise(g, head);
    } else {
      WeighScalar(g, head);
    }
    if (g.rederives) WeighRecords(g, head);
    PassOverState(g, head, TargetsOf(g, head));
    Accumulate(scratch.u, scratch.weight, g.record_stride, g.vectors, g.h, g.d_v_padded,
               scratch.accumulator);
    if (g.delta_rule) SolveDrafts(g, head);
    WriteOutputs(g, head);
  }
  return g.flags;
}

// `state` null: to the item's targets.
uint32_t FoldGroupTarget(const GroupItem& item, float* state, VerifyScratch& scratch) {
  Group g{item, scratch};
  g.rederives = g.records_targets;
  LoadCommittedKeys(g);
  DotRecords(g);
  const size_t heads = g.shape.heads_per_group();
  for (size_t head = item.group * heads; head < (item.group + 1) * heads; ++head) {
    LoadCommittedHead(g, head);
    if (g.rederives) WeighRecords(g, head);
    Destination to = TargetsOf(g, head);
    if (state != nullptr) to = {.hp = reinterpret_cast<std::byte*>(state + head * g.d_v * g.d_k)};
    PassOverState(g, head, to);
  }
  return g.flags;
}

uint32_t StoreGroupTarget(const GroupItem& item, const float* state, VerifyScratch& scratch) {
  Group g{item, scratch};
  const size_t heads = g.shape.heads_per_group();
  const size_t elements = g.d_v * g.d_k;
  for (size_t head = item.group * heads; head < (item.group + 1) * heads; ++head)
    StoreElements(g, TargetsOf(g, head), state + head * elements, 0, elements);
  hwy::FlushStream();
  return g.flags;
}

const char* TargetName() { return hwy::TargetName(HWY_TARGET); }

}  // namespace ssmd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ssmd::cpu {
namespace {

HWY_EXPORT(VerifyGroupTarget);
HWY_EXPORT(FoldGroupTarget);
HWY_EXPORT(StoreGroupTarget);
HWY_EXPORT(TargetName);

VerifyScratch& ThreadScratch() {
  thread_local const auto scratch = std::make_unique<VerifyScratch>();
  return *scratch;  // NOLINT(clang-analyzer-cplusplus.NewDelete): owned by the thread
}

void CheckItem(const GroupItem& item) {
  const LayerShape& shape = *item.shape;
  const Formats& formats = *item.formats;
  SSMD_CHECK(formats.checkpoint_hp == Dtype::kFp32 || formats.checkpoint_hp == Dtype::kFp16,
             "checkpoint_hp %s", DtypeName(formats.checkpoint_hp));
  SSMD_CHECK(!formats.two_precision() || formats.checkpoint_lp == Dtype::kFp16, "checkpoint_lp %s",
             DtypeName(formats.checkpoint_lp));
  SSMD_CHECK((item.target_lp != nullptr) == (item.target_hp != nullptr && formats.two_precision()),
             "targets and formats disagree");
  SSMD_CHECK(shape.d_k % 16 == 0 && shape.d_k <= kDimMax, "d_k %u", shape.d_k);
  SSMD_CHECK(shape.d_v % 8 == 0 && shape.d_v <= kDimMax, "d_v %u", shape.d_v);
  SSMD_CHECK(item.base <= item.tail && item.draft_tokens <= kDraftTokensMax, "T %u",
             item.draft_tokens);
  SSMD_CHECK(item.tail - item.base + item.draft_tokens <= item.ring_layout->ring_records &&
                 item.ring_layout->ring_records <= kRingRecordsMax,
             "%llu committed and %u drafted records in a ring of %u",
             static_cast<unsigned long long>(item.tail - item.base), item.draft_tokens,
             item.ring_layout->ring_records);
}

GroupItem CheckedReplay(const GroupItem& item) {
  CheckItem(item);
  SSMD_CHECK(item.source_dtype == item.formats->checkpoint_hp, "replay of %s",
             DtypeName(item.source_dtype));
  GroupItem replay = item;
  replay.draft_tokens = 0;
  replay.fold_to = item.tail;
  return replay;
}

}  // namespace

uint32_t VerifyGroup(const GroupItem& item) {
  CheckItem(item);
  const Formats& formats = *item.formats;
  SSMD_CHECK(item.draft_tokens > 0, "row without drafts");
  SSMD_CHECK(item.source_dtype == (item.target_hp == nullptr && formats.two_precision()
                                       ? formats.checkpoint_lp
                                       : formats.checkpoint_hp),
             "source of %s", DtypeName(item.source_dtype));
  SSMD_CHECK(item.target_hp == nullptr || (item.base <= item.fold_to && item.fold_to <= item.tail),
             "fold_to %llu", static_cast<unsigned long long>(item.fold_to));
  const FlushDenormals flush_denormals;
  return HWY_DYNAMIC_DISPATCH(VerifyGroupTarget)(item, ThreadScratch());
}

void ReplayGroup(const GroupItem& item, float* state) {
  GroupItem replay = CheckedReplay(item);
  replay.target_hp = replay.target_lp = nullptr;
  const FlushDenormals flush_denormals;
  HWY_DYNAMIC_DISPATCH(FoldGroupTarget)(replay, state, ThreadScratch());
}

uint32_t FoldGroup(const GroupItem& item) {
  SSMD_CHECK(item.target_hp != nullptr, "fold without a target");
  const GroupItem replay = CheckedReplay(item);
  const FlushDenormals flush_denormals;
  return HWY_DYNAMIC_DISPATCH(FoldGroupTarget)(replay, nullptr, ThreadScratch());
}

uint32_t StoreGroup(const GroupItem& item, const float* state) {
  SSMD_CHECK(
      item.target_hp != nullptr && (item.target_lp != nullptr) == item.formats->two_precision(),
      "targets and formats disagree");
  return HWY_DYNAMIC_DISPATCH(StoreGroupTarget)(item, state, ThreadScratch());
}

const char* VectorTarget() { return HWY_DYNAMIC_DISPATCH(TargetName)(); }

}  // namespace ssmd::cpu
#endif  // HWY_ONCE
