// Session: a lease on the server and the sequences that live under it.
//
// Open (Client::OpenSession) starts one thread that renews the lease every third of it, on the
// steady clock, until Close or the destructor. Closing releases all sequences of the session.
//
// Lost sessions. When the server answers STATE_LOST or with another epoch (it was restarted), or no
// longer knows the session (the lease ran out), status() says so for good, and every later call
// returns that status at once: open a new session and create the sequences again. IsStateLost()
// tells a restart from an expired lease.
//
// A step:   BeginStep -> Verify per layer, any order -> Commit | AbortStep
// Every call returns the server's reply or its error (errors.h); a failed call changed nothing
// unless state_service.proto says otherwise. A sequence is named by its id and expected version.
//
// Thread-safe. Close and the destructor must not run beside other calls.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/client.h"

namespace ssmd::client {

struct SequenceRef {
  uint64_t id = 0;
  uint64_t version = 0;  // expected
};

struct StepRow {
  SequenceRef sequence;
  uint32_t draft_tokens = 0;  // T: the last sampled token and its drafts; 0: a no-op row
};

struct StepOptions {
  bool auto_commit = false;
  absl::Duration timeout = absl::ZeroDuration();  // of the open step; zero: the server's maximum
};

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
                                                            bool overwrite = false,
                                                            const CallOptions& call = {});
  absl::StatusOr<v1::DeleteSnapshotResponse> DeleteSnapshot(uint64_t model_id,
                                                            const v1::SnapshotKey& key,
                                                            const CallOptions& call = {});

 private:
  friend class Client;

  static absl::StatusOr<std::unique_ptr<Session>> Open(std::shared_ptr<Caller> caller,
                                                       const SessionOptions& options,
                                                       const CallOptions& call);
  Session(std::shared_ptr<Caller> caller, const v1::OpenSessionResponse& opened,
          absl::Duration keep_alive_interval);

  template <typename Request, typename Response, typename Rpc>
  absl::StatusOr<Response> Call(Method method, Rpc rpc, Request& request, const CallOptions& call);
  void MarkLost(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  void KeepAliveLoop();
  void StopThread() ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t NewRequestId();

  const std::shared_ptr<Caller> caller_;
  v1::CallContext context_;  // constant after construction
  const absl::Duration lease_;
  const absl::Duration keep_alive_interval_;

  mutable absl::Mutex mu_;
  absl::Status lost_ ABSL_GUARDED_BY(mu_);      // OK: not lost
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;  // the thread must end
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  std::thread keep_alive_thread_;
};

}  // namespace ssmd::client
