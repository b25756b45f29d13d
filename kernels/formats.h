// Number formats of tensors, records and checkpoints, and their exact conversions.
//
// Narrowing is round to nearest even unless its name says Stochastic, and never saturates: a value
// past the largest finite number becomes infinity, NaN stays NaN, denormals are kept. One
// definition for host and device.
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

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): 128 bits that
// depend on a counter and a key alone, so any thread computes any element's bits.
struct PhiloxWords {
  uint32_t word[4] = {};
};
inline constexpr uint32_t kPhiloxMultiplier0 = 0xd2511f53u, kPhiloxMultiplier1 = 0xcd9e8d57u;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9e3779b9u, kPhiloxWeyl1 = 0xbb67ae85u;
inline constexpr int kPhiloxRounds = 10;

SSMD_HOST_DEVICE constexpr PhiloxWords Philox4x32(PhiloxWords counter, uint32_t key0,
                                                  uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t{kPhiloxMultiplier0} * counter.word[0];
    const uint64_t p1 = uint64_t{kPhiloxMultiplier1} * counter.word[2];
    counter = {{static_cast<uint32_t>(p1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(p1),
                static_cast<uint32_t>(p0 >> 32) ^ counter.word[3] ^ key1,
                static_cast<uint32_t>(p0)}};
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return counter;
}

// What the rounding bits of a checkpoint depend on, with the head and the element: nothing else, so
// fused and background flushes, retries and any batch write the same bytes.
struct RoundingKey {
  uint64_t model_seed = 0;
  uint64_t sequence_key = 0;
  uint32_t layer = 0;
  uint64_t fold_position = 0;  // of an import: its position
};

// A RoundingKey made ready: 254 bits of it do not fit Philox's 192, so a first call turns model
// seed (key) and (sequence key, layer) (counter) into the key of the others.
// Their counter:   word 0      element / 4; elements of a head are counted along d_k, then d_v
//                  word 1      head
//                  words 2, 3  fold position, low half first
// Word i of the result belongs to the element with element % 4 == i.
struct RoundingStream {
  uint32_t key0 = 0, key1 = 0;
  uint32_t position_low = 0, position_high = 0;
};

SSMD_HOST_DEVICE constexpr RoundingStream MakeRoundingStream(const RoundingKey& key) {
  const PhiloxWords words = Philox4x32({{static_cast<uint32_t>(key.sequence_key),
                                         static_cast<uint32_t>(key.sequence_key >> 32), key.layer}},
                                       static_cast<uint32_t>(key.model_seed),
                                       static_cast<uint32_t>(key.model_seed >> 32));
  return {words.word[0], words.word[1], static_cast<uint32_t>(key.fold_position),
          static_cast<uint32_t>(key.fold_position >> 32)};
}

// The bits of elements 4 * block .. 4 * block + 3 of one head.
SSMD_HOST_DEVICE constexpr PhiloxWords RoundingBits(const RoundingStream& stream, uint32_t head,
                                                    uint32_t block) {
  return Philox4x32({{block, head, stream.position_low, stream.position_high}}, stream.key0,
                    stream.key1);
}

// Rounds to one of the two neighbours, up in magnitude with the probability of the distance from
// the lower one (in steps of 2^-32 of their distance, so exactly that unless |value| < 2^-33): the
// expected result is the value. With `random` as a fraction of 2^32, up means fraction + random
// >= 1. What has a code keeps it. Past 65504 there is no upper neighbour: infinity.
SSMD_HOST_DEVICE inline uint16_t StochasticToFp16(float value, uint32_t random) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);  // NaN
  if (magnitude > 0x477fe000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude >= 0x38800000u) {  // 13 bits are dropped
    const uint32_t rounded = magnitude + (random >> 19) - (112u << 23);
    return static_cast<uint16_t>(sign | (rounded >> 13));
  }
  // Below 2^-14: in units of 2^-24, with 32 bits behind the point. A step up may reach 2^-14.
  const uint32_t exponent = magnitude >> 23;
  if (exponent < 126 - 55) return sign;  // below 2^-32 units
  const uint64_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const uint64_t fixed = (mantissa << 32) >> (126 - exponent);
  return static_cast<uint16_t>(sign | ((fixed + random) >> 32));
}

}  // namespace ssmd
