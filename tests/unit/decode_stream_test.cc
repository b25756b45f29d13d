// DecodeStream against a scripted server in the same process: order, limits, deadlines, and every
// way a stream can end.
#include "client/decode_stream.h"

#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"

namespace ssmd::client {
namespace {

constexpr uint64_t kEpoch = 0x51, kSessionId = 0x77, kModel = 0x33;

google::rpc::Status Failure(absl::StatusCode code, const std::string& reason) {
  google::rpc::Status status;
  status.set_code(static_cast<int>(code));
  status.set_message("scripted");
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("ssmd");
  status.add_details()->PackFrom(info);
  return status;
}

grpc::Status Grpc(const google::rpc::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), status.message(),
          status.SerializeAsString()};
}

using Wire = grpc::ServerReaderWriter<v1::StepsResponse, v1::StepsRequest>;

// An answer that names what was asked: a step's id is its tag, a commit's version its step's id.
v1::StepsResponse AnswerTo(const v1::StepsRequest& request) {
  v1::StepsResponse reply;
  reply.set_tag(request.tag());
  if (request.has_begin()) reply.mutable_begin()->set_step_id(request.tag());
  if (request.has_verify()) {
    v1::Tensor& output = *reply.mutable_verify()->mutable_output();
    output.add_shape(request.verify().layer_id());
  }
  if (request.has_commit()) reply.mutable_commit()->add_versions(request.commit().step_id());
  if (request.has_abort()) reply.mutable_abort();
  return reply;
}

class StepsService final : public v1::StateService::Service {
 public:
  using Requests = std::vector<v1::StepsRequest>;
  // Sees all requests of the stream so far. Returns nothing to go on, or the status that ends the
  // stream. A plain function: it may still run when the body of a test, and with it whatever a
  // lambda could have captured there, is gone.
  using Handler = std::optional<grpc::Status> (*)(const Requests&, Wire&);

