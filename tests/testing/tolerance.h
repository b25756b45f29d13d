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
//
// 4. Re-derived u (two precisions, delta rules) add nothing: they are FP32, rounded less than the
//    recorded ones, but KDA's walk then covers the h committed records too: T counts them.
//
// 5. Checkpoints that are not FP32. A row of S' written as FP16 HP errs by at most one spacing an
//    element (stochastic rounding): r = 2^-10 B + sqrt(d_k) 2^-24 a row. Later tokens never amplify
//    it (2.), so m writes add m r to D. Reading LP, rounded to nearest, adds r / 2 to the S of one
//    step. What that step and the N_r records in the ring made of it: u off by at most K r / 2
//    each, so the output is off by Q (1 + N_r K^2) r / 2. None of it reaches HP.
//
// 6. Raw form. The service's q, k and v are the oracle's with an FP32 error before they are rounded
//    to the activation dtype; both then round. Monotonic rounding bounds the difference by
//      doubt(x) = round(x + d) - round(x - d),   d = the FP32 error:
//    zero for nearly all 16-bit elements, one spacing where a rounding boundary lies between, and
//    2 d and a spacing for FP32.
//    d (ConvError), where C = |bias| + sum |weight z|: w + 1 roundings of the sum, times SiLU's
//    slope (at most 1.1), and SiLU's own 8 of its value y: 1.1 (w + 1) e C + 8 e |y|. After the
//    norm n (NormError): the element's d / n, and relative to y / n the norm's |d|_2 / n and d_k /
//    8 + 8 roundings. With dq, dk, dv the norms of the doubts of one token, the recurrence's own
//    perturbation is, per token, |dk| (2 K B + V) + K dv, or scale (V |dk| + K dv) for Mamba-2. It
//    is never amplified, so it sums over the tokens; the output adds |dq| B. Second-order terms: 5
//    % more.
//
//    Gates: relative errors of at most g = 32 e in beta, dt and log alpha, for arguments up to 8
//    before exp(A_log) and 16 behind. |d alpha| = alpha |log alpha| g <= g, so a token adds g B,
//    and g K (V + K B) for beta; Mamba-2 g K M in all for dt. D v: one rounding, and the doubt of
//    v.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/formats.h"
#include "tests/reference/token.h"

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
  // Raw form only.
  double value_scale = 1;  // Mamba-2: dt
  double skip = 0;         // |D|
  double q_doubt = 0;      // of one token's queries: 2-norm, the largest
  double k_doubt = 0;      // of keys: 2-norm, summed over all tokens, the largest group of each
  double v_doubt = 0;      // of values: summed over all tokens, the largest element of each
};

// Q, K, V and alpha_max grow to cover `token`, whose keys have d_k elements a group.
inline void Cover(Magnitudes& m, const reference::Token& token, size_t d_k) {
  for (size_t i = 0; i < token.q.size(); i += d_k) {
    double q = 0, k = 0;
    for (size_t c = i; c < i + d_k; ++c) {
      q += token.q[c] * token.q[c];
      k += token.k[c] * token.k[c];
    }
    m.q = std::max(m.q, std::sqrt(q));
    m.k = std::max(m.k, std::sqrt(k));
  }
  for (const double v : token.v) m.v = std::max(m.v, std::abs(v));
  for (const double a : token.log_alpha) m.alpha = std::max(m.alpha, std::exp(a));
}

// The FP32 error of the convolved `value` before it is rounded. `magnitude`: |bias| + sum |weight
// z|.
inline double ConvError(size_t conv_width, double magnitude, double value) {
  return (1.1 * (static_cast<double>(conv_width) + 1) * magnitude + 8 * std::abs(value)) * 0x1p-24;
}
// The same behind a division by `norm` that made `value`; `conv_error` before it, `errors_norm` the
// 2-norm of those of the whole vector.
inline double NormError(double conv_error, double errors_norm, size_t d_k, double norm,
                        double value) {
  const double roundings = static_cast<double>(d_k) / 8 + 8;
  return conv_error / norm + std::abs(value) * (errors_norm / norm + roundings * 0x1p-24);
}

struct ToleranceParams {
  bool is_delta_rule = false;
  size_t d_k = 0;
  size_t records = 0;       // N; h + T in one launch
  size_t draft_tokens = 0;  // T; two precisions and delta rules: T + h
  size_t folds = 0;         // m: checkpoints written one after another before this value (for a
                            // checkpoint: itself included)
  size_t ring_records = 0;  // N_r: h + T; two precisions only
  bool raw = false;
  Dtype correction = Dtype::kFp32;
  Dtype output = Dtype::kFp32;
  Dtype checkpoint_hp = Dtype::kFp32;
  Dtype checkpoint_lp = Dtype::kNone;
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
    const double r = 0x1p-10 * B + std::sqrt(static_cast<double>(p.d_k)) * 0x1p-24;
    if (p.checkpoint_hp == Dtype::kFp16) state_ += static_cast<double>(p.folds) * r;
    if (p.raw) {
      const double n = m.alpha < 1 ? std::min(N, 1 / (1 - m.alpha)) : N;
      constexpr double g = 32 * 0x1p-24;
      const double doubt = p.is_delta_rule ? m.k_doubt * (2 * m.k * B + m.v) + m.k * m.v_doubt
                                           : m.value_scale * (m.k_doubt * m.v + m.k * m.v_doubt);
      const double write = p.is_delta_rule ? n * (m.v + m.k * B) : m.u_mass;
      state_ += 1.05 * doubt + g * (n * B + m.k * write);
    }
    read_state_ = state_;
    if (p.checkpoint_lp != Dtype::kNone) {
      const double in_ring = static_cast<double>(p.ring_records) * m.k * m.k;
      read_state_ += (1 + in_ring) * r / 2;
    }
    output_before_rounding_ = m.q * read_state_;
    if (p.raw) {
      output_before_rounding_ += 1.05 * m.q_doubt * B;
      output_before_rounding_ += m.skip * (m.v_doubt + 0x1p-23 * m.v);
    }
  }

  // Bound on |S - oracle|, any element.
  double state() const { return state_; }
  // The same of the S that a step reads, LP where there is one.
  double read_state() const { return read_state_; }
  // Bound on |o - oracle| where the oracle's value is `exact`.
  double output(double exact) const {
    return output_before_rounding_ +
           UnitRoundoff(output_) * (std::abs(exact) + output_before_rounding_) +
           DenormalError(output_);
  }

 private:
  Dtype output_;
  double state_ = 0;
  double read_state_ = 0;
  double output_before_rounding_ = 0;
};

}  // namespace ssmd::testing
