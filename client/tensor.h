// Tensors of the wire from and to float memory, such as an Eigen matrix's row-major data().
//
//   v1::Tensor q = ToTensor(v1::DATA_TYPE_BF16, {tokens, groups, d_k}, {q.data(), q_size});
//   absl::Status s = FromTensor(reply.output(), absl::MakeSpan(out, out_size));
//
// Narrowing rounds to nearest, ties to even; values past the largest finite one become infinity
// (which the service rejects), NaN stays NaN. Pure functions, nothing is kept.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "ssmd/v1/tensor.pb.h"

namespace ssmd::client {

static_assert(std::endian::native == std::endian::little, "tensors travel little-endian");

inline uint16_t Bf16FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float FloatFromBf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t Fp16FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);   // NaN
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and up
  if (magnitude < 0x38800000u) {
    // Denormal: adding 0.5, whose last place is 2^-24, rounds to a multiple of 2^-24.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}

inline float FloatFromFp16(uint16_t half) {
  const uint32_t exponent = (half >> 10) & 0x1fu, mantissa = half & 0x3ffu;
  float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  if (exponent == 0x1fu) magnitude = std::bit_cast<float>(0x7f800000u | (mantissa << 13));
  if (exponent > 0 && exponent < 0x1fu)
    magnitude = std::bit_cast<float>(((exponent + 112u) << 23) | (mantissa << 13));
  return (half & 0x8000u) != 0 ? -magnitude : magnitude;
}

// Bytes of one element; 0 for an unknown type.
inline size_t DataTypeBytes(v1::DataType dtype) {
  if (dtype == v1::DATA_TYPE_FP32) return 4;
  return dtype == v1::DATA_TYPE_BF16 || dtype == v1::DATA_TYPE_FP16 ? 2 : 0;
}

// Requires: dtype is FP32, BF16 or FP16, and values.size() is the product of `shape`: a request
// that breaks this is refused by the service.
inline v1::Tensor ToTensor(v1::DataType dtype, std::initializer_list<uint64_t> shape,
                           absl::Span<const float> values) {
  v1::Tensor tensor;
  tensor.set_dtype(dtype);
  for (uint64_t extent : shape) tensor.add_shape(extent);
  std::string& data = *tensor.mutable_data();
  data.resize(values.size() * DataTypeBytes(dtype));
  if (dtype == v1::DATA_TYPE_FP32) {
    if (!values.empty()) std::memcpy(data.data(), values.data(), data.size());
    return tensor;
  }
  for (size_t i = 0; i * 2 < data.size(); ++i) {
    const uint16_t bits =
        dtype == v1::DATA_TYPE_BF16 ? Bf16FromFloat(values[i]) : Fp16FromFloat(values[i]);
    std::memcpy(&data[2 * i], &bits, 2);
  }
  return tensor;
}

// Widens a tensor into `values`. Errors: INVALID_ARGUMENT unless shape, data and `values` agree.
inline absl::Status FromTensor(const v1::Tensor& tensor, absl::Span<float> values) {
  const size_t element = DataTypeBytes(tensor.dtype());
  if (element == 0) return absl::InvalidArgumentError("tensor: unknown dtype");
  uint64_t count = 1;
  for (uint64_t extent : tensor.shape())
    if (__builtin_mul_overflow(count, extent, &count))
      return absl::InvalidArgumentError("tensor: the shape's product overflows 64 bits");
  if (count != values.size() || tensor.data().size() != values.size() * element)
    return absl::InvalidArgumentError(
        absl::StrCat("tensor: expected ", values.size(), " elements of ", element,
                     " bytes, got shape product ", count, " and ", tensor.data().size(), " bytes"));
  const char* data = tensor.data().data();
  if (tensor.dtype() == v1::DATA_TYPE_FP32) {
    if (!values.empty()) std::memcpy(values.data(), data, tensor.data().size());
    return absl::OkStatus();
  }
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, data + 2 * i, 2);
    values[i] = tensor.dtype() == v1::DATA_TYPE_BF16 ? FloatFromBf16(bits) : FloatFromFp16(bits);
  }
  return absl::OkStatus();
}

}  // namespace ssmd::client
