// The three small matrix products of the verify kernels, and the exponentials of decays.
//
// Everything is FP32 with d_k a multiple of 16 and rows in blocks of four. The sum behind each
// result runs in one order that depends only on the shape, never on how many results are computed
// together: a token's bytes are the same whether it came alone or with others.
// (Included once per instruction set: Highway's toggling include guard.)
#if defined(SSMD_KERNELS_CPU_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SSMD_KERNELS_CPU_PRODUCTS_INL_H_
#undef SSMD_KERNELS_CPU_PRODUCTS_INL_H_
#else
#define SSMD_KERNELS_CPU_PRODUCTS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

// GCC keeps an array of vectors in registers only when the loops over it are fully unrolled.
#if defined(__GNUC__) && !defined(__clang__)
#define SSMD_UNROLL _Pragma("GCC unroll 8")
#else
#define SSMD_UNROLL
#endif

HWY_BEFORE_NAMESPACE();
namespace ssmd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Tag = hn::CappedTag<float, 16>;
using Vector = hn::Vec<Tag>;

inline constexpr size_t kRowBlock = 4;
// Accumulators are kRowBlock times this many registers: 16 of AVX-512's 32, 8 of the others' 16.
inline constexpr size_t kVectorBlock = hn::MaxLanes(Tag()) >= 16 ? 4 : 2;

// out[0..3] := the lane sums of four vectors.
HWY_INLINE void StoreSums(Vector a, Vector b, Vector c, Vector e, float* HWY_RESTRICT out) {
#if HWY_TARGET == HWY_SCALAR
  out[0] = hn::GetLane(a);
  out[1] = hn::GetLane(b);
  out[2] = hn::GetLane(c);
  out[3] = hn::GetLane(e);
#else
  const Tag d;
  const hn::CappedTag<float, 4> d4;
  const auto ac = hn::Add(hn::InterleaveLower(d, a, c), hn::InterleaveUpper(d, a, c));
  const auto be = hn::Add(hn::InterleaveLower(d, b, e), hn::InterleaveUpper(d, b, e));
  const auto all = hn::Add(hn::InterleaveLower(d, ac, be), hn::InterleaveUpper(d, ac, be));
  alignas(64) float blocks[hn::MaxLanes(Tag())];  // each 128-bit block holds partial sums of all
  hn::Store(all, d, blocks);
  auto sum = hn::Load(d4, blocks);
  for (size_t i = 4; i < hn::Lanes(d); i += 4) sum = hn::Add(sum, hn::Load(d4, blocks + i));
  hn::StoreU(sum, d4, out);
#endif
}

// out[m * out_stride + r] := rows[r] . x[m] for four rows and kVectors vectors.
template <size_t kVectors>
HWY_INLINE void DotBlock(const float* HWY_RESTRICT rows, const float* HWY_RESTRICT x, size_t d_k,
                         float* HWY_RESTRICT out, size_t out_stride) {
  const Tag d;
  Vector sum[kVectors][kRowBlock];
  SSMD_UNROLL
  for (size_t m = 0; m < kVectors; ++m) {
    SSMD_UNROLL
    for (size_t r = 0; r < kRowBlock; ++r) sum[m][r] = hn::Zero(d);
  }
  for (size_t i = 0; i < d_k; i += hn::Lanes(d)) {
    Vector row[kRowBlock];
    SSMD_UNROLL
    for (size_t r = 0; r < kRowBlock; ++r) row[r] = hn::LoadU(d, rows + r * d_k + i);
    SSMD_UNROLL
    for (size_t m = 0; m < kVectors; ++m) {
      const auto x_m = hn::LoadU(d, x + m * d_k + i);
      SSMD_UNROLL
      for (size_t r = 0; r < kRowBlock; ++r) sum[m][r] = hn::MulAdd(row[r], x_m, sum[m][r]);
    }
  }
  SSMD_UNROLL
  for (size_t m = 0; m < kVectors; ++m)
    StoreSums(sum[m][0], sum[m][1], sum[m][2], sum[m][3], out + m * out_stride);
}

// The same for any number of vectors; the four rows stay in the first-level cache. Not inlined: GCC
// 12 then keeps GDN's two vectors at T = 1 some 15 % faster, and nothing gets slower.
HWY_NOINLINE void DotRows(const float* rows, const float* x, size_t x_count, size_t d_k, float* out,
                          size_t out_stride) {
  size_t m = 0;
  for (; m + kVectorBlock <= x_count; m += kVectorBlock)
    DotBlock<kVectorBlock>(rows, x + m * d_k, d_k, out + m * out_stride, out_stride);
  if (m + 2 <= x_count) {
    DotBlock<2>(rows, x + m * d_k, d_k, out + m * out_stride, out_stride);
    m += 2;
  }
  if (m < x_count) DotBlock<1>(rows, x + m * d_k, d_k, out + m * out_stride, out_stride);
}

