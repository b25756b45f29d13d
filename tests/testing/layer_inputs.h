// Made-up inputs of SSM layers: the bytes a service is sent and the doubles an oracle is fed, equal
// by construction.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/params.h"
#include "tests/reference/token.h"

namespace ssmd::testing {

inline float RoundTo(Dtype dtype, float value) {
  if (dtype == Dtype::kBf16) return Bf16ToFloat(FloatToBf16(value));
  if (dtype == Dtype::kFp16) return Fp16ToFloat(FloatToFp16(value));
  return value;
}

inline void AppendAs(Dtype dtype, float value, std::vector<std::byte>& out) {
  const uint16_t half = dtype == Dtype::kBf16 ? FloatToBf16(value) : FloatToFp16(value);
  const void* from = dtype == Dtype::kFp32 ? static_cast<const void*>(&value) : &half;
  const size_t at = out.size();
  out.resize(at + DtypeBytes(dtype));
  std::memcpy(&out[at], from, DtypeBytes(dtype));
}

inline float LoadAs(Dtype dtype, const std::byte* from) {
  if (dtype == Dtype::kFp32) {
    float value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  uint16_t half;
  std::memcpy(&half, from, sizeof(half));
  return dtype == Dtype::kBf16 ? Bf16ToFloat(half) : Fp16ToFloat(half);
}

// One token of one layer. Keys and queries have norm near 1, beta in (0, 1), decays from nearly
// none to strong.
inline reference::Token RandomToken(const LayerShape& shape, Dtype activation,
                                    std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
  reference::Token token;
  auto fill = [&](std::vector<double>& to, size_t count, float scale) {
    for (size_t i = 0; i < count; ++i) to.push_back(RoundTo(activation, normal(random) * scale));
  };
  const size_t keys = size_t{shape.key_group_count} * shape.d_k;
  const float unit = 0.9f / std::sqrt(static_cast<float>(shape.d_k));
  fill(token.q, keys, unit);
  fill(token.k, keys, unit);
  fill(token.v, size_t{shape.head_count} * shape.d_v, 1.0f);
  for (size_t i = 0; i < size_t{shape.head_count} * shape.decays_per_head(); ++i) {
    token.log_alpha.push_back(-std::exp(normal(random) * 2.0f - 2.0f));
  }
  for (auto* per_head : {&token.beta, &token.value_scale}) {
    if ((per_head == &token.beta) != shape.is_delta_rule()) continue;
    for (size_t i = 0; i < shape.head_count; ++i) per_head->push_back(uniform(random));
  }
  return token;
}

// The tensors of one Verify, packed token after token.
struct PackedInputs {
  std::vector<std::byte> q, k, v;
  std::vector<float> log_alpha, beta, value_scale;

  void Append(const reference::Token& token, Dtype activation) {
    for (const double x : token.q) AppendAs(activation, static_cast<float>(x), q);
    for (const double x : token.k) AppendAs(activation, static_cast<float>(x), k);
    for (const double x : token.v) AppendAs(activation, static_cast<float>(x), v);
    for (const double x : token.log_alpha) log_alpha.push_back(static_cast<float>(x));
    for (const double x : token.beta) beta.push_back(static_cast<float>(x));
    for (const double x : token.value_scale) value_scale.push_back(static_cast<float>(x));
  }
  VerifyInputs view() const {
    return {.q = q.data(),
            .k = k.data(),
            .v = v.data(),
            .log_alpha = log_alpha.data(),
            .beta = beta.empty() ? nullptr : beta.data(),
            .value_scale = value_scale.empty() ? nullptr : value_scale.data()};
  }
};

}  // namespace ssmd::testing
