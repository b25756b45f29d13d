#include "client/decode_stream.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "client/caller.h"

namespace ssmd::client {
namespace internal {

// One call. The fields below `deadline` are guarded by the core's mutex.
class StepsCall {
 public:
  StepsCall(std::shared_ptr<StepsCore> core_of, Method method_of, absl::Time deadline_at)
      : core(std::move(core_of)), method(method_of), deadline(deadline_at) {}

  const std::shared_ptr<StepsCore> core;
  const Method method;
  const absl::Time deadline;
  bool done = false;
  absl::Status status;
  v1::StepsResponse reply;
};

// The stream: a queue of writes, of which gRPC has one at a time, and the unanswered calls by tag.
// gRPC calls the On... functions on threads of its own.
//
// Life: a hold keeps the stream from being done while calls may still start writes. It is given
// back once, when the last write is over: after the half-close, or when reading has failed.
class StepsCore final : public grpc::ClientBidiReactor<v1::StepsRequest, v1::StepsResponse> {
 public:
  // Sees every error before its caller does.
  using Judge = std::function<void(Method, const absl::Status&)>;

  StepsCore(uint32_t calls_max, Judge judge) : calls_max_(calls_max), judge_(std::move(judge)) {}

  void Start(v1::StateService::StubInterface& stub) {
    stub.async()->Steps(&context_, this);
    AddHold();
    StartRead(&incoming_);
    StartCall();
  }

  // Waits for its turn, at most until the call's deadline.
  void Send(const std::shared_ptr<StepsCall>& call, v1::StepsRequest request) {
    absl::MutexLock lock(&mu_);
    const auto turn = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      return over_ || calls_.size() < calls_max_;
    };
    const bool has_turn = mu_.AwaitWithDeadline(absl::Condition(&turn), call->deadline);
    if (half_closing_) {
      End(*call, absl::FailedPreconditionError("the stream is finished"));
    } else if (over_) {
      mu_.Await(absl::Condition(&done_));  // at once; knows why it is over
      End(*call, StreamError(call->method));
    } else if (!has_turn) {
      End(*call, absl::DeadlineExceededError(
                     absl::StrCat(RuleOf(call->method).name, ": ", calls_max_,
                                  " calls of the stream were unanswered until the deadline")));
    } else {
      const uint64_t tag = next_tag_++;
      request.set_tag(tag);
      calls_.emplace(tag, call);
      writes_.push_back(std::move(request));
      if (!writing_) WriteNext();
    }
  }

  absl::Status WaitFor(StepsCall& call) {
    absl::MutexLock lock(&mu_);
    if (!mu_.AwaitWithDeadline(absl::Condition(&call.done), call.deadline))
      return absl::DeadlineExceededError(
          absl::StrCat(RuleOf(call.method).name, ": no answer until the deadline"));
    return call.status;
  }

  absl::Status Finish(absl::Time deadline) {
    bool in_time = true;
    {
      absl::MutexLock lock(&mu_);
      half_closing_ = true;
      if (!writing_) EndWrites();
      in_time = mu_.AwaitWithDeadline(absl::Condition(&done_), deadline);
    }
    if (!in_time) CancelAndWait();
    absl::MutexLock lock(&mu_);
    if (!in_time) return absl::DeadlineExceededError("Steps: the stream did not end in time");
    return FromGrpcStatus(final_, RuleOf(Method::kSteps).name);
  }