// target[r] := gamma * rows[r] + sum_{j < n} weights[j][r] keys[j], for four rows and kColumns
// vectors of columns. Returns `probe` made NaN by any result that is not finite.
template <size_t kColumns>
HWY_INLINE Vector FoldBlock(const float* HWY_RESTRICT rows, const float* HWY_RESTRICT gamma,
                            const float* HWY_RESTRICT weights, size_t weight_stride,
                            const float* HWY_RESTRICT keys, size_t n, size_t d_k,
                            float* HWY_RESTRICT target, bool target_is_aligned, Vector probe) {
  const Tag d;
  const size_t lanes = hn::Lanes(d);
  Vector sum[kColumns][kRowBlock];
  SSMD_UNROLL
  for (size_t c = 0; c < kColumns; ++c) {
    const auto decay = hn::LoadU(d, gamma + c * lanes);
    SSMD_UNROLL
    for (size_t r = 0; r < kRowBlock; ++r)
      sum[c][r] = hn::Mul(decay, hn::LoadU(d, rows + r * d_k + c * lanes));
  }
  for (size_t j = 0; j < n; ++j) {
    Vector weight[kRowBlock];
    SSMD_UNROLL
    for (size_t r = 0; r < kRowBlock; ++r) weight[r] = hn::Set(d, weights[j * weight_stride + r]);
    SSMD_UNROLL
    for (size_t c = 0; c < kColumns; ++c) {
      const auto key = hn::LoadU(d, keys + j * d_k + c * lanes);
      SSMD_UNROLL
      for (size_t r = 0; r < kRowBlock; ++r) sum[c][r] = hn::MulAdd(weight[r], key, sum[c][r]);
    }
  }
  SSMD_UNROLL
  for (size_t c = 0; c < kColumns; ++c) {
    SSMD_UNROLL
    for (size_t r = 0; r < kRowBlock; ++r) {
      float* to = target + r * d_k + c * lanes;
      if (target_is_aligned) {  // past the caches: a folding row is 1.5 times faster for it
        hn::Stream(sum[c][r], d, to);
      } else {
        hn::StoreU(sum[c][r], d, to);
      }
      probe = hn::MulAdd(sum[c][r], hn::Zero(d), probe);
    }
  }
  return probe;
}

// out[m][v] += sum_{j < n} weights[m][j] u[j][v] for kVectors rows of out; `width` floats each.
template <size_t kVectors>
HWY_INLINE void AccumulateBlock(const float* HWY_RESTRICT u, const float* HWY_RESTRICT weights,
                                size_t weight_stride, size_t n, size_t width,
                                float* HWY_RESTRICT out) {
  const Tag d;
  for (size_t v = 0; v < width; v += hn::Lanes(d)) {
    Vector sum[kVectors];
    SSMD_UNROLL
    for (size_t m = 0; m < kVectors; ++m) sum[m] = hn::LoadU(d, out + m * width + v);
    for (size_t j = 0; j < n; ++j) {
      const auto u_j = hn::LoadU(d, u + j * width + v);
      SSMD_UNROLL
      for (size_t m = 0; m < kVectors; ++m)
        sum[m] = hn::MulAdd(u_j, hn::Set(d, weights[m * weight_stride + j]), sum[m]);
    }
    SSMD_UNROLL
    for (size_t m = 0; m < kVectors; ++m) hn::StoreU(sum[m], d, out + m * width + v);
  }
}

HWY_INLINE void Accumulate(const float* u, const float* weights, size_t weight_stride,
                           size_t m_count, size_t n, size_t width, float* out) {
  size_t m = 0;
  for (; m + 4 <= m_count; m += 4)
    AccumulateBlock<4>(u, weights + m * weight_stride, weight_stride, n, width, out + m * width);
  for (; m < m_count; ++m)
    AccumulateBlock<1>(u, weights + m * weight_stride, weight_stride, n, width, out + m * width);
}

// out[i] := a[i] * b[i].
HWY_INLINE void Multiply(const float* a, const float* b, size_t count, float* out) {
  const Tag d;
  for (size_t i = 0; i < count; i += hn::Lanes(d))
    hn::StoreU(hn::Mul(hn::LoadU(d, a + i), hn::LoadU(d, b + i)), d, out + i);
}

// out[i] := factor * a[i].
HWY_INLINE void Scale(float factor, const float* a, size_t count, float* out) {
  const Tag d;
  for (size_t i = 0; i < count; i += hn::Lanes(d))
    hn::StoreU(hn::Mul(hn::Set(d, factor), hn::LoadU(d, a + i)), d, out + i);
}

HWY_INLINE float Dot(const float* a, const float* b, size_t count) {
  const Tag d;
  auto sum = hn::Zero(d);
  for (size_t i = 0; i < count; i += hn::Lanes(d))
    sum = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// values[i] := exp(min(values[i], 0)), within 1 ulp; below -104 it is 0. `count` is rounded up to
// 16 values, all of which must be there.
HWY_INLINE void ExpOfLogDecay(float* values, size_t count) {
  const Tag d;
  for (size_t i = 0; i < count; i += hn::Lanes(d)) {
    const auto exponent = hn::Min(hn::LoadU(d, values + i), hn::Zero(d));
    hn::StoreU(hn::Exp(d, exponent), d, values + i);
  }
}

using TagDouble = hn::CappedTag<double, 8>;
using TagHalf = hn::Rebind<float, TagDouble>;

// sum[i] += log_alpha[i].
HWY_INLINE void AddLogDecay(const float* log_alpha, size_t count, double* sum) {
  const TagDouble d;
  for (size_t i = 0; i < count; i += hn::Lanes(d)) {
    const auto term = hn::PromoteTo(d, hn::LoadU(TagHalf(), log_alpha + i));
    hn::StoreU(hn::Add(hn::LoadU(d, sum + i), term), d, sum + i);
  }
}

// out[i] := exp(sum[i]).
HWY_INLINE void ExpOfSum(const double* sum, size_t count, float* out) {
  const TagDouble d;
  for (size_t i = 0; i < count; i += hn::Lanes(d))
    hn::StoreU(hn::DemoteTo(TagHalf(), hn::LoadU(d, sum + i)), TagHalf(), out + i);
  ExpOfLogDecay(out, count);
}

}  // namespace ssmd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
