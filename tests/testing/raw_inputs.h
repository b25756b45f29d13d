// Made-up inputs of the raw form, and the oracle of a layer in raw form with what the tolerance
// needs to know of its history.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <random>
#include <vector>

#include "kernels/params.h"
#include "tests/reference/raw.h"
#include "tests/reference/recurrence.h"
#include "tests/testing/layer_inputs.h"
#include "tests/testing/tolerance.h"

namespace ssmd::testing {

// Which optional parameters a layer has.
struct RawOptions {
  bool conv_bias = true, dt_bias = true, d = true, norm = true, lower_bound = false;
};

inline RawParameters RandomRawParameters(const LayerShape& shape, const RawOptions& options,
                                         std::mt19937_64& random) {
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  auto fill = [&](size_t count, float scale) {
    std::vector<float> values(count);
    for (float& x : values) x = scale * uniform(random);
    return values;
  };
  RawParameters p;
  p.conv_weight = fill(size_t{shape.conv_channels()} * shape.conv_width, 1);
  if (options.conv_bias) p.conv_bias = fill(shape.conv_channels(), 0.5f);
  p.a_log = fill(shape.head_count, 0.7f);
  if (options.dt_bias) p.dt_bias = fill(size_t{shape.head_count} * shape.decays_per_head(), 2);
  if (options.d && !shape.is_delta_rule()) p.d = fill(shape.head_count, 1);
  p.qk_l2_norm = options.norm && shape.is_delta_rule();
  if (options.lower_bound && shape.family == Family::kKda) {
    p.kda_gate = KdaGate::kLowerBound;
    p.gate_lower_bound = -5;
  }
  return p;
}

inline reference::RawParameters ReferenceParameters(const LayerShape& shape,
                                                    const RawParameters& p) {
  auto wide = [](const std::vector<float>& v) { return std::vector<double>(v.begin(), v.end()); };
  return {.conv_width = shape.conv_width,
          .conv_weight = wide(p.conv_weight),
          .conv_bias = wide(p.conv_bias),
          .a_log = wide(p.a_log),
          .dt_bias = wide(p.dt_bias),
          .d = wide(p.d),
          .qk_l2_norm = p.qk_l2_norm,
          .lower_bound_gate = p.kda_gate == KdaGate::kLowerBound,
          .gate_lower_bound = p.gate_lower_bound};
}

// `scale` of the projections: without a norm, 1 / sqrt(d_k) keeps keys near norm 1.
inline reference::RawToken RandomRawToken(const LayerShape& shape, Dtype activation, float scale,
                                          std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  auto fill = [&](size_t count, float factor) {
    std::vector<double> values(count);
    for (double& x : values)
      x = RoundTo(activation, factor * std::clamp(normal(random), -4.0f, 4.0f));
    return values;
  };
  reference::RawToken token;
  token.projection = fill(shape.conv_channels(), scale);
  if (shape.family == Family::kMamba2) token.dt = fill(shape.head_count, 1.5f);
  if (shape.family == Family::kGdn) token.a = fill(shape.head_count, 1.5f);
  if (shape.is_delta_rule()) token.b = fill(shape.head_count, 1.5f);
  if (shape.family == Family::kKda) token.gate = fill(size_t{shape.head_count} * shape.d_k, 1.5f);
  return token;
}

// The tensors of one Verify in raw form, packed token after token.
struct PackedRawInputs {
  std::vector<std::byte> projection, dt, a, b, gate;

  void Append(const reference::RawToken& token, Dtype activation) {
    auto append = [&](const std::vector<double>& from, std::vector<std::byte>& to) {
      for (const double x : from) AppendAs(activation, static_cast<float>(x), to);
    };
    append(token.projection, projection);
    append(token.dt, dt);
    append(token.a, a);
    append(token.b, b);
    append(token.gate, gate);
  }
  RawInputs view() const {
    auto data = [](const std::vector<std::byte>& v) { return v.empty() ? nullptr : v.data(); };
    return {data(projection), data(dt), data(a), data(b), data(gate)};
  }
};

// What the service may have rounded one exact value to.
struct RoundedRange {
  double low, high;
  RoundedRange(Dtype activation, double exact, double error)
      : low(RoundTo(activation, static_cast<float>(exact - error))),
        high(RoundTo(activation, static_cast<float>(exact + error))) {}
  double doubt() const { return high - low; }
};

// FP32 errors of each element of q, k and v before it is rounded.
struct RawErrors {
  std::vector<double> q, k, v;
};

// One layer of one sequence in raw form. Copyable: a copy is the same sequence.
class RawOracle {
 public:
  RawOracle(const LayerShape& layer_shape, const RawParameters& parameters, Dtype activation_dtype)
      : shape(layer_shape),
        activation(activation_dtype),
        form(FamilyName(shape.family),
             {shape.head_count, shape.key_group_count, shape.d_k, shape.d_v},
             ReferenceParameters(shape, parameters)),
        recurrence(FamilyName(shape.family), form.shape),
        u_mass(size_t{shape.head_count} * shape.d_v) {
    magnitudes.value_scale = 0;
    for (const float d : parameters.d)
      magnitudes.skip = std::max(magnitudes.skip, std::abs(double{d}));
  }

