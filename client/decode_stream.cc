#include "client/decode_stream.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/caller.h"
#include "client/steps_core.h"

namespace ssmd::client {

template <typename Response>
absl::StatusOr<Response> Pending<Response>::Wait() {
  absl::Status status = core_->WaitFor(*call_);
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
  return std::unique_ptr<DecodeStream>(new DecodeStream(session, model_id, calls_max));
}

DecodeStream::DecodeStream(Session& session, uint64_t model_id, uint32_t calls_max)
    : session_(session),
      model_id_(model_id),
      core_(std::make_shared<internal::StepsCore>(
          calls_max, [&session](Method method, const absl::Status& status) {
            session.Judge(method, status).IgnoreError();
          })) {
  session.caller_->Authenticate(core_->context());
  session.caller_->stub().async()->Steps(&core_->context(), core_.get());
  core_->Start();
}

DecodeStream::~DecodeStream() { CancelAndWait(); }

void DecodeStream::CancelAndWait() {
  core_->Cancel();
  core_->AwaitDone(absl::InfiniteFuture());  // at once: a cancelled stream needs no server to end
}

template <typename Response>
Pending<Response> DecodeStream::Send(Method method, v1::StepsRequest request,
                                     const CallOptions& options) {
  const absl::Duration timeout = options.timeout > absl::ZeroDuration()
                                     ? options.timeout
                                     : session_.caller_->options().call_timeout;
  auto call = std::make_shared<internal::StepsCall>(method, absl::Now() + timeout);
  // The first message must have it, and which one that is the queue decides.
  *request.mutable_context() = session_.context_;
  core_->Send(call, std::move(request));
  return Pending<Response>(core_, std::move(call));
}

Pending<v1::BeginStepResponse> DecodeStream::SendBegin(absl::Span<const StepRow> rows,
                                                       const StepOptions& options,
                                                       const CallOptions& call) {
  v1::StepsRequest request;
  *request.mutable_begin() = BeginStepRequestOf(model_id_, rows, options);
  return Send<v1::BeginStepResponse>(Method::kBeginStep, std::move(request), call);
}

Pending<v1::VerifyResponse> DecodeStream::SendVerify(v1::VerifyRequest verify,
                                                     const CallOptions& call) {
  v1::StepsRequest request;
  *request.mutable_verify() = std::move(verify);
  request.mutable_verify()->set_model_id(model_id_);
  return Send<v1::VerifyResponse>(Method::kVerify, std::move(request), call);
}

Pending<v1::CommitResponse> DecodeStream::SendCommit(uint64_t step_id,
                                                     absl::Span<const uint32_t> accepted,
                                                     const CallOptions& call) {
  v1::StepsRequest request;
  v1::CommitRequest& commit = *request.mutable_commit();
  commit.set_model_id(model_id_);
  commit.set_step_id(step_id);
  commit.mutable_accepted()->Add(accepted.begin(), accepted.end());
  return Send<v1::CommitResponse>(Method::kCommit, std::move(request), call);
}

Pending<v1::AbortStepResponse> DecodeStream::SendAbort(uint64_t step_id, const CallOptions& call) {
  v1::StepsRequest request;
  request.mutable_abort()->set_model_id(model_id_);
  request.mutable_abort()->set_step_id(step_id);
  return Send<v1::AbortStepResponse>(Method::kAbortStep, std::move(request), call);
}

absl::Status DecodeStream::Finish(const CallOptions& call) {
  const absl::Duration timeout =
      call.timeout > absl::ZeroDuration() ? call.timeout : session_.caller_->options().call_timeout;
  core_->HalfClose();
  if (core_->AwaitDone(absl::Now() + timeout)) return core_->final_status();
  CancelAndWait();
  return absl::DeadlineExceededError("Steps: the stream did not end in time");
}

void DecodeStream::Cancel() { core_->Cancel(); }
uint32_t DecodeStream::calls_max() const { return core_->calls_max(); }
uint32_t DecodeStream::calls_unanswered() const { return core_->calls_unanswered(); }

}  // namespace ssmd::client
