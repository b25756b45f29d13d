// StepsCore on a stream that the test drives: any order in which gRPC may call it. The stream holds
// the core to gRPC's rules (grpcpp/support/client_callback.h).
#include "client/steps_core.h"

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "client/errors.h"
#include "gtest/gtest.h"

namespace ssmd::client::internal {
namespace {

class DrivenStream final
    : public grpc::ClientCallbackReaderWriter<v1::StepsRequest, v1::StepsResponse> {
 public:
  explicit DrivenStream(StepsCore& core) : core_(core) { BindReactor(&core); }

  // What gRPC would do next, in the order of its choice. Each ends one operation of the core.
  bool reading() const { return reading_ != nullptr; }
  void Answer(v1::StepsResponse answer) {
    *std::exchange(reading_, nullptr) = std::move(answer);
    React([&] { core_.OnReadDone(true); });
  }
  void FailRead() {
    reading_ = nullptr;
    failed_read_ = true;
    React([&] { core_.OnReadDone(false); });
  }
  bool writing() const { return writing_ != nullptr; }
  void EndWrite(bool ok) {
    const v1::StepsRequest& written = *std::exchange(writing_, nullptr);
    if (ok) received_.push_back(written);
    failed_write_ = !ok;
    React([&] { core_.OnWriteDone(ok); });
  }
  bool half_closing() const { return half_closing_; }
  void EndHalfClose() {
    half_closing_ = false;
    React([&] { core_.OnWritesDoneDone(!failed_read_); });
  }
  bool has_status() const { return failed_read_ && status_under_way_; }
  void EndWith(grpc::Status status) {
    status_ = std::move(status);
    status_under_way_ = false;
    React([] {});
  }
  bool is_done() const { return under_way_ == 0 && !told_; }
  void TellThatItIsDone() {
    told_ = true;
    core_.OnDone(status_);
  }

  const std::vector<v1::StepsRequest>& received() const { return received_; }
  bool half_closed() const { return half_closed_; }
  bool held() const { return holds_ > 0; }
  bool told() const { return told_; }

 private:
  // The core's side.
  void AddHold(int holds) override {
    ASSERT_FALSE(started_);
    holds_ += holds;
    under_way_ += holds;
  }
  void RemoveHold() override {
    ASSERT_GT(holds_, 0);
    --holds_;
    --under_way_;
  }
  void StartCall() override {
    ASSERT_FALSE(started_);
    started_ = true;
  }
  void Read(v1::StepsResponse* to) override {
    Begin();
    ASSERT_EQ(reading_, nullptr);
    reading_ = to;
  }
  void Write(const v1::StepsRequest* request, grpc::WriteOptions) override {
    BeginWriting();
    ASSERT_EQ(writing_, nullptr);
    writing_ = request;
  }
  void WritesDone() override {
    BeginWriting();
    half_closing_ = half_closed_ = true;
  }

  void BeginWriting() {
    ASSERT_FALSE(failed_write_);
    ASSERT_FALSE(half_closed_);
    Begin();
  }
  void Begin() {
    ASSERT_FALSE(failed_read_);
    ASSERT_TRUE(holds_ > 0 || reacting_) << "nothing keeps the stream from being done";
    ++under_way_;
  }
  template <typename Reaction>
  void React(Reaction reaction) {
    reacting_ = true;
    reaction();
    reacting_ = false;
    --under_way_;
  }

  StepsCore& core_;
  v1::StepsResponse* reading_ = nullptr;
  const v1::StepsRequest* writing_ = nullptr;
  std::vector<v1::StepsRequest> received_;
  grpc::Status status_;
  int holds_ = 0;
  int under_way_ = 1;  // operations and holds; the first is the status
  bool started_ = false, reacting_ = false, half_closing_ = false, half_closed_ = false;
  bool failed_read_ = false, failed_write_ = false, status_under_way_ = true, told_ = false;
};

constexpr uint32_t kCallsMax = 3;

class StepsCoreTest : public ::testing::Test {
 protected:
  StepsCoreTest() { core_->Start(); }

