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
// Added to the clock, an endless interval would pass its end.
constexpr absl::Duration kIntervalMax = absl::Hours(24);

}  // namespace

v1::BeginStepRequest BeginStepRequestOf(uint64_t model_id, absl::Span<const StepRow> rows,
                                        const StepOptions& options) {
  v1::BeginStepRequest request;
  request.set_model_id(model_id);
  bool any_commit_all = false;
  for (const StepRow& row : rows) {
    request.add_sequence_ids(row.sequence.id);
    request.add_versions(row.sequence.version);
    request.add_draft_tokens(row.draft_tokens);
    any_commit_all = any_commit_all || row.commit_all;
  }
  if (any_commit_all)
    for (const StepRow& row : rows)
      request.add_commit_modes(row.commit_all ? v1::COMMIT_MODE_ALL : v1::COMMIT_MODE_COUNTS);
  request.set_auto_commit(options.auto_commit);
  request.set_allow_partial(options.allow_partial);
  request.set_step_timeout_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(options.timeout)));
  if (options.commit_first.has_value()) {
    v1::CommitRequest& commit = *request.mutable_commit_first();
    commit.set_model_id(model_id);
    commit.set_step_id(options.commit_first->step_id);
    commit.mutable_accepted()->Add(options.commit_first->accepted.begin(),
                                   options.commit_first->accepted.end());
  }
  return request;
}

absl::StatusOr<std::unique_ptr<Session>> Session::Open(std::shared_ptr<Caller> caller,
                                                       const SessionOptions& options,
                                                       const CallOptions& call) {
  v1::OpenSessionRequest request;
  request.set_lease_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(options.lease)));
  request.set_client_name(options.client_name);
  request.set_adoption_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(options.adoption)));
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
      keep_alive_interval_(
          std::min(keep_alive_interval > absl::ZeroDuration() ? keep_alive_interval : lease_ / 3,
                   kIntervalMax)) {
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

absl::Status Session::CheckUsable() const {
  absl::MutexLock lock(&mu_);
  if (!lost_.ok()) return lost_;
  if (closed_) return absl::FailedPreconditionError("the session is closed");
  return absl::OkStatus();
}

absl::Status Session::Judge(Method method, const absl::Status& status) {
  // Only KeepAlive names nothing but the session, so its NOT_FOUND can mean nothing else.
  if (IsStateLost(status) || IsSessionExpired(status) ||
      (method == Method::kKeepAlive && absl::IsNotFound(status)))
    MarkLost(status);
  return status;
}

absl::Status Session::JudgeEpoch(Method method, uint64_t epoch) {
  // An epoch of 0 is the empty reply of a call whose lost attempt had succeeded.
  if (epoch == 0 || epoch == context_.server_epoch()) return absl::OkStatus();
  MarkLost(StateLostError(
      absl::StrCat(RuleOf(method).name, ": the server was restarted: session of epoch ",
                   absl::Hex(context_.server_epoch()), ", reply of ", absl::Hex(epoch))));
  return status();
}

// Checks around every call: before it that the session is usable, after it whose answer it was.
template <typename Request, typename Response, typename Rpc>
absl::StatusOr<Response> Session::Call(Method method, Rpc rpc, Request& request,
                                       const CallOptions& call) {
  if (absl::Status usable = CheckUsable(); !usable.ok()) return usable;
  *request.mutable_context() = context_;
  bool has_request_id = false;
  if constexpr (std::is_same_v<Request, v1::CreateSequencesRequest> ||
                std::is_same_v<Request, v1::ForkSequencesRequest>) {
    request.set_request_id(NewRequestId());
    has_request_id = true;
  }
  absl::StatusOr<Response> reply =
      caller_->Call<Request, Response>(method, rpc, request, call, has_request_id);
  if (!reply.ok()) return Judge(method, reply.status());
  if (absl::Status same = JudgeEpoch(method, reply->server_epoch()); !same.ok()) return same;
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
      std::unique_lock<std::mutex> lock(stop_mu_);
      if (stop_.wait_for(lock, absl::ToChronoNanoseconds(wait), [this] { return stopping_; }))
        return;
    }
    if (!status().ok()) return;
    // A failed renewal is only a sign; the server's answer to a later one decides.
    const bool renewed =
        KeepAlive({.timeout = std::clamp(lease_ / 3, kRenewAgain, kRenewTimeoutMax)}).ok();
    wait = renewed ? keep_alive_interval_ : std::min(keep_alive_interval_, kRenewAgain);
  }
}

