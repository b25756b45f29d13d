// Mamba-2, one token at a time:
//   S_t = alpha_t S_{t-1} + (scale_t v_t) k_t^T        o_t = S_t q_t
#pragma once

#include <cmath>

#include "tests/reference/token.h"

namespace ssmd::reference {

struct Mamba2 {
  explicit Mamba2(const Shape& s)
      : shape(s), state(s.head_count * s.d_v * s.d_k), u(s.head_count * s.d_v) {}

  // Returns o [head][d_v].
  std::vector<double> Step(const Token& token) {
    std::vector<double> o(shape.head_count * shape.d_v);
    for (size_t head = 0; head < shape.head_count; ++head) {
      const double* q = &token.q[shape.GroupOf(head) * shape.d_k];
      const double* k = &token.k[shape.GroupOf(head) * shape.d_k];
      const double alpha = std::exp(token.log_alpha[head]);
      for (size_t i = 0; i < shape.d_v; ++i) {
        const size_t row = head * shape.d_v + i;
        double* S = &state[row * shape.d_k];
        u[row] = token.value_scale[head] * token.v[row];
        for (size_t c = 0; c < shape.d_k; ++c) S[c] = alpha * S[c] + u[row] * k[c];
        for (size_t c = 0; c < shape.d_k; ++c) o[row] += S[c] * q[c];
      }
    }
    return o;
  }

  Shape shape;
  std::vector<double> state;  // [head][d_v][d_k]
  std::vector<double> u;      // scale * v of the last token
};

}  // namespace ssmd::reference
