// StepsCore: the client's side of one Steps stream. A queue of writes, of which gRPC has one at a
// time, and the unanswered calls by their tags. Private to client/; decode_stream.h is its face.
//
// Threads. gRPC calls the On... functions on threads of its own, a read's and a write's at a time,
// OnDone after all others. Everything else may be called by any thread at any time.
//
// Life. Only threads of the application own a core (DecodeStream, Pending), never gRPC's: the last
// reference may be the channel's last too, and a channel that ends on a thread of its completion
// queue frees that queue under the thread. So the owner that started a core keeps it until
// AwaitDone; the critical section in which OnDone says that it is done is the last that gRPC's
// threads do with the core.
//
// gRPC's rules, which Proceed keeps. A hold keeps the stream from being done while calls may still
// start writes; it is given back once, when the last write is over: after the half-close, or when
// the stream has failed. Nothing is written after a write or a read that failed. Reading goes on
// until a read fails: gRPC holds the stream's status back while answers are unread.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/retry.h"
#include "ssmd/v1/state_service.grpc.pb.h"

namespace ssmd::client::internal {

// One call. What stands below `deadline` is guarded by the core's mutex until WaitFor has returned.
struct StepsCall {
  StepsCall(Method method_of, absl::Time deadline_at) : method(method_of), deadline(deadline_at) {}

  const Method method;
  const absl::Time deadline;
  bool done = false;
  absl::Status status;
  v1::StepsResponse reply;
};

class StepsCore final : public grpc::ClientBidiReactor<v1::StepsRequest, v1::StepsResponse> {
 public:
  // Sees every error before its caller does; not called after AwaitDone has returned true.
  using Judge = std::function<void(Method, const absl::Status&)>;

  StepsCore(uint32_t calls_max, Judge judge) : calls_max_(calls_max), judge_(std::move(judge)) {}

  // Requires: this reactor and context() belong to a stream that was not started.
  void Start();
  grpc::ClientContext& context() { return context_; }

  // Waits for its turn, at most until the call's deadline.
  void Send(const std::shared_ptr<StepsCall>& call, v1::StepsRequest request);
  // Until the call's deadline. OK: `call.reply` is the answer.
  absl::Status WaitFor(const StepsCall& call);

  // What was sent before is still written and answered; what is sent after it is refused.
  void HalfClose();
  void Cancel() { context_.TryCancel(); }
  // Whether the stream ended, and gRPC is through with this object, by then.
  bool AwaitDone(absl::Time deadline);
  // Requires: AwaitDone has returned true.
  absl::Status final_status() const;

  uint32_t calls_max() const { return calls_max_; }
  uint32_t calls_unanswered() const;

  void OnWriteDone(bool ok) override;
  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

 private:
  void Proceed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Answer() ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status StreamError(Method method) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

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
  bool over_ ABSL_GUARDED_BY(mu_) = false;          // a write or a read failed; OnDone will say why
  bool writes_ended_ ABSL_GUARDED_BY(mu_) = false;  // and the hold was given back
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  grpc::Status final_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ssmd::client::internal
