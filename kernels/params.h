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
inline constexpr SlotIndex kNoSlot{0xffffffffu};  // a padding row
inline constexpr PageIndex kZeroPage{0};          // immutable zeros, shared by every empty sequence
constexpr uint32_t ToInt(SlotIndex index) { return static_cast<uint32_t>(index); }
constexpr uint32_t ToInt(PageIndex index) { return static_cast<uint32_t>(index); }
constexpr uint32_t ToInt(StepIndex index) { return static_cast<uint32_t>(index); }

// When a fold runs. A property of the registration, not of the load.
enum class FlushMode : uint8_t {
  kFused,       // inside the Verify of the step at which it is due
  kBackground,  // ahead of time, beside Verifies; the step at which it is due reads the new page
};

// The short convolution and gates of one layer in raw form; FP32, row-major.
enum class KdaGate : uint8_t { kSoftplus, kLowerBound };
struct RawParameters {
  std::vector<float> conv_weight;  // [channels, w]; tap w-1 is the current token
  std::vector<float> conv_bias;    // [channels] or empty
  std::vector<float> a_log;        // [head]
  std::vector<float> dt_bias;      // [head], KDA [head, d_k]; or empty
  std::vector<float> d;            // [head] or empty; Mamba-2
  bool qk_l2_norm = false;         // GDN, KDA: epsilon 1e-6, then q times d_k^-0.5
  KdaGate kda_gate = KdaGate::kSoftplus;
  float gate_lower_bound = 0;
  friend bool operator==(const RawParameters&, const RawParameters&) = default;
};

// What a backend reserves for one registered model, all of it at start.
struct BackendSpec {
  std::vector<LayerShape> layers;
  std::vector<RawParameters> raw;  // per layer; empty: post_conv form
  Formats formats;
  FlushRule rule;
  uint64_t rounding_seed = 0;  // of the model
  uint32_t slot_count =
      0;  // sequences and snapshots together: a snapshot is a slot that no step names
  uint32_t page_count = 0;  // zero page included
  uint32_t step_count = 0;  // open steps
  uint32_t rows_max = 0;    // rows of one step
  uint32_t folds_max = 0;   // F: folds planned in one step, mandatory ones included
  FlushMode flush_mode = FlushMode::kFused;
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
  uint64_t rounding_key =
      0;  // of the sequence: with the fold position it decides every rounding bit
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
  uint64_t rounding_key = 0;
  SlotIndex slot{};
  uint32_t draft_tokens = 0;  // T of this row; 0: nothing is read or written
  PageIndex source_page = kNoPage;
  PageIndex target_page = kNoPage;  // kNoPage: this row only reads
  // The row reads the page of its sequence's background flush: base and source_page are that
  // flush's target, and the commit makes it the sequence's page.
  bool installs_flush = false;
};

// A fold that runs beside Verifies. Reads records [from, to) and page `source`, writes page
// `target`.
enum class FlushId : uint64_t {};  // never reused
struct BackgroundFlush {
  FlushId id{};
  SlotIndex slot{};
  uint64_t rounding_key = 0;
  PageIndex source = kNoPage;
  PageIndex target = kNoPage;
  uint64_t from = 0;
  uint64_t to = 0;
  uint64_t born = 0;  // tail when it was planned; steps planned from a later tail read its page
};

struct PlanRow {
  SlotIndex slot{};           // kNoSlot: padding, nothing is read, outputs are zeros
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
  uint32_t folds_deferred = 0;   // due, put off for want of pages or of F
  uint32_t background_used = 0;  // rows that read the page of a finished background flush
  uint32_t background_started = 0;
  uint64_t committed_records = 0;  // sum of h over live rows
  uint64_t draft_tokens = 0;       // sum of T over live rows
  uint64_t padding_tokens = 0;     // sum of T over padding rows
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

// The same in raw form, before convolution and gates; all in activation dtype. Read only.
struct RawInputs {
  const void* projection = nullptr;  // [tokens, channels]: Mamba-2 x|B|C, GDN and KDA q|k|v
  const void* dt = nullptr;          // [tokens, head]; Mamba-2
  const void* a = nullptr;           // [tokens, head]; GDN
  const void* b = nullptr;           // [tokens, head]; GDN, KDA
  const void* gate = nullptr;        // [tokens, head, d_k]; KDA
};

struct VerifyParams {
  StepIndex step{};
  uint32_t layer = 0;        // index into BackendSpec::layers
  uint64_t token_count = 0;  // MUST equal the plan's sum of T
  VerifyInputs inputs;       // post_conv form
  RawInputs raw;             // raw form
  void* output = nullptr;    // output dtype [tokens, head, d_v]; written
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
  uint64_t rounding_key = 0;
};

// What background flushes have moved so far.
struct BackgroundBytes {
  uint64_t checkpoint_hp_read = 0, checkpoint_hp_write = 0, checkpoint_lp_write = 0;
  uint64_t ring_read = 0;
};

struct PageCounts {
  uint32_t total = 0;  // zero page not counted
  uint32_t free = 0;
  uint32_t step_targets = 0;
};

}  // namespace ssmd
