// The client against a scripted server in the same process: what is sent again, when, and with what
// in it. Time is a number that only the injected sleep moves.
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/channel_arguments.h>

#include <cmath>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "client/session.h"
#include "client/tensor.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"

namespace ssmd::client {
namespace {

constexpr uint64_t kEpoch = 0x51, kSessionId = 0x77, kModel = 0x33;

struct Detail {
  std::string reason, field;
  int retry_ms = -1;
  std::vector<std::pair<std::string, std::string>> metadata;
};

grpc::Status Failure(grpc::StatusCode code, const Detail& detail = {}) {
  google::rpc::Status status;
  status.set_code(code);
  status.set_message("scripted");
  if (!detail.reason.empty()) {
    google::rpc::ErrorInfo info;
    info.set_reason(detail.reason);
    info.set_domain("ssmd");
    for (const auto& [key, value] : detail.metadata) (*info.mutable_metadata())[key] = value;
    status.add_details()->PackFrom(info);
  }
  if (!detail.field.empty()) {
    google::rpc::BadRequest bad;
    bad.add_field_violations()->set_field(detail.field);
    status.add_details()->PackFrom(bad);
  }
  if (detail.retry_ms >= 0) {
    google::rpc::RetryInfo retry;
    retry.mutable_retry_delay()->set_nanos(detail.retry_ms * 1'000'000);
    status.add_details()->PackFrom(retry);
  }
  return {code, status.message(), status.SerializeAsString()};
}

grpc::Status Lost() { return {grpc::StatusCode::UNAVAILABLE, "connection reset"}; }

// Answers every call with the next scripted status, OK when the script is used up.
class ScriptedService final : public v1::StateService::Service {
 public:
  void Script(std::initializer_list<grpc::Status> statuses) {
    absl::MutexLock lock(&mu_);
    script_.assign(statuses.begin(), statuses.end());
    calls_ = 0;
    request_ids_.clear();
  }
  int calls() const {
    absl::MutexLock lock(&mu_);
    return calls_;
  }
  std::vector<uint64_t> request_ids() const {
    absl::MutexLock lock(&mu_);
    return request_ids_;
  }
  void set_epoch(uint64_t epoch) {
    absl::MutexLock lock(&mu_);
    epoch_ = epoch;
  }
  void WaitForKeepAlives(int count) {
    absl::MutexLock lock(&mu_);
    auto reached = [this, count]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return keep_alives_ >= count; };
    mu_.Await(absl::Condition(&reached));
  }
  void FailKeepAlives(grpc::Status status) {
    absl::MutexLock lock(&mu_);
    keep_alive_status_ = status;
  }