  // Of `token`, which `form` has just returned.
  RawErrors Errors(const reference::Token& token) const {
    const reference::Token& magnitude = form.conv_magnitude;
    RawErrors errors;
    for (size_t i = 0; i < token.v.size(); ++i)
      errors.v.push_back(ConvError(shape.conv_width, magnitude.v[i], token.v[i]));
    const double q_scale =
        form.parameters.qk_l2_norm ? std::sqrt(static_cast<double>(shape.d_k)) : 1;
    errors.q = KeyErrors(token.q, magnitude.q, form.q_norm, q_scale);
    errors.k = KeyErrors(token.k, magnitude.k, form.k_norm, 1);
    return errors;
  }

  // One token through convolution, gates, rounding and recurrence: o [head][d_v]; magnitudes grow.
  std::vector<double> Step(const reference::RawToken& raw) {
    reference::Token token = form.Step(raw);
    Round(token);
    std::vector<double> o = recurrence.Step(token);
    form.AddSkip(token.v, o);
    Measure(token);
    return o;
  }

  LayerShape shape;
  Dtype activation;
  reference::RawForm form;
  reference::Recurrence recurrence;
  std::vector<double> u_mass;  // per element of u
  Magnitudes magnitudes;

 private:
  // Of values that were divided by `norm` (of their key group) and by `scale`.
  std::vector<double> KeyErrors(const std::vector<double>& values,
                                const std::vector<double>& magnitudes_of,
                                const std::vector<double>& norm, double scale) const {
    std::vector<double> errors(values.size());
    for (size_t first = 0; first < values.size(); first += shape.d_k) {
      const double n = norm[first / shape.d_k];
      double squares = 0;
      for (size_t i = first; i < first + shape.d_k; ++i) {
        errors[i] = ConvError(shape.conv_width, magnitudes_of[i], values[i] * n * scale);
        squares += errors[i] * errors[i];
      }
      if (!form.parameters.qk_l2_norm) continue;
      for (size_t i = first; i < first + shape.d_k; ++i) {
        errors[i] =
            NormError(errors[i], std::sqrt(squares), shape.d_k, n, values[i] * scale) / scale;
      }
    }
    return errors;
  }

  // Rounds q, k and v as the service does, and notes how far it may have rounded otherwise.
  void Round(reference::Token& token) {
    const RawErrors errors = Errors(token);
    auto round = [&](double& x, double error) {
      const double doubt = RoundedRange(activation, x, error).doubt();
      x = RoundTo(activation, static_cast<float>(x));
      return doubt;
    };
    double k_doubt = 0, v_doubt = 0;
    for (size_t group = 0; group < shape.key_group_count; ++group) {
      double q = 0, k = 0;
      for (size_t i = group * shape.d_k; i < (group + 1) * shape.d_k; ++i) {
        q += std::pow(round(token.q[i], errors.q[i]), 2);
        k += std::pow(round(token.k[i], errors.k[i]), 2);
      }
      magnitudes.q_doubt = std::max(magnitudes.q_doubt, std::sqrt(q));
      k_doubt = std::max(k_doubt, std::sqrt(k));
    }
    for (size_t i = 0; i < token.v.size(); ++i)
      v_doubt = std::max(v_doubt, round(token.v[i], errors.v[i]));
    magnitudes.k_doubt += k_doubt;
    magnitudes.v_doubt += v_doubt;
  }

  void Measure(const reference::Token& token) {
    Magnitudes& m = magnitudes;
    Cover(m, token, shape.d_k);
    for (const double s : token.value_scale) m.value_scale = std::max(m.value_scale, s);
    const size_t decays = shape.decays_per_head();
    for (size_t row = 0; row < u_mass.size(); ++row) {
      const auto first = token.log_alpha.begin() + static_cast<ptrdiff_t>(row / shape.d_v * decays);
      const double alpha =
          std::exp(*std::max_element(first, first + static_cast<ptrdiff_t>(decays)));
      u_mass[row] = alpha * u_mass[row] + std::abs(recurrence.u()[row]);
      m.u_mass = std::max(m.u_mass, u_mass[row]);
    }
  }
};

}  // namespace ssmd::testing
