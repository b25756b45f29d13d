// One plain struct per backend operation. Every pointer says dtype, shape and who writes it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "kernels/cursor.h"
#include "kernels/layout.h"

namespace ssmd {

// Indices into a backend's pools. Distinct types: a slot is never a page is never a step.
enum class SlotIndex : uint32_t {};
enum class PageIndex : uint32_t {};
enum class StepIndex : uint32_t {};
inline constexpr PageIndex kNoPage{0xffffffffu};
inline constexpr PageIndex kZeroPage{0};  // immutable zeros, shared by every empty sequence
constexpr uint32_t ToInt(SlotIndex index) { return static_cast<uint32_t>(index); }
constexpr uint32_t ToInt(PageIndex index) { return static_cast<uint32_t>(index); }
constexpr uint32_t ToInt(StepIndex index) { return static_cast<uint32_t>(index); }

// What a backend reserves for one registered model, all of it at start.
struct BackendSpec {
  std::vector<LayerShape> layers;
  Formats formats;
  FlushRule rule;
  uint32_t slot_count =
      0;  // sequences and snapshots together: a snapshot is a slot that no step names
  uint32_t page_count = 0;  // zero page included
  uint32_t step_count = 0;  // open steps
  uint32_t rows_max = 0;    // rows of one step
  uint32_t folds_max = 0;   // F: folds planned in one step, mandatory ones included
  // Fill whatever no record or page owns with 0xff (NaN in every format): a read of garbage then
  // shows.
  bool poison_garbage = false;
};

// The committed state of one slot. Lives with the backend; moved only by its control operations.
struct SlotCursor {
  uint64_t base = 0;        // position of the checkpoint page: the rollback floor
  uint64_t tail = 0;        // committed tokens
  uint64_t high_water = 0;  // highest tail ever held
  uint64_t version = 0;     // +1 per committed step, rollback and import
  PageIndex page = kZeroPage;
  uint32_t window =
      0;  // W: records before the next fold is due; L but for the staggered first window
  friend bool operator==(const SlotCursor&, const SlotCursor&) = default;
};

// What one row of a step reads and writes. Written by Plan, immutable until the step ends.
struct StepRow {
  uint64_t base = 0;
  uint64_t tail = 0;
  uint64_t fold_to = 0;  // meaningful when target_page != kNoPage
  SlotIndex slot{};
  uint32_t draft_tokens = 0;  // T of this row; 0: nothing is read or written
  PageIndex source_page = kNoPage;
  PageIndex target_page = kNoPage;  // kNoPage: this row only reads
};

struct PlanRow {
  SlotIndex slot{};
  uint64_t version = 0;       // MUST equal the slot's
  uint32_t draft_tokens = 0;  // 0..T_max
};

struct PlanParams {
  StepIndex step{};
  absl::Span<const PlanRow> rows;  // distinct slots
};

// Sums over the rows of a planned step; the bytes of every later Verify follow from them.
struct PlanReport {
  uint32_t live_rows = 0;  // rows with T > 0
  uint32_t folds = 0;
  uint32_t folds_deferred = 0;     // due, put off for want of pages or of F
  uint64_t committed_records = 0;  // sum of h over live rows
  uint64_t draft_tokens = 0;       // sum of T
};

// Inputs of one layer for all tokens of a step, packed by row in the order of the plan. Read only.
struct VerifyInputs {
  const void* q = nullptr;             // activation dtype [tokens, key_group, d_k]
  const void* k = nullptr;             // activation dtype [tokens, key_group, d_k]
  const void* v = nullptr;             // activation dtype [tokens, head, d_v]
  const float* log_alpha = nullptr;    // FP32 [tokens, head], KDA [tokens, head, d_k]; finite, <= 0
  const float* beta = nullptr;         // FP32 [tokens, head]; GDN and KDA, else null
  const float* value_scale = nullptr;  // FP32 [tokens, head]; Mamba-2 (dt); null: 1
};

struct VerifyParams {
  StepIndex step{};
  uint32_t layer = 0;        // index into BackendSpec::layers
  uint64_t token_count = 0;  // MUST equal the plan's sum of T
  VerifyInputs inputs;
  void* output = nullptr;  // output dtype [tokens, head, d_v]; written
};

// Why a row's results cannot be used. Bits.
enum PoisonFlags : uint32_t {
  kPoisonNone = 0,
  kPoisonInput = 1,     // an input is NaN or infinite
  kPoisonDecay = 2,     // a log_alpha is positive
  kPoisonOverflow = 4,  // a correction, output or folded state left its format's range
};

struct PoisonedRow {
  uint32_t row = 0;
  uint32_t flags = kPoisonNone;
};

struct VerifyReport {
  std::vector<PoisonedRow> poisoned;  // ascending by row
};

struct CommitParams {
  StepIndex step{};
  absl::Span<const uint32_t> accepted;  // per row, 0..T
};

// Copies committed state to another slot: fork, snapshot and restore.
struct CopySlotParams {
  SlotIndex source{};
  SlotIndex target{};     // free
  uint64_t position = 0;  // in [source.base, source.tail]: the child's tail
  uint32_t window = 0;    // the child's first window
};

struct PageCounts {
  uint32_t total = 0;  // zero page not counted
  uint32_t free = 0;
  uint32_t step_targets = 0;
};

}  // namespace ssmd
