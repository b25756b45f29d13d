#include "service/steps_stream.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "service/fence.h"
#include "service/handlers.h"
#include "service/status_map.h"

namespace ssmd {
namespace {

// One message, from its intake to the end of the write of its reply.
struct Work {
  v1::StepsRequest request;
  v1::StepsResponse response;
  SessionCall session;  // empty while the call is held
  Method method = Method::kBeginStep;
  absl::Time begun, queued;
  std::optional<handlers::PreparedVerify> prepared;
};
using WorkRef = std::shared_ptr<Work>;

bool RodeCommit(const v1::StepsResponse& response) {
  return response.has_begin() && response.begin().committed().versions_size() > 0;
}

Method MethodOf(const v1::StepsRequest& request) {
  switch (request.call_case()) {
    case v1::StepsRequest::kVerify:
      return Method::kVerify;
    case v1::StepsRequest::kCommit:
      return Method::kCommit;
    case v1::StepsRequest::kAbort:
      return Method::kAbortStep;
    default:
      return Method::kBeginStep;
  }
}

// Thread-safe: gRPC's reactions of one stream overlap, workers and other calls come in besides.
// mu_ is held over gRPC's Start* calls, which never call back on the same stack, and over nothing
// else that is foreign: handlers, the store, the queue and StreamTable are called without it.
//
// Lifetime: self_ keeps the stream until OnDone; whoever may run longer (workers, StreamTable's
// callers) holds a reference. After Finish no Start* is called.
class StepsStream final : public grpc::ServerBidiReactor<v1::StepsRequest, v1::StepsResponse>,
                          public StreamTable::Stream,
                          public std::enable_shared_from_this<StepsStream> {
 public:
  explicit StepsStream(ServiceCore& core) : core_(core), opened_(core.clock()) {}

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
    WorkRef work;
    bool first = false;
    {
      MutexLock lock(&mu_);
      if (!ok) {
        reading_ = false;
        reads_done_ = true;
      } else if (!finished_) {
        work = std::make_shared<Work>();
        work->request.Swap(&incoming_);
        ++in_work_;
        first = !started_;
        started_ = true;
      }
    }
    if (work != nullptr) {
      // reading_ stays set meanwhile: a read that OnWriteDone started could overtake this message.
      Admit(work, first);
      MutexLock lock(&mu_);
      reading_ = false;
      MaybeRead();
    }
    Settle();
  }

  void OnWriteDone(bool ok) override {
    const std::shared_ptr<StepsStream> keep = shared_from_this();
    WorkRef written;
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
    BegunSteps begun;
    {
      MutexLock lock(&mu_);
      // The status itself may have found nobody.
      if (broken_) begun = std::exchange(begun_, {});
    }
    AbortAll(begun);
    core_.streams.Remove(this);
    core_.metrics.CountRpc(Method::kSteps, final_code_, core_.clock() - opened_);
  }

  // ---- StreamTable::Stream

  OwnerId owner() const override { return OwnerId{owner_.load(std::memory_order_relaxed)}; }

  void CheckHeld() override {
    const std::shared_ptr<StepsStream> keep = shared_from_this();
    std::vector<WorkRef> held;
    {
      MutexLock lock(&mu_);
      held.assign(held_.begin(), held_.end());
    }
    for (const WorkRef& work : held) {
      const Predecessors state = FindPredecessors(*work);
      if (state == Predecessors::kOpen) continue;
      {
        MutexLock lock(&mu_);
        const auto place = std::find(held_.begin(), held_.end(), work);
        if (place == held_.end()) continue;  // another thread was faster
        held_.erase(place);
        --core_.streams.held;
      }
      absl::StatusOr<SessionCall> session = core_.sessions.Enter(owner());
      if (!session.ok()) {
        Reply(work, session.status());
        continue;
      }
      work->session = *std::move(session);
      state == Predecessors::kAborted ? Reply(work, PredecessorAborted()) : Plan(work);
    }
  }

  void Drain() override {
    const std::shared_ptr<StepsStream> keep = shared_from_this();
    std::deque<WorkRef> held;
    {
      MutexLock lock(&mu_);
      if (finished_ || broken_) return;
      draining_ = true;
      held = TakeHeld();
    }
    for (const WorkRef& work : held) Reply(work, core_.CheckServing());
    Settle();
  }

