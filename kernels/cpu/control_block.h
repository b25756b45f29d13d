// ControlBlock: cursors, page references and step rows of one model on the CPU; the control
// stream's state.
//
// Owns no bytes of checkpoints or rings: it says which pages and rows mean what.
//
// Invariants (CheckInvariants, after every mutation in debug builds of the tests):
//   refs(page) = slots on it + open step rows reading it + open step rows writing it
//                + pending flushes reading it + pending flushes writing it + imports writing it;
//                free iff 0, zero page excepted
//   a step's target page has exactly one reference base <= tail, tail - base <= R -
//   T_max, base <= max(high_water - K, 0) once anything was folded
//
// Thread-compatible: the backend's control mutex guards every call.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "kernels/params.h"
#include "kernels/status.h"

namespace ssmd::cpu {

// Runs background flushes for a control block, in whatever time it likes: no decision depends on
// it.
class FlushRunner {
 public:
  virtual ~FlushRunner() = default;
  virtual void Start(const BackgroundFlush& flush) = 0;
  // Returns when the target page is complete.
  virtual void Finish(FlushId id) = 0;
  // Returns when nothing of the flush runs or will run.
  virtual void Drop(FlushId id) = 0;
};

class ControlBlock {
 public:
  ControlBlock(const BackendSpec& spec, FlushRunner* runner);

  void ClearSlot(SlotIndex slot, uint32_t window, uint64_t rounding_key);
  absl::StatusOr<PlanReport> Plan(const PlanParams& params);
  absl::Status Commit(const CommitParams& params);
  void Abort(StepIndex step);
  absl::Status Rollback(SlotIndex slot, uint64_t version, uint64_t position);
  absl::Status CopySlot(const CopySlotParams& params);
  void ReleaseSlot(SlotIndex slot);
  absl::StatusOr<bool> FlushSlot(SlotIndex slot);
  absl::Status BeginImport(SlotIndex slot, uint64_t version);
  void EndImport(SlotIndex slot, uint64_t position);
  void AbortImport(SlotIndex slot);
  PageIndex import_page(SlotIndex slot) const { return slots_[ToInt(slot)].import_page; }

  // OUT_OF_RANGE + ROLLBACK_FLOOR unless position is in [base, tail].
  absl::Status CheckInWindow(const SlotCursor& cursor, uint64_t position) const;
  // Rows of an open step; stable until it ends.
  const std::vector<StepRow>& rows(StepIndex step) const { return steps_[ToInt(step)].rows; }
  const SlotCursor& cursor(SlotIndex slot) const { return slots_[ToInt(slot)].cursor; }
  PageCounts page_counts() const;
  // Pages that became free since the last call and still are; tracked only to poison them.
  std::vector<PageIndex> TakeFreed();
  void CheckInvariants() const;

 private:
  struct Slot {
    SlotCursor cursor;
    bool live = false;
    bool in_step = false;
    PageIndex import_page = kNoPage;  // an import is open
    uint64_t import_floor = 0;        // where the last import started it: nothing below exists
    bool idle() const { return live && !in_step && import_page == kNoPage; }
    std::optional<BackgroundFlush> pending;
  };
  struct Step {
    std::vector<StepRow> rows;
    bool open = false;
  };

  PageIndex TakePage();
  void AddRef(PageIndex page) { ++page_refs_[ToInt(page)]; }
  void DropRef(PageIndex page);
  void CloseStep(Step& step);
  // What the next step of a slot starts from: its cursor, or that after its pending flush.
  struct Origin {
    uint64_t base;
    PageIndex page;
    uint32_t window;
    bool installs_flush;
  };
  Origin OriginOf(const Slot& slot) const;
  absl::Status CheckVersion(SlotIndex slot, uint64_t version) const;
  void StartFlush(SlotIndex slot);
  void CancelFlush(Slot& slot);
  void InstallFlush(Slot& slot);
  void MaybeStartFlush(SlotIndex index, uint32_t draft_tokens, PlanReport& report);
  // Indices of the plan's rows that fold, given the free pages; RESOURCE_EXHAUSTED when a mandatory
  // one cannot.
  absl::StatusOr<std::vector<bool>> ChooseFolds(absl::Span<const PlanRow> rows,
                                                PlanReport& report) const;

  const FlushRule rule_;
  const FlushMode flush_mode_;
  const bool track_freed_;
  const uint32_t folds_max_;
  FlushRunner* const runner_;
  uint64_t next_flush_ = 1;
  std::vector<Slot> slots_;
  std::vector<Step> steps_;
  std::vector<uint32_t> page_refs_;
  std::vector<PageIndex> free_pages_;
  std::vector<PageIndex> freed_;
};

}  // namespace ssmd::cpu