  grpc::Status OpenSession(grpc::ServerContext*, const v1::OpenSessionRequest*,
                           v1::OpenSessionResponse* reply) override {
    absl::MutexLock lock(&mu_);
    reply->set_server_epoch(epoch_);
    reply->set_session_id(kSessionId);
    reply->set_lease_ms(600'000);
    return grpc::Status::OK;
  }
  grpc::Status KeepAlive(grpc::ServerContext*, const v1::KeepAliveRequest* request,
                         v1::KeepAliveResponse* reply) override {
    absl::MutexLock lock(&mu_);
    EXPECT_EQ(request->context().session_id(), kSessionId);
    reply->set_server_epoch(epoch_);
    ++keep_alives_;
    return keep_alive_status_;
  }
  grpc::Status CloseSession(grpc::ServerContext*, const v1::CloseSessionRequest*,
                            v1::CloseSessionResponse* reply) override {
    return Answer(reply);
  }
  grpc::Status CreateSequences(grpc::ServerContext*, const v1::CreateSequencesRequest* request,
                               v1::CreateSequencesResponse* reply) override {
    Remember(request->request_id());
    return Answer(reply);
  }
  grpc::Status ForkSequences(grpc::ServerContext*, const v1::ForkSequencesRequest* request,
                             v1::ForkSequencesResponse* reply) override {
    Remember(request->request_id());
    return Answer(reply);
  }
  grpc::Status ReleaseSequences(grpc::ServerContext*, const v1::ReleaseSequencesRequest*,
                                v1::ReleaseSequencesResponse* reply) override {
    return Answer(reply);
  }
  grpc::Status Commit(grpc::ServerContext*, const v1::CommitRequest* request,
                      v1::CommitResponse* reply) override {
    EXPECT_EQ(request->context().server_epoch(), kEpoch);
    return Answer(reply);
  }
  grpc::Status Rollback(grpc::ServerContext*, const v1::RollbackRequest*,
                        v1::RollbackResponse* reply) override {
    return Answer(reply);
  }

 private:
  void Remember(uint64_t request_id) {
    absl::MutexLock lock(&mu_);
    request_ids_.push_back(request_id);
  }
  template <typename Response>
  grpc::Status Answer(Response* reply) {
    absl::MutexLock lock(&mu_);
    ++calls_;
    reply->set_server_epoch(epoch_);
    if (script_.empty()) return grpc::Status::OK;
    grpc::Status status = script_.front();
    script_.pop_front();
    return status;
  }

  mutable absl::Mutex mu_;
  std::deque<grpc::Status> script_ ABSL_GUARDED_BY(mu_);
  std::vector<uint64_t> request_ids_ ABSL_GUARDED_BY(mu_);
  int calls_ ABSL_GUARDED_BY(mu_) = 0;
  int keep_alives_ ABSL_GUARDED_BY(mu_) = 0;
  grpc::Status keep_alive_status_ ABSL_GUARDED_BY(mu_);
  uint64_t epoch_ ABSL_GUARDED_BY(mu_) = kEpoch;
};

class ClientTest : public ::testing::Test {
 protected:
  ClientTest() {
    grpc::ServerBuilder builder;
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    Client::Options options;
    options.call_timeout = absl::Seconds(10);
    options.environment = {[this] { return now_; },
                           [this](absl::Duration delay) {
                             now_ += delay;
                             sleeps_.push_back(delay);
                           },
                           [] { return 0.5; }};
    client_ = Client::FromChannel(server_->InProcessChannel({}), options);
    session_ = client_->OpenSession({.keep_alive_interval = absl::Hours(1)}).value();
  }
  ~ClientTest() override {
    session_.reset();
    server_->Shutdown();
  }

  absl::Status Commit() { return session_->Commit(kModel, 9, {1, 2}).status(); }