void Session::StopThread() {
  {
    const std::lock_guard<std::mutex> lock(stop_mu_);
    stopping_ = true;
  }
  stop_.notify_all();
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

void Session::Abandon() {
  StopThread();
  absl::MutexLock lock(&mu_);
  closed_ = true;
}

absl::StatusOr<v1::UnregisterModelResponse> Session::UnregisterModel(uint64_t model_id,
                                                                     const CallOptions& call) {
  v1::UnregisterModelRequest request;
  request.set_model_id(model_id);
  return Call<v1::UnregisterModelRequest, v1::UnregisterModelResponse>(
      Method::kUnregisterModel, &Caller::Stub::UnregisterModel, request, call);
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

absl::StatusOr<v1::AdoptSequencesResponse> Session::AdoptSequences(uint64_t model_id,
                                                                   uint64_t old_session_id,
                                                                   absl::Span<const uint64_t> ids,
                                                                   const CallOptions& call) {
  v1::AdoptSequencesRequest request;
  request.set_model_id(model_id);
  request.set_old_session_id(old_session_id);
  request.mutable_sequence_ids()->Add(ids.begin(), ids.end());
  return Call<v1::AdoptSequencesRequest, v1::AdoptSequencesResponse>(
      Method::kAdoptSequences, &Caller::Stub::AdoptSequences, request, call);
}

absl::StatusOr<v1::FlushSequencesResponse> Session::FlushSequences(uint64_t model_id,
                                                                   absl::Span<const uint64_t> ids,
                                                                   const CallOptions& call) {
  v1::FlushSequencesRequest request;
  request.set_model_id(model_id);
  request.mutable_sequence_ids()->Add(ids.begin(), ids.end());
  return Call<v1::FlushSequencesRequest, v1::FlushSequencesResponse>(
      Method::kFlushSequences, &Caller::Stub::FlushSequences, request, call);
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
  v1::BeginStepRequest request = BeginStepRequestOf(model_id, rows, options);
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
                                                                   const SnapshotOptions& options,
                                                                   const CallOptions& call) {
  v1::CreateSnapshotRequest request;
  request.set_model_id(model_id);
  request.set_sequence_id(sequence.id);
  request.set_version(sequence.version);
  *request.mutable_key() = key;
  request.set_overwrite(options.overwrite);
  request.set_worker_window(options.worker_window);
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

absl::StatusOr<v1::LookupPrefixResponse> Session::LookupPrefix(
    uint64_t model_id, absl::Span<const std::string> digests, uint64_t position_max,
    const CallOptions& call) {
  v1::LookupPrefixRequest request;
  request.set_model_id(model_id);
  for (const std::string& digest : digests) request.add_digests(digest);
  request.set_position_max(position_max);
  return Call<v1::LookupPrefixRequest, v1::LookupPrefixResponse>(
      Method::kLookupPrefix, &Caller::Stub::LookupPrefix, request, call);
}

absl::StatusOr<v1::ListSnapshotsResponse> Session::ListSnapshots(uint64_t model_id,
                                                                 const std::string& page_token,
                                                                 uint32_t page_size,
                                                                 const CallOptions& call) {
  v1::ListSnapshotsRequest request;
  request.set_model_id(model_id);
  request.set_page_token(page_token);
  request.set_page_size(page_size);
  return Call<v1::ListSnapshotsRequest, v1::ListSnapshotsResponse>(
      Method::kListSnapshots, &Caller::Stub::ListSnapshots, request, call);
}

absl::StatusOr<ExportSummary> Session::ExportState(uint64_t model_id, const ExportSource& source,
                                                   StateSink& sink, const CallOptions& call) {
  if (absl::Status usable = CheckUsable(); !usable.ok()) return usable;
  v1::ExportStateRequest request;
  *request.mutable_context() = context_;
  request.set_model_id(model_id);
  if (const auto* sequence = std::get_if<SequenceRef>(&source)) {
    request.set_sequence_id(sequence->id);
    request.set_version(sequence->version);
  } else {
    *request.mutable_snapshot() = std::get<v1::SnapshotKey>(source);
  }
  ExportSummary summary;
  absl::Status own;
  absl::Status exported = caller_->Stream(
      Method::kExportState, call, [&](grpc::ClientContext& context, Caller::Stub& stub) {
        return RunExport(context, stub, request, sink, own, summary);
      });
  if (!own.ok()) return own;
  if (!exported.ok()) return Judge(Method::kExportState, exported);
  if (absl::Status same = JudgeEpoch(Method::kExportState, summary.server_epoch); !same.ok())
    return same;
  return summary;
}

absl::StatusOr<v1::ImportStateResponse> Session::ImportState(uint64_t model_id,
                                                             SequenceRef sequence,
                                                             StateSource& source,
                                                             const CallOptions& call) {
  if (absl::Status usable = CheckUsable(); !usable.ok()) return usable;
  v1::ImportStateRequest::Header header;
  *header.mutable_context() = context_;
  header.set_model_id(model_id);
  header.set_sequence_id(sequence.id);
  header.set_version(sequence.version);
  v1::ImportStateResponse reply;
  absl::Status own;
  absl::Status imported = caller_->Stream(
      Method::kImportState, call, [&](grpc::ClientContext& context, Caller::Stub& stub) {
        return RunImport(context, stub, header, source, own, reply);
      });
  if (!own.ok()) return own;
  if (!imported.ok()) return Judge(Method::kImportState, imported);
  if (absl::Status same = JudgeEpoch(Method::kImportState, reply.server_epoch()); !same.ok())
    return same;
  return reply;
}

}  // namespace ssmd::client
