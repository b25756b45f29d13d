// Session: a lease on the server and the sequences that live under it.
//
// Open (Client::OpenSession) starts one thread that renews the lease every third of it, on the
// steady clock, until Close or the destructor. Closing releases all sequences of the session.
//
// Lost sessions. When the server answers STATE_LOST or with another epoch (it was restarted),
// SESSION_EXPIRED (the lease ran out), or no longer knows the session, status() says so for good,
// and every later call returns that status at once: open a new session and create the sequences
// again, or adopt them if this one asked to keep them. IsStateLost() tells a restart from an
// expired lease.
//
// A step:   BeginStep -> Verify per layer, any order -> Commit | AbortStep
// A worker that decodes uses decode_stream.h for it: the same calls on one stream.
// Every call returns the server's reply or its error (errors.h); a failed call changed nothing
// unless state_service.proto says otherwise. A sequence is named by its id and expected version.
//
// Thread-safe. Close and the destructor must not run beside other calls.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/transfer.h"

namespace ssmd::client {

struct StepRow {
  SequenceRef sequence;
  uint32_t draft_tokens = 0;  // T: the last sampled token and its drafts; 0: a no-op row
  bool commit_all = false;    // every token enters (prefill); its count in Commit must be T
};

// The commit of an earlier step, which rides on a BeginStep.
struct StepCommit {
  uint64_t step_id = 0;
  std::vector<uint32_t> accepted;  // one per row
};

struct StepOptions {
  bool auto_commit = false;
  absl::Duration timeout = absl::ZeroDuration();  // of the open step; zero: the server's maximum
  // A row with a bad sequence or version becomes padding; the reply's row_status says why.
  bool allow_partial = false;
  // Applied first. If it fails, nothing is begun and the call has its error.
  std::optional<StepCommit> commit_first;
};

struct SnapshotOptions {
  bool overwrite = false;
  std::string worker_window;  // opaque, kept and returned as is; at most 1 MiB
};

// The message of a BeginStep, but for its context.
v1::BeginStepRequest BeginStepRequestOf(uint64_t model_id, absl::Span<const StepRow> rows,
                                        const StepOptions& options);

class Session {
 public:
  ~Session();  // closes, and does not report how that went
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  uint64_t id() const { return context_.session_id(); }
  uint64_t server_epoch() const { return context_.server_epoch(); }
  absl::Duration lease() const { return lease_; }  // granted

  // OK, or why the session is lost.
  absl::Status status() const;

  absl::StatusOr<v1::KeepAliveResponse> KeepAlive(const CallOptions& call = {});
  // Ends the thread and the session. After it every call answers FAILED_PRECONDITION.
  absl::StatusOr<v1::CloseSessionResponse> Close(const CallOptions& call = {});
  // Ends the thread and leaves the lease to run out, so that the sequences can be adopted (when
  // SessionOptions::adoption asked for it). After it every call answers FAILED_PRECONDITION.
  void Abandon();

  // Errors: FAILED_PRECONDITION while sequences of it live or wait for adoption.
  absl::StatusOr<v1::UnregisterModelResponse> UnregisterModel(uint64_t model_id,
                                                              const CallOptions& call = {});

  absl::StatusOr<v1::CreateSequencesResponse> CreateSequences(uint64_t model_id, uint32_t count,
                                                              const CallOptions& call = {});
  absl::StatusOr<v1::CreateSequencesResponse> CreateFromSnapshot(uint64_t model_id, uint32_t count,
                                                                 const v1::SnapshotKey& key,
                                                                 const CallOptions& call = {});
  // `position`: of the window; unset: the parent's tail.
  absl::StatusOr<v1::ForkSequencesResponse> ForkSequences(
      uint64_t model_id, SequenceRef parent, uint32_t count,
      std::optional<uint64_t> position = std::nullopt, const CallOptions& call = {});
  absl::StatusOr<v1::ReleaseSequencesResponse> ReleaseSequences(uint64_t model_id,
                                                                absl::Span<const uint64_t> ids,
                                                                const CallOptions& call = {});
  // Takes over sequences of a session that has ended; without ids: all of them in this model.
  absl::StatusOr<v1::AdoptSequencesResponse> AdoptSequences(uint64_t model_id,
                                                            uint64_t old_session_id,
                                                            absl::Span<const uint64_t> ids = {},
                                                            const CallOptions& call = {});
  absl::StatusOr<v1::FlushSequencesResponse> FlushSequences(uint64_t model_id,
                                                            absl::Span<const uint64_t> ids,
                                                            const CallOptions& call = {});
  // Without ids: all of the session's.
  absl::StatusOr<v1::GetSequencesResponse> GetSequences(uint64_t model_id,
                                                        absl::Span<const uint64_t> ids = {},
                                                        const CallOptions& call = {});

