// The demo's C++ model against float64 logits of its PyTorch twin, and against itself: chunking,
// rollback and forks must not change a bit.
#include "client/demo/model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "client/demo/compare.h"
#include "client/demo/generate.h"
#include "client/demo/local_ssm.h"
#include "client/tools/metrics_page.h"

namespace ssmd::demo {
namespace {

const char* const kWeights = SSMD_SOURCE_DIR "/client/demo/weights/hybrid-kjv.safetensors";
const char* const kGolden = SSMD_SOURCE_DIR "/tests/data/hybrid_golden.safetensors";

// One sequence under test: a model, its states, its cache.
template <typename Real>
struct Worker {
  explicit Worker(const HybridModel& m)
      : model(m), ssm(std::make_shared<LocalSsm<Real>>(m.ssm_parameters())) {
    handle = ssm->Create(1).value()[0];
  }

  // Runs `tokens` in one step, keeps the first `accepted`; returns the logits of all of them.
  Matrix Step(const std::vector<uint8_t>& tokens, uint32_t accepted,
              std::vector<Matrix>* hidden = nullptr) {
    const ModelRow row{&cache, handle, tokens};
    Matrix logits = model.Forward({&row, 1}, *ssm, hidden).value();
    EXPECT_TRUE(model.Commit({&row, 1}, {accepted}, *ssm).ok());
    return logits;
  }

  Worker Fork() {
    Worker child(*this);
    child.handle = ssm->Fork(handle, 1).value()[0];
    return child;
  }

  const HybridModel& model;
  std::shared_ptr<LocalSsm<Real>> ssm;
  SsmLayers::Handle handle{};
  SequenceCache cache;
};

class DemoModelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(kWeights)) GTEST_SKIP() << "no weights at " << kWeights;
    const auto weights = Safetensors::Read(kWeights);
    ASSERT_TRUE(weights.ok()) << weights.status();
    auto model = HybridModel::Load(*weights);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    for (char c : std::string("Paul, and Silvanus, and Timotheus, unto the church of"))
      tokens_.push_back(static_cast<uint8_t>(c));
  }

  std::vector<uint8_t> Tokens(size_t begin, size_t end) const {
    return {tokens_.begin() + begin, tokens_.begin() + end};
  }

  std::unique_ptr<HybridModel> model_;
  std::vector<uint8_t> tokens_;
};

// Largest error of a logit in FP32 arithmetic, u = 2^-24, against float64 (the recurrences are in
// float64 on both sides).
//   A sum of at most 384 terms runs in 8 or more lanes: at most 51 roundings one after another.
//   They are independent to first order, so its error is about sqrt(51) u = 7 u of its partial
//   sums; those exceed the result by cancellation: allow 4, so 28 u.
//   One sub-block (mixer or MLP) has at most four such sums in a row: sqrt(4) * 28 u = 56 u of its
//   addend, which is no larger than the residual stream.
//   16 sub-blocks, independent: 4 * 56 u. RMSNorm passes relative errors on unchanged; later
//   sub-blocks react to earlier errors: allow 2. Sum: 448 u of the largest logit.
constexpr double kRelativeTolerance = 448 * 0x1p-24;
double GoldenTolerance(double largest_logit) { return kRelativeTolerance * largest_logit; }

