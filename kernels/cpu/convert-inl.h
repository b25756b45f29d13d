// Vector forms of the conversions in kernels/formats.h: the same bits, tested against them (but for
// the payload of a NaN that widens).
//
// Counts are multiples of 8; pointers need only their element's alignment.
// (Included once per instruction set: Highway's toggling include guard.)
#if defined(SSMD_KERNELS_CPU_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SSMD_KERNELS_CPU_CONVERT_INL_H_
#undef SSMD_KERNELS_CPU_CONVERT_INL_H_
#else
#define SSMD_KERNELS_CPU_CONVERT_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/formats.h"

HWY_BEFORE_NAMESPACE();
namespace ssmd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using TagF = hn::CappedTag<float, 8>;
using TagI = hn::RebindToSigned<TagF>;
using Tag16 = hn::Rebind<uint16_t, TagF>;

HWY_INLINE hn::Vec<TagF> Bf16BitsToFloat(hn::Vec<Tag16> code) {
  return hn::BitCast(TagF(), hn::ShiftLeft<16>(hn::PromoteTo(TagI(), code)));
}

HWY_INLINE hn::Vec<TagF> Fp16BitsToFloat(hn::Vec<Tag16> code) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3  // F16C: one instruction
  const hn::Rebind<hwy::float16_t, TagF> d16;
  return hn::PromoteTo(TagF(), hn::BitCast(d16, code));
#else
  const TagI di;
  const TagF df;
  const auto bits = hn::PromoteTo(di, code);
  const auto magnitude = hn::And(bits, hn::Set(di, 0x7fff));
  const auto sign = hn::ShiftLeft<16>(hn::AndNot(hn::Set(di, 0x7fff), bits));
  const auto shifted = hn::ShiftLeft<13>(magnitude);
  const auto normal = hn::Add(shifted, hn::Set(di, 112 << 23));
  const auto special = hn::Add(shifted, hn::Set(di, 224 << 23));  // exponent 31 becomes 255
  // 2^-14 (1 + m / 1024) - 2^-14: exact, and no denormal is ever an operand.
  const auto raised = hn::BitCast(df, hn::Add(shifted, hn::Set(di, 113 << 23)));
  const auto denormal = hn::BitCast(di, hn::Sub(raised, hn::Set(df, 0x1p-14f)));
  auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(di, 0x400)), denormal, normal);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(di, 0x7bff)), special, result);
  return hn::BitCast(df, hn::Or(result, sign));
#endif
}

HWY_INLINE hn::Vec<TagI> FloatToBf16Bits(hn::Vec<TagF> value) {
  const TagI di;
  const auto bits = hn::BitCast(di, value);
  const hn::RebindToUnsigned<TagI> du;
  const auto high = hn::BitCast(di, hn::ShiftRight<16>(hn::BitCast(du, bits)));
  const auto odd = hn::And(high, hn::Set(di, 1));
  const auto sum = hn::Add(hn::Add(bits, hn::Set(di, 0x7fff)), odd);
  const auto rounded = hn::BitCast(di, hn::ShiftRight<16>(hn::BitCast(du, sum)));
  const auto magnitude = hn::And(bits, hn::Set(di, 0x7fffffff));
  const auto is_nan = hn::Gt(magnitude, hn::Set(di, 0x7f800000));
  return hn::IfThenElse(is_nan, hn::Or(high, hn::Set(di, 0x40)), rounded);
}

HWY_INLINE hn::Vec<TagI> FloatToFp16Bits(hn::Vec<TagF> value) {
  const TagI di;
  const TagF df;
  const auto bits = hn::BitCast(di, value);
  const auto magnitude = hn::And(bits, hn::Set(di, 0x7fffffff));
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3  // F16C: one instruction, but for NaN
  const hn::Rebind<hwy::float16_t, TagF> d16;
  const auto code = hn::PromoteTo(di, hn::BitCast(Tag16(), hn::DemoteTo(d16, value)));
  const auto nan =
      hn::Or(hn::And(hn::ShiftRight<16>(bits), hn::Set(di, 0x8000)), hn::Set(di, 0x7e00));
  return hn::IfThenElse(hn::Gt(magnitude, hn::Set(di, 0x7f800000)), nan, code);
#else
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(di, 0x8000));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(di, 1));
  const auto sum = hn::Add(hn::Add(magnitude, hn::Set(di, 0xfff - (112 << 23))), odd);
  auto result = hn::ShiftRight<13>(sum);
  const auto aligned = hn::Add(hn::BitCast(df, magnitude), hn::Set(df, 0.5f));
  const auto denormal = hn::Sub(hn::BitCast(di, aligned), hn::Set(di, 0x3f000000));
  result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(di, 0x38800000)), denormal, result);
  const auto too_large = hn::Gt(magnitude, hn::Set(di, 0x477fefff));
  result = hn::IfThenElse(too_large, hn::Set(di, 0x7c00), result);
  const auto is_nan = hn::Gt(magnitude, hn::Set(di, 0x7f800000));
  result = hn::IfThenElse(is_nan, hn::Set(di, 0x7e00), result);
  return hn::Or(result, sign);
