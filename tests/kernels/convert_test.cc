// The vector conversions on every instruction set against kernels/formats.h, bit for bit.
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/formats.h"

#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/kernels/convert_test.cc"
#include "hwy/foreach_target.h"
// Highway wants foreach_target before highway.h.
#include "hwy/highway.h"
#include "kernels/cpu/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ssmd::cpu::HWY_NAMESPACE {

void WidenAll(Dtype dtype, const std::byte* from, size_t count, float* to) {
  Widen(dtype, from, count, to);
}
void NarrowAll(Dtype dtype, const float* from, size_t count, std::byte* to) {
  Narrow(dtype, from, count, to);
}
void NarrowAllStochastic(const float* from, size_t count, const RoundingStream& stream,
                         uint32_t head, size_t element, std::byte* to) {
  NarrowStochastic(from, count, stream, head, element, to);
}
bool AllAreFinite(const float* values, size_t count) { return AllFinite(values, count); }

}  // namespace ssmd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ssmd::cpu {
namespace {

HWY_EXPORT(WidenAll);
HWY_EXPORT(NarrowAll);
HWY_EXPORT(NarrowAllStochastic);
HWY_EXPORT(AllAreFinite);

class Convert : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

TEST_P(Convert, WidensEveryCodeAsFormatsDo) {
  std::vector<uint16_t> codes(1 << 16);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint16_t>(i);
  std::vector<float> values(codes.size());
  const auto* bytes = reinterpret_cast<const std::byte*>(codes.data());
  for (Dtype dtype : {Dtype::kBf16, Dtype::kFp16}) {
    HWY_DYNAMIC_DISPATCH(WidenAll)(dtype, bytes, codes.size(), values.data());
    for (size_t i = 0; i < codes.size(); ++i) {
      const float scalar = dtype == Dtype::kBf16 ? Bf16ToFloat(codes[i]) : Fp16ToFloat(codes[i]);
      if (std::isnan(scalar)) {
        ASSERT_TRUE(std::isnan(values[i])) << i;
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(values[i]), std::bit_cast<uint32_t>(scalar)) << i;
      }
    }
  }
}

// Every high half with low halves around the rounding positions of both formats.
TEST_P(Convert, NarrowsAsFormatsDo) {
  std::vector<float> values;
  for (uint32_t high = 0; high < 1 << 16; ++high) {
    for (uint32_t low : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u})
      values.push_back(std::bit_cast<float>(high << 16 | low));
  }
  std::vector<uint16_t> codes(values.size());
  auto* bytes = reinterpret_cast<std::byte*>(codes.data());
  for (Dtype dtype : {Dtype::kBf16, Dtype::kFp16}) {
    HWY_DYNAMIC_DISPATCH(NarrowAll)(dtype, values.data(), values.size(), bytes);
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(codes[i], dtype == Dtype::kBf16 ? FloatToBf16(values[i]) : FloatToFp16(values[i]))
          << std::hex << std::bit_cast<uint32_t>(values[i]);
    }
  }
}

// All exponents, with mantissas around the rounding positions; counts that end inside a chunk.
TEST_P(Convert, NarrowsStochasticallyAsFormatsDo) {
  std::vector<float> values;
  for (uint32_t high = 0; high < 1 << 16; high += 3) {
    for (uint32_t low : {0x0000u, 0x0001u, 0x1000u, 0x1fffu, 0x2000u, 0x7fffu, 0x8000u, 0xabcdu})
      values.push_back(std::bit_cast<float>(high << 16 | low));
  }
  const RoundingStream stream = MakeRoundingStream({1, 2, 3, uint64_t{5} << 33});
  std::vector<uint16_t> codes(values.size());
  constexpr uint32_t kHead = 6;
  constexpr size_t kElement = 48;
  for (size_t count : {size_t{16}, size_t{48}, values.size() / 16 * 16}) {
    HWY_DYNAMIC_DISPATCH(NarrowAllStochastic)
    (values.data(), count, stream, kHead, kElement, reinterpret_cast<std::byte*>(codes.data()));
    for (size_t i = 0; i < count; ++i) {
      const uint32_t element = static_cast<uint32_t>(kElement + i);
      const uint32_t word = RoundingBits(stream, kHead, element / 4).word[element % 4];
      ASSERT_EQ(codes[i], StochasticToFp16(values[i], word))
          << std::hex << std::bit_cast<uint32_t>(values[i]);
    }
  }
}

TEST_P(Convert, FindsTheOneValueThatIsNotFinite) {
  std::vector<float> values(48, 3e38f);
  EXPECT_TRUE(HWY_DYNAMIC_DISPATCH(AllAreFinite)(values.data(), values.size()));
  for (size_t i = 0; i < values.size(); ++i) {
    for (float bad : {INFINITY, -INFINITY, NAN}) {
      values[i] = bad;
      EXPECT_FALSE(HWY_DYNAMIC_DISPATCH(AllAreFinite)(values.data(), values.size())) << i;
    }
    values[i] = 0;
  }
}

INSTANTIATE_TEST_SUITE_P(EveryInstructionSet, Convert,
                         ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) { return hwy::TargetName(target.param); });

}  // namespace
}  // namespace ssmd::cpu
#endif  // HWY_ONCE
