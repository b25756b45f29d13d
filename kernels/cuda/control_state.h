// Where the control stream's state lives: cursors, page references, free list and step rows of one
// model, in device memory; what control_logic.h works on.
//
// Invariants: those of cpu/control_block.h. Besides, free_pages[0 .. counters->free) are exactly
// the pages with no reference, and only kernels of the control stream touch any of it; verify
// kernels read the rows of open steps, which are immutable.
//
// Plain data; pointers are device memory (host memory where a test runs the same code).
#pragma once

#include "kernels/cuda/verify_launch.h"

namespace ssmd::cuda {

// SlotCursor and what else belongs to a slot.
struct DeviceSlot {
  uint64_t base = 0, tail = 0, high_water = 0, version = 0, rounding_key = 0;
  uint64_t import_floor = 0;
  uint64_t flush_from = 0, flush_to = 0, flush_born = 0;  // of the pending background flush
  uint32_t flush_source = kNone, flush_target = kNone;    // kNone: none is pending
  uint32_t page = 0, window = 0;
  uint32_t import_page = kNone;  // an import is open
  uint16_t live = 0, in_step = 0;
};

// A fold outside of a verify: a background flush, a requested flush, or a replay.
struct DeviceFold {
  uint64_t from, to;  // records [from, to)
  uint64_t rounding_key;
  uint32_t slot, source_page, target_page;
};

// What a plan is made from; row i of the step is rows[i].
struct DevicePlanRow {
  uint64_t version;
  uint32_t slot;  // kNone: padding
  uint32_t draft_tokens;
};

enum class ControlCode : uint32_t {
  kOk,
  kNothing,          // there was nothing to do
  kVersionMismatch,  // row; a: the slot's version
  kNoPage,           // a: rows that must fold, b: pages they may take
  kOutsideWindow,    // a: base, b: tail
  kAcceptedTooMany,  // row; a: accepted, b: drafts
  kBroken,           // a precondition that only a bug of the caller can break; row
};

struct ControlResult {
  ControlCode code = ControlCode::kOk;
  uint32_t row = kNone;
  uint64_t a = 0, b = 0;
};

struct DevicePlanReport {
  ControlResult result;
  PlanReport report;
  uint64_t background_records = 0;  // that the started flushes read
};

struct ControlCounters {
  uint32_t free = 0;
  uint32_t step_targets = 0;
  uint32_t freed = 0;  // pages became free since they were last poisoned
};

// What a step is besides its DeviceStep, which verifies read.
struct StepState {
  uint32_t open = 0;
  uint32_t row_count = 0;
  uint32_t targets = 0;
};

inline constexpr uint32_t kScratchArrays = 5;  // of rows_max words each
inline constexpr uint32_t kHistogramWords = kRingRecordsMax + 1;

struct ControlState {
  FlushRule rule;
  FlushMode flush_mode = FlushMode::kFused;
  uint32_t folds_max = 0;
  uint32_t slot_count = 0, page_count = 0, step_count = 0, rows_max = 0;

  DeviceSlot* slots = nullptr;     // [slot_count]
  uint32_t* page_refs = nullptr;   // [page_count]
  uint32_t* free_pages = nullptr;  // [page_count]
  uint32_t* page_freed = nullptr;  // [page_count] 1: free, and not poisoned since
  ControlCounters* counters = nullptr;
  StepState* step_states = nullptr;         // [step_count]
  DeviceStep* steps = nullptr;              // [step_count]
  DeviceRow* rows = nullptr;                // [step_count][rows_max]
  DevicePlanReport* reports = nullptr;      // [step_count]: of the last plan
  ControlResult* commit_results = nullptr;  // [step_count]
  uint32_t* scratch = nullptr;              // [kScratchArrays][rows_max] and the histogram
  DeviceFold* folds = nullptr;     // [rows_max]: background flushes that the last plan started
  uint32_t* fold_count = nullptr;  // of `folds`

  SSMD_HOST_DEVICE DeviceRow* step_rows(uint32_t step) const {
    return rows + uint64_t{step} * rows_max;
  }
};

}  // namespace ssmd::cuda
