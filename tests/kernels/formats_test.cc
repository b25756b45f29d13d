#include "kernels/formats.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>

#include "gtest/gtest.h"

namespace ssmd {
namespace {

constexpr uint32_t kCodes = 1u << 16;

// One 16-bit format, for tests that say the same of both.
struct Format {
  const char* name;
  float (*to_float)(uint16_t);
  uint16_t (*from_float)(float);
  uint16_t infinity;  // the largest finite code is one less
};
const Format kFormats[] = {{"fp16", Fp16ToFloat, FloatToFp16, 0x7c00},
                           {"bf16", Bf16ToFloat, FloatToBf16, 0x7f80}};

TEST(Formats, EveryCodeRoundTrips) {
  for (const Format& format : kFormats) {
    for (uint32_t code = 0; code < kCodes; ++code) {
      const float value = format.to_float(static_cast<uint16_t>(code));
      if ((code & 0x7fff) > format.infinity) {
        EXPECT_TRUE(std::isnan(value)) << format.name << " " << code;
        const uint16_t back = format.from_float(value);
        EXPECT_GT(back & 0x7fff, format.infinity) << format.name << " " << code;
      } else {
        EXPECT_EQ(format.from_float(value), code) << format.name;
      }
    }
  }
}

// Between two adjacent codes the format rounds to the nearer one, and their midpoint to the even
// one; past the largest finite code the next would be 2^(exponent + 1), and infinity stands for it.
TEST(Formats, RoundsToNearestEven) {
  for (const Format& format : kFormats) {
    for (uint16_t low = 0; low < format.infinity; ++low) {
      const uint16_t high = static_cast<uint16_t>(low + 1);
      const double a = format.to_float(low);
      const double b =
          high < format.infinity ? format.to_float(high) : 2 * a - format.to_float(low - 1);
      const float middle = static_cast<float>((a + b) / 2);
      ASSERT_EQ(middle, (a + b) / 2) << "midpoints are exact in FP32";
      const uint16_t even = low % 2 == 0 ? low : high;
      for (uint16_t sign : {0, 0x8000}) {
        const float s = sign ? -1.0f : 1.0f;
        EXPECT_EQ(format.from_float(s * middle), sign | even) << format.name << " " << low;
        EXPECT_EQ(format.from_float(s * std::nextafter(middle, 0.0f)), sign | low);
        EXPECT_EQ(format.from_float(s * std::nextafter(middle, INFINITY)), sign | high);
      }
    }
  }
}

TEST(Formats, KnownValues) {
  EXPECT_EQ(Fp16ToFloat(0x3c00), 1.0f);
  EXPECT_EQ(Fp16ToFloat(0x7bff), 65504.0f);
  EXPECT_EQ(Fp16ToFloat(0x0001), 0x1p-24f);
  EXPECT_EQ(Fp16ToFloat(0x03ff), 1023 * 0x1p-24f);
  EXPECT_EQ(Fp16ToFloat(0x0400), 0x1p-14f);
  EXPECT_TRUE(std::signbit(Fp16ToFloat(0x8000)));
  EXPECT_EQ(FloatToFp16(65519.996f), 0x7bff);
  EXPECT_EQ(FloatToFp16(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToFp16(1e30f), 0x7c00);
  EXPECT_EQ(FloatToFp16(0x1p-25f), 0x0000);
  EXPECT_EQ(FloatToFp16(0x1.8p-25f), 0x0001);
  EXPECT_EQ(FloatToFp16(-0.0f), 0x8000);
  EXPECT_EQ(FloatToFp16(INFINITY), 0x7c00);
  EXPECT_EQ(FloatToBf16(1.0f), 0x3f80);
  EXPECT_EQ(FloatToBf16(3.4e38f), 0x7f80);
  EXPECT_EQ(FloatToBf16(0x1p-133f), 0x0001);
  EXPECT_EQ(FloatToBf16(-INFINITY), 0xff80);
  // A NaN whose payload lies in the dropped bits only stays a NaN.
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(Fp16ToFloat(FloatToFp16(std::bit_cast<float>(0x7f800001u)))));
}

// Known answers of the Random123 distribution (kat_vectors, philox4x32 10).
TEST(Formats, PhiloxKnownAnswers) {
  struct Answer {
    uint32_t counter[4], key[2], words[4];
  };
  const Answer kAnswers[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
       {0xffffffff, 0xffffffff},
       {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       {0xa4093822, 0x299f31d0},
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
  for (const Answer& a : kAnswers) {
    const PhiloxWords words =
        Philox4x32({{a.counter[0], a.counter[1], a.counter[2], a.counter[3]}}, a.key[0], a.key[1]);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(words.word[i], a.words[i]);
  }
}

TEST(Formats, RoundingBitsDependOnEveryPartOfTheirKey) {
  constexpr uint64_t kHigh = uint64_t{1} << 40;
  const RoundingKey key{7, 8, 9, 10};
  const RoundingKey others[] = {{6, 8, 9, 10},         {7 + kHigh, 8, 9, 10}, {7, 9, 9, 10},
                                {7, 8 + kHigh, 9, 10}, {7, 8, 8, 10},         {7, 8, 9, 11},
                                {7, 8, 9, 10 + kHigh}};
  auto word = [](const RoundingKey& k, uint32_t head, uint32_t block) {
    return RoundingBits(MakeRoundingStream(k), head, block).word[2];
  };
  EXPECT_EQ(word(key, 3, 4), word(key, 3, 4));
  EXPECT_NE(word(key, 3, 4), word(key, 4, 4));
  EXPECT_NE(word(key, 3, 4), word(key, 3, 5));
  for (const RoundingKey& other : others) EXPECT_NE(word(key, 3, 4), word(other, 3, 4));
}

// Between every two neighbours: the lower when the random fraction leaves no carry, else the upper;
// what has a code keeps it.
TEST(Formats, StochasticRoundsToANeighbour) {
  std::mt19937 random(2);
  for (uint16_t low = 0; low < 0x7c00; ++low) {
    const uint16_t high = static_cast<uint16_t>(low + 1);
    const float a = Fp16ToFloat(low);
    const float b = high < 0x7c00 ? Fp16ToFloat(high) : 65536.0f;
    const float middle = (a + b) / 2;
    for (uint16_t sign : {0, 0x8000}) {
      const float s = sign ? -1.0f : 1.0f;
      for (uint32_t bits :
           {0u, 0x7fffffffu, 0x80000000u, 0xffffffffu, static_cast<uint32_t>(random())})
        ASSERT_EQ(StochasticToFp16(s * a, bits), sign | low);
      if (high == 0x7c00) {  // no upper neighbour
        for (float beyond : {std::nextafter(a, b), middle, b}) {
          EXPECT_EQ(StochasticToFp16(s * beyond, 0), sign | high);
          EXPECT_EQ(StochasticToFp16(s * beyond, 0xffffffffu), sign | high);
        }
        continue;
      }
      ASSERT_EQ(StochasticToFp16(s * middle, 0x7fffffffu), sign | low) << low;
      ASSERT_EQ(StochasticToFp16(s * middle, 0x80000000u), sign | high) << low;
      const float between =
          a + (b - a) * std::uniform_real_distribution<float>(0.01f, 0.99f)(random);
      ASSERT_EQ(StochasticToFp16(s * between, 0), sign | low) << low;
      ASSERT_EQ(StochasticToFp16(s * between, 0xffffffffu), sign | high) << low;
      const uint16_t code = StochasticToFp16(s * between, static_cast<uint32_t>(random()));
      ASSERT_TRUE(code == (sign | low) || code == (sign | high));
    }
  }
  EXPECT_EQ(StochasticToFp16(INFINITY, 5), 0x7c00);
  EXPECT_EQ(StochasticToFp16(-INFINITY, 5), 0xfc00);
  EXPECT_TRUE(std::isnan(Fp16ToFloat(StochasticToFp16(NAN, 5))));
  EXPECT_EQ(StochasticToFp16(1e-40f, 0xffffffffu), 0);
}

// A normal number drops 13 bits: of the 2^13 values of the random word's top bits, exactly as many
// round up as the dropped fraction says.
TEST(Formats, StochasticIsExactlyUnbiasedForNormalNumbers) {
  std::mt19937 random(3);
  for (int i = 0; i < 200; ++i) {
    const uint32_t fraction = static_cast<uint32_t>(random() % 8192);
    const uint32_t exponent = static_cast<uint32_t>(113 + random() % 29);
    const uint32_t code = static_cast<uint32_t>(random() % 1024);
    const float value = std::bit_cast<float>(exponent << 23 | code << 13 | fraction);
    const uint16_t low = StochasticToFp16(value, 0);
    uint32_t up = 0;
    for (uint32_t top = 0; top < 8192; ++top)
      up += StochasticToFp16(value, top << 19 | static_cast<uint32_t>(random() & 0x7ffff)) != low;
    ASSERT_EQ(up, fraction) << value;
  }
}

// 2^18 words of one Philox stream for each of 64 values, denormals among them. The share that
// rounds up lies within 5.5 standard deviations of the fraction: a fair coin fails that once
// in 2.6e7 values, 64 values once in 4e5 seeds (the seed here is fixed).
TEST(Formats, StochasticIsUnbiasedOverPhilox) {
  constexpr uint32_t kBlocks = 1 << 16;
  std::mt19937 random(4);
  for (uint32_t i = 0; i < 64; ++i) {
    const float exponent = std::uniform_real_distribution<float>(-30, 15)(random);
    const float value = std::exp2(exponent);
    const double low = Fp16ToFloat(StochasticToFp16(value, 0));
    const double high = Fp16ToFloat(static_cast<uint16_t>(StochasticToFp16(value, 0) + 1));
    const double fraction = (value - low) / (high - low);
    const RoundingStream stream = MakeRoundingStream({1, 2, 3, i});
    double up = 0;
    for (uint32_t block = 0; block < kBlocks; ++block) {
      for (const uint32_t word : RoundingBits(stream, 0, block).word)
        up += Fp16ToFloat(StochasticToFp16(value, word)) > low;
    }
    const double n = 4.0 * kBlocks;
    EXPECT_LE(std::abs(up - n * fraction), 5.5 * std::sqrt(n * fraction * (1 - fraction)) + 1e-9)
        << value;
  }
}

#ifdef __FLT16_MAX__
TEST(Formats, Fp16MatchesTheCompilersType) {
  for (uint32_t code = 0; code < kCodes; ++code) {
    const auto half = std::bit_cast<_Float16>(static_cast<uint16_t>(code));
    const float value = static_cast<float>(half);
    if (std::isnan(value)) continue;
    EXPECT_EQ(Fp16ToFloat(static_cast<uint16_t>(code)), value) << code;
  }
  std::mt19937 random(1);
  for (int i = 0; i < 1 << 20; ++i) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (std::isnan(value)) continue;
    EXPECT_EQ(FloatToFp16(value), std::bit_cast<uint16_t>(static_cast<_Float16>(value))) << value;
  }
}
#endif

}  // namespace
}  // namespace ssmd
