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
