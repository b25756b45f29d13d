// The one place where tolerances of the kernels against the float64 recurrence are derived.
//
// Write e = 2^-24 (FP32), c = unit roundoff of the dtype that records keep u in, N tokens since the
// checkpoint was exact, and K, Q, V, M as in Magnitudes. The oracle gets the same rounded inputs,
// so two sources remain.
//
// 1. FP32 evaluation. Every result is a sum  S x~ + sum_j u_j w_j  of d_k + N terms, whose x~ and
//    w_j carry at most 8 + T roundings (an exponential of an argument rounded once, products of
//    weights, KDA's walk over T drafts). The magnitudes of the terms sum to at most
//    |x| B,  B = |S_0| + K M. Rounding errors of a long sum behave as a random walk: with
//    probability beyond 1 - 2 exp(-8) for each result, and far more in practice since it takes the
//    magnitudes at their worst, n roundings cost at most 4 sqrt(n) e (Higham and Mary, 2019). So
//      error <= f |x| B,   f = (4 sqrt(d_k + N) + T + 8) e.
//
// 2. Errors of u. Let d_t be the error of u_t and E_t the error of one row of S_t (2-norm).
//    Subtracting the exact and the perturbed recurrence, with A = alpha or Diag(alpha):
//      E_t = E_{t-1} A (I - beta k k^T) + d_t k^T      Mamba-2: E_t = E_{t-1} A + d_t k^T
//    ||A|| <= 1, and ||I - beta k k^T|| <= 1 while beta |k|^2 <= 2 (beta in [0, 1], |k| near 1). So
//    a past error is never amplified:  |E_t| <= K sum_j gamma_{j+1:t} |d_j|. It decays
//    geometrically, and without decay it grows linearly with the number of tokens. The parts of d:
//      rounding to the record's dtype   c |u_j|, which sums to c M
//      its denormals, evaluation        a + f (V + K B) each, which sums to n times that,
//                                       n = min(N, 1 / (1 - alpha_max)); beta <= 1
//    (Mamba-2 computes no u: dt x costs one FP32 rounding, c = e, a = f = 0 here.)
//
// 3. Folds. A value that came through m folds carries the evaluation errors of m + 1 launches, none
//    of them amplified (2.): f counts m + 1 times.
//
// State:  D = K (c M + n (a + f (V + K B))) + f B.   Output:  Q D, rounded once to its dtype.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/formats.h"

namespace ssmd::testing {

// Unit roundoff, and the largest absolute error of rounding a denormal.
constexpr double UnitRoundoff(Dtype dtype) {
  return dtype == Dtype::kFp32 ? 0x1p-24 : dtype == Dtype::kFp16 ? 0x1p-11 : 0x1p-8;
}
constexpr double DenormalError(Dtype dtype) { return dtype == Dtype::kFp16 ? 0x1p-25 : 0x1p-126; }

// Largest values that a comparison's history holds.
struct Magnitudes {
  double state_row = 0;  // |S_0|: 2-norm of a row of the checkpoint
  double u_mass = 0;     // M: sum_j gamma_{j+1:t} |u_j| of one element of u, any t
  double v = 0;          // V: an element of v
  double q = 0;          // Q: 2-norm of a query
  double k = 0;          // K: 2-norm of a key
  double alpha = 0;      // alpha_max over heads, tokens and channels
};

struct ToleranceParams {
  bool is_delta_rule = false;
  size_t d_k = 0;
  size_t records = 0;       // N; h + T in one launch
  size_t draft_tokens = 0;  // T
  size_t folds = 0;         // m: checkpoints written one after another before this value
  Dtype correction = Dtype::kFp32;
  Dtype output = Dtype::kFp32;
  Magnitudes magnitudes;
};

class Tolerance {
 public:
  explicit Tolerance(const ToleranceParams& p) : output_(p.output) {
    const Magnitudes& m = p.magnitudes;
    const double N = static_cast<double>(p.records);
    const double T = static_cast<double>(p.draft_tokens);
    const double f = (4 * std::sqrt(static_cast<double>(p.d_k) + N) + T + 8) * 0x1p-24 *
                     static_cast<double>(p.folds + 1);
    const double B = m.state_row + m.k * m.u_mass;
    double d = UnitRoundoff(p.is_delta_rule ? p.correction : Dtype::kFp32) * m.u_mass;
    if (p.is_delta_rule) {
      const double n = m.alpha < 1 ? std::min(N, 1 / (1 - m.alpha)) : N;
      d += n * (DenormalError(p.correction) + f * (m.v + m.k * B));
    }
    state_ = m.k * d + f * B;
    output_before_rounding_ = m.q * state_;
  }

  // Bound on |S - oracle|, any element.
  double state() const { return state_; }
  // Bound on |o - oracle| where the oracle's value is `exact`.
  double output(double exact) const {
    return output_before_rounding_ +
           UnitRoundoff(output_) * (std::abs(exact) + output_before_rounding_) +
           DenormalError(output_);
  }

 private:
  Dtype output_;
  double state_ = 0;
  double output_before_rounding_ = 0;
};

}  // namespace ssmd::testing
