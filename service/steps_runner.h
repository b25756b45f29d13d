// StepsRunner: what becomes of the calls of one Steps stream, from their intake to their reply. The
// contract is in steps_stream.h; reading, writing and ending are the stream's. No gRPC here.
//
//   AdmitFirst | Admit -> lane of the step it names -> handler or Verify queue -> Replies::Send
//                  BeginStep, of versions to come:  held -> the step has ended -> planned -> Send
//
// Thread-safe, and without a lock of its own: lanes, held begins and begun steps lock for
// themselves, and handlers, stores, the queue and Replies are called with none of those locks held.
//
// Lifetime: shared, since a Verify on the queue keeps it. It calls Replies only while a call is in
// work: admitted, and not yet sent or dropped.
#pragma once

#include <atomic>
#include <memory>

#include "service/begun_steps.h"
#include "service/core.h"
#include "service/held_begins.h"
#include "service/step_lanes.h"
#include "service/steps_call.h"

namespace ssmd {

class StepsRunner : public std::enable_shared_from_this<StepsRunner> {
 public:
  class Replies {
   public:
    // Takes a call whose response is complete: once for each call admitted, but for those that
    // DropHeld counts.
    virtual void Send(const StepsCallRef& call) = 0;
    virtual bool broken() const = 0;  // nobody reads replies any more

   protected:
    ~Replies() = default;
  };

  StepsRunner(ServiceCore& core, Replies& replies, const Principal& caller = {});

  OwnerId owner() const { return OwnerId{owner_.load(std::memory_order_relaxed)}; }

  // The first message, whose context says for whom the stream speaks. An error refuses the stream,
  // and the call is then not admitted.
  absl::Status AdmitFirst(const StepsCallRef& call);
  // A later message; after AdmitFirst succeeded.
  void Admit(const StepsCallRef& call);

  // Plans or fails held BeginSteps whose predecessors have ended, in order of arrival: at once, or
  // on the thread that is at it.
  void CheckHeld();
  // No BeginStep is held from here on. AnswerHeld: those that are answer UNAVAILABLE / DRAINING.
  // DropHeld: they end without a reply; returns how many. It may be called with the stream's lock
  // held.
  void AnswerHeld();
  uint32_t DropHeld();

  // Aborts the steps that the stream began and that are open. Call it when no call is in work.
  void AbortOpenSteps();

 private:
  absl::StatusOr<SessionCall> EnterAgain(const v1::StepsRequest& request);
  void Dispatch(const StepsCallRef& call);
  absl::Status CheckWanted(const StepsCall& call) const;

  // Lanes. Run: false when a worker has taken the call and will go on with the lane.
  void EnterLane(uint64_t step_id, const StepsCallRef& call);
  void RunLane(uint64_t step_id, StepsCallRef call);
  bool Run(uint64_t step_id, const StepsCallRef& call);
  bool Enqueue(uint64_t step_id, const StepsCallRef& call);
  void Verify(uint64_t step_id, const StepsCallRef& call);

  void BeginAfterCommit(uint64_t committed_step, const StepsCallRef& call);
  void Begin(const StepsCallRef& call);
  void CheckEachHeld();
  void Plan(const StepsCallRef& call);

  void Reply(const StepsCallRef& call, const absl::Status& status);

  ServiceCore& core_;
  Replies& replies_;
  const Principal caller_;
  std::atomic<uint64_t> owner_{0};
  StepLanes lanes_;
  HeldBegins held_;
  std::atomic<uint32_t> checks_wanted_{0};  // calls of CheckHeld that no look has served yet
  BegunSteps begun_;
};

}  // namespace ssmd
