// ControlBlock: cursors, page references and step rows of one model on the CPU; the control
// stream's state.
//
// Owns no bytes of checkpoints or rings: it says which pages and rows mean what.
//
// Invariants (CheckInvariants, after every mutation in debug builds of the tests):
//   refs(page) = slots on it + open step rows reading it + open step rows writing it;   free iff 0,
//   zero page excepted a target page has exactly one reference base <= tail, tail - base <= R -
//   T_max, base <= max(high_water - K, 0) once anything was folded
//
// Thread-compatible: the backend's control mutex guards every call.
#pragma once

#include <vector>

#include "kernels/params.h"
#include "kernels/status.h"

namespace ssmd::cpu {

class ControlBlock {
 public:
  explicit ControlBlock(const BackendSpec& spec);

  void ClearSlot(SlotIndex slot, uint32_t window);
  absl::StatusOr<PlanReport> Plan(const PlanParams& params);
  absl::Status Commit(const CommitParams& params);
  void Abort(StepIndex step);
  absl::Status Rollback(SlotIndex slot, uint64_t version, uint64_t position);
  absl::Status CopySlot(const CopySlotParams& params);
  void ReleaseSlot(SlotIndex slot);

  // Rows of an open step; stable until it ends.
  const std::vector<StepRow>& rows(StepIndex step) const { return steps_[ToInt(step)].rows; }
  const SlotCursor& cursor(SlotIndex slot) const { return slots_[ToInt(slot)].cursor; }
  PageCounts page_counts() const;
  // Pages whose last reference went away since the last call; tracked only to poison them.
  std::vector<PageIndex> TakeFreed() { return std::move(freed_); }
  void CheckInvariants() const;

 private:
  struct Slot {
    SlotCursor cursor;
    bool live = false;
    bool in_step = false;
  };
  struct Step {
    std::vector<StepRow> rows;
    bool open = false;
  };

  PageIndex TakePage();
  void AddRef(PageIndex page) { ++page_refs_[ToInt(page)]; }
  void DropRef(PageIndex page);
  void CloseStep(Step& step);
  // Indices of the plan's rows that fold, given the free pages; RESOURCE_EXHAUSTED when a mandatory
  // one cannot.
  absl::StatusOr<std::vector<bool>> ChooseFolds(absl::Span<const PlanRow> rows,
                                                PlanReport& report) const;
  absl::Status CheckInWindow(const SlotCursor& cursor, uint64_t position) const;

  const FlushRule rule_;
  const bool track_freed_;
  const uint32_t folds_max_;
  std::vector<Slot> slots_;
  std::vector<Step> steps_;
  std::vector<uint32_t> page_refs_;
  std::vector<PageIndex> free_pages_;
  std::vector<PageIndex> freed_;
};

}  // namespace ssmd::cpu
