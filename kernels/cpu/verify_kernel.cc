// The equations are in verify_kernel.h. Order of work for one key group:
//   LoadGroup        q, k to FP32; draft keys appended to the ring; k_j . x_m once for all heads
//   per head:
//     LoadHead       committed u (Mamba-2: dt x) to FP32; the drafts' decays appended
//     Weigh...       W, A and the decayed vectors x~ = (q~, k~), per decay kind
//     WeighRecords   A among the committed records, where their u is re-derived
//     PassOverState  S x~ for all x~, the re-derived u, and S' for a folding row, block by block
//     SolveDrafts    u of the drafts, rounded and appended (delta rules)
//     WriteOutputs
// group-inl.h has the loading, weights-inl.h the weighing, state_pass-inl.h the pass.
// The file is compiled once per instruction set (scalar, SSE4, AVX2, AVX-512); the best one is
// chosen at run time.
#include "kernels/cpu/verify_kernel.h"

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
#include "kernels/cpu/state_pass-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ssmd::cpu::HWY_NAMESPACE {

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