TEST_F(DemoModelTest, MatchesTheGoldenLogits) {
  if (!std::filesystem::exists(kGolden)) GTEST_SKIP() << "no golden logits at " << kGolden;
  const Safetensors golden = Safetensors::Read(kGolden).value();
  const size_t count = golden.shape("tokens").at(0);
  const std::vector<int32_t> tokens = golden.Ints("tokens", {count}).value();
  const std::vector<float> expected = golden.Floats("logits", {count, kVocabulary}).value();
  const std::vector<float> expected_hidden = golden.Floats("hidden", {8, kModelDim}).value();

  Worker<double> worker(*model_);
  std::vector<Matrix> hidden;
  const Matrix logits =
      worker.Step({tokens.begin(), tokens.end()}, static_cast<uint32_t>(count), &hidden);
  double largest = 0, worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(std::isfinite(logits.data()[i]));
    largest = std::max(largest, std::abs(double{expected[i]}));
    worst = std::max(worst, std::abs(double{logits.data()[i]} - double{expected[i]}));
  }
  RecordProperty("worst", std::to_string(worst));
  std::printf("largest logit %.3f, largest difference %.3g, bound %.3g\n", largest, worst,
              GoldenTolerance(largest));
  EXPECT_LE(worst, GoldenTolerance(largest));

  // The stream after each block, last token: says which block is wrong when the logits are.
  ASSERT_EQ(hidden.size(), 8u);
  for (size_t block = 0; block < 8; ++block) {
    const Eigen::Map<const Matrix> row(&expected_hidden[block * kModelDim], 1, kModelDim);
    const double gap = (hidden[block].bottomRows(1) - row).norm() / row.norm();
    EXPECT_LE(gap, kRelativeTolerance) << "block " << block;
  }
}

TEST_F(DemoModelTest, TheGoldenComparisonCanFail) {
  if (!std::filesystem::exists(kGolden)) GTEST_SKIP() << "no golden logits at " << kGolden;
  const Safetensors golden = Safetensors::Read(kGolden).value();
  const size_t count = golden.shape("tokens").at(0);
  const std::vector<int32_t> tokens = golden.Ints("tokens", {count}).value();
  const std::vector<float> expected = golden.Floats("logits", {count, kVocabulary}).value();
  // The states lose one token: everything after it is off by far more than rounding.
  Worker<double> worker(*model_);
  std::vector<uint8_t> bytes(tokens.begin(), tokens.end());
  worker.Step({bytes.begin(), bytes.begin() + 20}, 20);
  Worker<double> before = worker.Fork();
  worker.Step({bytes[20]}, 1);
  worker.handle = before.handle;  // cache at 21 tokens, states at 20
  const Matrix logits = worker.Step({bytes.begin() + 21, bytes.end()}, 0);
  double worst = 0;
  for (Eigen::Index i = 0; i < logits.size(); ++i)
    worst = std::max(worst,
                     std::abs(double{logits.data()[i]} - double{expected[21 * kVocabulary + i]}));
  EXPECT_GT(worst, 100 * GoldenTolerance(20.0));
}

TEST_F(DemoModelTest, ChunkingChangesNoBit) {
  Worker<float> whole(*model_);
  const uint32_t count = static_cast<uint32_t>(tokens_.size());
  const Matrix expected = whole.Step(tokens_, count);
  for (size_t chunk : {1u, 4u, 7u}) {
    Worker<float> worker(*model_);
    for (size_t begin = 0; begin < tokens_.size(); begin += chunk) {
      const auto piece = Tokens(begin, std::min(begin + chunk, tokens_.size()));
      const Matrix logits = worker.Step(piece, static_cast<uint32_t>(piece.size()));
      ASSERT_EQ(logits, expected.middleRows(begin, piece.size())) << "chunk " << chunk;
    }
    EXPECT_EQ(worker.cache.position(), tokens_.size());
  }
}

TEST_F(DemoModelTest, BatchNeighboursChangeNoBit) {
  Worker<float> alone(*model_);
  const Matrix expected = alone.Step(Tokens(0, 5), 5);
  Worker<float> first(*model_);
  Worker<float> second = first.Fork();
  const auto one = Tokens(10, 17), two = Tokens(0, 5);
  const std::vector<ModelRow> rows = {{&first.cache, first.handle, one},
                                      {&second.cache, second.handle, two}};
  const Matrix logits = model_->Forward(rows, *first.ssm).value();
  EXPECT_EQ(logits.bottomRows(5), expected);
  EXPECT_TRUE(model_->Commit(rows, {7, 5}, *first.ssm).ok());
}

