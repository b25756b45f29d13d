// The raw input form, one token at a time: a short causal convolution per channel, then gates.
//   y_c = SiLU(bias_c + sum_{i < w} weight_ci z_c[t - (w-1) + i])      z before token 0 is 0
//   Mamba-2   y = v | k | q     dt = softplus(dt + dt_bias), log_alpha = -exp(A_log) dt, scale = dt
//   GDN       y = q | k | v     log_alpha = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)
//   KDA       y = q | k | v     log_alpha = -exp(A_log) softplus(g + dt_bias), per channel, or
//                               lower_bound sigmoid(exp(A_log) (g + dt_bias)); beta = sigmoid(b)
//   norm      q, k := q, k / sqrt(|.|^2 + 1e-6) per key group, q := q d_k^-0.5
//
// Step returns q, k and v exact. Round them to the activation dtype, as the service does, before
// feeding the token to a recurrence; its output gets D v on top (AddSkip).
#pragma once

#include <cmath>
#include <deque>
#include <string>
#include <utility>

#include "tests/reference/token.h"

namespace ssmd::reference {

struct RawParameters {
  size_t conv_width = 0;            // w
  std::vector<double> conv_weight;  // [channel][w]
  std::vector<double> conv_bias;    // [channel] or empty
  std::vector<double> a_log;        // [head]
  std::vector<double> dt_bias;      // [head], KDA [head][d_k]; or empty
  std::vector<double> d;            // [head] or empty; Mamba-2
  bool qk_l2_norm = false;
  bool lower_bound_gate = false;  // KDA
  double gate_lower_bound = 0;
};

struct RawToken {
  std::vector<double> projection;  // z, [channel]
  std::vector<double> dt, a, b;    // [head]: Mamba-2; GDN; GDN and KDA
  std::vector<double> gate;        // g, [head][d_k]; KDA
};

struct RawForm {
  RawForm(std::string family_name, const Shape& s, RawParameters p)
      : family(std::move(family_name)), shape(s), parameters(std::move(p)) {}

  static double Softplus(double x) { return x > 40 ? x : std::log1p(std::exp(x)); }
  static double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

  // Convolves, computes the gates, and moves the window on by this token.
  Token Step(const RawToken& raw) {
    const size_t w = parameters.conv_width;
    const size_t channels = raw.projection.size();
    window.push_back(raw.projection);
    std::vector<double> y(channels), magnitude(channels);
    for (size_t c = 0; c < channels; ++c) {
      double sum = parameters.conv_bias.empty() ? 0 : parameters.conv_bias[c];
      magnitude[c] = std::abs(sum);
      for (size_t age = 0; age < w && age < window.size(); ++age) {
        const double term =
            parameters.conv_weight[c * w + (w - 1 - age)] * window[window.size() - 1 - age][c];
        sum += term;
        magnitude[c] += std::abs(term);
      }
      y[c] = sum * Sigmoid(sum);
    }
    if (window.size() > w - 1) window.pop_front();

    const size_t keys = shape.key_group_count * shape.d_k;
    const size_t values = shape.head_count * shape.d_v;
    const bool mamba2 = family == "mamba2", kda = family == "kda";
    auto split = [&](const std::vector<double>& all) {
      auto part = [&](size_t first, size_t count) {
        return std::vector<double>(all.begin() + first, all.begin() + first + count);
      };
      return Token{.q = part(mamba2 ? values + keys : 0, keys),
                   .k = part(mamba2 ? values : keys, keys),
                   .v = part(mamba2 ? 0 : 2 * keys, values)};
    };
    Token token = split(y);
    conv_magnitude = split(magnitude);
    q_norm.assign(shape.key_group_count, 1);
    k_norm.assign(shape.key_group_count, 1);
    for (size_t group = 0; group < shape.key_group_count && parameters.qk_l2_norm; ++group) {
      q_norm[group] = Normalise(&token.q[group * shape.d_k]);
      k_norm[group] = Normalise(&token.k[group * shape.d_k]);
      for (size_t i = 0; i < shape.d_k; ++i)
        token.q[group * shape.d_k + i] /= std::sqrt(static_cast<double>(shape.d_k));
    }

    const size_t decays = kda ? shape.d_k : 1;
    for (size_t i = 0; i < shape.head_count * decays; ++i) {
      const double rate = std::exp(parameters.a_log[i / decays]);
      const double in = kda ? raw.gate[i] : mamba2 ? raw.dt[i] : raw.a[i];
      const double x = in + (parameters.dt_bias.empty() ? 0 : parameters.dt_bias[i]);
      token.log_alpha.push_back(kda && parameters.lower_bound_gate
                                    ? parameters.gate_lower_bound * Sigmoid(rate * x)
                                    : -rate * Softplus(x));
      if (mamba2) token.value_scale.push_back(Softplus(x));
    }
    for (const double b : raw.b) token.beta.push_back(Sigmoid(b));
    return token;
  }

  // o += D v.
  void AddSkip(const std::vector<double>& v, std::vector<double>& o) const {
    for (size_t i = 0; i < o.size() && !parameters.d.empty(); ++i)
      o[i] += parameters.d[i / shape.d_v] * v[i];
  }

  std::string family;
  Shape shape;
  RawParameters parameters;
  std::deque<std::vector<double>> window;  // projections of the last w - 1 tokens, oldest first
  // Of the last token: |bias| + sum |weight z| of each q, k and v, and what q and k were divided
  // by.
  Token conv_magnitude;
  std::vector<double> q_norm, k_norm;

 private:
  double Normalise(double* x) const {
    double squares = 1e-6;
    for (size_t i = 0; i < shape.d_k; ++i) squares += x[i] * x[i];
    for (size_t i = 0; i < shape.d_k; ++i) x[i] /= std::sqrt(squares);
    return std::sqrt(squares);
  }
};

}  // namespace ssmd::reference
