// Device side of the number formats: activations, records and checkpoints to FP32 and back.
#pragma once

#include <cuda_runtime.h>

#include "kernels/formats.h"
#include "kernels/layout.h"

namespace ssmd::cuda {

__device__ inline float LoadAs(Dtype dtype, const void* from, uint64_t index) {
  if (dtype == Dtype::kFp32) return static_cast<const float*>(from)[index];
  const uint16_t code = static_cast<const uint16_t*>(from)[index];
  return dtype == Dtype::kBf16 ? Bf16ToFloat(code) : Fp16ToFloat(code);
}

// Elements [index, index + 4); `index` is a multiple of 4, `from` aligned to 16 bytes.
__device__ inline float4 LoadFourAs(Dtype dtype, const void* from, uint64_t index) {
  if (dtype == Dtype::kFp32)
    return *reinterpret_cast<const float4*>(static_cast<const float*>(from) + index);
  const uint2 codes = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(from) + index);
  const auto low = [](uint32_t pair) { return static_cast<uint16_t>(pair & 0xffffu); };
  const auto high = [](uint32_t pair) { return static_cast<uint16_t>(pair >> 16); };
  if (dtype == Dtype::kBf16) {
    return {Bf16ToFloat(low(codes.x)), Bf16ToFloat(high(codes.x)), Bf16ToFloat(low(codes.y)),
            Bf16ToFloat(high(codes.y))};
  }
  return {Fp16ToFloat(low(codes.x)), Fp16ToFloat(high(codes.x)), Fp16ToFloat(low(codes.y)),
          Fp16ToFloat(high(codes.y))};
}

// Rounds to nearest even; returns what was stored.
__device__ inline float StoreAs(Dtype dtype, void* to, uint64_t index, float value) {
  if (dtype == Dtype::kFp32) return static_cast<float*>(to)[index] = value;
  const uint16_t code = dtype == Dtype::kBf16 ? FloatToBf16(value) : FloatToFp16(value);
  static_cast<uint16_t*>(to)[index] = code;
  return dtype == Dtype::kBf16 ? Bf16ToFloat(code) : Fp16ToFloat(code);
}

__device__ inline bool IsFinite(float value) { return isfinite(value); }
__device__ inline bool IsFinite(const float4& v) {
  return isfinite(v.x) && isfinite(v.y) && isfinite(v.z) && isfinite(v.w);
}

// One layer of a checkpoint page, for reading.
struct CheckpointSource {
  const std::byte* data;
  Dtype dtype;
  __device__ float4 Four(uint64_t element) const { return LoadFourAs(dtype, data, element); }
};

// One layer of a page, for writing: both copies from the same FP32 values; HP, which is read back
// into the recurrence, is rounded stochastically.
struct CheckpointTarget {
  std::byte* hp;
  std::byte* lp;  // null: one checkpoint
  Dtype hp_dtype, lp_dtype;
  RoundingStream rounding;
  uint32_t elements_per_head;

  // `element` is a multiple of 4, counted over all heads. False when a value left a format's range.
  __device__ bool StoreFour(uint64_t element, const float4& value) const {
    bool good = IsFinite(value);
    const float values[4] = {value.x, value.y, value.z, value.w};
    if (hp_dtype == Dtype::kFp32) {
      *reinterpret_cast<float4*>(reinterpret_cast<float*>(hp) + element) = value;
    } else {
      const auto head = static_cast<uint32_t>(element / elements_per_head);
      const auto block = static_cast<uint32_t>(element % elements_per_head / 4);
      const PhiloxWords bits = RoundingBits(rounding, head, block);
      uint32_t codes[4];
      for (int i = 0; i < 4; ++i) {
        codes[i] = StochasticToFp16(values[i], bits.word[i]);
        good = good && fabsf(values[i]) <= 65504.0f;
      }
      *reinterpret_cast<uint2*>(reinterpret_cast<uint16_t*>(hp) + element) = {
          codes[0] | codes[1] << 16, codes[2] | codes[3] << 16};
    }
    if (lp != nullptr) {
      for (int i = 0; i < 4; ++i)
        good = IsFinite(StoreAs(lp_dtype, lp, element + i, values[i])) && good;
    }
    return good;
  }
};

}  // namespace ssmd::cuda
