// Number formats of tensors, records and checkpoints, and their exact conversions.
//
// Every narrowing here is round to nearest even and never saturates: a value past the largest
// finite number becomes infinity, NaN stays NaN, denormals are kept. (Stochastic rounding and the
// scaled 8- and 4-bit formats join this file with the two-precision checkpoints.) One definition
// for host and device.
#pragma once

#include <bit>
#include <cstdint>

#ifdef __CUDACC__
#define SSMD_HOST_DEVICE __host__ __device__
#else
#define SSMD_HOST_DEVICE
#endif

namespace ssmd {

enum class Dtype : uint8_t { kNone = 0, kFp32 = 1, kBf16 = 2, kFp16 = 3 };

constexpr uint32_t DtypeBytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::kNone:
      return 0;
    case Dtype::kFp32:
      return 4;
    case Dtype::kBf16:
    case Dtype::kFp16:
      return 2;
  }
  return 0;
}

constexpr const char* DtypeName(Dtype dtype) {
  switch (dtype) {
    case Dtype::kNone:
      return "none";
    case Dtype::kFp32:
      return "fp32";
    case Dtype::kBf16:
      return "bf16";
    case Dtype::kFp16:
      return "fp16";
  }
  return "?";
}

SSMD_HOST_DEVICE inline float Bf16ToFloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

SSMD_HOST_DEVICE inline uint16_t FloatToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u)
    return static_cast<uint16_t>((bits >> 16) | 0x40u);  // quiet NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

SSMD_HOST_DEVICE inline float Fp16ToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {  // zero or denormal: mantissa * 2^-24, exact in FP32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

SSMD_HOST_DEVICE inline uint16_t FloatToFp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);   // NaN
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds past 65504
  if (magnitude <
      0x38800000u) {  // below 2^-14: denormal; adding 2^-1 * 2^-1.. aligns the rounding position
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;  // ulp of [0.5, 1) is 2^-24
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(aligned) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23);
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

}  // namespace ssmd