  void Handle(Handler handler) {
    absl::MutexLock lock(&mu_);
    handler_ = handler;
  }
  // Closing its side does not end a stream then.
  void EndStreamsWhenCancelled() {
    absl::MutexLock lock(&mu_);
    until_cancelled_ = true;
  }
  void set_calls_max(uint32_t count) {
    absl::MutexLock lock(&mu_);
    calls_max_ = count;
  }
  Requests requests() const {  // of the last stream
    absl::MutexLock lock(&mu_);
    return requests_;
  }
  void WaitForRequests(size_t count) {
    absl::MutexLock lock(&mu_);
    auto reached = [this, count]()
                       ABSL_NO_THREAD_SAFETY_ANALYSIS { return requests_.size() >= count; };
    mu_.Await(absl::Condition(&reached));
  }
  void WaitForEnd() {  // of a stream, by the client
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&ended_));
  }

  grpc::Status OpenSession(grpc::ServerContext*, const v1::OpenSessionRequest*,
                           v1::OpenSessionResponse* reply) override {
    reply->set_server_epoch(kEpoch);
    reply->set_session_id(kSessionId);
    reply->set_lease_ms(600'000);
    return grpc::Status::OK;
  }
  grpc::Status CloseSession(grpc::ServerContext*, const v1::CloseSessionRequest*,
                            v1::CloseSessionResponse*) override {
    return grpc::Status::OK;
  }
  grpc::Status GetCapabilities(grpc::ServerContext*, const v1::GetCapabilitiesRequest*,
                               v1::GetCapabilitiesResponse* reply) override {
    absl::MutexLock lock(&mu_);
    reply->set_server_epoch(kEpoch);
    reply->set_stream_calls_max(calls_max_);
    return grpc::Status::OK;
  }
  grpc::Status Steps(grpc::ServerContext* context, Wire* wire) override {
    Requests requests;
    v1::StepsRequest request;
    while (wire->Read(&request)) {
      requests.push_back(request);
      if (std::optional<grpc::Status> end = Remember(requests)(requests, *wire); end.has_value())
        return *end;
    }
    while (until_cancelled() && !context->IsCancelled()) absl::SleepFor(absl::Milliseconds(1));
    absl::MutexLock lock(&mu_);
    ended_ = true;
    return grpc::Status::OK;
  }

 private:
  static std::optional<grpc::Status> AnswerEach(const Requests& requests, Wire& wire) {
    wire.Write(AnswerTo(requests.back()));
    return std::nullopt;
  }
  Handler Remember(const Requests& requests) {
    absl::MutexLock lock(&mu_);
    requests_ = requests;
    return handler_;
  }
  bool until_cancelled() const {
    absl::MutexLock lock(&mu_);
    return until_cancelled_;
  }

  mutable absl::Mutex mu_;
  Handler handler_ ABSL_GUARDED_BY(mu_) = AnswerEach;
  Requests requests_ ABSL_GUARDED_BY(mu_);
  uint32_t calls_max_ ABSL_GUARDED_BY(mu_) = 8;
  bool until_cancelled_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

// Handlers of several tests.
std::optional<grpc::Status> AnswerNothing(const StepsService::Requests&, Wire&) {
  return std::nullopt;
}

class DecodeStreamTest : public ::testing::Test {
 protected:
  using Requests = StepsService::Requests;

  DecodeStreamTest() {
    grpc::ServerBuilder builder;
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    Client::Options options;
    options.call_timeout = absl::Seconds(30);
    client_ = Client::FromChannel(server_->InProcessChannel({}), options);
    session_ = client_->OpenSession({.keep_alive_interval = absl::Hours(1)}).value();
  }
  ~DecodeStreamTest() override {
    stream_.reset();
    session_.reset();
    server_->Shutdown();
  }

  DecodeStream& Open(const DecodeStreamOptions& options = {}) {
    stream_ = DecodeStream::Open(*session_, kModel, options).value();
    return *stream_;
  }
  static v1::VerifyRequest Layer(uint32_t layer) {
    v1::VerifyRequest request;
    request.set_step_id(1);
    request.set_layer_id(layer);
    return request;
  }

  StepsService service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<DecodeStream> stream_;
};

TEST_F(DecodeStreamTest, AStepWithTheCommitOfTheLastRidingOnItsBegin) {
  DecodeStream& stream = Open();
  const StepRow rows[] = {{{5, 1}, 3}, {{6, 9}, 2, true}};
  const auto begun = stream.Begin(rows, {.commit_first = StepCommit{77, {2, 1}}});
  ASSERT_TRUE(begun.ok()) << begun.status();
  EXPECT_EQ(stream.Verify(Layer(4))->output().shape(0), 4u);
  EXPECT_EQ(stream.Commit(begun->step_id(), {1, 2})->versions(0), begun->step_id());
  EXPECT_TRUE(stream.Abort(9).ok());
  EXPECT_TRUE(stream.Finish().ok());

  const auto requests = service_.requests();
  ASSERT_EQ(requests.size(), 4u);
  EXPECT_EQ(requests[0].context().session_id(), kSessionId);
  EXPECT_EQ(requests[0].context().server_epoch(), kEpoch);
  const v1::BeginStepRequest& begin = requests[0].begin();
  EXPECT_EQ(begin.model_id(), kModel);
  EXPECT_EQ(begin.sequence_ids(1), 6u);
  EXPECT_EQ(begin.versions(1), 9u);
  EXPECT_EQ(begin.draft_tokens(0), 3u);
  EXPECT_EQ(begin.commit_modes(0), v1::COMMIT_MODE_COUNTS);
  EXPECT_EQ(begin.commit_modes(1), v1::COMMIT_MODE_ALL);
  EXPECT_EQ(begin.commit_first().step_id(), 77u);
  EXPECT_EQ(begin.commit_first().accepted(1), 1u);
  EXPECT_EQ(requests[1].verify().model_id(), kModel);
}

TEST_F(DecodeStreamTest, AnswersMayComeInAnyOrder) {
  service_.Handle([](const Requests& requests, Wire& wire) -> std::optional<grpc::Status> {
    if (requests.size() == 3)
      for (const size_t i : {2, 1, 0}) wire.Write(AnswerTo(requests[i]));
    return std::nullopt;
  });
  DecodeStream& stream = Open();
  auto one = stream.SendVerify(Layer(1)), two = stream.SendVerify(Layer(2));
  auto three = stream.SendVerify(Layer(3));
  EXPECT_EQ(one.Wait()->output().shape(0), 1u);
  EXPECT_EQ(three.Wait()->output().shape(0), 3u);
  EXPECT_EQ(two.Wait()->output().shape(0), 2u);
  EXPECT_EQ(stream.calls_unanswered(), 0u);
}

TEST_F(DecodeStreamTest, AFullStreamTakesTheNextCallWhenOneIsAnswered) {
  service_.Handle([](const Requests& requests, Wire& wire) -> std::optional<grpc::Status> {
    if (requests.back().has_abort()) wire.Write(AnswerTo(requests[0]));
    return std::nullopt;
  });
  service_.set_calls_max(3);
  DecodeStream& stream = Open();
  EXPECT_EQ(stream.calls_max(), 3u);
  auto one = stream.SendVerify(Layer(1)), two = stream.SendVerify(Layer(2));
  auto abort = stream.SendAbort(1);  // full; it makes the server answer the first
  auto fourth = stream.SendVerify(Layer(4));
  service_.WaitForRequests(4);
  EXPECT_TRUE(one.Wait().ok());
  EXPECT_EQ(stream.calls_unanswered(), 3u);
  const absl::Status no_turn =
      stream.SendVerify(Layer(5), {.timeout = absl::Milliseconds(20)}).Wait().status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(no_turn)) << no_turn;
  EXPECT_EQ(service_.requests().size(), 4u);  // it was never sent
}