  void Cancel() { context_.TryCancel(); }
  void CancelAndWait() {
    Cancel();
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&done_));
  }

  uint32_t calls_max() const { return calls_max_; }
  uint32_t calls_unanswered() const {
    absl::MutexLock lock(&mu_);
    return static_cast<uint32_t>(calls_.size());
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mu_);
    writing_ = false;
    writes_.pop_front();
    if (!ok || over_) {
      writes_.clear();  // reading ends as well, and says why
      if (over_) EndWrites();
    } else if (!writes_.empty()) {
      WriteNext();
    } else if (half_closing_) {
      EndWrites();
    }
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      absl::MutexLock lock(&mu_);
      over_ = true;
      if (!writing_) EndWrites();
      return;
    }
    Answer();
    StartRead(&incoming_);
  }

  void OnDone(const grpc::Status& status) override {
    std::vector<std::shared_ptr<StepsCall>> left;
    {
      absl::MutexLock lock(&mu_);
      over_ = true;
      final_ = status;
      for (auto& [tag, call] : calls_) left.push_back(std::move(call));
      calls_.clear();
    }
    judge_(Method::kSteps, FromGrpcStatus(status, RuleOf(Method::kSteps).name));
    absl::MutexLock lock(&mu_);
    for (const auto& call : left) End(*call, StreamError(call->method));
    done_ = true;
  }

 private:
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    writing_ = true;
    StartWrite(&writes_.front());
  }

  // Nothing will be written any more.
  void EndWrites() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (std::exchange(writes_ended_, true)) return;
    if (!over_) StartWritesDone();
    RemoveHold();
  }

  void Answer() {
    std::shared_ptr<StepsCall> call;
    {
      absl::MutexLock lock(&mu_);
      const auto found = calls_.find(incoming_.tag());
      if (found == calls_.end()) return;
      call = std::move(found->second);
      calls_.erase(found);
    }
    absl::Status status = FromRpcStatus(incoming_.status(), RuleOf(call->method).name);
    if (!status.ok()) judge_(call->method, status);
    absl::MutexLock lock(&mu_);
    call->reply = std::move(incoming_);
    End(*call, std::move(status));
  }

  static void End(StepsCall& call, absl::Status status) {
    call.status = std::move(status);
    call.done = true;
  }

  absl::Status StreamError(Method method) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const char* name = RuleOf(method).name;
    if (final_.ok()) return absl::UnavailableError(absl::StrCat(name, ": the stream has ended"));
    return FromGrpcStatus(final_, name);
  }

  const uint32_t calls_max_;
  const Judge judge_;
  grpc::ClientContext context_;
  v1::StepsResponse incoming_;  // of the read under way

  mutable absl::Mutex mu_;
  absl::flat_hash_map<uint64_t, std::shared_ptr<StepsCall>> calls_ ABSL_GUARDED_BY(mu_);
  std::deque<v1::StepsRequest> writes_ ABSL_GUARDED_BY(mu_);  // the first is under way if writing_
  uint64_t next_tag_ ABSL_GUARDED_BY(mu_) = 1;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool half_closing_ ABSL_GUARDED_BY(mu_) = false;
  bool writes_ended_ ABSL_GUARDED_BY(mu_) = false;
  bool over_ ABSL_GUARDED_BY(mu_) = false;  // no answer will come any more
  bool done_ ABSL_GUARDED_BY(mu_) = false;  // and gRPC is through with this object
  grpc::Status final_ ABSL_GUARDED_BY(mu_);
};

}  // namespace internal

template <typename Response>
absl::StatusOr<Response> Pending<Response>::Wait() {
  absl::Status status = call_->core->WaitFor(*call_);
  if (!status.ok()) return status;
  v1::StepsResponse& reply = call_->reply;
  if constexpr (std::is_same_v<Response, v1::BeginStepResponse>) {
    if (reply.has_begin()) return std::move(*reply.mutable_begin());
  } else if constexpr (std::is_same_v<Response, v1::VerifyResponse>) {
    if (reply.has_verify()) return std::move(*reply.mutable_verify());
  } else if constexpr (std::is_same_v<Response, v1::CommitResponse>) {
    if (reply.has_commit()) return std::move(*reply.mutable_commit());
  } else {
    if (reply.has_abort()) return std::move(*reply.mutable_abort());
  }
  return absl::InternalError(
      absl::StrCat(RuleOf(call_->method).name, ": the stream's answer is to another call"));
}

template class Pending<v1::BeginStepResponse>;
template class Pending<v1::VerifyResponse>;
template class Pending<v1::CommitResponse>;
template class Pending<v1::AbortStepResponse>;

