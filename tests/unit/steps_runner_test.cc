// service/steps_runner.cc without gRPC: what is held, dropped and answered, each once.
#include "service/steps_runner.h"

#include <gtest/gtest.h>

#include <map>
#include <thread>

#include "tests/testing/fake_clock.h"
#include "tests/testing/model_specs.h"

namespace ssmd {
namespace {

// Steps here have no tokens, and so need no Verify.
class StepsRunnerTest : public ::testing::Test {
 protected:
  // Keeps replies by tag, and is in the table of streams for those who end steps.
  class Stream final : public StepsRunner::Replies, public StreamTable::Stream {
   public:
    explicit Stream(ServiceCore& core) : runner(std::make_shared<StepsRunner>(core, *this)) {}
    void Send(const StepsCallRef& call) override {
      MutexLock lock(&mu_);
      EXPECT_TRUE(replies_.emplace(call->response.tag(), call->response).second)
          << "a second reply to " << call->response.ShortDebugString();
    }
    bool broken() const override { return is_broken; }
    OwnerId owner() const override { return runner->owner(); }
    void CheckHeld() override { runner->CheckHeld(); }
    void Drain() override { runner->AnswerHeld(); }

    bool Answered(uint64_t tag) const {
      MutexLock lock(&mu_);
      return replies_.contains(tag);
    }
    v1::StepsResponse Reply(uint64_t tag) const {
      MutexLock lock(&mu_);
      const auto found = replies_.find(tag);
      EXPECT_TRUE(found != replies_.end()) << "no reply to " << tag;
      return found == replies_.end() ? v1::StepsResponse() : found->second;
    }

    const std::shared_ptr<StepsRunner> runner;
    std::atomic<bool> is_broken{false};

   private:
    mutable Mutex mu_;
    std::map<uint64_t, v1::StepsResponse> replies_ ABSL_GUARDED_BY(mu_);
  };

  StepsRunnerTest() : core_(Config(), clock_.AsClock()), stream_(std::make_shared<Stream>(core_)) {
    v1::RegisterModelRequest model;
    *model.mutable_spec() = testing::SmallSpec();
    v1::RegisterModelResponse registered;
    EXPECT_TRUE(handlers::RegisterModel(core_, Principal{}, model, registered).ok());
    model_id_ = registered.model_id();
    owner_ = core_.sessions.Open(0, "test")->id;
    const NewSequences created = *store().CreateSequences(owner_, 2);
    for (const SequenceId id : created.ids) ids_.push_back(static_cast<uint64_t>(id));
    core_.streams.Add(stream_);
    Send({});  // the first message, without a call, only has the context
  }
  ~StepsRunnerTest() override { EXPECT_EQ(core_.streams.held.load(), 0u); }

  static ServerConfig Config() {
    ServerConfig config;
    config.compute_threads = 1;
    config.state_bytes_max = 64u << 20;
    config.stream_begins_max = 2;
    return config;
  }
  Store& store() { return *(*core_.models.Find(model_id_))->store; }

  static StepsCallRef CallOf(v1::StepsRequest request, uint64_t tag) {
    auto call = std::make_shared<StepsCall>();
    call->request = std::move(request);
    call->request.set_tag(tag);
    return call;
  }
  // Returns the tag.
  uint64_t Send(v1::StepsRequest request) {
    const uint64_t tag = ++last_tag_;
    if (tag > 1) {
      stream_->runner->Admit(CallOf(std::move(request), tag));
      return tag;
    }
    request.mutable_context()->set_server_epoch(core_.epoch);
    request.mutable_context()->set_session_id(static_cast<uint64_t>(owner_));
    EXPECT_TRUE(stream_->runner->AdmitFirst(CallOf(std::move(request), tag)).ok());
    return tag;
  }
  v1::StepsRequest BeginOf(uint64_t sequence, uint64_t version) const {
    v1::StepsRequest request;
    request.mutable_begin()->set_model_id(model_id_);
    request.mutable_begin()->add_sequence_ids(sequence);
    request.mutable_begin()->add_versions(version);
    request.mutable_begin()->add_draft_tokens(0);
    return request;
  }
  uint64_t Begin(uint64_t sequence, uint64_t version) {
    const v1::StepsResponse reply = stream_->Reply(Send(BeginOf(sequence, version)));
    EXPECT_EQ(reply.status().code(), 0) << reply.ShortDebugString();
    return reply.begin().step_id();
  }
  v1::StepsRequest CommitOf(uint64_t step) const {
    v1::StepsRequest request;
    request.mutable_commit()->set_model_id(model_id_);
    request.mutable_commit()->set_step_id(step);
    request.mutable_commit()->add_accepted(0);
    return request;
  }
  int CodeOf(uint64_t tag) const { return stream_->Reply(tag).status().code(); }
  static int Code(absl::StatusCode code) { return static_cast<int>(code); }