TEST_F(DecodeStreamTest, ALateAnswerIsDroppedAndTheStreamGoesOn) {
  service_.Handle([](const Requests& requests, Wire& wire) -> std::optional<grpc::Status> {
    if (requests.size() == 2)
      for (const v1::StepsRequest& each : requests) wire.Write(AnswerTo(each));
    return std::nullopt;
  });
  DecodeStream& stream = Open();
  const auto first = stream.Verify(Layer(1), {.timeout = absl::Milliseconds(30)});
  EXPECT_TRUE(absl::IsDeadlineExceeded(first.status()));
  EXPECT_EQ(first.status().message(), "Verify: no answer until the deadline");
  EXPECT_EQ(stream.calls_unanswered(), 1u);
  EXPECT_EQ(stream.Verify(Layer(2))->output().shape(0), 2u);
  EXPECT_EQ(stream.calls_unanswered(), 0u);
}

TEST_F(DecodeStreamTest, ACallsErrorIsItsOwn) {
  service_.Handle([](const Requests& requests, Wire& wire) -> std::optional<grpc::Status> {
    const v1::StepsRequest& request = requests.back();
    v1::StepsResponse reply;
    reply.set_tag(request.tag());
    *reply.mutable_status() = Failure(absl::StatusCode::kAborted, "VERSION_MISMATCH");
    wire.Write(request.has_begin() ? reply : AnswerTo(request));
    return std::nullopt;
  });
  DecodeStream& stream = Open();
  const absl::Status status = stream.Begin({}).status();
  EXPECT_TRUE(absl::IsAborted(status));
  EXPECT_EQ(status.message(), "BeginStep: scripted");
  EXPECT_EQ(ErrorReason(status), "VERSION_MISMATCH");
  EXPECT_TRUE(stream.Verify(Layer(1)).ok());
  EXPECT_TRUE(session_->status().ok());
}

TEST_F(DecodeStreamTest, FinishWaitsForAnswersAndEndsTheStream) {
  service_.Handle([](const Requests& requests, Wire& wire) -> std::optional<grpc::Status> {
    if (requests.size() == 2)
      for (const v1::StepsRequest& each : requests) wire.Write(AnswerTo(each));
    return std::nullopt;
  });
  DecodeStream& stream = Open();
  auto one = stream.SendVerify(Layer(1)), two = stream.SendVerify(Layer(2));
  EXPECT_TRUE(stream.Finish().ok());
  service_.WaitForEnd();
  EXPECT_TRUE(one.Wait().ok());
  EXPECT_TRUE(two.Wait().ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(stream.Verify(Layer(3)).status()));
}

TEST_F(DecodeStreamTest, FinishGivesUpAtItsDeadline) {
  service_.Handle(AnswerNothing);
  service_.EndStreamsWhenCancelled();
  DecodeStream& stream = Open();
  auto call = stream.SendVerify(Layer(1));
  service_.WaitForRequests(1);
  EXPECT_TRUE(absl::IsDeadlineExceeded(stream.Finish({.timeout = absl::Milliseconds(30)})));
  EXPECT_TRUE(absl::IsCancelled(call.Wait().status()));
  service_.WaitForEnd();
}

TEST_F(DecodeStreamTest, CancelFailsWhatIsUnanswered) {
  service_.Handle(AnswerNothing);
  service_.EndStreamsWhenCancelled();
  DecodeStream& stream = Open();
  auto call = stream.SendVerify(Layer(1));
  service_.WaitForRequests(1);
  stream.Cancel();
  EXPECT_TRUE(absl::IsCancelled(call.Wait().status()));
  service_.WaitForEnd();
  EXPECT_TRUE(absl::IsCancelled(stream.Verify(Layer(2)).status()));
  EXPECT_TRUE(session_->status().ok());
}

TEST_F(DecodeStreamTest, AnswersOutliveTheStreamAndTheConnection) {
  service_.Handle(AnswerNothing);
  auto call = Open().SendVerify(Layer(1));
  stream_.reset();
  session_.reset();
  client_.reset();
  EXPECT_TRUE(absl::IsCancelled(call.Wait().status()));
}

TEST_F(DecodeStreamTest, WhatEndsTheStreamEndsItsCalls) {
  service_.Handle([](const Requests& requests, Wire&) -> std::optional<grpc::Status> {
    if (requests.size() < 2) return std::nullopt;
    return Grpc(Failure(absl::StatusCode::kUnavailable, "DRAINING"));
  });
  DecodeStream& stream = Open();
  auto one = stream.SendVerify(Layer(1)), two = stream.SendVerify(Layer(2));
  for (const absl::Status& status :
       {one.Wait().status(), two.Wait().status(), stream.Verify(Layer(3)).status()}) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_EQ(ErrorReason(status), "DRAINING");
  }
  EXPECT_TRUE(session_->status().ok());
}

TEST_F(DecodeStreamTest, ALostStateOrSessionIsTheSessionsEnd) {
  service_.Handle([](const Requests&, Wire&) -> std::optional<grpc::Status> {
    return Grpc(Failure(absl::StatusCode::kNotFound, "SESSION_EXPIRED"));
  });
  DecodeStream& stream = Open();
  EXPECT_TRUE(IsSessionExpired(stream.Verify(Layer(1)).status()));
  EXPECT_TRUE(IsSessionExpired(session_->status()));
  EXPECT_TRUE(IsSessionExpired(DecodeStream::Open(*session_, kModel).status()));
}

}  // namespace
}  // namespace ssmd::client
