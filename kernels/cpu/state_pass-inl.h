// The one pass over a head's checkpoint: S x~ for every vector, the re-derived u, and S' of a fold,
// written to HP and LP.
// (Included once per instruction set: Highway's toggling include guard.)
#if defined(SSMD_KERNELS_CPU_STATE_PASS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SSMD_KERNELS_CPU_STATE_PASS_INL_H_
#undef SSMD_KERNELS_CPU_STATE_PASS_INL_H_
#else
#define SSMD_KERNELS_CPU_STATE_PASS_INL_H_
#endif

#include <algorithm>
#include <cstring>
#include <limits>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/cpu/weights-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ssmd::cpu::HWY_NAMESPACE {

// How far ahead of the dot products the checkpoint is fetched. At T = 1, 8 KiB is some 10 % faster
// than none, and 32 KiB or more gain less. Fetching records ahead as well was no faster.
inline constexpr size_t kPrefetchBytes = 8192;

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

}  // namespace ssmd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