  std::shared_ptr<StepsCall> Send(uint32_t layer) {
    auto call = std::make_shared<StepsCall>(Method::kVerify, absl::UnixEpoch());
    v1::StepsRequest request;
    request.mutable_verify()->set_layer_id(layer);
    core_->Send(call, std::move(request));
    return call;
  }
  static v1::StepsResponse AnswerTo(const v1::StepsRequest& request) {
    v1::StepsResponse reply;
    reply.set_tag(request.tag());
    reply.mutable_verify()->mutable_output()->add_shape(request.verify().layer_id());
    return reply;
  }
  bool done() { return core_->AwaitDone(absl::UnixEpoch()); }

  std::vector<std::pair<Method, absl::Status>> judged_;
  std::shared_ptr<StepsCore> core_ =
      std::make_shared<StepsCore>(kCallsMax, [this](Method method, const absl::Status& status) {
        EXPECT_FALSE(done());  // its owner may have let go of what judges
        judged_.emplace_back(method, status);
      });
  DrivenStream stream_{*core_};
};

TEST_F(StepsCoreTest, AfterAWriteThatFailedAnswersAreReadAndNothingIsWritten) {
  const auto one = Send(1), two = Send(2);
  stream_.EndWrite(true);
  stream_.EndWrite(false);  // of the second
  EXPECT_FALSE(stream_.held());
  const auto three = Send(3);
  EXPECT_FALSE(stream_.writing());
  stream_.Answer(AnswerTo(stream_.received()[0]));
  EXPECT_TRUE(core_->WaitFor(*one).ok());
  stream_.FailRead();
  EXPECT_FALSE(two->done);
  stream_.EndWith({grpc::StatusCode::UNAVAILABLE, "gone"});
  ASSERT_TRUE(stream_.is_done());
  stream_.TellThatItIsDone();
  for (const auto& call : {two, three, Send(4)})
    EXPECT_EQ(core_->WaitFor(*call), absl::UnavailableError("Verify: gone"));
}

TEST_F(StepsCoreTest, WhatWasSentIsWrittenBeforeTheHalfClose) {
  const auto one = Send(1), two = Send(2);
  core_->HalfClose();
  EXPECT_TRUE(absl::IsFailedPrecondition(core_->WaitFor(*Send(3))));
  stream_.EndWrite(true);
  EXPECT_FALSE(stream_.half_closed());
  stream_.EndWrite(true);
  EXPECT_TRUE(stream_.half_closed());
  EXPECT_FALSE(stream_.held());
  EXPECT_EQ(stream_.received().size(), 2u);
}

// The last reference to the core may be the last to its channel, which must not end on a thread of
// its own completion queue.
TEST_F(StepsCoreTest, GrpcOwnsNoneOfIt) {
  Send(1);  // under way, and its caller does not wait
  Send(2);
  EXPECT_EQ(core_.use_count(), 1);
  stream_.EndWrite(true);
  EXPECT_EQ(core_.use_count(), 1);
}

// A race for address sanitizer: what OnDone still does with a core whose owner has let go. Not
// every run sees a mistake.
TEST_F(StepsCoreTest, ItsOwnerLetsGoWhenItIsDone) {
  for (int i = 0; i < 2000; ++i) {
    auto core = std::make_shared<StepsCore>(kCallsMax, [](Method, const absl::Status&) {});
    DrivenStream stream(*core);
    core->Start();
    auto call = std::make_shared<StepsCall>(Method::kVerify, absl::InfiniteFuture());
    core->Send(call, {});
    stream.EndWrite(false);
    stream.FailRead();
    stream.EndWith(grpc::Status::CANCELLED);
    absl::Notification looking;
    std::thread owner([core = std::move(core), &looking]() mutable {
      looking.Notify();
      while (!core->AwaitDone(absl::UnixEpoch())) std::this_thread::yield();
      core.reset();
    });
    looking.WaitForNotification();
    stream.TellThatItIsDone();
    owner.join();
  }
}

// Random orders of everything that can happen, half of them without a half-close. A failing one is
// replayed by its number alone.
class StepsCoreOrders : public StepsCoreTest, public ::testing::WithParamInterface<uint32_t> {};

TEST_P(StepsCoreOrders, EveryCallEndsAsTheServerSaid) {
  constexpr uint32_t kCalls = 12;
  const grpc::Status end(grpc::StatusCode::ABORTED, "the end");
  struct Sent {
    std::shared_ptr<StepsCall> call;
    bool refused, answered;
  };
  std::vector<Sent> sent;  // of layer i
  std::vector<v1::StepsRequest> unanswered;
  size_t seen = 0;  // of what the server received
  bool finished = false;
  std::mt19937 random(GetParam());
  const auto one_in = [&](uint32_t n) { return random() % n == 0; };

  for (int step = 0; !stream_.told() || sent.size() < kCalls; ++step) {
    ASSERT_LT(step, 10'000) << "the stream does not end";
    for (; seen < stream_.received().size(); ++seen) unanswered.push_back(stream_.received()[seen]);
    switch (random() % 7) {
      case 0:
        if (sent.size() < kCalls && (core_->calls_unanswered() < kCallsMax || stream_.told()))
          sent.push_back({Send(static_cast<uint32_t>(sent.size())), finished, false});
        break;
      case 1:
        if (stream_.writing()) stream_.EndWrite(!one_in(20));
        break;
      case 2:
        if (stream_.reading() && one_in(20)) stream_.Answer({});  // to nobody
        if (stream_.reading() && !unanswered.empty()) {
          const auto it = unanswered.begin() + random() % unanswered.size();
          const v1::StepsRequest request = *it;
          unanswered.erase(it);
          sent[request.verify().layer_id()].answered = true;
          stream_.Answer(AnswerTo(request));
        }
        break;
      case 3:
        if (stream_.reading() && one_in(10)) stream_.FailRead();
        break;
      case 4:
        if (GetParam() % 2 == 0 && one_in(10)) {
          core_->HalfClose();
          finished = true;
        }
        break;
      case 5:
        if (stream_.half_closing()) stream_.EndHalfClose();
        break;
      case 6:
        if (stream_.has_status()) stream_.EndWith(end);
        if (stream_.is_done()) stream_.TellThatItIsDone();
        break;
    }
    if (HasFatalFailure()) return;
    ASSERT_EQ(done(), stream_.told());
  }

  EXPECT_FALSE(stream_.held());
  EXPECT_EQ(core_->calls_unanswered(), 0u);
  EXPECT_EQ(core_->final_status(), absl::AbortedError("Steps: the end"));
  ASSERT_EQ(judged_.size(), 1u);
  EXPECT_EQ(judged_[0].first, Method::kSteps);
  EXPECT_TRUE(std::is_sorted(stream_.received().begin(), stream_.received().end(),
                             [](const auto& a, const auto& b) { return a.tag() < b.tag(); }));
  for (uint32_t layer = 0; layer < kCalls; ++layer) {
    const absl::Status status = core_->WaitFor(*sent[layer].call);
    if (sent[layer].answered) {
      EXPECT_TRUE(status.ok());
      EXPECT_EQ(sent[layer].call->reply.verify().output().shape(0), layer);
    } else if (sent[layer].refused) {
      EXPECT_TRUE(absl::IsFailedPrecondition(status));
    } else {
      EXPECT_EQ(status, absl::AbortedError("Verify: the end"));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Orders, StepsCoreOrders, ::testing::Range(0u, 500u));

}  // namespace
}  // namespace ssmd::client::internal
