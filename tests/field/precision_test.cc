// Field reports 46, 83, 86-88: errors over long runs, extreme decays, and rounding bits.
#include "tests/testing/store_fixture.h"

namespace ssmd {
namespace {

using testing::kAlice;
using testing::TokenLists;

class PrecisionTest : public testing::StoreFixture {
 protected:
  static Geometry OneHead(Dtype hp, Dtype lp) {
    Geometry geometry;
    geometry.layers = {{Family::kMamba2, 1, 1, 16, 8}, {Family::kGdn, 1, 1, 16, 8}};
    geometry.formats = {.activation = Dtype::kBf16,
                        .correction = Dtype::kFp16,
                        .checkpoint_hp = hp,
                        .checkpoint_lp = lp};
    geometry.window_records = 16;
    geometry.draft_tokens_max = 1;
    return geometry;
  }
  // Decodes without keeping the oracle's prefixes; returns the largest error of the states, by
  // eighth of the run.
  std::array<double, 8> ErrorsOver(uint64_t tokens) {
    const SequenceId id = store_->CreateSequences(kAlice, 1)->ids[0];
    TokenLists::States oracle;
    for (const LayerShape& shape : geometry_.layers) {
      oracle.emplace_back(
          FamilyName(shape.family),
          reference::Shape{shape.head_count, shape.key_group_count, shape.d_k, shape.d_v});
    }
    std::array<double, 8> errors{};
    std::vector<float> state(16 * 8), output(8);
    const std::vector<uint32_t> one = {1};
    for (uint64_t p = 0; p < tokens; ++p) {
      const int token = AnyToken();
      const auto step = store_->BeginStep(kAlice, {.rows = {{id, p + 1, 1}}});
      if (!step.ok()) {
        ADD_FAILURE() << step.status();
        break;
      }
      for (uint32_t layer = 0; layer < geometry_.layers.size(); ++layer) {
        testing::PackedInputs packed;
        packed.Append(inputs_[token][layer], geometry_.formats.activation);
        EXPECT_TRUE(store_
                        ->Verify(kAlice, {.step = step->id,
                                          .layer = layer,
                                          .token_count = 1,
                                          .inputs = packed.view(),
                                          .output = output.data()})
                        .ok());
        oracle[layer].Step(inputs_[token][layer]);
      }
      EXPECT_TRUE(store_->Commit(kAlice, step->id, one).ok());
      if (p % 32 != 31) continue;
      double& worst = errors[p * 8 / tokens];
      for (uint32_t layer = 0; layer < geometry_.layers.size(); ++layer) {
        EXPECT_TRUE(store_->ReadState(kAlice, id, layer, p + 1, absl::MakeSpan(state)).ok());
        for (size_t i = 0; i < state.size(); ++i)
          worst = std::max(worst, std::abs(state[i] - oracle[layer].state()[i]));
      }
    }
    const std::vector<SequenceId> ids = {id};
    EXPECT_TRUE(store_->Release(kAlice, ids).ok());
    return errors;
  }
};

// Report 46: 64k tokens through folds of 16: behind the first eighth the error does not grow.
TEST_F(PrecisionTest, SixtyFourThousandTokensDoNotDrift) {
  Make(OneHead(Dtype::kFp32, Dtype::kNone));
  const std::array<double, 8> errors = ErrorsOver(65536);
  std::printf("  first eighth: %.3g, last: %.3g\n", errors[0], errors[7]);
  EXPECT_LE(errors[0], 8e-4);  // twice what was measured
  for (int eighth = 1; eighth < 8; ++eighth) {
    EXPECT_LE(errors[eighth], 2 * errors[0]) << eighth;
  }
}

// Report 83: each checkpoint format over a long decode, against a recorded threshold.
TEST_F(PrecisionTest, EveryCheckpointFormatOverFourThousandTokens) {
  struct Case {
    Dtype hp, lp;
    double threshold;  // twice what was measured when this was written; states are of size 3
  };
  for (const Case& c : {Case{Dtype::kFp32, Dtype::kNone, 7e-4},
                        {Dtype::kFp32, Dtype::kFp16, 3e-7},  // corrections are re-derived in FP32
                        {Dtype::kFp16, Dtype::kNone, 6e-4},
                        {Dtype::kFp16, Dtype::kFp16, 2.5e-4}}) {
    SCOPED_TRACE(absl::StrCat(DtypeName(c.hp), "/", DtypeName(c.lp)));
    Make(OneHead(c.hp, c.lp));
    const std::array<double, 8> errors = ErrorsOver(4096);
    const double worst = *std::max_element(errors.begin(), errors.end());
    std::printf("  %s/%s: %.3g\n", DtypeName(c.hp), DtypeName(c.lp), worst);
    EXPECT_LE(worst, c.threshold);
    EXPECT_LE(errors[7], 2 * *std::max_element(errors.begin(), errors.begin() + 4));
  }
}

// Report 86: decays that are as strong as a float can say stay finite through a thousand windows.
TEST_F(PrecisionTest, StrongestDecaysStayFinite) {
  Make();
  for (auto& token : inputs_) {
    for (auto& layer : token) {
      for (size_t i = 0; i < layer.log_alpha.size(); ++i)
        layer.log_alpha[i] = i % 3 == 0 ? -3e38 : i % 3 == 1 ? -100.0f : -1e-30f;
    }
  }
  Measure();
  Create();
  for (int window = 0; window < 1000 && !HasFailure(); ++window) {
    Verify(4);
    Commit(1 + window % 4);
  }
  ExpectMatchesOracle();
}

// Report 87: a decay of 1e-12 a token, 64 tokens: nothing is divided by it.
TEST_F(PrecisionTest, TinyDecaysEqualTheStepwiseRecurrence) {
  Geometry geometry = SmallGeometry();
  geometry.window_records = 80;
  geometry.draft_tokens_max = 16;
  Make(geometry);
  for (auto& token : inputs_) {
    for (auto& layer : token) {
      for (double& x : layer.log_alpha) x = static_cast<float>(std::log(1e-12));
    }
  }
  Measure();
  Create();
  Prefill(64);
  EXPECT_EQ(State().floor, 0u);  // all of them are records
  ExpectMatchesOracle();
  Prefill(64);
  EXPECT_GT(State().floor, 0u);
  ExpectMatchesOracle();
}

// Report 88: rounding bits differ from sequence to sequence and from flush to flush; the same seed
// gives the same bytes.
TEST_F(PrecisionTest, RoundingBitsAreUniqueAndReproducible) {
  Geometry geometry = OneHead(Dtype::kFp16, Dtype::kNone);
  geometry.layers = {{Family::kMamba2, 1, 1, 16, 8}};
  geometry.formats.correction = Dtype::kNone;
  geometry.draft_tokens_max = 4;
  std::vector<std::vector<float>> runs[2];
  for (auto& run : runs) {
    random_.seed(3);
    Make(geometry);
    std::vector<int> text;
    for (int i = 0; i < 40; ++i) text.push_back(i % kVocabulary);
    for (int sequence = 0; sequence < 3; ++sequence) {
      const SequenceId id = Create();
      for (int i = 0; i < 40; i += 4) {
        VerifyTokens(std::vector<int>(text.begin() + i, text.begin() + i + 4));
        Commit(4);
        const std::vector<SequenceId> ids = {id};
        ASSERT_TRUE(store_->Flush(kAlice, ids).ok());
        run.push_back(ReadState(id, 0, State(id).floor));
      }
    }
  }
  EXPECT_EQ(runs[0], runs[1]);
  for (int flush = 0; flush < 10; ++flush) {
    EXPECT_NE(runs[0][flush], runs[0][10 + flush]);
    EXPECT_NE(runs[0][10 + flush], runs[0][20 + flush]);
  }
}

}  // namespace
}  // namespace ssmd
