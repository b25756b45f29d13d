// The equations are in verify_kernel.h. Order of work for one key group:
//   LoadGroup        q, k to FP32; draft keys appended to the ring; k_j . x_m once for all heads
//   per head:
//     LoadHead       committed u (Mamba-2: dt x) to FP32; the drafts' decays appended
//     Weigh...       W, A and the decayed vectors x~ = (q~, k~), per decay kind
//     PassOverState  S x~ for all x~, and S' for a folding row, four state rows at a time
//     SolveDrafts    u of the drafts, rounded and appended (delta rules)
//     WriteOutputs
// The file is compiled once per instruction set (scalar, SSE4, AVX2, AVX-512); the best one is
// chosen at run time.
#include "kernels/cpu/verify_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>
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
inline constexpr size_t kPrefetchFloats = 2048;

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
  const Dtype value_dtype = delta_rule ? formats.correction : formats.activation;
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

// Committed u of one head to FP32, and for scalar decays the sums of their logs.
HWY_INLINE void LoadCommittedHead(Group& g, size_t head) {
  const size_t first = head * g.d_v * DtypeBytes(g.value_dtype);
  for (size_t j = 0; j < g.h; ++j) {
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
  for (size_t j = 0; j < g.n; ++j) {
    const size_t row = j * g.d_v_padded;
    Scale(scratch.exponent[j], scratch.u + row, g.d_v_padded, scratch.fold_u + row);
  }
  std::fill_n(scratch.gamma, 16, static_cast<float>(total));
  ExpOfLogDecay(scratch.gamma, 16);
  std::fill_n(scratch.gamma, g.d_k, scratch.gamma[0]);
  return {scratch.gamma, scratch.fold_u, scratch.keys};
}

// Four rows of S, from row v on.
HWY_INLINE Vector FoldRows(const Group& g, const FoldOperands& fold, const float* rows, size_t v,
                           float* target, Vector probe) {
  const size_t lanes = hn::Lanes(Tag());
  const bool aligned = reinterpret_cast<uintptr_t>(target) % (lanes * sizeof(float)) == 0;
  size_t i = 0;
  for (; i + kVectorBlock * lanes <= g.d_k; i += kVectorBlock * lanes) {
    probe = FoldBlock<kVectorBlock>(rows + i, fold.gamma + i, fold.u + v, g.d_v_padded,
                                    fold.keys + i, g.n, g.d_k, target + i, aligned, probe);
  }
  for (; i < g.d_k; i += lanes) {
    probe = FoldBlock<1>(rows + i, fold.gamma + i, fold.u + v, g.d_v_padded, fold.keys + i, g.n,
                         g.d_k, target + i, aligned, probe);
  }
  return probe;
}

HWY_INLINE void Prefetch(const float* from, const float* end, size_t count) {
  for (size_t i = 0; i < count && from + i < end; i += 64 / sizeof(float))
    __builtin_prefetch(from + i, 0, 2);
}

// accumulator[m][v] := S x~_m, and target := S' where there is one.
HWY_INLINE void PassOverState(Group& g, size_t head, float* target) {
  VerifyScratch& scratch = g.scratch;
  const float* state = g.item.source + head * g.d_v * g.d_k;
  const float* page_end = g.item.source + g.shape.state_elements();
  const float* x = g.channelwise ? scratch.decayed_x : scratch.x;
  FoldOperands fold{};
  if (target != nullptr) fold = PrepareFold(g, head);
  auto probe = hn::Zero(Tag());
  for (size_t v = 0; v < g.d_v; v += kRowBlock) {
    const float* rows = state + v * g.d_k;
    Prefetch(rows + kPrefetchFloats, page_end, kRowBlock * g.d_k);
    DotRows(rows, x, g.vectors, g.d_k, scratch.accumulator + v, g.d_v_padded);
    if (target != nullptr) probe = FoldRows(g, fold, rows, v, target + v * g.d_k, probe);
  }
  if (target != nullptr) hwy::FlushStream();
  g.FlagUnless(hn::AllTrue(Tag(), hn::Eq(probe, probe)), kPoisonOverflow);
  if (g.channelwise) return;
  for (size_t s = 0; s < g.T; ++s)
    scratch.exponent[s] = static_cast<float>(scratch.log_decay[g.h + s]);
  ExpOfLogDecay(scratch.exponent, g.T);
  for (size_t m = 0; m < g.vectors; ++m) {
    float* row = scratch.accumulator + m * g.d_v_padded;
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
    const float* o = g.scratch.accumulator + s * g.d_v_padded;
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
  LoadGroup(g);
  const size_t heads = g.shape.heads_per_group();
  for (size_t head = item.group * heads; head < (item.group + 1) * heads; ++head) {
    LoadCommittedHead(g, head);
    AppendDrafts(g, head);
    if (g.channelwise) {
      WeighChannelwise(g, head);
    } else {
      WeighScalar(g, head);
    }
    PassOverState(g, head, item.target ? item.target + head * g.d_v * g.d_k : nullptr);
    Accumulate(scratch.u, scratch.weight, g.record_stride, g.vectors, g.h, g.d_v_padded,
               scratch.accumulator);
    if (g.delta_rule) SolveDrafts(g, head);
    WriteOutputs(g, head);
  }
  return g.flags;
}

void ReplayGroupTarget(const GroupItem& item, float* state, VerifyScratch& scratch) {
  Group g{item, scratch};
  LoadCommittedKeys(g);
  const size_t heads = g.shape.heads_per_group();
  for (size_t head = item.group * heads; head < (item.group + 1) * heads; ++head) {
    LoadCommittedHead(g, head);
    const FoldOperands fold = PrepareFold(g, head);
    auto probe = hn::Zero(Tag());
    for (size_t v = 0; v < g.d_v; v += kRowBlock) {
      const size_t at = (head * g.d_v + v) * g.d_k;
      probe = FoldRows(g, fold, item.source + at, v, state + at, probe);
    }
  }
  hwy::FlushStream();
}

const char* TargetName() { return hwy::TargetName(HWY_TARGET); }

}  // namespace ssmd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ssmd::cpu {
namespace {

HWY_EXPORT(VerifyGroupTarget);
HWY_EXPORT(ReplayGroupTarget);
HWY_EXPORT(TargetName);

VerifyScratch& ThreadScratch() {
  thread_local const auto scratch = std::make_unique<VerifyScratch>();
  return *scratch;
}

void CheckItem(const GroupItem& item) {
  const LayerShape& shape = *item.shape;
  SSMD_CHECK(item.formats->checkpoint_hp == Dtype::kFp32 && !item.formats->two_precision(),
             "the CPU kernels read one FP32 checkpoint");
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

}  // namespace

uint32_t VerifyGroup(const GroupItem& item) {
  CheckItem(item);
  SSMD_CHECK(item.draft_tokens > 0, "row without drafts");
  SSMD_CHECK(item.target == nullptr || (item.base <= item.fold_to && item.fold_to <= item.tail),
             "fold_to %llu", static_cast<unsigned long long>(item.fold_to));
  const FlushDenormals flush_denormals;
  return HWY_DYNAMIC_DISPATCH(VerifyGroupTarget)(item, ThreadScratch());
}

void ReplayGroup(const GroupItem& item, float* state) {
  CheckItem(item);
  GroupItem replay = item;
  replay.draft_tokens = 0;
  replay.fold_to = item.tail;
  const FlushDenormals flush_denormals;
  HWY_DYNAMIC_DISPATCH(ReplayGroupTarget)(replay, state, ThreadScratch());
}

const char* VectorTarget() { return HWY_DYNAMIC_DISPATCH(TargetName)(); }

}  // namespace ssmd::cpu
#endif  // HWY_ONCE
