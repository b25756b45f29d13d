#include "client/session.h"

#include <algorithm>
#include <type_traits>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/caller.h"

namespace ssmd::client {
namespace {

// A lease that could not be renewed is tried again this soon, if that is sooner than the interval.
constexpr absl::Duration kRenewAgain = absl::Seconds(1);
// Bounds the wait of Close and of the destructor for a server that does not answer.
constexpr absl::Duration kRenewTimeoutMax = absl::Seconds(5);

}  // namespace

absl::StatusOr<std::unique_ptr<Session>> Session::Open(std::shared_ptr<Caller> caller,
                                                       const SessionOptions& options,
                                                       const CallOptions& call) {
  v1::OpenSessionRequest request;
  request.set_lease_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(options.lease)));
  request.set_client_name(options.client_name);
  absl::StatusOr<v1::OpenSessionResponse> opened =
      caller->Call(Method::kOpenSession, &Caller::Stub::OpenSession, request, call);
  if (!opened.ok()) return opened.status();
  return std::unique_ptr<Session>(
      new Session(std::move(caller), *opened, options.keep_alive_interval));
}

Session::Session(std::shared_ptr<Caller> caller, const v1::OpenSessionResponse& opened,
                 absl::Duration keep_alive_interval)
    : caller_(std::move(caller)),
      lease_(absl::Milliseconds(opened.lease_ms())),
      keep_alive_interval_(keep_alive_interval > absl::ZeroDuration() ? keep_alive_interval
                                                                      : lease_ / 3) {
  context_.set_server_epoch(opened.server_epoch());
  context_.set_session_id(opened.session_id());
  keep_alive_thread_ = std::thread([this] { KeepAliveLoop(); });
}

Session::~Session() {
  bool open;
  {
    absl::MutexLock lock(&mu_);
    open = !closed_ && lost_.ok();
  }
  if (open) Close({.timeout = kRenewTimeoutMax}).status().IgnoreError();
  StopThread();
}

absl::Status Session::status() const {
  absl::MutexLock lock(&mu_);
  return lost_;
}

void Session::MarkLost(const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  if (lost_.ok()) lost_ = status;
}

// Checks around every call: before it that the session is usable, after it whose answer it was.
template <typename Request, typename Response, typename Rpc>
absl::StatusOr<Response> Session::Call(Method method, Rpc rpc, Request& request,
                                       const CallOptions& call) {
  {
    absl::MutexLock lock(&mu_);
    if (!lost_.ok()) return lost_;
    if (closed_) return absl::FailedPreconditionError("the session is closed");
  }
  *request.mutable_context() = context_;
  bool has_request_id = false;
  if constexpr (std::is_same_v<Request, v1::CreateSequencesRequest> ||
                std::is_same_v<Request, v1::ForkSequencesRequest>) {
    request.set_request_id(NewRequestId());
    has_request_id = true;
  }
  absl::StatusOr<Response> reply =
      caller_->Call<Request, Response>(method, rpc, request, call, has_request_id);
  if (!reply.ok()) {
    // Only KeepAlive names nothing but the session, so its NOT_FOUND can mean nothing else.
    if (IsStateLost(reply.status()) ||
        (method == Method::kKeepAlive && absl::IsNotFound(reply.status())))
      MarkLost(reply.status());
    return reply;
  }
  // An epoch of 0 is the empty reply of a call whose lost attempt had succeeded.
  if (reply->server_epoch() != 0 && reply->server_epoch() != context_.server_epoch()) {
    MarkLost(StateLostError(absl::StrCat(
        RuleOf(method).name, ": the server was restarted: session of epoch ",
        absl::Hex(context_.server_epoch()), ", reply of ", absl::Hex(reply->server_epoch()))));
    return status();
  }
  return reply;
}

uint64_t Session::NewRequestId() {
  thread_local absl::BitGen random;
  return absl::Uniform<uint64_t>(absl::IntervalClosed, random, 1, UINT64_MAX);
}

