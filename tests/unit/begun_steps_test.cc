// service/begun_steps.cc: what a BeginStep waits for, and what is left to abort.
#include "service/begun_steps.h"

#include <gtest/gtest.h>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"
#include "service/validate.h"
#include "tests/testing/model_specs.h"

namespace ssmd {
namespace {

using State = BegunSteps::State;

constexpr OwnerId kOwner{1}, kOther{2};

class BegunStepsTest : public ::testing::Test {
 protected:
  BegunStepsTest() {
    const auto registered = table_.Register(*ParseModelSpec(testing::SmallSpec()),
                                            {.sequences_max = 600, .steps_max = 4});
    EXPECT_TRUE(registered.ok()) << registered.status();
    model_ = registered->model;
    ids_ = model_->store->CreateSequences(kOwner, 2)->ids;
  }

  v1::BeginStepRequest BeginOf(const std::vector<SequenceVersion>& rows) const {
    v1::BeginStepRequest begin;
    begin.set_model_id(model_->id);
    for (const SequenceVersion& row : rows) {
      begin.add_sequence_ids(static_cast<uint64_t>(row.id));
      begin.add_versions(row.version);
    }
    return begin;
  }
  // Begins a step without tokens, which needs no Verify, and adds it.
  StepId Begin(const std::vector<SequenceVersion>& rows) {
    StepRequest request;
    for (const SequenceVersion& row : rows) request.rows.push_back({row.id, row.version});
    const auto step = model_->store->BeginStep(kOwner, request);
    EXPECT_TRUE(step.ok()) << step.status();
    v1::BeginStepResponse response;
    response.set_step_id(static_cast<uint64_t>(step->id));
    steps_.Add(kOwner, BeginOf(rows), response);
    return step->id;
  }
  void Commit(StepId step, const std::vector<uint32_t>& accepted) {
    EXPECT_TRUE(model_->store->Commit(kOwner, step, accepted).ok());
  }
  State Look(const std::vector<SequenceVersion>& rows) {
    return steps_.Look(kOwner, steps_.PredecessorsOf(BeginOf(rows)));
  }
  uint32_t OpenSteps() const { return model_->store->usage().open_steps; }

  cpu::ThreadPool pool_{1};
  cpu::CpuDevice device_{64u << 20, &pool_};
  ModelTable table_{{}, [this](const BackendSpec& spec) { return device_.CreateBackend(spec); }};
  ModelRef model_;
  std::vector<SequenceId> ids_;
  BegunSteps steps_{&table_};
};

TEST_F(BegunStepsTest, ARowWaitsForTheStepBeforeItsVersionOnly) {
  const StepId step = Begin({{ids_[0], 1}});
  EXPECT_EQ(Look({{ids_[0], 2}}), State::kOpen);
  EXPECT_EQ(Look({{ids_[1], 1}, {ids_[0], 2}}), State::kOpen);
  EXPECT_EQ(Look({{ids_[0], 1}}), State::kEnded) << "not the next version";
  EXPECT_EQ(Look({{ids_[0], 3}}), State::kEnded) << "chains are not held";
  EXPECT_EQ(Look({{ids_[1], 2}}), State::kEnded) << "no step of this stream";
  EXPECT_EQ(Look({{kPaddingRow, 0}}), State::kEnded);
  v1::BeginStepRequest begin = BeginOf({{ids_[0], 2}});
  EXPECT_TRUE(steps_.PredecessorsOf(begin, static_cast<uint64_t>(step)).empty());
  begin.set_model_id(begin.model_id() ^ 1);
  EXPECT_TRUE(steps_.PredecessorsOf(begin).empty()) << "another model";
}

TEST_F(BegunStepsTest, SeesHowOthersEndedAStep) {
  Commit(Begin({{ids_[0], 1}}), {0});
  EXPECT_EQ(Look({{ids_[0], 2}}), State::kEnded);
  const StepId second = Begin({{ids_[0], 2}});
  EXPECT_TRUE(model_->store->Abort(kOwner, second).ok());
  EXPECT_EQ(Look({{ids_[0], 3}}), State::kAborted);
  Begin({{ids_[1], 1}});
  EXPECT_EQ(Look({{ids_[0], 3}, {ids_[1], 2}}), State::kOpen) << "first all must have ended";
  const auto waits_for = steps_.PredecessorsOf(BeginOf({{ids_[1], 2}}));
  model_->store->ReleaseOwner(kOwner);
  EXPECT_EQ(steps_.Look(kOwner, waits_for), State::kEnded) << "the sequence is gone";
  EXPECT_EQ(steps_.Look(kOther, waits_for), State::kEnded);
}

TEST_F(BegunStepsTest, AbortsWhatIsOpenOnceAndNothingElse) {
  Begin({{ids_[0], 1}});
  Begin({{kPaddingRow, 0}});
  const StepId committed = Begin({{ids_[1], 1}});
  Commit(committed, {0});
  steps_.Forget(static_cast<uint64_t>(committed));
  const StepId others = model_->store->BeginStep(kOwner, {.rows = {{ids_[1], 2}}})->id;
  EXPECT_EQ(OpenSteps(), 3u);
  EXPECT_TRUE(steps_.AbortAll(kOwner));
  EXPECT_EQ(OpenSteps(), 1u);
  EXPECT_TRUE(model_->store->StepTokenCount(kOwner, others).ok());
  EXPECT_FALSE(steps_.AbortAll(kOwner));
  EXPECT_EQ(model_->store->counters().steps_aborted, 2u);
  EXPECT_EQ(Look({{ids_[0], 2}}), State::kAborted) << "known for those who come late";
}

// Sequences come and go, and others end the steps: what is remembered follows what lives.
TEST_F(BegunStepsTest, ForgetsWhatIsGone) {
  Begin({{ids_[0], 1}});
  for (int i = 0; i < 2'000; ++i) {
    const SequenceId id = model_->store->CreateSequences(kOwner, 1)->ids[0];
    Commit(Begin({{id, 1}}), {0});  // by a unary call: nobody says Forget
    EXPECT_EQ(Look({{id, 2}}), State::kEnded);
    EXPECT_TRUE(model_->store->Release(kOwner, {id}).ok());
  }
  EXPECT_LE(steps_.size(), 600u);
  EXPECT_EQ(Look({{ids_[0], 2}}), State::kOpen);
  EXPECT_TRUE(steps_.AbortAll(kOwner));
  EXPECT_EQ(OpenSteps(), 0u);
}

}  // namespace
}  // namespace ssmd