#endif
}

// StochasticToFp16 with one random word per lane.
HWY_INLINE hn::Vec<TagI> StochasticToFp16Bits(hn::Vec<TagF> value, hn::Vec<TagI> random) {
  const TagI di;
  const hn::RebindToUnsigned<TagI> du;
  const auto bits = hn::BitCast(di, value);
  const auto magnitude = hn::And(bits, hn::Set(di, 0x7fffffff));
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(di, 0x8000));
  const auto step = hn::BitCast(di, hn::ShiftRight<19>(hn::BitCast(du, random)));
  auto result = hn::ShiftRight<13>(hn::Add(hn::Add(magnitude, step), hn::Set(di, -(112 << 23))));
  const auto is_denormal = hn::Lt(magnitude, hn::Set(di, 0x38800000));
  if (!hn::AllFalse(di, is_denormal)) {
    // mantissa * 2^-shift units of 2^-24, split at the point; `left` or `right` is 0.
    const auto mantissa =
        hn::BitCast(du, hn::Or(hn::And(magnitude, hn::Set(di, 0x7fffff)), hn::Set(di, 0x800000)));
    const auto shift =
        hn::Max(hn::Sub(hn::Set(di, 126), hn::ShiftRight<23>(magnitude)), hn::Set(di, 0));
    const auto left =
        hn::Sub(hn::Set(di, 32), hn::Max(hn::Min(shift, hn::Set(di, 32)), hn::Set(di, 1)));
    const auto right =
        hn::Min(hn::Sub(hn::Max(shift, hn::Set(di, 32)), hn::Set(di, 32)), hn::Set(di, 31));
    const auto whole = hn::Shr(mantissa, hn::BitCast(du, hn::Min(shift, hn::Set(di, 31))));
    const auto fraction = hn::Shr(hn::Shl(mantissa, hn::BitCast(du, left)), hn::BitCast(du, right));
    const auto noise = hn::BitCast(du, random);
    const auto sum = hn::Add(fraction, noise);
    const auto carry = hn::ShiftRight<31>(
        hn::Or(hn::And(fraction, noise), hn::AndNot(sum, hn::Or(fraction, noise))));
    const auto denormal = hn::BitCast(di, hn::Add(whole, carry));
    result = hn::IfThenElse(is_denormal, denormal, result);
  }
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(di, 0x477fe000)), hn::Set(di, 0x7c00), result);
  const auto is_nan = hn::Gt(magnitude, hn::Set(di, 0x7f800000));
  result = hn::IfThenElse(is_nan, hn::Set(di, 0x7e00), result);
  return hn::Or(result, sign);
}

