// DecodeStream: the steps of a worker that decodes, on one Steps stream.
//
//   auto stream = DecodeStream::Open(*session, model_id);
//   auto begun = (*stream)->Begin(rows, {.commit_first = last_step});   // commits the step before
//   for each layer:  auto verified = (*stream)->Verify(request);
//   ...                                                                 // sample
//   (*stream)->Finish();                                                // answers, then the end
//
// The same calls as Session's, one stream instead of a call each, and a commit may ride on the next
// BeginStep. Every call has two forms: Verify(...) waits, SendVerify(...) returns a Pending to wait
// for later, so that calls overlap.
//
// Pipelining. A SendBegin may name the versions that the open step of this stream will produce
// (version + 1): the server holds it until that step has ended. If that step is aborted, so is it.
//
// Limits. At most `calls_max` calls are unanswered; a further Send waits for one to be answered.
//
// Deadlines. A call waits until its timeout (CallOptions; default the client's call_timeout) for
// its turn and its answer, then fails with DEADLINE_EXCEEDED. The server may have done or may yet
// do what was asked; the late answer is dropped, and the stream goes on.
//
// Errors. A call's own: code, "<method>: ..." and details (errors.h), as from Session. When the
// stream ends, every unanswered and every later call has the stream's error; the server aborts the
// steps that it began and that are open. Nothing is sent again and nothing reconnects: open
// another stream on the session and begin the step again. A commit whose answer was lost may have
// taken effect: ask GetSequences. STATE_LOST and SESSION_EXPIRED end the session too.
//
// Thread-safe, but for Finish and the destructor. Not for gRPC's threads (a callback of another
// call): everything here may wait for them. The session outlives the stream; Pendings may outlive
// both and the client.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/session.h"

namespace ssmd::client {

struct DecodeStreamOptions {
  uint32_t calls_max = 0;  // unanswered ones; 0, or more than the server takes: the server's limit
};

namespace internal {
class StepsCore;
struct StepsCall;
}  // namespace internal

// The answer of a call that was sent. Movable; Wait once.
template <typename Response>
class Pending {
 public:
  Pending(Pending&&) noexcept = default;
  Pending& operator=(Pending&&) noexcept = default;

  absl::StatusOr<Response> Wait();

 private:
  friend class DecodeStream;
  Pending(std::shared_ptr<internal::StepsCore> core, std::shared_ptr<internal::StepsCall> call)
      : core_(std::move(core)), call_(std::move(call)) {}

  std::shared_ptr<internal::StepsCore> core_;
  std::shared_ptr<internal::StepsCall> call_;
};

class DecodeStream {
 public:
  using Options = DecodeStreamOptions;

  // Asks for the server's limits and opens the stream. Errors: those of GetCapabilities; NOT_FOUND
  // for an unknown model.
  static absl::StatusOr<std::unique_ptr<DecodeStream>> Open(Session& session, uint64_t model_id,
                                                            const Options& options = {});
  ~DecodeStream();  // cancels, unless Finish was called
  DecodeStream(const DecodeStream&) = delete;
  DecodeStream& operator=(const DecodeStream&) = delete;

  Pending<v1::BeginStepResponse> SendBegin(absl::Span<const StepRow> rows,
                                           const StepOptions& options = {},
                                           const CallOptions& call = {});
  // The caller fills step, layer and tensors; they are moved, not copied.
  Pending<v1::VerifyResponse> SendVerify(v1::VerifyRequest request, const CallOptions& call = {});
  Pending<v1::CommitResponse> SendCommit(uint64_t step_id, absl::Span<const uint32_t> accepted,
                                         const CallOptions& call = {});
  Pending<v1::AbortStepResponse> SendAbort(uint64_t step_id, const CallOptions& call = {});

  absl::StatusOr<v1::BeginStepResponse> Begin(absl::Span<const StepRow> rows,
                                              const StepOptions& options = {},
                                              const CallOptions& call = {}) {
    return SendBegin(rows, options, call).Wait();
  }
  absl::StatusOr<v1::VerifyResponse> Verify(v1::VerifyRequest request,
                                            const CallOptions& call = {}) {
    return SendVerify(std::move(request), call).Wait();
  }
  absl::StatusOr<v1::CommitResponse> Commit(uint64_t step_id, absl::Span<const uint32_t> accepted,
                                            const CallOptions& call = {}) {
    return SendCommit(step_id, accepted, call).Wait();
  }
  absl::StatusOr<v1::AbortStepResponse> Abort(uint64_t step_id, const CallOptions& call = {}) {
    return SendAbort(step_id, call).Wait();
  }

  // Half-closes: everything sent is answered, then the server ends the stream. Returns how it
  // ended. Open steps stay open until their timeout. Errors: DEADLINE_EXCEEDED, and the stream is
  // then cancelled.
  absl::Status Finish(const CallOptions& call = {});

  // Ends the stream at once: unanswered calls fail with CANCELLED, its open steps are aborted.
  void Cancel();

  uint32_t calls_max() const;
  uint32_t calls_unanswered() const;

 private:
  DecodeStream(Session& session, uint64_t model_id, uint32_t calls_max);
  template <typename Response>
  Pending<Response> Send(Method method, v1::StepsRequest request, const CallOptions& call);
  void CancelAndWait();

  Session& session_;
  const uint64_t model_id_;
  const std::shared_ptr<internal::StepsCore> core_;
};

}  // namespace ssmd::client
