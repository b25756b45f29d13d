#include "service/steps_runner.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "service/fence.h"
#include "service/handlers.h"
#include "service/status_map.h"

namespace ssmd {
namespace {

absl::Status StreamCancelled() {
  return absl::CancelledError("the stream was cancelled before the call ran");
}

absl::Status PredecessorAborted() {
  return ErrorWithReason(absl::StatusCode::kAborted, reason::kStepAborted,
                         "begin: the step that was to produce its versions was aborted");
}

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

}  // namespace

StepsRunner::StepsRunner(ServiceCore& core, Replies& replies, const Principal& caller)
    : core_(core),
      replies_(replies),
      caller_(caller),
      held_(core.config.stream_begins_max, &core.streams.held),
      begun_(&core.models) {}

// ---- intake

absl::Status StepsRunner::AdmitFirst(const StepsCallRef& call) {
  call->begun = core_.clock();
  call->method = MethodOf(call->request);
  const v1::StepsRequest& request = call->request;
  SSMD_ASSIGN_OR_RETURN(call->session,
                        Fence(core_, caller_, request.has_context(), request.context()));
  owner_.store(request.context().session_id(), std::memory_order_relaxed);
  Dispatch(call);
  return absl::OkStatus();
}

void StepsRunner::Admit(const StepsCallRef& call) {
  call->begun = core_.clock();
  call->method = MethodOf(call->request);
  absl::StatusOr<SessionCall> session = EnterAgain(call->request);
  if (!session.ok()) return Reply(call, session.status());
  call->session = *std::move(session);
  Dispatch(call);
}

// A later message's context, if any, must be the first one's.
absl::StatusOr<SessionCall> StepsRunner::EnterAgain(const v1::StepsRequest& request) {
  if (request.has_context()) {
    SSMD_RETURN_IF_ERROR(CheckEpoch(core_, true, request.context()));
    if (OwnerId{request.context().session_id()} != owner())
      return InvalidField("context.session_id",
                          "context.session_id: expected the session of the first message");
  }
  return Reenter(core_, caller_, Method::kSteps, owner());
}

void StepsRunner::Dispatch(const StepsCallRef& call) {
  const v1::StepsRequest& request = call->request;
  switch (request.call_case()) {
    case v1::StepsRequest::kBegin:
      if (request.begin().has_commit_first())
        return EnterLane(request.begin().commit_first().step_id(), call);
      return Begin(call);
    case v1::StepsRequest::kVerify:
      return EnterLane(request.verify().step_id(), call);
    case v1::StepsRequest::kCommit:
      return EnterLane(request.commit().step_id(), call);
    case v1::StepsRequest::kAbort:
      return EnterLane(request.abort().step_id(), call);
    case v1::StepsRequest::CALL_NOT_SET:
      break;
  }
  Reply(call, InvalidField("call", "call: expected begin, verify, commit or abort, got none"));
}

absl::Status StepsRunner::CheckWanted(const StepsCall& call) const {
  if (replies_.broken()) return StreamCancelled();
  if (call.session.closing())
    return ErrorWithReason(absl::StatusCode::kNotFound, reason::kSessionExpired,
                           "the session was closed");
  return absl::OkStatus();
}

// ---- lanes

void StepsRunner::EnterLane(uint64_t step_id, const StepsCallRef& call) {
  if (lanes_.Enter(step_id, call)) RunLane(step_id, call);
}

void StepsRunner::RunLane(uint64_t step_id, StepsCallRef call) {
  while (call != nullptr && Run(step_id, call)) call = lanes_.Next(step_id);
}

bool StepsRunner::Run(uint64_t step_id, const StepsCallRef& call) {
  if (const absl::Status wanted = CheckWanted(*call); !wanted.ok()) {
    Reply(call, wanted);
    return true;
  }
  const v1::StepsRequest& request = call->request;
  switch (request.call_case()) {
    case v1::StepsRequest::kVerify:
      return !Enqueue(step_id, call);
    case v1::StepsRequest::kCommit: {
      v1::CommitResponse& response = *call->response.mutable_commit();
      response.set_server_epoch(core_.epoch);
      const absl::Status status =
          handlers::Commit(core_, *call->session, request.commit(), response);
      if (status.ok()) begun_.Forget(step_id);
      Reply(call, status);
      break;
    }
    case v1::StepsRequest::kAbort: {
      v1::AbortStepResponse& response = *call->response.mutable_abort();
      response.set_server_epoch(core_.epoch);
      const absl::Status status =
          handlers::AbortStep(core_, *call->session, request.abort(), response);
      if (status.ok()) begun_.Forget(step_id);
      Reply(call, status);
      break;
    }
    default:  // BeginStep with commit_first
      BeginAfterCommit(step_id, call);
      break;
  }
  core_.streams.StepMayHaveEnded(owner());
  return true;
}

// Puts a Verify on the queue of workers; false when it was answered already.
bool StepsRunner::Enqueue(uint64_t step_id, const StepsCallRef& call) {
  const absl::Status status = [&]() -> absl::Status {
    SSMD_ASSIGN_OR_RETURN(call->prepared,
                          handlers::PrepareVerify(core_, *call->session, call->request.verify()));
    call->queued = core_.clock();
    return core_.verify_queue.Push(
        [keep = shared_from_this(), step_id, call] { keep->Verify(step_id, call); },
        call->request.ByteSizeLong());
  }();
  if (status.ok()) return true;
  Reply(call, status);
  core_.streams.StepMayHaveEnded(owner());
  return false;
}

void StepsRunner::Verify(uint64_t step_id, const StepsCallRef& call) {
  const absl::Time begun = core_.clock();
  absl::Status status = CheckWanted(*call);
  if (status.ok()) {
    v1::VerifyResponse& response = *call->response.mutable_verify();
    response.set_server_epoch(core_.epoch);
    status = handlers::RunVerify(*call->prepared, call->session->id(), response);
    core_.CountVerify(step_id, begun - call->queued, core_.clock() - begun, response.committed());
    if (status.ok() && response.committed()) begun_.Forget(step_id);
  }
  Reply(call, status);
  core_.streams.StepMayHaveEnded(owner());
  RunLane(step_id, lanes_.Next(step_id));
}

// ---- BeginStep

// Runs in the lane of the step that is committed first.
void StepsRunner::BeginAfterCommit(uint64_t committed_step, const StepsCallRef& call) {
  v1::BeginStepRequest& begin = *call->request.mutable_begin();
  // Most often nothing else is open: then the handler does both, checked before the commit.
  if (begun_.Look(owner(), begun_.PredecessorsOf(begin, committed_step)) ==
      BegunSteps::State::kEnded)
    return Plan(call);
  begin.mutable_commit_first()->set_model_id(begin.model_id());
  v1::CommitResponse& committed = *call->response.mutable_begin()->mutable_committed();
  committed.set_server_epoch(core_.epoch);
  const absl::Status status =
      handlers::Commit(core_, *call->session, begin.commit_first(), committed);
  if (!status.ok()) return Reply(call, status);
  begun_.Forget(committed_step);
  begin.clear_commit_first();
  Begin(call);
}

void StepsRunner::Begin(const StepsCallRef& call) {
  call->predecessors = begun_.PredecessorsOf(call->request.begin());
  switch (begun_.Look(owner(), call->predecessors)) {
    case BegunSteps::State::kAborted:
      return Reply(call, PredecessorAborted());
    case BegunSteps::State::kEnded:
      return Plan(call);
    case BegunSteps::State::kOpen:
      break;
  }
  call->session.End();  // before any thread may take the call and enter anew
  if (const absl::Status held = held_.Hold(call); !held.ok()) return Reply(call, held);
  CheckHeld();  // the step may have ended between the look and the hold
}

void StepsRunner::CheckHeld() {
  // One thread at a time, so that BeginSteps are planned in order of arrival; it looks again for
  // those that came meanwhile.
  if (checks_wanted_.fetch_add(1) > 0) return;
  uint32_t seen = 0;
  do {
    seen = checks_wanted_.load();
    CheckEachHeld();
  } while (checks_wanted_.fetch_sub(seen) != seen);
}

void StepsRunner::CheckEachHeld() {
  for (const StepsCallRef& call : held_.All()) {
    // The request may be another thread's already, which took the call; its predecessors stay.
    const BegunSteps::State state = begun_.Look(owner(), call->predecessors);
    if (state == BegunSteps::State::kOpen || !held_.Take(call)) continue;
    absl::StatusOr<SessionCall> session = Reenter(core_, caller_, Method::kSteps, owner());
    if (!session.ok()) {
      Reply(call, session.status());
      continue;
    }
    call->session = *std::move(session);
    state == BegunSteps::State::kAborted ? Reply(call, PredecessorAborted()) : Plan(call);
  }
}

void StepsRunner::AnswerHeld() {
  const absl::Status draining = core_.CheckServing();
  for (const StepsCallRef& call : held_.Close(draining)) Reply(call, draining);
}

uint32_t StepsRunner::DropHeld() {
  return static_cast<uint32_t>(held_.Close(StreamCancelled()).size());
}

void StepsRunner::Plan(const StepsCallRef& call) {
  const v1::BeginStepRequest& begin = call->request.begin();
  v1::BeginStepResponse& response = *call->response.mutable_begin();
  response.set_server_epoch(core_.epoch);
  absl::Status status = CheckWanted(*call);
  if (status.ok()) status = handlers::BeginStep(core_, *call->session, begin, response);
  if (RodeCommit(call->response)) begun_.Forget(begin.commit_first().step_id());
  if (status.ok()) begun_.Add(owner(), begin, response);
  Reply(call, status);
}

void StepsRunner::AbortOpenSteps() {
  if (begun_.AbortAll(owner())) core_.streams.StepMayHaveEnded(owner());
}

// ---- replies

void StepsRunner::Reply(const StepsCallRef& call, const absl::Status& status) {
  call->session.End();  // the lease counts from here, before the client can see the reply
  core_.metrics.CountRpc(call->method, status.code(), core_.clock() - call->begun);
  call->response.set_tag(call->request.tag());
  if (!status.ok()) {
    core_.LogAnswer(call->method, absl::StrCat("tag ", call->request.tag()),
                    static_cast<uint64_t>(owner()), status);
    // A commit that rode along may have happened, whatever came of the rest.
    if (!RodeCommit(call->response)) call->response.clear_reply();
    *call->response.mutable_status() = ToRpcStatus(status);
  }
  call->prepared.reset();
  call->request = {};  // its tensors do not wait for a slow reader
  replies_.Send(call);
}

}  // namespace ssmd
