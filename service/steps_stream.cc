#include "service/steps_stream.h"

#include <spdlog/spdlog.h>

#include <deque>
#include <memory>
#include <utility>

#include "service/status_map.h"
#include "service/steps_runner.h"

namespace ssmd {
namespace {

// Reads, writes and ends; what becomes of a call in between is the runner's.
//
// Thread-safe: gRPC's reactions of one stream overlap, workers and other calls come in besides.
// mu_ is held over gRPC's Start* calls, which never call back on the same stack, and over DropHeld;
// over nothing else that is foreign.
//
// Lifetime: self_ keeps the stream until OnDone, which comes after Finish, and Finish when no call
// is in work. Whoever enters the stream takes a reference first, since what it does may bring the
// end. After Finish no Start* is called.
class StepsStream final : public grpc::ServerBidiReactor<v1::StepsRequest, v1::StepsResponse>,
                          public StreamTable::Stream,
                          public StepsRunner::Replies,
                          public std::enable_shared_from_this<StepsStream> {
 public:
  StepsStream(ServiceCore& core, const Principal& caller)
      : core_(core),
        opened_(core.clock()),
        runner_(std::make_shared<StepsRunner>(core, *this, caller)) {}

  void Start() {
    self_ = shared_from_this();
    const std::shared_ptr<StepsStream> keep = self_;
    {
      MutexLock lock(&mu_);
      MaybeRead();
    }
    core_.streams.Add(keep);
  }

  // ---- reactions

  void OnReadDone(bool ok) override {
    const std::shared_ptr<StepsStream> keep = shared_from_this();
    StepsCallRef call;
    bool first = false;
    {
      MutexLock lock(&mu_);
      if (!ok) {
        reading_ = false;
        reads_done_ = true;
      } else if (!finished_) {
        call = std::make_shared<StepsCall>();
        call->request.Swap(&incoming_);
        ++in_work_;
        first = !started_;
        started_ = true;
      }
    }
    if (call != nullptr) {
      // reading_ stays set meanwhile: a read that OnWriteDone started could overtake this message.
      if (first) {
        AdmitFirst(call);
      } else {
        runner_->Admit(call);
      }
      MutexLock lock(&mu_);
      reading_ = false;
      MaybeRead();
    }
    Settle();
  }

  void OnWriteDone(bool ok) override {
    const std::shared_ptr<StepsStream> keep = shared_from_this();
    StepsCallRef written;
    {
      MutexLock lock(&mu_);
      writing_ = false;
      written = std::move(current_);
      --in_work_;
      if (!ok) BreakOff();
      MaybeWrite();
      MaybeRead();
    }
    Settle();
  }

  void OnCancel() override {
    const std::shared_ptr<StepsStream> keep = shared_from_this();
    core_.metrics.CountCancelled();
    {
      MutexLock lock(&mu_);
      BreakOff();
    }
    Settle();
  }

  void OnDone() override {
    const std::shared_ptr<StepsStream> keep = std::move(self_);
    if (broken()) runner_->AbortOpenSteps();  // the status itself may have found nobody
    core_.streams.Remove(this);
    // A cancelled stream's last read may have looked like a half-close, and then it ended with OK.
    const bool cancelled = broken() && final_code_ == absl::StatusCode::kOk;
    core_.metrics.CountRpc(Method::kSteps, cancelled ? absl::StatusCode::kCancelled : final_code_,
                           core_.clock() - opened_);
  }

  // ---- StreamTable::Stream

  OwnerId owner() const override { return runner_->owner(); }

  void CheckHeld() override {
    const std::shared_ptr<StepsStream> keep = shared_from_this();
    runner_->CheckHeld();
  }

  void Drain() override {
    const std::shared_ptr<StepsStream> keep = shared_from_this();
    {
      MutexLock lock(&mu_);
      if (finished_ || broken_) return;
      draining_ = true;
    }
    runner_->AnswerHeld();
    Settle();
  }

  // ---- StepsRunner::Replies

  void Send(const StepsCallRef& call) override {
    const std::shared_ptr<StepsStream> keep = shared_from_this();
    {
      MutexLock lock(&mu_);
      if (broken_) {
        --in_work_;
      } else {
        outbox_.push_back(call);
        MaybeWrite();
      }
    }
    Settle();
  }

  bool broken() const override {
    MutexLock lock(&mu_);
    return broken_;
  }

 private:
  void MaybeRead() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (reading_ || reads_done_ || broken_ || draining_ || finished_ || !fatal_.ok()) return;
    if (in_work_ >= core_.config.stream_calls_max) return;
    reading_ = true;
    StartRead(&incoming_);
  }

  void MaybeWrite() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (writing_ || outbox_.empty() || finished_) return;
    writing_ = true;
    current_ = std::move(outbox_.front());
    outbox_.pop_front();
    StartWrite(&current_->response);
  }

  // Nobody reads replies any more: what waits is dropped, what runs ends by itself.
  void BreakOff() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    broken_ = true;
    in_work_ -= static_cast<uint32_t>(outbox_.size()) + runner_->DropHeld();
    outbox_.clear();
  }

  void AdmitFirst(const StepsCallRef& call) {
    const absl::Status refused = runner_->AdmitFirst(call);
    if (refused.ok()) return;
    spdlog::debug("Steps refused: {}", refused.ToString());
    MutexLock lock(&mu_);
    fatal_ = refused;
    --in_work_;
  }

  // Ends the stream when it is time and nothing is in work.
  void Settle() {
    absl::Status result;
    {
      MutexLock lock(&mu_);
      const bool ending = broken_ || draining_ || reads_done_ || !fatal_.ok();
      if (finished_ || !ending || in_work_ > 0 || writing_) return;
      finished_ = true;
      result = fatal_;
      if (broken_) {
        result = absl::CancelledError("the stream was cancelled");
      } else if (result.ok() && draining_ && !reads_done_) {
        result = core_.CheckServing();
      }
      final_code_ = result.code();
    }
    if (!result.ok()) runner_->AbortOpenSteps();
    Finish(ToGrpcStatus(result));
  }

  ServiceCore& core_;
  const absl::Time opened_;
  const std::shared_ptr<StepsRunner> runner_;
  std::shared_ptr<StepsStream> self_;
  absl::StatusCode final_code_ = absl::StatusCode::kOk;  // before Finish; read in OnDone

  mutable Mutex mu_;
  v1::StepsRequest incoming_;                  // gRPC's while reading_
  StepsCallRef current_ ABSL_GUARDED_BY(mu_);  // gRPC's while writing_
  bool started_ ABSL_GUARDED_BY(mu_) = false;  // the first message came
  bool reading_ ABSL_GUARDED_BY(mu_) = false, writing_ ABSL_GUARDED_BY(mu_) = false;
  bool reads_done_ ABSL_GUARDED_BY(mu_) = false;  // half-close
  bool broken_ ABSL_GUARDED_BY(mu_) = false;      // cancelled, or the connection is lost
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status fatal_ ABSL_GUARDED_BY(mu_);  // the first message was refused
  uint32_t in_work_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<StepsCallRef> outbox_ ABSL_GUARDED_BY(mu_);  // replies behind the one being written
};

}  // namespace

grpc::ServerBidiReactor<v1::StepsRequest, v1::StepsResponse>* ServeSteps(ServiceCore& core,
                                                                         const Principal& caller) {
  const auto stream = std::make_shared<StepsStream>(core, caller);
  stream->Start();
  return stream.get();
}

}  // namespace ssmd