void Session::KeepAliveLoop() {
  absl::Duration wait = keep_alive_interval_;
  while (true) {
    {
      absl::MutexLock lock(&mu_);
      mu_.AwaitWithTimeout(absl::Condition(&stopping_), wait);
      if (stopping_ || !lost_.ok()) return;
    }
    // A failed renewal is only a sign; the server's answer to a later one decides.
    const bool renewed =
        KeepAlive({.timeout = std::clamp(lease_ / 3, kRenewAgain, kRenewTimeoutMax)}).ok();
    wait = renewed ? keep_alive_interval_ : std::min(keep_alive_interval_, kRenewAgain);
  }
}

void Session::StopThread() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  if (keep_alive_thread_.joinable()) keep_alive_thread_.join();
}

absl::StatusOr<v1::KeepAliveResponse> Session::KeepAlive(const CallOptions& call) {
  v1::KeepAliveRequest request;
  return Call<v1::KeepAliveRequest, v1::KeepAliveResponse>(Method::kKeepAlive,
                                                           &Caller::Stub::KeepAlive, request, call);
}

absl::StatusOr<v1::CloseSessionResponse> Session::Close(const CallOptions& call) {
  StopThread();
  v1::CloseSessionRequest request;
  auto reply = Call<v1::CloseSessionRequest, v1::CloseSessionResponse>(
      Method::kCloseSession, &Caller::Stub::CloseSession, request, call);
  absl::MutexLock lock(&mu_);
  closed_ = true;
  return reply;
}

absl::StatusOr<v1::CreateSequencesResponse> Session::CreateSequences(uint64_t model_id,
                                                                     uint32_t count,
                                                                     const CallOptions& call) {
  v1::CreateSequencesRequest request;
  request.set_model_id(model_id);
  request.set_count(count);
  return Call<v1::CreateSequencesRequest, v1::CreateSequencesResponse>(
      Method::kCreateSequences, &Caller::Stub::CreateSequences, request, call);
}

absl::StatusOr<v1::CreateSequencesResponse> Session::CreateFromSnapshot(uint64_t model_id,
                                                                        uint32_t count,
                                                                        const v1::SnapshotKey& key,
                                                                        const CallOptions& call) {
  v1::CreateSequencesRequest request;
  request.set_model_id(model_id);
  request.set_count(count);
  *request.mutable_from_snapshot() = key;
  return Call<v1::CreateSequencesRequest, v1::CreateSequencesResponse>(
      Method::kCreateSequences, &Caller::Stub::CreateSequences, request, call);
}

absl::StatusOr<v1::ForkSequencesResponse> Session::ForkSequences(uint64_t model_id,
                                                                 SequenceRef parent, uint32_t count,
                                                                 std::optional<uint64_t> position,
                                                                 const CallOptions& call) {
  v1::ForkSequencesRequest request;
  request.set_model_id(model_id);
  request.set_sequence_id(parent.id);
  request.set_version(parent.version);
  request.set_count(count);
  if (position.has_value()) request.set_position(*position);
  return Call<v1::ForkSequencesRequest, v1::ForkSequencesResponse>(
      Method::kForkSequences, &Caller::Stub::ForkSequences, request, call);
}

absl::StatusOr<v1::ReleaseSequencesResponse> Session::ReleaseSequences(
    uint64_t model_id, absl::Span<const uint64_t> ids, const CallOptions& call) {
  v1::ReleaseSequencesRequest request;
  request.set_model_id(model_id);
  request.mutable_sequence_ids()->Add(ids.begin(), ids.end());
  return Call<v1::ReleaseSequencesRequest, v1::ReleaseSequencesResponse>(
      Method::kReleaseSequences, &Caller::Stub::ReleaseSequences, request, call);
}

absl::StatusOr<v1::GetSequencesResponse> Session::GetSequences(uint64_t model_id,
                                                               absl::Span<const uint64_t> ids,
                                                               const CallOptions& call) {
  v1::GetSequencesRequest request;
  request.set_model_id(model_id);
  request.mutable_sequence_ids()->Add(ids.begin(), ids.end());
  return Call<v1::GetSequencesRequest, v1::GetSequencesResponse>(
      Method::kGetSequences, &Caller::Stub::GetSequences, request, call);
}