  testing::FakeClock clock_;
  ServiceCore core_;
  const std::shared_ptr<Stream> stream_;
  uint64_t model_id_ = 0, last_tag_ = 0;
  OwnerId owner_{};
  std::vector<uint64_t> ids_;
};

TEST_F(StepsRunnerTest, AFirstMessageIsFenced) {
  Stream other(core_);
  EXPECT_EQ(other.runner->AdmitFirst(CallOf({}, 1)).code(), absl::StatusCode::kInvalidArgument);
  v1::StepsRequest request;
  request.mutable_context()->set_server_epoch(core_.epoch);
  request.mutable_context()->set_session_id(12345);
  EXPECT_EQ(other.runner->AdmitFirst(CallOf(request, 2)).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(other.owner(), OwnerId{0});
  EXPECT_FALSE(other.Answered(1) || other.Answered(2)) << "the stream ends instead";
}

TEST_F(StepsRunnerTest, AHeldBeginIsPlannedWhenItsStepHasEnded) {
  const uint64_t step = Begin(ids_[0], 1);
  const uint64_t held = Send(BeginOf(ids_[0], 2));
  EXPECT_EQ(core_.streams.held.load(), 1u);
  EXPECT_FALSE(stream_->Answered(held));
  EXPECT_EQ(CodeOf(Send(CommitOf(step))), 0);
  EXPECT_EQ(CodeOf(held), 0);
  EXPECT_EQ(store().Get(owner_, SequenceId{ids_[0]})->open_step,
            StepId{stream_->Reply(held).begin().step_id()});
}

TEST_F(StepsRunnerTest, AnAbortedStepTakesItsHeldBeginsWithIt) {
  const uint64_t step = Begin(ids_[0], 1);
  const uint64_t one = Send(BeginOf(ids_[0], 2)), two = Send(BeginOf(ids_[0], 2));
  const uint64_t three = Send(BeginOf(ids_[0], 2));
  EXPECT_EQ(CodeOf(three), Code(absl::StatusCode::kResourceExhausted));  // stream_begins_max
  EXPECT_TRUE(store().Abort(owner_, StepId{step}).ok());  // by somebody else, who then says so
  core_.streams.StepMayHaveEnded(owner_);
  EXPECT_EQ(CodeOf(one), Code(absl::StatusCode::kAborted));
  EXPECT_EQ(CodeOf(two), Code(absl::StatusCode::kAborted));
}

TEST_F(StepsRunnerTest, AHeldBeginDoesNotKeepTheLease) {
  Begin(ids_[0], 1);
  const uint64_t held = Send(BeginOf(ids_[0], 2));
  clock_.Advance(absl::Milliseconds(core_.config.lease_ms_default));
  core_.Sweep();
  EXPECT_EQ(CodeOf(held), Code(absl::StatusCode::kNotFound));
  EXPECT_EQ(store().usage().sequences, 0u);
}

TEST_F(StepsRunnerTest, WhatIsHeldWhenTheStreamBreaksIsDropped) {
  const uint64_t step = Begin(ids_[0], 1);
  const uint64_t held = Send(BeginOf(ids_[0], 2));
  stream_->is_broken = true;
  EXPECT_EQ(stream_->runner->DropHeld(), 1u);
  EXPECT_EQ(stream_->runner->DropHeld(), 0u);
  const uint64_t late = Send(BeginOf(ids_[0], 2));  // read before the break
  EXPECT_EQ(CodeOf(late), Code(absl::StatusCode::kCancelled));
  EXPECT_EQ(CodeOf(Send(CommitOf(step))), Code(absl::StatusCode::kCancelled)) << "not run";
  stream_->runner->AbortOpenSteps();
  EXPECT_EQ(store().usage().open_steps, 0u);
  EXPECT_EQ(store().counters().steps_aborted, 1u);
  EXPECT_FALSE(stream_->Answered(held));
}

TEST_F(StepsRunnerTest, WhatIsHeldWhenTheServerDrainsIsAnswered) {
  const uint64_t step = Begin(ids_[0], 1);
  const uint64_t held = Send(BeginOf(ids_[0], 2));
  core_.draining = true;
  stream_->Drain();
  EXPECT_EQ(CodeOf(held), Code(absl::StatusCode::kUnavailable));
  const uint64_t late = Send(BeginOf(ids_[0], 2));
  EXPECT_EQ(CodeOf(late), Code(absl::StatusCode::kUnavailable)) << "nothing is held any more";
  EXPECT_EQ(CodeOf(Send(CommitOf(step))), 0) << "what is open may go on";
}

// The end of a step is told by whoever ended it, by the sweeper and by the BeginStep itself: one of
// them answers, and the others do not look at what is being answered.
TEST_F(StepsRunnerTest, ManyWhoTellOfOneEndGiveOneReply) {
  constexpr int kThreads = 3, kRounds = 300;
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&] {
      while (!done) core_.streams.CheckAllHeld();
    });
  uint64_t version = 1;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t step = Begin(ids_[0], version);
    const uint64_t held = Send(BeginOf(ids_[0], ++version));
    EXPECT_EQ(CodeOf(Send(CommitOf(step))), 0);
    while (!stream_->Answered(held)) std::this_thread::yield();
    EXPECT_EQ(CodeOf(held), 0);
    const uint64_t second = stream_->Reply(held).begin().step_id();
    EXPECT_EQ(CodeOf(Send(CommitOf(second))), 0);
    ++version;
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace ssmd