absl::StatusOr<std::unique_ptr<DecodeStream>> DecodeStream::Open(Session& session,
                                                                 uint64_t model_id,
                                                                 const Options& options) {
  if (absl::Status usable = session.CheckUsable(); !usable.ok()) return usable;
  v1::GetCapabilitiesRequest request;
  request.set_model_id(model_id);
  auto limits = session.caller_->Call<v1::GetCapabilitiesRequest, v1::GetCapabilitiesResponse>(
      Method::kGetCapabilities, &Caller::Stub::GetCapabilities, request, {});
  if (!limits.ok()) return limits.status();
  if (absl::Status same = session.JudgeEpoch(Method::kGetCapabilities, limits->server_epoch());
      !same.ok())
    return same;
  uint32_t calls_max = std::max(1u, limits->stream_calls_max());
  if (options.calls_max > 0) calls_max = std::min(calls_max, options.calls_max);
  auto core = std::make_shared<internal::StepsCore>(
      calls_max, [&session](Method method, const absl::Status& status) {
        session.Judge(method, status).IgnoreError();
      });
  core->Start(session.caller_->stub());
  return std::unique_ptr<DecodeStream>(new DecodeStream(session, model_id, std::move(core)));
}

DecodeStream::DecodeStream(Session& session, uint64_t model_id,
                           std::shared_ptr<internal::StepsCore> core)
    : session_(session), model_id_(model_id), core_(std::move(core)) {}

DecodeStream::~DecodeStream() { core_->CancelAndWait(); }

std::shared_ptr<internal::StepsCall> DecodeStream::Send(Method method, v1::StepsRequest request,
                                                        const CallOptions& options) {
  const absl::Duration timeout = options.timeout > absl::ZeroDuration()
                                     ? options.timeout
                                     : session_.caller_->options().call_timeout;
  auto call = std::make_shared<internal::StepsCall>(core_, method, absl::Now() + timeout);
  // The first message must have it, and which one that is the queue decides.
  *request.mutable_context() = session_.context_;
  core_->Send(call, std::move(request));
  return call;
}

Pending<v1::BeginStepResponse> DecodeStream::SendBegin(absl::Span<const StepRow> rows,
                                                       const StepOptions& options,
                                                       const CallOptions& call) {
  v1::StepsRequest request;
  *request.mutable_begin() = BeginStepRequestOf(model_id_, rows, options);
  return Pending<v1::BeginStepResponse>(Send(Method::kBeginStep, std::move(request), call));
}

Pending<v1::VerifyResponse> DecodeStream::SendVerify(v1::VerifyRequest verify,
                                                     const CallOptions& call) {
  v1::StepsRequest request;
  *request.mutable_verify() = std::move(verify);
  request.mutable_verify()->set_model_id(model_id_);
  return Pending<v1::VerifyResponse>(Send(Method::kVerify, std::move(request), call));
}

Pending<v1::CommitResponse> DecodeStream::SendCommit(uint64_t step_id,
                                                     absl::Span<const uint32_t> accepted,
                                                     const CallOptions& call) {
  v1::StepsRequest request;
  v1::CommitRequest& commit = *request.mutable_commit();
  commit.set_model_id(model_id_);
  commit.set_step_id(step_id);
  commit.mutable_accepted()->Add(accepted.begin(), accepted.end());
  return Pending<v1::CommitResponse>(Send(Method::kCommit, std::move(request), call));
}

Pending<v1::AbortStepResponse> DecodeStream::SendAbort(uint64_t step_id, const CallOptions& call) {
  v1::StepsRequest request;
  request.mutable_abort()->set_model_id(model_id_);
  request.mutable_abort()->set_step_id(step_id);
  return Pending<v1::AbortStepResponse>(Send(Method::kAbortStep, std::move(request), call));
}

absl::Status DecodeStream::Finish(const CallOptions& call) {
  const absl::Duration timeout =
      call.timeout > absl::ZeroDuration() ? call.timeout : session_.caller_->options().call_timeout;
  return core_->Finish(absl::Now() + timeout);
}

void DecodeStream::Cancel() { core_->Cancel(); }
uint32_t DecodeStream::calls_max() const { return core_->calls_max(); }
uint32_t DecodeStream::calls_unanswered() const { return core_->calls_unanswered(); }

}  // namespace ssmd::client
