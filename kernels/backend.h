// Backend: the seam between the state store and the hardware. One instance holds one registered
// model.
//
// It owns what DESIGN calls device state: checkpoint pages with their reference counts and free
// list, rings, slot cursors, and the rows of open steps. The host store owns identities (sequences,
// versions as seen by clients, steps, snapshots) and never steps from a cursor.
//
// Order. Control operations (everything but Verify) form one sequence, the control stream: each
// sees the effect of all earlier ones. Verify runs beside them; it reads only its immutable step
// rows, the pages that the step holds references to and the records [base, tail) + drafts of its
// own slots, so no control operation of another step disturbs it. The caller MUST NOT end a step
// (Commit, Abort) while one of its Verifies runs, nor run the same layer of one step twice at a
// time.
//
// Thread-safe under those rules. Every error leaves all state as it was; preconditions that only a
// bug of the caller can break are SSMD_CHECKs.
#pragma once

#include <memory>

#include "absl/functional/function_ref.h"
#include "kernels/params.h"
#include "kernels/status.h"

namespace ssmd {

// Runs independent work items on threads that somebody else owns. ParallelFor returns when all are
// done.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual void ParallelFor(size_t count, absl::FunctionRef<void(size_t)> item) = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual const char* name() const = 0;  // "cpu"

  // Makes a slot an empty sequence: cursors reset as one unit, zero page, no history.
  // Requires: the slot is free.
  virtual void ClearSlot(SlotIndex slot, uint32_t window, uint64_t rounding_key) = 0;

  // Plans a step: flush decision, source and target pages, ring positions, per row.
  // Errors: ABORTED + VERSION_MISMATCH; RESOURCE_EXHAUSTED + NO_PAGE when a mandatory fold finds no
  // free page.
  virtual absl::StatusOr<PlanReport> Plan(const PlanParams& params) = 0;

  // Outputs of all draft tokens of one layer; appends their records behind `tail`; a folding row
  // also writes its target page. Repeatable: the same inputs give the same bytes. Errors: INTERNAL
  // when the device fails. Poisoned rows are reported, not errors; other rows are unaffected.
  virtual absl::StatusOr<VerifyReport> Verify(const VerifyParams& params) = 0;

  // Accepts the first accepted[i] drafts of each row; pages and cursors move; the step's entry is
  // free again. Errors: OUT_OF_RANGE when a count exceeds its row's drafts; the step is then still
  // open.
  virtual absl::Status Commit(const CommitParams& params) = 0;

  // Drops the step: target pages are freed, nothing else ever changed.
  virtual void Abort(StepIndex step) = 0;

  // Moves `tail` back to `position`.
  // Errors: ABORTED + VERSION_MISMATCH; OUT_OF_RANGE + ROLLBACK_FLOOR outside [base, tail].
  virtual absl::Status Rollback(SlotIndex slot, uint64_t version, uint64_t position) = 0;

  // Folds committed records, all but K, into a fresh page now. Returns false when there is nothing
  // to fold. Requires: no step or import is open on the slot. Errors: RESOURCE_EXHAUSTED + NO_PAGE.
  virtual absl::StatusOr<bool> FlushSlot(SlotIndex slot) = 0;

  // Import: Begin takes a page; WriteImport fills it layer by layer; End makes it the slot's state
  // at `position` (version + 1), or Abort gives it back and nothing changed. `windows`, raw form:
  // per layer [w - 1, channels] in activation dtype. Requires: no step is open; until End or Abort
  // the slot accepts only CopySlot. Errors of BeginImport: ABORTED + VERSION_MISMATCH,
  // RESOURCE_EXHAUSTED + NO_PAGE.
  virtual absl::Status BeginImport(SlotIndex slot, uint64_t version) = 0;
  virtual void WriteImport(SlotIndex slot, uint32_t layer, uint64_t position,
                           absl::Span<const float> state) = 0;
  virtual void EndImport(SlotIndex slot, uint64_t position,
                         absl::Span<const std::vector<std::byte>> windows) = 0;
  virtual void AbortImport(SlotIndex slot) = 0;

  // The child shares the page (a reference) and gets copies of the records [base, position).
  // Errors: OUT_OF_RANGE + ROLLBACK_FLOOR when position lies outside [base, tail].
  virtual absl::Status CopySlot(const CopySlotParams& params) = 0;

  // Drops the slot's page reference; its bytes are garbage from here on.
  virtual void ReleaseSlot(SlotIndex slot) = 0;

  // Replays the checkpoint and the records [base, position) of one layer into `state`, FP32 [head,
  // d_v, d_k]. Errors: OUT_OF_RANGE + ROLLBACK_FLOOR when position lies outside [base, tail].
  virtual absl::Status ReadState(SlotIndex slot, uint32_t layer, uint64_t position,
                                 absl::Span<float> state) = 0;

  // Raw form: the convolution window before `position`, [w - 1, channels] in activation dtype,
  // oldest token first. Errors: as ReadState.
  virtual absl::Status ReadWindow(SlotIndex slot, uint32_t layer, uint64_t position,
                                  absl::Span<std::byte> window) = 0;

  virtual SlotCursor ReadCursor(SlotIndex slot) = 0;
  virtual PageCounts ReadPageCounts() = 0;
  virtual BackgroundBytes ReadBackgroundBytes() = 0;
};

// Backends are made by the server or embedder and handed to the store.
using BackendFactory =
    absl::FunctionRef<absl::StatusOr<std::unique_ptr<Backend>>(const BackendSpec&)>;

}  // namespace ssmd