// text  P a u l ,   a n d ...
// step  [0, 9) kept; [9, 12) + wrong drafts, only 3 kept; then a step of which nothing is kept
TEST_F(DemoModelTest, RejectedDraftsLeaveNoTrace) {
  Worker<float> plain(*model_);
  const Matrix expected = plain.Step(Tokens(0, 20), 20);

  Worker<float> worker(*model_);
  worker.Step(Tokens(0, 9), 9);
  std::vector<uint8_t> drafts = Tokens(9, 12);
  drafts.insert(drafts.end(), {'#', '?', '~'});
  const Matrix first = worker.Step(drafts, 3);
  EXPECT_EQ(first.topRows(3), expected.middleRows(9, 3));
  worker.Step({'x', 'y'}, 0);
  EXPECT_EQ(worker.cache.position(), 12u);
  EXPECT_EQ(worker.Step(Tokens(12, 20), 8), expected.middleRows(12, 8));
}

TEST_F(DemoModelTest, ForksGoTheirOwnWays) {
  Worker<float> plain(*model_);
  const Matrix expected = plain.Step(Tokens(0, 20), 20);
  Worker<float> parent(*model_);
  parent.Step(Tokens(0, 12), 12);
  Worker<float> child = parent.Fork();
  child.Step({'#', '?'}, 2);
  EXPECT_EQ(parent.Step(Tokens(12, 20), 8), expected.middleRows(12, 8));
  EXPECT_EQ(child.cache.position(), 14u);
}

TEST_F(DemoModelTest, CachesRollBackAndSurviveAFile) {
  Worker<float> worker(*model_);
  worker.Step(Tokens(0, 40), 40);
  Worker<float> early(*model_);
  early.Step(Tokens(0, 30), 30);
  // The states come from a sequence that stopped there, the cache from one that went on.
  worker.handle = early.ssm->Fork(early.handle, 1).value()[0];
  worker.ssm = early.ssm;
  ASSERT_TRUE(worker.cache.Truncate(30).ok());
  SafetensorsWriter writer;
  worker.cache.Save(writer);
  worker.cache = SequenceCache::Load(Safetensors::Parse(writer.Serialize()).value()).value();
  EXPECT_EQ(worker.Step(Tokens(30, 38), 8), early.Step(Tokens(30, 38), 8));

  SequenceCache cache = worker.cache;  // at 38
  EXPECT_TRUE(absl::IsOutOfRange(cache.Truncate(39)));
  EXPECT_EQ(cache.position(), 38u);
}

TEST_F(DemoModelTest, GreedyTextDoesNotDependOnTheDrafts) {
  // Token by token, without drafts.
  Worker<float> plain(*model_);
  std::string expected(tokens_.begin(), tokens_.end());
  Matrix logits = plain.Step(tokens_, static_cast<uint32_t>(tokens_.size()));
  std::mt19937_64 random;
  for (int i = 0; i < 60; ++i) {
    const Eigen::Index last = logits.rows() - 1;
    const uint8_t byte = PickByte({logits.row(last).data(), kVocabulary}, 0.0f, random);
    expected.push_back(static_cast<char>(byte));
    logits = plain.Step({byte}, 1);
  }
  Worker<float> drafted(*model_);
  Stream stream;
  stream.text.assign(tokens_.begin(), tokens_.end());
  stream.ssm = drafted.handle;
  Stream* const streams[] = {&stream};
  ASSERT_TRUE(Prefill(*model_, *drafted.ssm, streams, 8, false).ok());
  const auto stats = Generate(*model_, *drafted.ssm, streams, {.new_bytes = 60});
  ASSERT_TRUE(stats.ok()) << stats.status();
  EXPECT_EQ(stream.text, expected);
  EXPECT_EQ(stats->new_bytes, 60u);
  EXPECT_LT(stats->steps, 60u);  // some drafts were accepted
}

TEST(DraftByLookup, TakesWhatFollowedTheLongestLatestMatch) {
  const auto draft = [](const std::string& text, size_t count) {
    return DraftByLookup(text, {}, count);
  };
  EXPECT_EQ(draft("abcdefg", 3), "");
  EXPECT_EQ(draft("abcX..abcY..abc", 3), "Y..");
  EXPECT_EQ(draft("zabcX..abcY..zabc", 3), "X..");  // longer wins over later
  EXPECT_EQ(draft("abcabc", 3), "abc");
  EXPECT_EQ(draft("aaaa", 3), "a");  // overlaps the end
  EXPECT_EQ(draft("abcXabc", 0), "");
  EXPECT_EQ(draft("", 3), "");
  EXPECT_EQ(draft("a", 3), "");
  const std::string one = "..bcdef", two = ".abcxyz";  // after "bc" and "abc"
  EXPECT_EQ(DraftByLookup("wabc", {&one, &two}, 3), "xyz");
  EXPECT_EQ(DraftByLookup("xbcQ.ybc", {&one, &two}, 2), "Q.");  // of equals, its own text
}

