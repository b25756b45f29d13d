// The decay-weighted products of keys and vectors, W and A of verify_kernel.h, per decay kind; and
// the forward substitution that re-derives u of the committed records.
// (Included once per instruction set: Highway's toggling include guard.)
#if defined(SSMD_KERNELS_CPU_WEIGHTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SSMD_KERNELS_CPU_WEIGHTS_INL_H_
#undef SSMD_KERNELS_CPU_WEIGHTS_INL_H_
#else
#define SSMD_KERNELS_CPU_WEIGHTS_INL_H_
#endif

#include <algorithm>
#include <cmath>

#include "hwy/highway.h"
#include "kernels/cpu/group-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ssmd::cpu::HWY_NAMESPACE {

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

}  // namespace ssmd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
