// Kimi Delta Attention, one token at a time: GDN with one decay per key channel, which acts before
// the delta rule reads.
//   u_t = beta_t (v_t - S_{t-1} (alpha_t * k_t))       (* and Diag act on channels)
//   S_t = S_{t-1} Diag(alpha_t) + u_t k_t^T            o_t = S_t q_t
#pragma once

#include <cmath>

#include "tests/reference/token.h"

namespace ssmd::reference {

struct Kda {
  explicit Kda(const Shape& s)
      : shape(s), state(s.head_count * s.d_v * s.d_k), u(s.head_count * s.d_v) {}

  // Returns o [head][d_v].
  std::vector<double> Step(const Token& token) {
    std::vector<double> o(shape.head_count * shape.d_v);
    std::vector<double> alpha(shape.d_k);
    for (size_t head = 0; head < shape.head_count; ++head) {
      const double* q = &token.q[shape.GroupOf(head) * shape.d_k];
      const double* k = &token.k[shape.GroupOf(head) * shape.d_k];
      for (size_t c = 0; c < shape.d_k; ++c)
        alpha[c] = std::exp(token.log_alpha[head * shape.d_k + c]);
      for (size_t i = 0; i < shape.d_v; ++i) {
        const size_t row = head * shape.d_v + i;
        double* S = &state[row * shape.d_k];
        double read = 0;
        for (size_t c = 0; c < shape.d_k; ++c) read += S[c] * alpha[c] * k[c];
        u[row] = token.beta[head] * (token.v[row] - read);
        for (size_t c = 0; c < shape.d_k; ++c) S[c] = S[c] * alpha[c] + u[row] * k[c];
        for (size_t c = 0; c < shape.d_k; ++c) o[row] += S[c] * q[c];
      }
    }
    return o;
  }

  Shape shape;
  std::vector<double> state;  // [head][d_v][d_k]
  std::vector<double> u;      // the correction of the last token
};

}  // namespace ssmd::reference