absl::StatusOr<v1::BeginStepResponse> Session::BeginStep(uint64_t model_id,
                                                         absl::Span<const StepRow> rows,
                                                         const StepOptions& options,
                                                         const CallOptions& call) {
  v1::BeginStepRequest request;
  request.set_model_id(model_id);
  for (const StepRow& row : rows) {
    request.add_sequence_ids(row.sequence.id);
    request.add_versions(row.sequence.version);
    request.add_draft_tokens(row.draft_tokens);
  }
  request.set_auto_commit(options.auto_commit);
  request.set_step_timeout_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(options.timeout)));
  return Call<v1::BeginStepRequest, v1::BeginStepResponse>(Method::kBeginStep,
                                                           &Caller::Stub::BeginStep, request, call);
}

absl::StatusOr<v1::VerifyResponse> Session::Verify(v1::VerifyRequest& request,
                                                   const CallOptions& call) {
  return Call<v1::VerifyRequest, v1::VerifyResponse>(Method::kVerify, &Caller::Stub::Verify,
                                                     request, call);
}

absl::StatusOr<v1::CommitResponse> Session::Commit(uint64_t model_id, uint64_t step_id,
                                                   absl::Span<const uint32_t> accepted,
                                                   const CallOptions& call) {
  v1::CommitRequest request;
  request.set_model_id(model_id);
  request.set_step_id(step_id);
  request.mutable_accepted()->Add(accepted.begin(), accepted.end());
  return Call<v1::CommitRequest, v1::CommitResponse>(Method::kCommit, &Caller::Stub::Commit,
                                                     request, call);
}

absl::StatusOr<v1::AbortStepResponse> Session::AbortStep(uint64_t model_id, uint64_t step_id,
                                                         const CallOptions& call) {
  v1::AbortStepRequest request;
  request.set_model_id(model_id);
  request.set_step_id(step_id);
  return Call<v1::AbortStepRequest, v1::AbortStepResponse>(Method::kAbortStep,
                                                           &Caller::Stub::AbortStep, request, call);
}

absl::StatusOr<v1::RollbackResponse> Session::Rollback(uint64_t model_id, SequenceRef sequence,
                                                       uint64_t position, const CallOptions& call) {
  v1::RollbackRequest request;
  request.set_model_id(model_id);
  request.set_sequence_id(sequence.id);
  request.set_version(sequence.version);
  request.set_position(position);
  return Call<v1::RollbackRequest, v1::RollbackResponse>(Method::kRollback, &Caller::Stub::Rollback,
                                                         request, call);
}

absl::StatusOr<v1::CreateSnapshotResponse> Session::CreateSnapshot(uint64_t model_id,
                                                                   SequenceRef sequence,
                                                                   const v1::SnapshotKey& key,
                                                                   bool overwrite,
                                                                   const CallOptions& call) {
  v1::CreateSnapshotRequest request;
  request.set_model_id(model_id);
  request.set_sequence_id(sequence.id);
  request.set_version(sequence.version);
  *request.mutable_key() = key;
  request.set_overwrite(overwrite);
  return Call<v1::CreateSnapshotRequest, v1::CreateSnapshotResponse>(
      Method::kCreateSnapshot, &Caller::Stub::CreateSnapshot, request, call);
}

absl::StatusOr<v1::DeleteSnapshotResponse> Session::DeleteSnapshot(uint64_t model_id,
                                                                   const v1::SnapshotKey& key,
                                                                   const CallOptions& call) {
  v1::DeleteSnapshotRequest request;
  request.set_model_id(model_id);
  *request.mutable_key() = key;
  return Call<v1::DeleteSnapshotRequest, v1::DeleteSnapshotResponse>(
      Method::kDeleteSnapshot, &Caller::Stub::DeleteSnapshot, request, call);
}

}  // namespace ssmd::client