// words[0, 4 * count) := RoundingBits of blocks [block, block + count); up to 28 words more are
// written. `count` is a multiple of 4.
HWY_INLINE void FillRoundingBits(const RoundingStream& stream, uint32_t head, uint32_t block,
                                 size_t count, uint32_t* words) {
#if HWY_TARGET == HWY_SCALAR
  for (size_t i = 0; i < count; ++i) {
    const PhiloxWords bits = RoundingBits(stream, head, block + static_cast<uint32_t>(i));
    std::memcpy(words + 4 * i, bits.word, sizeof(bits.word));
  }
#else
  // One block a lane; the upper halves of the 64-bit lanes hold garbage until the end.
  const hn::CappedTag<uint64_t, 8> d;
  const hn::Repartition<uint32_t, decltype(d)> d32;
  const auto multiplier0 = hn::Set(d32, kPhiloxMultiplier0);
  const auto multiplier1 = hn::Set(d32, kPhiloxMultiplier1);
  for (size_t i = 0; i < count; i += hn::Lanes(d)) {
    auto c0 = hn::Iota(d, block + i);
    auto c1 = hn::Set(d, head);
    auto c2 = hn::Set(d, stream.position_low);
    auto c3 = hn::Set(d, stream.position_high);
    uint32_t key0 = stream.key0, key1 = stream.key1;
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const auto p0 = hn::MulEven(hn::BitCast(d32, c0), multiplier0);
      const auto p1 = hn::MulEven(hn::BitCast(d32, c2), multiplier1);
      c0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(p1), c1), hn::Set(d, key0));
      c2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(p0), c3), hn::Set(d, key1));
      c1 = p1;
      c3 = p0;
      key0 += kPhiloxWeyl0;
      key1 += kPhiloxWeyl1;
    }
    const auto low = hn::Set(d, uint64_t{0xffffffffu});
    const auto first = hn::Or(hn::And(c0, low), hn::ShiftLeft<32>(c1));
    const auto second = hn::Or(hn::And(c2, low), hn::ShiftLeft<32>(c3));
    hn::StoreInterleaved2(first, second, d, reinterpret_cast<uint64_t*>(words + 4 * i));
  }
#endif
}

// to[i] := StochasticToFp16(from[i]) with the bits of elements [element, element + count) of a
// head. `count` and `element` are multiples of 16.
HWY_INLINE void NarrowStochastic(const float* from, size_t count, const RoundingStream& stream,
                                 uint32_t head, size_t element, std::byte* to) {
  constexpr size_t kChunk = 64;
  alignas(64) uint32_t words[kChunk + 32];
  auto* to16 = reinterpret_cast<uint16_t*>(to);
  const TagF df;
  for (size_t first = 0; first < count; first += kChunk) {
    const size_t chunk = count - first < kChunk ? count - first : kChunk;
    FillRoundingBits(stream, head, static_cast<uint32_t>((element + first) / 4), chunk / 4, words);
    for (size_t i = 0; i < chunk; i += hn::Lanes(df)) {
      const auto random = hn::BitCast(TagI(), hn::LoadU(hn::RebindToUnsigned<TagI>(), words + i));
      const auto bits = StochasticToFp16Bits(hn::LoadU(df, from + first + i), random);
      hn::StoreU(hn::DemoteTo(Tag16(), bits), Tag16(), to16 + first + i);
    }
  }
}

// to[i] := FP32 of from[i].
HWY_INLINE void Widen(Dtype dtype, const std::byte* from, size_t count, float* to) {
  if (dtype == Dtype::kFp32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  const auto* from16 = reinterpret_cast<const uint16_t*>(from);
  const TagF df;
  for (size_t i = 0; i < count; i += hn::Lanes(df)) {
    const auto code = hn::LoadU(Tag16(), from16 + i);
    hn::StoreU(dtype == Dtype::kBf16 ? Bf16BitsToFloat(code) : Fp16BitsToFloat(code), df, to + i);
  }
}

// to[i] := from[i] rounded to nearest even.
HWY_INLINE void Narrow(Dtype dtype, const float* from, size_t count, std::byte* to) {
  if (dtype == Dtype::kFp32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  auto* to16 = reinterpret_cast<uint16_t*>(to);
  const TagF df;
  for (size_t i = 0; i < count; i += hn::Lanes(df)) {
    const auto value = hn::LoadU(df, from + i);
    const auto bits = dtype == Dtype::kBf16 ? FloatToBf16Bits(value) : FloatToFp16Bits(value);
    hn::StoreU(hn::DemoteTo(Tag16(), bits), Tag16(), to16 + i);
  }
}

// True when no value is NaN or infinite: 0 * x is NaN for exactly those.
HWY_INLINE bool AllFinite(const float* values, size_t count) {
  const TagF df;
  auto probe = hn::Zero(df);
  for (size_t i = 0; i < count; i += hn::Lanes(df))
    probe = hn::MulAdd(hn::LoadU(df, values + i), hn::Zero(df), probe);
  return hn::AllTrue(df, hn::Eq(probe, probe));
}

}  // namespace ssmd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