 private:
  struct Begun {
    uint64_t model_id = 0;
    uint64_t sequence_id = 0;  // one of its rows; 0: all are padding
  };
  using BegunSteps = absl::flat_hash_map<uint64_t, Begun>;  // by step id
  // The last step of a sequence that this stream began.
  struct SequenceStep {
    uint64_t model_id = 0, step_id = 0, version = 0;
  };
  enum class Predecessors { kNone, kOpen, kAborted };

  static absl::Status PredecessorAborted() {
    return ErrorWithReason(absl::StatusCode::kAborted, reason::kStepAborted,
                           "begin: the step that was to produce its versions was aborted");
  }

  // ---- flow; all need mu_

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

  std::deque<WorkRef> TakeHeld() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    core_.streams.held -= static_cast<uint32_t>(held_.size());
    return std::exchange(held_, {});
  }

  // Nobody reads replies any more: what waits is dropped, what runs ends by itself.
  void BreakOff() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    broken_ = true;
    in_work_ -= static_cast<uint32_t>(outbox_.size() + held_.size());
    outbox_.clear();
    TakeHeld();
  }

  // ---- intake

  void Admit(const WorkRef& work, bool first) {
    work->begun = core_.clock();
    work->method = MethodOf(work->request);
    const v1::StepsRequest& request = work->request;
    if (first) {
      absl::StatusOr<SessionCall> session = Fence(core_, request.has_context(), request.context());
      if (!session.ok()) {
        spdlog::debug("Steps refused: {}", session.status().ToString());
        MutexLock lock(&mu_);
        fatal_ = session.status();
        --in_work_;
        return;
      }
      owner_.store(request.context().session_id(), std::memory_order_relaxed);
      work->session = *std::move(session);
    } else {
      absl::StatusOr<SessionCall> session = Reenter(request);
      if (!session.ok()) return Reply(work, session.status());
      work->session = *std::move(session);
    }
    switch (request.call_case()) {
      case v1::StepsRequest::kBegin:
        if (request.begin().has_commit_first())
          return EnterLane(request.begin().commit_first().step_id(), work);
        return Begin(work);
      case v1::StepsRequest::kVerify:
        return EnterLane(request.verify().step_id(), work);
      case v1::StepsRequest::kCommit:
        return EnterLane(request.commit().step_id(), work);
      case v1::StepsRequest::kAbort:
        return EnterLane(request.abort().step_id(), work);
      case v1::StepsRequest::CALL_NOT_SET:
        break;
    }
    Reply(work, InvalidField("call", "call: expected begin, verify, commit or abort, got none"));
  }

  // A later message: its context, if any, must be the first one's.
  absl::StatusOr<SessionCall> Reenter(const v1::StepsRequest& request) {
    if (request.has_context()) {
      SSMD_RETURN_IF_ERROR(CheckEpoch(core_, true, request.context()));
      if (OwnerId{request.context().session_id()} != owner())
        return InvalidField("context.session_id",
                            "context.session_id: expected the session of the first message");
    }
    return core_.sessions.Enter(owner());
  }

  // ---- lanes: the calls that name one step, one at a time

  void EnterLane(uint64_t step_id, const WorkRef& work) {
    {
      MutexLock lock(&mu_);
      const auto [lane, is_new] = lanes_.try_emplace(step_id);
      if (!is_new) {
        lane->second.push_back(work);
        return;
      }
    }
    RunLane(step_id, work);
  }

  void RunLane(uint64_t step_id, WorkRef work) {
    while (work != nullptr && Run(step_id, work)) work = NextInLane(step_id);
  }

  WorkRef NextInLane(uint64_t step_id) {
    MutexLock lock(&mu_);
    const auto lane = lanes_.find(step_id);
    if (lane->second.empty()) {
      lanes_.erase(lane);
      return nullptr;
    }
    WorkRef work = std::move(lane->second.front());
    lane->second.pop_front();
    return work;
  }

  // False when a worker has taken the call and will go on with the lane.
  bool Run(uint64_t step_id, const WorkRef& work) {
    if (const absl::Status wanted = CheckWanted(*work); !wanted.ok()) {
      Reply(work, wanted);
      return true;
    }
    const v1::StepsRequest& request = work->request;
    switch (request.call_case()) {
      case v1::StepsRequest::kVerify:
        return !Enqueue(step_id, work);
      case v1::StepsRequest::kCommit: {
        v1::CommitResponse& response = *work->response.mutable_commit();
        response.set_server_epoch(core_.epoch);
        const absl::Status status =
            handlers::Commit(core_, *work->session, request.commit(), response);
        if (status.ok()) Forget(step_id);
        Reply(work, status);
        break;
      }
      case v1::StepsRequest::kAbort: {
        v1::AbortStepResponse& response = *work->response.mutable_abort();
        response.set_server_epoch(core_.epoch);
        const absl::Status status =
            handlers::AbortStep(core_, *work->session, request.abort(), response);
        if (status.ok()) Forget(step_id);
        Reply(work, status);
        break;
      }
      default:  // BeginStep with commit_first
        BeginAfterCommit(step_id, work);
        break;
    }
    core_.streams.StepMayHaveEnded(owner());
    return true;
  }

  absl::Status CheckWanted(const Work& work) {
    {
      MutexLock lock(&mu_);
      if (broken_) return absl::CancelledError("the stream was cancelled before the call ran");
    }
    if (work.session.closing())
      return ErrorWithReason(absl::StatusCode::kNotFound, reason::kSessionExpired,
                             "the session was closed");
    return absl::OkStatus();
  }

  // Puts a Verify on the queue of workers; false when it was answered already.
  bool Enqueue(uint64_t step_id, const WorkRef& work) {
    const absl::Status status = [&]() -> absl::Status {
      SSMD_ASSIGN_OR_RETURN(work->prepared,
                            handlers::PrepareVerify(core_, *work->session, work->request.verify()));
      work->queued = core_.clock();
      return core_.verify_queue.Push(
          [keep = shared_from_this(), step_id, work] { keep->Verify(step_id, work); },
          work->request.ByteSizeLong());
    }();
    if (status.ok()) return true;
    Reply(work, status);
    core_.streams.StepMayHaveEnded(owner());
    return false;
  }

  void Verify(uint64_t step_id, const WorkRef& work) {
    const absl::Time begun = core_.clock();
    absl::Status status = CheckWanted(*work);
    if (status.ok()) {
      v1::VerifyResponse& response = *work->response.mutable_verify();
      response.set_server_epoch(core_.epoch);
      status = handlers::RunVerify(*work->prepared, work->session->id(), response);
      core_.metrics.CountVerifyPhases(begun - work->queued, core_.clock() - begun);
      if (status.ok() && response.committed()) Forget(step_id);
    }
    Reply(work, status);
    core_.streams.StepMayHaveEnded(owner());
    RunLane(step_id, NextInLane(step_id));
  }

  // ---- BeginStep

  // Runs in the lane of the step that is committed first.
  void BeginAfterCommit(uint64_t committed_step, const WorkRef& work) {
    // Most often nothing else is open: then the handler does both, checked before the commit.
    if (FindPredecessors(*work, committed_step) == Predecessors::kNone) return Plan(work);
    v1::BeginStepRequest& begin = *work->request.mutable_begin();
    begin.mutable_commit_first()->set_model_id(begin.model_id());
    v1::CommitResponse& committed = *work->response.mutable_begin()->mutable_committed();
    committed.set_server_epoch(core_.epoch);
    const absl::Status status =
        handlers::Commit(core_, *work->session, begin.commit_first(), committed);
    if (!status.ok()) return Reply(work, status);
    Forget(committed_step);
    begin.clear_commit_first();
    Begin(work);
  }

  void Begin(const WorkRef& work) {
    switch (FindPredecessors(*work)) {
      case Predecessors::kAborted:
        return Reply(work, PredecessorAborted());
      case Predecessors::kNone:
        return Plan(work);
      case Predecessors::kOpen:
        break;
    }
    absl::Status status;
    {
      MutexLock lock(&mu_);
      if (broken_) {
        status = absl::CancelledError("the stream was cancelled before the call ran");
      } else if (draining_) {
        status = core_.CheckServing();
      } else if (held_.size() >= core_.config.stream_begins_max) {
        status = Exhausted(reason::kLimit,
                           absl::StrCat("stream_begins_max: ", held_.size(),
                                        " BeginStep calls wait for open steps"),
                           1);
      } else {
        held_.push_back(work);
        ++core_.streams.held;
      }
    }
    if (!status.ok()) return Reply(work, status);
    work->session.End();
    CheckHeld();  // the step may have ended between the look and the hold
  }

  // What has become of the steps, but for `except`, whose next versions the rows name.
  Predecessors FindPredecessors(const Work& work, uint64_t except = 0) {
    const v1::BeginStepRequest& begin = work.request.begin();
    struct Candidate {
      SequenceId sequence;
      SequenceStep step;
    };
    std::vector<Candidate> candidates;
    {
      MutexLock lock(&mu_);
      const int rows = std::min(begin.sequence_ids_size(), begin.versions_size());
      for (int i = 0; i < rows; ++i) {
        const auto found = last_step_.find(begin.sequence_ids(i));
        if (found == last_step_.end() || found->second.model_id != begin.model_id() ||
            found->second.version + 1 != begin.versions(i) || found->second.step_id == except)
          continue;
        candidates.push_back({SequenceId{begin.sequence_ids(i)}, found->second});
      }
    }
    if (candidates.empty()) return Predecessors::kNone;
    const auto model = core_.models.Find(begin.model_id());
    if (!model.ok()) return Predecessors::kNone;
    Predecessors result = Predecessors::kNone;
    for (const Candidate& candidate : candidates) {
      const auto state = (*model)->store->Get(owner(), candidate.sequence);
      if (!state.ok()) continue;
      if (static_cast<uint64_t>(state->open_step) == candidate.step.step_id)
        return Predecessors::kOpen;
      // Not open and not committed: it was aborted.
      if (state->version == candidate.step.version) result = Predecessors::kAborted;
    }
    return result;
  }

  void Plan(const WorkRef& work) {
    const v1::BeginStepRequest& begin = work->request.begin();
    v1::BeginStepResponse& response = *work->response.mutable_begin();
    response.set_server_epoch(core_.epoch);
    absl::Status status = CheckWanted(*work);
    if (status.ok()) status = handlers::BeginStep(core_, *work->session, begin, response);
    if (RodeCommit(work->response)) Forget(begin.commit_first().step_id());
    if (status.ok()) {
      uint64_t some_sequence = 0;
      MutexLock lock(&mu_);
      for (int i = 0; i < begin.sequence_ids_size(); ++i) {
        if (begin.sequence_ids(i) == 0) continue;
        if (response.row_status_size() > i && response.row_status(i).code() != 0) continue;
        some_sequence = begin.sequence_ids(i);
        last_step_[some_sequence] = {begin.model_id(), response.step_id(), begin.versions(i)};
      }
      begun_[response.step_id()] = {begin.model_id(), some_sequence};
    }
    Prune();
    Reply(work, status);
  }

  // ---- what this stream remembers of steps

  void Forget(uint64_t step_id) {
    MutexLock lock(&mu_);
    begun_.erase(step_id);
  }

  // Drops what others ended meanwhile, now and then: both tables stay in proportion to what is
  // alive.
  void Prune() {
    BegunSteps steps;
    std::vector<std::pair<uint64_t, SequenceStep>> sequences;
    {
      MutexLock lock(&mu_);
      if (begun_.size() + last_step_.size() < prune_at_) return;
      steps = begun_;
      sequences.assign(last_step_.begin(), last_step_.end());
    }
    std::vector<uint64_t> gone_steps, gone_sequences;
    for (const auto& [step_id, begun] : steps)
      if (!MayBeOpen(step_id, begun)) gone_steps.push_back(step_id);
    for (const auto& [id, step] : sequences) {
      const auto model = core_.models.Find(step.model_id);
      if (!model.ok() || !(*model)->store->Get(owner(), SequenceId{id}).ok())
        gone_sequences.push_back(id);
    }
    MutexLock lock(&mu_);
    for (const uint64_t id : gone_steps) begun_.erase(id);
    for (const uint64_t id : gone_sequences) last_step_.erase(id);
    prune_at_ = std::max(kPruneMin, 2 * (begun_.size() + last_step_.size()));
  }

  bool MayBeOpen(uint64_t step_id, const Begun& begun) {
    const auto model = core_.models.Find(begun.model_id);
    if (!model.ok()) return false;
    const Store& store = *(*model)->store;
    if (begun.sequence_id == 0) return store.StepTokenCount(owner(), StepId{step_id}).ok();
    const auto state = store.Get(owner(), SequenceId{begun.sequence_id});
    return state.ok() && static_cast<uint64_t>(state->open_step) == step_id;
  }

  void AbortAll(const BegunSteps& steps) {
    for (const auto& [step_id, begun] : steps) {
      const auto model = core_.models.Find(begun.model_id);
      if (!model.ok()) continue;
      // Committed or aborted by others meanwhile, or its owner gone: nothing is left to do.
      (void)(*model)->store->Abort(owner(), StepId{step_id});
    }
    if (!steps.empty()) core_.streams.StepMayHaveEnded(owner());
  }

  // ---- replies and the end

  void Reply(const WorkRef& work, const absl::Status& status) {
    work->session.End();  // the lease counts from here, before the client can see the reply
    core_.metrics.CountRpc(work->method, status.code(), core_.clock() - work->begun);
    work->response.set_tag(work->request.tag());
    if (!status.ok()) {
      if (absl::IsInternal(status)) {
        spdlog::error("Steps: {} failed: {}", MethodName(work->method), status.ToString());
      } else {
        spdlog::debug("Steps: {} refused: {}", MethodName(work->method), status.ToString());
      }
      // A commit that rode along may have happened, whatever came of the rest.
      if (!RodeCommit(work->response)) work->response.clear_reply();
      *work->response.mutable_status() = ToRpcStatus(status);
    }
    work->prepared.reset();
    work->request = {};  // its tensors do not wait for a slow reader
    {
      MutexLock lock(&mu_);
      if (broken_) {
        --in_work_;
      } else {
        outbox_.push_back(work);
        MaybeWrite();
      }
    }
    Settle();
  }

  // Ends the stream when it is time and nothing is in work.
  void Settle() {
    BegunSteps begun;
    grpc::Status status;
    {
      MutexLock lock(&mu_);
      const bool ending = broken_ || draining_ || reads_done_ || !fatal_.ok();
      if (finished_ || !ending || in_work_ > 0 || writing_) return;
      finished_ = true;
      absl::Status result = fatal_;
      if (broken_) {
        result = absl::CancelledError("the stream was cancelled");
      } else if (result.ok() && draining_ && !reads_done_) {
        result = core_.CheckServing();
      }
      if (!result.ok()) begun = std::exchange(begun_, {});
      status = ToGrpcStatus(result);
      final_code_ = result.code();
    }
    AbortAll(begun);
    Finish(status);
  }

  static constexpr size_t kPruneMin = 256;

  ServiceCore& core_;
  const absl::Time opened_;
  std::shared_ptr<StepsStream> self_;
  std::atomic<uint64_t> owner_{0};
  absl::StatusCode final_code_ = absl::StatusCode::kOk;  // before Finish; read in OnDone

  Mutex mu_;
  v1::StepsRequest incoming_;                  // gRPC's while reading_
  WorkRef current_ ABSL_GUARDED_BY(mu_);       // gRPC's while writing_
  bool started_ ABSL_GUARDED_BY(mu_) = false;  // the first message came
  bool reading_ ABSL_GUARDED_BY(mu_) = false, writing_ ABSL_GUARDED_BY(mu_) = false;
  bool reads_done_ ABSL_GUARDED_BY(mu_) = false;  // half-close
  bool broken_ ABSL_GUARDED_BY(mu_) = false;      // cancelled, or the connection is lost
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status fatal_ ABSL_GUARDED_BY(mu_);  // the first message was refused
  uint32_t in_work_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<WorkRef> outbox_ ABSL_GUARDED_BY(mu_);  // replies that wait for the one being written
  std::deque<WorkRef> held_ ABSL_GUARDED_BY(mu_);
  // Step id -> calls that wait for the running one. An entry is there while one runs.
  absl::flat_hash_map<uint64_t, std::deque<WorkRef>> lanes_ ABSL_GUARDED_BY(mu_);
  BegunSteps begun_ ABSL_GUARDED_BY(mu_);  // and, as far as is known, not ended
  absl::flat_hash_map<uint64_t, SequenceStep> last_step_ ABSL_GUARDED_BY(mu_);  // by sequence
  size_t prune_at_ ABSL_GUARDED_BY(mu_) = kPruneMin;
};

}  // namespace

grpc::ServerBidiReactor<v1::StepsRequest, v1::StepsResponse>* ServeSteps(ServiceCore& core) {
  const auto stream = std::make_shared<StepsStream>(core);
  stream->Start();
  return stream.get();
}

}  // namespace ssmd