// The tolerance of the demo, on a text of the model's own: float64 recurrences are within it,
// states that are off by 2^-11 are not.
TEST_F(DemoModelTest, TheDemosToleranceHoldsAndHasTeeth) {
  const auto run = [&](std::shared_ptr<SsmLayers> ssm) {
    Stream stream;
    stream.text.assign(tokens_.begin(), tokens_.end());
    stream.prompt_bytes = stream.text.size();
    stream.ssm = ssm->Create(1).value()[0];
    Stream* const streams[] = {&stream};
    EXPECT_TRUE(Prefill(*model_, *ssm, streams, 8, true).ok());
    EXPECT_TRUE(Generate(*model_, *ssm, streams, {.new_bytes = 100, .keep_logits = true}).ok());
    return stream;
  };
  const Stream plain = run(std::make_shared<LocalSsm<float>>(model_->ssm_parameters()));
  const Stream exact = run(std::make_shared<LocalSsm<double>>(model_->ssm_parameters()));
  const Stream wrong = run(std::make_shared<LocalSsm<float>>(model_->ssm_parameters(), 0x1p-11));
  const double tolerance = MeasureTolerance(*model_, plain, nullptr).value().logit;
  const Comparison good = Compare({&plain, 1}, {&exact, 1});
  EXPECT_TRUE(good.tokens_equal) << good.first_difference;
  EXPECT_EQ(good.positions, plain.text.size() - 1);
  EXPECT_LE(good.logit_difference, tolerance);
  EXPECT_GT(Compare({&plain, 1}, {&wrong, 1}).logit_difference, 10 * tolerance);

  Stream other = plain;
  other.text.back() = '#';
  const Comparison bad = Compare({&plain, 1}, {&other, 1});
  EXPECT_FALSE(bad.tokens_equal);
  EXPECT_EQ(bad.first_difference, "prompt 1, byte 100 after the prompt");
  other = plain;
  other.logits[3 * kVocabulary] = std::nanf("");
  EXPECT_TRUE(std::isinf(Compare({&plain, 1}, {&other, 1}).logit_difference));
}

TEST(MetricsPage, SumsAFamilyByLabel) {
  using namespace client;
  const Samples samples = ParseMetrics(
      "# HELP b_total Bytes\n# TYPE b_total counter\n"
      "b_total{kind=\"ring_read\",model=\"m\"} 3\nb_total{kind=\"ring_write\",model=\"m\"} 4.5e2\n"
      "b_total_other 7\nplain 8\nnot a number\n\n");
  EXPECT_EQ(SumOf(samples, "b_total"), 453);
  EXPECT_EQ(SumOf(samples, "b_total", "kind=\"ring_read\""), 3);
  EXPECT_EQ(SumOf(samples, "plain"), 8);
  EXPECT_EQ(SumOf(samples, "absent"), 0);
  EXPECT_TRUE(absl::IsUnavailable(FetchMetrics("no-port").status()));
  EXPECT_TRUE(absl::IsUnavailable(FetchMetrics("127.0.0.1:1").status()));
}

TEST(PickByte, GreedyAndSampled) {
  std::vector<float> logits(kVocabulary, -1.0f);
  logits[7] = logits[9] = 2.0f;
  std::mt19937_64 random(1);
  EXPECT_EQ(PickByte(logits, 0.0f, random), 7);
  int sevens = 0;
  for (int i = 0; i < 1000; ++i) {
    const uint8_t byte = PickByte(logits, 0.1f, random);
    ASSERT_TRUE(byte == 7 || byte == 9);
    sevens += byte == 7;
  }
  EXPECT_NEAR(sevens, 500, 80);  // five standard deviations
}

}  // namespace
}  // namespace ssmd::demo
