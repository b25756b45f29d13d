// Checkpoints that are not one FP32 copy: how each copy is rounded, that corrections are re-derived
// from HP, and that LP never reaches HP.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/cpu/verify_kernel.h"
#include "tests/kernels/verify_fixture.h"
#include "tests/testing/test_device.h"

namespace ssmd::testing {
namespace {

constexpr uint32_t kWindow = 16;  // L
constexpr Family kFamilies[] = {Family::kMamba2, Family::kGdn, Family::kKda};
constexpr Dtype kActivations[] = {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32};
struct Precisions {
  Dtype hp, lp;
};
constexpr Precisions kPrecisions[] = {
    {Dtype::kFp32, Dtype::kFp16}, {Dtype::kFp16, Dtype::kFp16}, {Dtype::kFp16, Dtype::kNone}};
// {heads, key groups, d_k, d_v}
constexpr uint32_t kShapes[][4] = {
    {6, 3, 16, 8}, {4, 2, 48, 24}, {2, 1, 128, 80}, {1, 1, 256, 256}};

Sequence MakeSequence(Family family, const Precisions& p, size_t index,
                      const uint32_t (&s)[4] = kShapes[1]) {
  return Sequence({.shape = {family, s[0], s[1], s[2], s[3]},
                   .formats = {.activation = kActivations[index % 3],
                               .correction = index / 3 % 2 ? Dtype::kFp32 : Dtype::kFp16,
                               .checkpoint_hp = p.hp,
                               .checkpoint_lp = p.lp},
                   .base = 1000 + 7 * index,
                   .seed = index});
}

void OnEveryInstructionSet(void (*test)()) {
  for (int64_t target : {HWY_AVX3, HWY_AVX2, HWY_SSE4, HWY_SCALAR}) {
    hwy::SetSupportedTargetsForTest(0);
    if (target != HWY_SCALAR && (hwy::SupportedTargets() & target) == 0) continue;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(cpu::VectorTarget());
    test();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

void Sweep(size_t stride) {
  size_t index = 0;
  for (Family family : kFamilies) {
    for (const Precisions& p : kPrecisions) {
      for (const auto& shape : kShapes) {
        for (uint32_t T : {1, 3, 8, 16}) {
          for (uint32_t h : {0u, 1u, 5u, kWindow}) {
            if (++index % stride != 0) continue;
            Sequence sequence = MakeSequence(family, p, index, shape);
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
}

TEST(TwoPrecision, MatchesOracle) { Sweep(1); }

TEST(TwoPrecision, MatchesOracleOnEveryInstructionSet) {
  OnEveryInstructionSet([] { Sweep(7); });
}

cpu::GroupItem ReplayItem(Sequence& sequence, const std::vector<std::byte>& hp) {
  cpu::GroupItem item;
  item.shape = &sequence.params.shape;
  item.formats = &sequence.params.formats;
  item.ring_layout = &sequence.ring_layout;
  item.ring = sequence.ring();
  item.source = hp.data();
  item.source_dtype = sequence.params.formats.checkpoint_hp;
  item.base = sequence.base;
  item.tail = sequence.tail;
  return item;
}

// HP = SR and LP = RTN of the same FP32 values, with the bits that formats.h documents; and a fused
// fold, a fold of its own and an import of the replayed state write the same bytes.
void CopiesAreRoundedFromTheAccumulator() {
  size_t index = 0;
  for (Family family : kFamilies) {
    for (const Precisions& p : kPrecisions) {
      Sequence sequence = MakeSequence(family, p, ++index);
      sequence.History(11);
      const LayerShape& shape = sequence.params.shape;
      const uint64_t position = sequence.tail;
      SCOPED_TRACE(sequence.Name());
      const Sequence::Result fused =
          sequence.Verify(sequence.MakeDrafts(3), static_cast<int64_t>(position));
      EXPECT_EQ(fused.flags, kPoisonNone);

      std::vector<float> state(shape.state_elements());
      const std::vector<std::byte> source = sequence.Hp();
      cpu::GroupItem item = ReplayItem(sequence, source);
      ReplayGroups(item, state.data());

      const RoundingStream stream = MakeRoundingStream(sequence.RoundingAt(position));
      std::vector<std::byte> hp, lp;
      size_t rounded_away = 0;
      for (size_t i = 0; i < state.size(); ++i) {
        const size_t head_elements = size_t{shape.d_v} * shape.d_k;
        const uint32_t head = static_cast<uint32_t>(i / head_elements);
        const size_t element = i % head_elements;
        if (p.lp == Dtype::kFp16) AppendAs(p.lp, state[i], lp);
        if (p.hp == Dtype::kFp32) {
          AppendAs(p.hp, state[i], hp);
          continue;
        }
        const PhiloxWords bits = RoundingBits(stream, head, static_cast<uint32_t>(element / 4));
        const uint16_t code = StochasticToFp16(state[i], bits.word[element % 4]);
        AppendAs(p.hp, Fp16ToFloat(code), hp);
        rounded_away += code != FloatToFp16(state[i]);
      }
      EXPECT_EQ(rounded_away > state.size() / 8, p.hp == Dtype::kFp16) << "not stochastic";
      EXPECT_EQ(fused.hp, hp);
      EXPECT_EQ(fused.lp, lp);

      std::vector<std::byte> hp_target(hp.size()), lp_target(lp.size());
      item.target_hp = hp_target.data();
      item.target_lp = lp.empty() ? nullptr : lp_target.data();
      item.rounding = sequence.RoundingAt(position);
      EXPECT_EQ(FoldGroups(item), kPoisonNone);
      EXPECT_EQ(hp_target, hp);
      EXPECT_EQ(lp_target, lp);

      hp_target.assign(hp.size(), std::byte{0xff});
      lp_target.assign(lp.size(), std::byte{0xff});
      for (item.group = 0; item.group < shape.key_group_count; ++item.group)
        EXPECT_EQ(cpu::StoreGroup(item, state.data()), kPoisonNone);
      EXPECT_EQ(hp_target, hp);
      EXPECT_EQ(lp_target, lp);
    }
  }
}

TEST(TwoPrecision, CopiesAreRoundedFromTheAccumulator) {
  OnEveryInstructionSet(CopiesAreRoundedFromTheAccumulator);
}

// The recorded u of delta rules are not read where HP is: NaN in their place changes nothing.
TEST(TwoPrecision, RederivesCorrectionsWithoutTheRecordedOnes) {
  size_t index = 0;
  for (Family family : {Family::kGdn, Family::kKda}) {
    for (const Precisions& p : kPrecisions) {
      if (p.lp == Dtype::kNone) continue;
      for (const auto& shape : kShapes) {
        Sequence sequence = MakeSequence(family, p, ++index, shape);
        sequence.History(13);
        SCOPED_TRACE(sequence.Name());
        for (uint64_t position = sequence.base; position < sequence.tail; ++position) {
          std::memset(sequence.Record(sequence.ring_layout.value, position), 0xff,
                      sequence.ring_layout.value.row_bytes);
        }
        sequence.VerifyMatchesOracle(sequence.MakeDrafts(4),
                                     static_cast<int64_t>(sequence.tail - index % 3));
      }
    }
  }
}

// Teeth: the recorded v and beta are what u is derived from.
TEST(TwoPrecision, ComparisonFailsWhenATargetIsPerturbed) {
  for (Family family : {Family::kGdn, Family::kKda}) {
    Sequence sequence = MakeSequence(family, kPrecisions[0], 2);
    ASSERT_EQ(sequence.params.formats.activation, Dtype::kFp32);
    sequence.History(kWindow);
    const Drafts drafts = sequence.MakeDrafts(2);
    const int64_t fold_to = static_cast<int64_t>(sequence.tail);
    sequence.VerifyMatchesOracle(drafts, fold_to);
    const Tolerance bound = sequence.Bound(sequence.Expect(drafts), drafts.count);
    for (const RingComponent& component :
         {sequence.ring_layout.target, sequence.ring_layout.beta}) {
      Sequence perturbed = sequence;
      reinterpret_cast<float*>(perturbed.Record(component, sequence.tail - 3))[1] += 0.1f;
      const Sequence::Result result = perturbed.Verify(drafts, fold_to);
      EXPECT_FALSE(Near(result.target, sequence.states[sequence.h()], bound.state()));
    }
  }
}

// Two equal sequences, one with NaN for LP, through 60 steps of random T and acceptance.
TEST(TwoPrecision, LpNeverReachesHp) {
  size_t index = 0;
  for (Family family : kFamilies) {
    for (const Precisions& p : kPrecisions) {
      if (p.lp == Dtype::kNone) continue;
      for (uint64_t kept : {0, 4}) {
        Sequence good = MakeSequence(family, p, ++index);
        Sequence bad = good;
        SCOPED_TRACE(good.Name() + " K " + std::to_string(kept));
        size_t folds = 0, poisoned = 0;
        for (int step = 0; step < 60; ++step) {
          const uint32_t T = 1 + good.random() % 6;
          const bool fold = good.h() + T > kWindow && good.h() > kept;
          const int64_t fold_to = fold ? static_cast<int64_t>(good.tail - kept) : -1;
          // K = 0: LP is bad until the first fold writes it. K > 0: after every fold again.
          if (folds == 0 || kept > 0) bad.lp.assign(bad.lp.size(), std::byte{0xff});
          const Drafts drafts = good.MakeDrafts(T);
          const Sequence::Result a = good.Verify(drafts, fold_to);
          const Sequence::Result b = bad.Verify(drafts, fold_to);
          EXPECT_EQ(a.flags, kPoisonNone);
          EXPECT_EQ(a.hp, b.hp);
          EXPECT_EQ(a.lp, b.lp);
          poisoned += b.flags != kPoisonNone;
          folds += fold;
          // A fold re-derives all records, so it and all that follows is as if LP had been right.
          if (fold || (kept == 0 && folds > 0)) {
            EXPECT_EQ(a.output, b.output) << "step " << step;
            EXPECT_EQ(b.flags, kPoisonNone);
          }
          const size_t accepted = good.random() % (T + 1);
          for (Sequence* sequence : {&good, &bad}) sequence->Commit(drafts, accepted);
          if (fold) {
            good.Install(a, static_cast<uint64_t>(fold_to));
            bad.Install(b, static_cast<uint64_t>(fold_to));
          }
          if (HasFailure()) return;
        }
        EXPECT_GT(folds, 5u);
        EXPECT_GT(poisoned, 0u);
      }
    }
  }
}

TEST(TwoPrecision, FlagsStatesPastFp16) {
  for (const Precisions& p : kPrecisions) {
    for (const auto& [value, flags] :
         {std::pair{65504.0f, kPoisonNone}, std::pair{65505.0f, kPoisonOverflow},
          std::pair{-65520.0f, kPoisonOverflow}}) {
      Sequence sequence(
          {.shape = {Family::kMamba2, 2, 1, 16, 8},
           .formats = {.activation = Dtype::kFp32, .checkpoint_hp = p.hp, .checkpoint_lp = p.lp}});
      std::vector<float> state(sequence.params.shape.state_elements(), 1);
      state[37] = value;
      std::vector<std::byte> hp(state.size() * 4), lp(state.size() * 2);
      const std::vector<std::byte> source = sequence.Hp();
      cpu::GroupItem item = ReplayItem(sequence, source);
      item.target_hp = hp.data();
      if (p.lp != Dtype::kNone) item.target_lp = lp.data();
      // LP alone rounds 65505 down to 65504.
      const bool only_lp = p.hp == Dtype::kFp32 && value == 65505.0f;
      EXPECT_EQ(cpu::StoreGroup(item, state.data()), only_lp ? kPoisonNone : flags)
          << value << " " << DtypeName(p.hp);
    }
  }
}

// 2,000 tokens with decays near 1, where errors live long. Each write of an FP16 HP errs by at most
// half a spacing in standard deviation and is unbiased, so m writes leave sqrt(m) 2^-11 of the
// state's root mean square (twice that here). An FP32 HP keeps FP32 errors whatever LP is.
TEST(TwoPrecision, LongRunsKeepTheirStates) {
  const Precisions all[] = {
      {Dtype::kFp32, Dtype::kNone}, kPrecisions[0], kPrecisions[1], kPrecisions[2]};
  for (Family family : kFamilies) {
    for (const Precisions& p : all) {
      Sequence sequence({.shape = {family, 2, 1, 64, 32},
                         .formats = {.activation = Dtype::kBf16,
                                     .correction = Dtype::kFp32,
                                     .checkpoint_hp = p.hp,
                                     .checkpoint_lp = p.lp},
                         .seed = 21,
                         .log_alpha_min = -0.004f,
                         .log_alpha_max = -0.0001f});
      double output_error = 0, output_square = 0;
      for (int step = 0; step < 1000; ++step) {
        const bool fold = sequence.h() + 2 > kWindow;
        const Drafts drafts = sequence.MakeDrafts(2);
        const uint64_t to = sequence.tail;
        const Sequence::Result result =
            sequence.Verify(drafts, fold ? static_cast<int64_t>(to) : -1);
        ASSERT_EQ(result.flags, kPoisonNone);
        if (step >= 900) {
          const Sequence::Expected expected = sequence.Expect(drafts);
          const std::vector<float> output = Decode(Dtype::kFp32, result.output);
          for (size_t i = 0; i < output.size(); ++i) {
            output_error += std::pow(output[i] - expected.output[i], 2);
            output_square += std::pow(expected.output[i], 2);
          }
        }
        sequence.Commit(drafts, 2);
        if (fold) sequence.Install(result, to);
      }
      double error = 0, square = 0;
      for (size_t i = 0; i < sequence.source.size(); ++i) {
        error += std::pow(sequence.source[i] - sequence.states[0][i], 2);
        square += std::pow(sequence.states[0][i], 2);
      }
      const double relative = std::sqrt(error / square);
      const double read = std::sqrt(output_error / output_square);
      std::printf("  %-6s %s/%s: state error %.2e, output error %.2e of the root mean square\n",
                  FamilyName(family), DtypeName(p.hp), DtypeName(p.lp), relative, read);
      const double m = static_cast<double>(sequence.folds_done);
      EXPECT_LT(relative, p.hp == Dtype::kFp32 ? 1e-5 : 2 * std::sqrt(m) * 0x1p-11);
      EXPECT_LT(read, p.hp == Dtype::kFp32 ? (p.lp == Dtype::kNone ? 1e-5 : 0x1p-10)
                                           : 2 * std::sqrt(m) * 0x1p-11 + 0x1p-10);
    }
  }
}

// Import: cast once from FP32, under the import's position. The zero page is zero in both copies.
TEST(TwoPrecision, ImportIsRoundedOnce) {
  for (const Precisions& p : kPrecisions) {
    const LayerShape shape{Family::kGdn, 4, 2, 32, 16};
    cpu::ThreadPool pool(2);
    const auto device = MakeTestDevice(1 << 26, &pool);
    auto created = device->CreateBackend({.layers = {shape, shape},
                                          .formats = {.checkpoint_hp = p.hp, .checkpoint_lp = p.lp},
                                          .rounding_seed = 99,
                                          .slot_count = 1,
                                          .page_count = 4,
                                          .step_count = 1,
                                          .rows_max = 1,
                                          .folds_max = 1,
                                          .poison_garbage = true});
    ASSERT_TRUE(created.ok()) << created.status();
    Backend& backend = **created;
    backend.ClearSlot(SlotIndex{0}, 16, 5);
    std::vector<float> read(shape.state_elements(), NAN);
    ASSERT_TRUE(backend.ReadState(SlotIndex{0}, 1, 0, absl::MakeSpan(read)).ok());
    EXPECT_EQ(read, std::vector<float>(read.size(), 0.0f));

    std::mt19937 random(4);
    std::vector<float> state(shape.state_elements());
    for (float& x : state) x = std::normal_distribution<float>()(random);
    ASSERT_TRUE(backend.BeginImport(SlotIndex{0}, 1).ok());
    for (uint32_t layer = 0; layer < 2; ++layer)
      backend.WriteImport(SlotIndex{0}, layer, 1234, state);
    backend.EndImport(SlotIndex{0}, 1234, {});
    ASSERT_TRUE(backend.ReadState(SlotIndex{0}, 1, 1234, absl::MakeSpan(read)).ok());
    const RoundingStream stream = MakeRoundingStream({99, 5, 1, 1234});
    for (size_t i = 0; i < state.size() && p.hp == Dtype::kFp16; ++i) {
      const uint32_t element = static_cast<uint32_t>(i % (shape.d_v * shape.d_k));
      const PhiloxWords bits =
          RoundingBits(stream, static_cast<uint32_t>(i / (shape.d_v * shape.d_k)), element / 4);
      state[i] = Fp16ToFloat(StochasticToFp16(state[i], bits.word[element % 4]));
    }
    EXPECT_EQ(read, state);
  }
}

}  // namespace
}  // namespace ssmd::testing