  absl::StatusOr<v1::BeginStepResponse> BeginStep(uint64_t model_id, absl::Span<const StepRow> rows,
                                                  const StepOptions& options = {},
                                                  const CallOptions& call = {});
  // The caller fills everything but the context (tensor.h makes the tensors); the call adds that to
  // the request in place, so that large tensors are not copied.
  absl::StatusOr<v1::VerifyResponse> Verify(v1::VerifyRequest& request,
                                            const CallOptions& call = {});
  absl::StatusOr<v1::CommitResponse> Commit(uint64_t model_id, uint64_t step_id,
                                            absl::Span<const uint32_t> accepted,
                                            const CallOptions& call = {});
  absl::StatusOr<v1::AbortStepResponse> AbortStep(uint64_t model_id, uint64_t step_id,
                                                  const CallOptions& call = {});
  absl::StatusOr<v1::RollbackResponse> Rollback(uint64_t model_id, SequenceRef sequence,
                                                uint64_t position, const CallOptions& call = {});

  absl::StatusOr<v1::CreateSnapshotResponse> CreateSnapshot(uint64_t model_id, SequenceRef sequence,
                                                            const v1::SnapshotKey& key,
                                                            const SnapshotOptions& options = {},
                                                            const CallOptions& call = {});
  absl::StatusOr<v1::DeleteSnapshotResponse> DeleteSnapshot(uint64_t model_id,
                                                            const v1::SnapshotKey& key,
                                                            const CallOptions& call = {});
  absl::StatusOr<v1::LookupPrefixResponse> LookupPrefix(uint64_t model_id,
                                                        absl::Span<const std::string> digests,
                                                        uint64_t position_max,
                                                        const CallOptions& call = {});
  // One page; page_token: of the reply before, "" for the first.
  absl::StatusOr<v1::ListSnapshotsResponse> ListSnapshots(uint64_t model_id,
                                                          const std::string& page_token = "",
                                                          uint32_t page_size = 0,
                                                          const CallOptions& call = {});

  // Reads out a sequence or a snapshot; transfer.h has sinks. A lost connection starts it over:
  // `sink.Begin` is called again. The call's timeout is for the whole transfer.
  // Errors: the sink's; DATA_LOSS when the bytes do not match the server's checksum.
  absl::StatusOr<ExportSummary> ExportState(uint64_t model_id, const ExportSource& source,
                                            StateSink& sink, const CallOptions& call = {});
  // Replaces a sequence's state by what `source` reads. Not sent again when it is lost: ask for the
  // sequence's version (GetSequences), and repeat the whole while that is unchanged.
  absl::StatusOr<v1::ImportStateResponse> ImportState(uint64_t model_id, SequenceRef sequence,
                                                      StateSource& source,
                                                      const CallOptions& call = {});

 private:
  friend class Client;
  friend class DecodeStream;

  static absl::StatusOr<std::unique_ptr<Session>> Open(std::shared_ptr<Caller> caller,
                                                       const SessionOptions& options,
                                                       const CallOptions& call);
  Session(std::shared_ptr<Caller> caller, const v1::OpenSessionResponse& opened,
          absl::Duration keep_alive_interval);

  absl::Status CheckUsable() const ABSL_LOCKS_EXCLUDED(mu_);
  // What an error, or the epoch of a reply, says about the session.
  absl::Status Judge(Method method, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status JudgeEpoch(Method method, uint64_t epoch) ABSL_LOCKS_EXCLUDED(mu_);
  template <typename Request, typename Response, typename Rpc>
  absl::StatusOr<Response> Call(Method method, Rpc rpc, Request& request, const CallOptions& call);
  void MarkLost(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  void KeepAliveLoop();
  void StopThread();
  uint64_t NewRequestId();

  const std::shared_ptr<Caller> caller_;
  v1::CallContext context_;  // constant after construction
  const absl::Duration lease_;
  const absl::Duration keep_alive_interval_;

  mutable absl::Mutex mu_;
  absl::Status lost_ ABSL_GUARDED_BY(mu_);  // OK: not lost
  bool closed_ ABSL_GUARDED_BY(mu_) = false;

  // absl::Mutex counts its timeouts on the wall clock. Once that is set back, a renewal would come
  // after the lease's end; a condition_variable's wait_for is on the steady clock.
  std::mutex stop_mu_;
  std::condition_variable stop_;
  bool stopping_ = false;  // guarded by stop_mu_: the thread must end
  std::thread keep_alive_thread_;
};

}  // namespace ssmd::client
