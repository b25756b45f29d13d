// Values in the dtypes of the wire and the records, one scalar conversion at a time.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "absl/types/span.h"
#include "kernels/formats.h"

namespace ssmd::testing {

inline float DecodeOne(Dtype dtype, const std::byte* from) {
  if (dtype == Dtype::kFp32) {
    float value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return dtype == Dtype::kBf16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
}

inline void EncodeOne(Dtype dtype, float value, std::byte* to) {
  if (dtype == Dtype::kFp32) {
    std::memcpy(to, &value, sizeof(value));
    return;
  }
  const uint16_t bits = dtype == Dtype::kBf16 ? FloatToBf16(value) : FloatToFp16(value);
  std::memcpy(to, &bits, sizeof(bits));
}

// `value` as a reader of the dtype sees it.
inline float Rounded(Dtype dtype, float value) {
  std::byte bytes[sizeof(float)];
  EncodeOne(dtype, value, bytes);
  return DecodeOne(dtype, bytes);
}

inline std::vector<float> Decode(Dtype dtype, absl::Span<const std::byte> bytes) {
  std::vector<float> values(bytes.size() / DtypeBytes(dtype));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = DecodeOne(dtype, bytes.data() + i * DtypeBytes(dtype));
  return values;
}

}  // namespace ssmd::testing