  ScriptedService service_;
  std::unique_ptr<grpc::Server> server_;
  absl::Time now_ = absl::FromUnixSeconds(1'000'000);
  std::vector<absl::Duration> sleeps_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Session> session_;
};

TEST(RetryTable, NamesEveryMethodOfTheServices) {
  size_t row = 0;
  for (const auto* service : {v1::VerifyRequest::descriptor()->file()->service(0),
                              v1::DrainRequest::descriptor()->file()->service(0)})
    for (int i = 0; i < service->method_count(); ++i, ++row) {
      ASSERT_LT(row, kMethodCount);
      EXPECT_EQ(service->method(i)->name(), RuleOf(static_cast<Method>(row)).name);
    }
  EXPECT_EQ(row, kMethodCount);
}

TEST(RetrySchedule, DoublesUpToTheCapAndStopsAtTheDeadline) {
  RetryRule many = RuleOf(Method::kCommit);
  many.attempts_max = 100;
  absl::Time now = absl::UnixEpoch();
  RetryEnvironment environment{[&] { return now; }, nullptr, [] { return 0.0; }};
  RetrySchedule schedule(many, false, now + absl::Seconds(10));
  std::vector<int64_t> delays_ms;
  while (auto delay = schedule.Next(absl::UnavailableError("gone"), environment)) {
    delays_ms.push_back(absl::ToInt64Milliseconds(*delay));
    now += *delay;
  }
  // Half of 20, 40, ...: 10 + 20 + .. + 640 = 1270, then 1000 each; a tenth second is never begun.
  EXPECT_EQ(delays_ms, (std::vector<int64_t>{10, 20, 40, 80, 160, 320, 640, 1000, 1000, 1000, 1000,
                                             1000, 1000, 1000, 1000}));
}

TEST_F(ClientTest, LostCallsAreSentAgainWithGrowingWaits) {
  service_.Script({Lost(), Lost(), Lost()});
  EXPECT_TRUE(Commit().ok());
  EXPECT_EQ(service_.calls(), 4);
  EXPECT_EQ(sleeps_, (std::vector<absl::Duration>{absl::Milliseconds(15), absl::Milliseconds(30),
                                                  absl::Milliseconds(60)}));
}

TEST_F(ClientTest, AttemptsAreBounded) {
  service_.Script({Lost(), Lost(), Lost(), Lost(), Lost(), Lost(), Lost(), Lost(), Lost()});
  const absl::Status status = Commit();
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_EQ(status.message(), "Commit: connection reset (attempt 8)");
  EXPECT_EQ(service_.calls(), 8);
}

TEST_F(ClientTest, FinalErrorsAreNotSentAgain) {
  for (grpc::StatusCode code :
       {grpc::StatusCode::INVALID_ARGUMENT, grpc::StatusCode::NOT_FOUND, grpc::StatusCode::ABORTED,
        grpc::StatusCode::FAILED_PRECONDITION, grpc::StatusCode::OUT_OF_RANGE,
        grpc::StatusCode::PERMISSION_DENIED, grpc::StatusCode::UNIMPLEMENTED,
        grpc::StatusCode::INTERNAL, grpc::StatusCode::DEADLINE_EXCEEDED,
        grpc::StatusCode::RESOURCE_EXHAUSTED}) {
    // RetryInfo must not turn a final code into a retry; without it RESOURCE_EXHAUSTED is final
    // too.
    const int retry_ms = code == grpc::StatusCode::RESOURCE_EXHAUSTED ? -1 : 1;
    service_.Script({Failure(code, {.reason = "SOME_REASON", .retry_ms = retry_ms})});
    EXPECT_EQ(static_cast<int>(Commit().code()), static_cast<int>(code));
    EXPECT_EQ(service_.calls(), 1) << code;
  }
  service_.Script({Failure(grpc::StatusCode::UNAVAILABLE, {.reason = "DRAINING", .retry_ms = 1})});
  EXPECT_EQ(ErrorReason(Commit()), "DRAINING");
  EXPECT_EQ(service_.calls(), 1);
  EXPECT_TRUE(sleeps_.empty());
}

TEST_F(ClientTest, RetryInfoIsTheShortestWait) {
  service_.Script(
      {Failure(grpc::StatusCode::RESOURCE_EXHAUSTED, {.reason = "NO_PAGE", .retry_ms = 500})});
  EXPECT_TRUE(Commit().ok());
  EXPECT_EQ(sleeps_, std::vector<absl::Duration>{absl::Milliseconds(500)});
}

TEST_F(ClientTest, AWaitPastTheDeadlineIsNotBegun) {
  service_.Script(
      {Failure(grpc::StatusCode::RESOURCE_EXHAUSTED, {.reason = "NO_PAGE", .retry_ms = 500})});
  const absl::Status status =
      session_->Commit(kModel, 9, {1}, {.timeout = absl::Milliseconds(400)}).status();
  EXPECT_EQ(ErrorReason(status), "NO_PAGE");
  EXPECT_EQ(ErrorRetryAfter(status), absl::Milliseconds(500));
  EXPECT_TRUE(sleeps_.empty());
}

TEST_F(ClientTest, ACallMayHaveNoDeadline) {
  service_.Script({Lost()});
  EXPECT_TRUE(session_->Commit(kModel, 9, {1}, {.timeout = absl::InfiniteDuration()}).ok());
  EXPECT_EQ(service_.calls(), 2);
}

TEST_F(ClientTest, RequestIdsAreEqualWithinACallAndUniqueAcrossCalls) {
  service_.Script({Lost(), Lost()});
  EXPECT_TRUE(session_->CreateSequences(kModel, 3).ok());
  EXPECT_TRUE(session_->ForkSequences(kModel, {5, 1}, 2).ok());
  EXPECT_TRUE(session_->CreateSequences(kModel, 3).ok());
  const std::vector<uint64_t> ids = service_.request_ids();
  ASSERT_EQ(ids.size(), 5u);
  EXPECT_NE(ids[0], 0u);
  EXPECT_EQ(ids[0], ids[1]);
  EXPECT_EQ(ids[0], ids[2]);
  EXPECT_NE(ids[3], 0u);
  EXPECT_NE(ids[3], ids[0]);
  EXPECT_NE(ids[4], ids[0]);
}

TEST_F(ClientTest, WithoutARequestIdALostCreateIsFinalButARefusedOneIsNot) {
  const RetryEnvironment environment{[this] { return now_; }, nullptr, [] { return 0.5; }};
  RetrySchedule lost(RuleOf(Method::kCreateSequences), false, absl::InfiniteFuture());
  EXPECT_FALSE(lost.Next(absl::UnavailableError("gone"), environment).has_value());
  const absl::Status refused = FromGrpcStatus(
      Failure(grpc::StatusCode::RESOURCE_EXHAUSTED, {.reason = "NO_SLOT", .retry_ms = 1}), "x");
  RetrySchedule again(RuleOf(Method::kCreateSequences), false, absl::InfiniteFuture());
  EXPECT_TRUE(again.Next(refused, environment).has_value());
}

TEST_F(ClientTest, NotFoundAfterALostReleaseMeansItWasDone) {
  service_.Script({Lost(), Failure(grpc::StatusCode::NOT_FOUND)});
  EXPECT_TRUE(session_->ReleaseSequences(kModel, {1, 2}).ok());
  service_.Script({Failure(grpc::StatusCode::NOT_FOUND)});
  EXPECT_TRUE(absl::IsNotFound(session_->ReleaseSequences(kModel, {1, 2}).status()));
  service_.Script({Lost(), Failure(grpc::StatusCode::NOT_FOUND)});
  EXPECT_TRUE(absl::IsNotFound(Commit()));  // a commit is not an ending
}

TEST_F(ClientTest, DetailsAreDecoded) {
  service_.Script(
      {Failure(grpc::StatusCode::OUT_OF_RANGE,
               {.reason = "ROLLBACK_FLOOR", .metadata = {{"floor", "12"}, {"tail", "20"}}})});
  absl::Status status = session_->Rollback(kModel, {5, 1}, 3).status();
  EXPECT_EQ(ErrorReason(status), "ROLLBACK_FLOOR");
  EXPECT_EQ(ErrorFloor(status), 12u);
  EXPECT_EQ(ErrorMetadata(status, "tail"), "20");
  service_.Script({Failure(grpc::StatusCode::INVALID_ARGUMENT, {.field = "accepted[1]"})});
  status = Commit();
  EXPECT_EQ(ErrorField(status), "accepted[1]");
  EXPECT_FALSE(ErrorFloor(status).has_value());
  EXPECT_EQ(status.message(), "Commit: scripted");
}

TEST_F(ClientTest, StateLostIsForGood) {
  service_.Script({Failure(grpc::StatusCode::FAILED_PRECONDITION, {.reason = "STATE_LOST"})});
  EXPECT_TRUE(IsStateLost(Commit()));
  EXPECT_TRUE(IsStateLost(session_->status()));
  EXPECT_TRUE(IsStateLost(session_->CreateSequences(kModel, 1).status()));
  EXPECT_EQ(service_.calls(), 1);  // the second call was not sent
}

TEST_F(ClientTest, AnExpiredSessionIsForGood) {
  service_.Script({Failure(grpc::StatusCode::NOT_FOUND, {.reason = "SESSION_EXPIRED"})});
  EXPECT_TRUE(IsSessionExpired(Commit()));
  EXPECT_TRUE(IsSessionExpired(session_->status()));
  EXPECT_FALSE(IsStateLost(session_->status()));
  EXPECT_TRUE(IsSessionExpired(session_->CreateSequences(kModel, 1).status()));
  EXPECT_EQ(service_.calls(), 1);
}

TEST_F(ClientTest, AnAbandonedSessionRefusesCallsAndIsNotClosed) {
  service_.Script({});
  session_->Abandon();
  EXPECT_TRUE(absl::IsFailedPrecondition(Commit()));
  session_.reset();
  EXPECT_EQ(service_.calls(), 0);  // no CloseSession
}

TEST_F(ClientTest, AReplyOfAnotherEpochIsALostSession) {
  service_.set_epoch(kEpoch + 1);
  EXPECT_TRUE(IsStateLost(Commit()));
  EXPECT_TRUE(IsStateLost(session_->status()));
}

TEST_F(ClientTest, AClosedSessionRefusesCalls) {
  EXPECT_TRUE(session_->Close().ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(Commit()));
  EXPECT_FALSE(IsStateLost(Commit()));
}

TEST_F(ClientTest, TheThreadRenewsTheLeaseAndFindsItsEnd) {
  auto session = client_->OpenSession({.keep_alive_interval = absl::Milliseconds(1)}).value();
  service_.WaitForKeepAlives(3);
  EXPECT_TRUE(session->status().ok());
  service_.FailKeepAlives(Failure(grpc::StatusCode::NOT_FOUND));
  session->KeepAlive().status().IgnoreError();  // this one or the thread's has seen the answer
  EXPECT_TRUE(absl::IsNotFound(session->status()));
}

TEST(Tensor, RoundTripsAndRefusesWrongSizes) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> values = {0.0f, -0.0f, 1.0f, -2.5f, 0x1p-24f, 65504.0f, inf, -inf};
  for (v1::DataType dtype : {v1::DATA_TYPE_FP32, v1::DATA_TYPE_FP16}) {
    std::vector<float> back(values.size());
    ASSERT_TRUE(FromTensor(ToTensor(dtype, {2, 4}, values), absl::MakeSpan(back)).ok());
    EXPECT_EQ(values, back) << dtype;
    EXPECT_TRUE(std::signbit(back[1]));
  }
  EXPECT_EQ(FloatFromBf16(Bf16FromFloat(1.0f + 0x1p-8f)), 1.0f);  // a tie goes to even
  EXPECT_EQ(FloatFromBf16(Bf16FromFloat(1.0f + 0x1.8p-7f)), 1.0f + 0x1p-6f);
  EXPECT_EQ(FloatFromFp16(Fp16FromFloat(65520.0f)), inf);
  EXPECT_EQ(FloatFromFp16(Fp16FromFloat(0x1p-25f)), 0.0f);
  EXPECT_EQ(FloatFromFp16(Fp16FromFloat(0x1.8p-24f)), 0x1p-23f);
  EXPECT_TRUE(std::isnan(FloatFromFp16(Fp16FromFloat(std::nanf("")))));
  EXPECT_TRUE(std::isnan(FloatFromBf16(Bf16FromFloat(std::nanf("")))));

  std::vector<float> seven(7);
  v1::Tensor tensor = ToTensor(v1::DATA_TYPE_FP32, {2, 4}, values);
  EXPECT_TRUE(absl::IsInvalidArgument(FromTensor(tensor, absl::MakeSpan(seven))));
  tensor.clear_shape();
  tensor.add_shape(uint64_t{1} << 63);
  tensor.add_shape(2);
  EXPECT_TRUE(absl::IsInvalidArgument(FromTensor(tensor, absl::MakeSpan(seven))));
  EXPECT_TRUE(absl::IsInvalidArgument(FromTensor(v1::Tensor(), absl::MakeSpan(seven))));
}

}  // namespace
}  // namespace ssmd::client
