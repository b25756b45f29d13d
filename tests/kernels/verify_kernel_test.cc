#include "kernels/cpu/verify_kernel.h"

#include <bit>
#include <limits>

#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "tests/kernels/verify_fixture.h"

namespace ssmd::testing {
namespace {

constexpr uint32_t kWindow = 16;  // L
constexpr Family kFamilies[] = {Family::kMamba2, Family::kGdn, Family::kKda};
constexpr Dtype kDtypes[] = {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// {heads, key groups, d_k, d_v}
constexpr uint32_t kShapes[][4] = {
    {16, 1, 16, 8},  {6, 3, 16, 8},    {4, 1, 48, 24},   {8, 4, 48, 24},   {4, 1, 128, 64},
    {2, 1, 128, 80}, {2, 1, 128, 128}, {2, 2, 128, 128}, {1, 1, 256, 256},
};

LayerShape Shape(Family family, const uint32_t (&s)[4]) { return {family, s[0], s[1], s[2], s[3]}; }

// Walks through all 18 combinations of dtypes as `index` grows.
Formats FormatsOf(size_t index) {
  return {.activation = kDtypes[index % 3],
          .correction = index / 3 % 2 ? Dtype::kFp32 : Dtype::kFp16,
          .output = kDtypes[index / 6 % 3]};
}

Sequence SmallSequence(Family family, size_t index = 0, uint64_t seed = 1) {
  return Sequence({.shape = {family, 4, 2, 48, 24},
                   .formats = FormatsOf(index),
                   .base = 1000 + 7 * index,
                   .seed = seed});
}

void Sweep(size_t stride) {
  size_t index = 0;
  for (Family family : kFamilies) {
    for (const auto& shape : kShapes) {
      for (uint32_t T : {1, 2, 3, 4, 7, 8, 15, 16}) {
        for (uint32_t h : {0u, 1u, kWindow - T, kWindow}) {
          if (++index % stride != 0) continue;
          const uint64_t origin = index * 2654435761u % 1000 + (index % 5 ? 0 : uint64_t{1} << 40);
          Sequence sequence({.shape = Shape(family, shape),
                             .formats = FormatsOf(index),
                             .ring_records = index % 4 ? 32u : 37u,
                             .base = origin,
                             .seed = index});
          sequence.History(h);
          const uint64_t kept = index % 3 ? 0 : std::min<uint64_t>(h, 3);  // K
          const int64_t fold_to = index % 2 ? -1 : static_cast<int64_t>(sequence.tail - kept);
          SCOPED_TRACE(sequence.Name() + " T " + std::to_string(T) + " fold_to " +
                       std::to_string(fold_to));
          sequence.VerifyMatchesOracle(sequence.MakeDrafts(T), fold_to);
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

TEST(VerifyKernel, MatchesOracle) { Sweep(1); }

TEST(VerifyKernel, MatchesOracleOnEveryInstructionSet) {
  for (int64_t target : {HWY_AVX3, HWY_AVX2, HWY_SSE4, HWY_SCALAR}) {
    hwy::SetSupportedTargetsForTest(0);
    if (target != HWY_SCALAR && (hwy::SupportedTargets() & target) == 0) continue;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(cpu::VectorTarget());
    EXPECT_STREQ(cpu::VectorTarget(), hwy::TargetName(target));
    Sweep(13);
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

TEST(VerifyKernel, FullRingOfTheLargestSize) {
  for (Family family : kFamilies) {
    Sequence sequence({.shape = {family, 2, 1, 16, 8},
                       .ring_records = kRingRecordsMax,
                       .base = 12345,
                       .seed = 3});
    sequence.History(kRingRecordsMax - kDraftTokensMax);
    sequence.VerifyMatchesOracle(sequence.MakeDrafts(kDraftTokensMax),
                                 static_cast<int64_t>(sequence.tail));
  }
}

// Accept a random part of each step, fold when due: outputs and pages follow the accepted stream.
TEST(VerifyKernel, FollowsTheAcceptedStreamThroughFolds) {
  for (Family family : kFamilies) {
    for (uint64_t kept : {0, 4}) {
      Sequence sequence = SmallSequence(family, 1, 7 + kept);
      const uint64_t start = sequence.base;
      for (int step = 0; step < 60; ++step) {
        const uint32_t T = 1 + sequence.random() % 8;
        const bool fold = sequence.h() + T > kWindow && sequence.h() > kept;
        const int64_t fold_to = fold ? static_cast<int64_t>(sequence.tail - kept) : -1;
        SCOPED_TRACE(sequence.Name() + " step " + std::to_string(step));
        const Drafts drafts = sequence.MakeDrafts(T);
        const Sequence::Result result =
            sequence.VerifyMatchesOracle(drafts, fold_to, sequence.base - start);
        sequence.Commit(drafts, sequence.random() % (T + 1));
        if (fold) sequence.Install(result, static_cast<uint64_t>(fold_to));
        if (HasFailure()) return;
      }
      EXPECT_GT(sequence.base, start);
    }
  }
}

// A token's sums run in one order however many tokens come with it. (KDA decays drafts another way
// than committed records: equal within the bound only.)
TEST(VerifyKernel, FourTokensAtOnceEqualFourSteps) {
  for (Family family : kFamilies) {
    for (size_t index = 0; index < 6; ++index) {
      Sequence at_once = SmallSequence(family, index);
      at_once.History(9);
      Sequence one_by_one = at_once;
      const Drafts drafts = at_once.MakeDrafts(4);
      const Sequence::Result result = at_once.VerifyMatchesOracle(drafts);
      std::vector<std::byte> output;
      for (size_t s = 0; s < 4; ++s) {
        const Drafts one = one_by_one.Slice(drafts, s, 1);
        const Sequence::Result step = one_by_one.VerifyMatchesOracle(one);
        output.insert(output.end(), step.output.begin(), step.output.end());
        one_by_one.Commit(one, 1);
      }
      if (family != Family::kKda) {
        EXPECT_EQ(output, result.output);
        EXPECT_EQ(at_once.ring_buffer, one_by_one.ring_buffer);
      }
    }
  }
}

TEST(VerifyKernel, SameBytesOnEveryLaunchAndInAnyGroupOrder) {
  for (Family family : kFamilies) {
    Sequence sequence({.shape = {family, 8, 4, 128, 80}, .base = 77});
    sequence.History(12);
    const Drafts drafts = sequence.MakeDrafts(5);
    const int64_t fold_to = static_cast<int64_t>(sequence.tail) - 2;
    const Sequence::Result first = sequence.Verify(drafts, fold_to);
    const std::vector<std::byte> ring = sequence.ring_buffer;
    for (int launch = 0; launch < 5; ++launch) {
      std::vector<uint32_t> groups = {0, 1, 2, 3};
      std::shuffle(groups.begin(), groups.end(), sequence.random);
      const Sequence::Result again = sequence.Verify(drafts, fold_to, groups);
      EXPECT_EQ(again.output, first.output);
      EXPECT_EQ(again.target, first.target);
      EXPECT_EQ(sequence.ring_buffer, ring);
    }
    EXPECT_EQ(sequence.Verify(drafts).output, first.output) << "a fold changes no output";
  }
}

TEST(VerifyKernel, ReplayIsTheFold) {
  for (Family family : kFamilies) {
    Sequence sequence = SmallSequence(family);
    sequence.History(11);
    const Drafts drafts = sequence.MakeDrafts(2);
    const std::vector<float> folded =
        sequence.Verify(drafts, static_cast<int64_t>(sequence.tail)).target;
    std::vector<float> replayed(sequence.source.size(), kNan);
    cpu::GroupItem item;
    item.shape = &sequence.params.shape;
    item.formats = &sequence.params.formats;
    item.ring_layout = &sequence.ring_layout;
    item.ring = sequence.ring();
    item.source = reinterpret_cast<const std::byte*>(sequence.source.data());
    item.base = sequence.base;
    item.tail = sequence.tail;
    ReplayGroups(item, replayed.data());
    EXPECT_EQ(replayed, folded);
  }
}

TEST(VerifyKernel, DecayExtremes) {
  // {log_alpha_min, log_alpha_max}: none, 1e-12 a token, far below the smallest float, mixed.
  constexpr float kDecays[][2] = {{0, 0}, {-27.6f, -27.6f}, {-1e30f, -1e4f}, {-200, 0}};
  for (Family family : kFamilies) {
    for (const auto& decay : kDecays) {
      Sequence sequence({.shape = {family, 4, 2, 48, 24},
                         .ring_records = 96,
                         .base = 50,
                         .log_alpha_min = decay[0],
                         .log_alpha_max = decay[1]});
      sequence.History(64);
      SCOPED_TRACE(sequence.Name() + " log_alpha " + std::to_string(decay[0]));
      sequence.VerifyMatchesOracle(sequence.MakeDrafts(16), static_cast<int64_t>(sequence.tail));
    }
  }
}

// An input that is wrong, and the flags it must raise.
struct BadInput {
  const char* what;
  std::vector<std::byte> Drafts::*bytes;
  std::vector<float> Drafts::*floats;
  float value;
  uint32_t flags;
};

TEST(VerifyKernel, FlagsBadInputs) {
  const BadInput kCases[] = {
      {"q NaN", &Drafts::q, nullptr, kNan, kPoisonInput},
      {"q infinite", &Drafts::q, nullptr, kInfinity, kPoisonInput},
      {"k NaN", &Drafts::k, nullptr, kNan, kPoisonInput},
      {"k infinite", &Drafts::k, nullptr, -kInfinity, kPoisonInput},
      {"v NaN", &Drafts::v, nullptr, kNan, kPoisonInput},
      {"v infinite", &Drafts::v, nullptr, kInfinity, kPoisonInput},
      {"log_alpha NaN", nullptr, &Drafts::log_alpha, kNan, kPoisonInput},
      {"log_alpha -infinite", nullptr, &Drafts::log_alpha, -kInfinity, kPoisonInput},
      {"log_alpha +infinite", nullptr, &Drafts::log_alpha, kInfinity, kPoisonInput | kPoisonDecay},
      {"log_alpha positive", nullptr, &Drafts::log_alpha, 1e-6f, kPoisonDecay},
      {"beta NaN", nullptr, &Drafts::beta, kNan, kPoisonInput},
      {"beta infinite", nullptr, &Drafts::beta, kInfinity, kPoisonInput},
      {"value_scale NaN", nullptr, &Drafts::value_scale, kNan, kPoisonInput},
      {"value_scale infinite", nullptr, &Drafts::value_scale, kInfinity, kPoisonInput},
  };
  size_t index = 0;
  for (Family family : kFamilies) {
    for (const BadInput& bad : kCases) {
      Sequence sequence = SmallSequence(family, ++index);
      sequence.History(6);
      Drafts drafts = sequence.MakeDrafts(4);
      const Dtype dtype = sequence.params.formats.activation;
      if (bad.bytes != nullptr) {
        auto& bytes = drafts.*bad.bytes;
        const size_t count = bytes.size() / DtypeBytes(dtype);
        EncodeOne(dtype, bad.value, bytes.data() + sequence.random() % count * DtypeBytes(dtype));
      } else if (auto& floats = drafts.*bad.floats; !floats.empty()) {
        floats[sequence.random() % floats.size()] = bad.value;
      } else {
        continue;  // not an input of this family
      }
      SCOPED_TRACE(sequence.Name() + " " + bad.what);
      // The fixture checks that nothing but this row's drafts, output and target is written.
      const uint32_t flags = sequence.Verify(drafts, static_cast<int64_t>(sequence.tail)).flags;
      EXPECT_EQ(flags & ~kPoisonOverflow, bad.flags);
    }
  }
}

TEST(VerifyKernel, FlagsCorrectionsPastFp16) {
  Sequence sequence = SmallSequence(Family::kGdn, 0);
  ASSERT_EQ(sequence.params.formats.correction, Dtype::kFp16);
  Drafts drafts = sequence.MakeDrafts(2);
  for (float& beta : drafts.beta) beta = 1;
  EncodeOne(Dtype::kBf16, 65024, drafts.v.data());  // the last bf16 below 65504
  EXPECT_EQ(sequence.Verify(drafts).flags, kPoisonNone);
  EncodeOne(Dtype::kBf16, 66048, drafts.v.data());
  EXPECT_EQ(sequence.Verify(drafts).flags, kPoisonOverflow);
}

TEST(VerifyKernel, FlagsOutputsPastTheirDtype) {
  SequenceParams params{.shape = {Family::kMamba2, 2, 1, 16, 8},
                        .formats = {.activation = Dtype::kFp32, .output = Dtype::kFp16}};
  for (const auto& [value, flags] :
       {std::pair{30000.0f, kPoisonNone}, std::pair{70000.0f, kPoisonOverflow}}) {
    Sequence sequence(params);
    Drafts drafts = sequence.MakeDrafts(1);
    drafts.k = drafts.q;  // |q| = 1: o is near v
    drafts.value_scale.assign(2, 1.0f);
    EncodeOne(Dtype::kFp32, value, drafts.v.data());
    EXPECT_EQ(sequence.Verify(drafts).flags, flags) << value;
  }
}

TEST(VerifyKernel, FlagsFoldedStatesPastFp32) {
  Sequence sequence({.shape = {Family::kGdn, 2, 1, 16, 8},
                     .formats = {.activation = Dtype::kFp32, .correction = Dtype::kFp32}});
  sequence.History(1);
  const Drafts drafts = sequence.MakeDrafts(1);
  EXPECT_EQ(sequence.Verify(drafts, static_cast<int64_t>(sequence.tail)).flags, kPoisonNone);
  // The draft decays everything away, so that only the folded state overflows.
  Drafts decayed = drafts;
  decayed.log_alpha.assign(2, -1000);
  sequence.source[3] = 3e38f;
  EncodeOne(Dtype::kFp32, 3e38f, sequence.Record(sequence.ring_layout.value, sequence.base));
  std::byte* key = sequence.Record(sequence.ring_layout.key, sequence.base);
  EncodeOne(Dtype::kFp32, 1, key + 3 * sizeof(float));
  EXPECT_EQ(sequence.Verify(decayed, static_cast<int64_t>(sequence.tail)).flags, kPoisonOverflow);
}

TEST(VerifyKernel, MissingValueScaleIsOne) {
  Sequence sequence = SmallSequence(Family::kMamba2);
  Drafts drafts = sequence.MakeDrafts(3);
  drafts.value_scale.assign(drafts.value_scale.size(), 1.0f);
  const Sequence::Result given = sequence.Verify(drafts);
  const std::vector<std::byte> ring = sequence.ring_buffer;
  drafts.value_scale.clear();
  EXPECT_EQ(sequence.Verify(drafts).output, given.output);
  EXPECT_EQ(sequence.ring_buffer, ring);
}

TEST(VerifyKernel, LeavesTheCallersDenormalsAlone) {
  Sequence sequence = SmallSequence(Family::kGdn);
  const Drafts drafts = sequence.MakeDrafts(1);
  sequence.Verify(drafts);
  volatile float tiny = 0x1p-127f;
  EXPECT_EQ(tiny * 0.5f, 0x1p-128f);
}

// Teeth: one wrong value in one committed record must fail the comparison.
TEST(VerifyKernel, ComparisonFailsWhenOneRecordIsPerturbed) {
  for (Family family : kFamilies) {
    Sequence sequence({.shape = {family, 4, 2, 128, 64},
                       .formats = {.activation = Dtype::kFp32, .correction = Dtype::kFp32},
                       .base = 29});
    sequence.History(kWindow);
    const Drafts drafts = sequence.MakeDrafts(4);
    const int64_t fold_to = static_cast<int64_t>(sequence.tail);
    sequence.VerifyMatchesOracle(drafts, fold_to);
    const Sequence::Expected expected = sequence.Expect(drafts);
    const Tolerance bound = sequence.Bound(expected, drafts.count);
    const RingLayout& ring = sequence.ring_layout;
    const uint64_t position = sequence.tail - 4;
    for (const RingComponent& component : {ring.key, ring.value, ring.log_alpha}) {
      Sequence perturbed = sequence;
      auto* values = reinterpret_cast<float*>(perturbed.Record(component, position));
      if (component.offset_bytes == ring.log_alpha.offset_bytes) {
        for (size_t i = 0; i < sequence.params.shape.decays_per_head(); ++i) values[i] *= 1.1f;
      } else {  // the largest of the first 16 values, 10 % off
        *std::max_element(values, values + 16,
                          [](float a, float b) { return std::abs(a) < std::abs(b); }) *= 1.1f;
      }
      const Sequence::Result result = perturbed.Verify(drafts, fold_to);
      EXPECT_FALSE(Near(Decode(Dtype::kFp32, result.output), expected.output,
                        [&](double exact) { return bound.output(exact); }))
          << sequence.Name() << " component at " << component.offset_bytes;
      EXPECT_FALSE(Near(result.target, sequence.states[sequence.h()], bound.state()));
    }
  }
}

}  // namespace
}  // namespace ssmd::testing
