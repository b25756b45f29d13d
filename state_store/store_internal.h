// What store.cc (sequences, snapshots, owners) and store_steps.cc (steps) share. Private to the
// store.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "state_store/store.h"

namespace ssmd {

inline std::string Name(SequenceId id) {
  return absl::StrFormat("sequence 0x%016x", static_cast<uint64_t>(id));
}
inline std::string Name(StepId id) {
  return absl::StrFormat("step 0x%016x", static_cast<uint64_t>(id));
}

// Prefixes a message with who asked, keeping code and details.
inline absl::Status Annotate(const absl::Status& status, absl::string_view prefix) {
  absl::Status result(status.code(), absl::StrCat(prefix, ": ", status.message()));
  status.ForEachPayload(
      [&](absl::string_view key, const absl::Cord& value) { result.SetPayload(key, value); });
  return result;
}

inline absl::Status Retired() { return absl::NotFoundError("the model was unregistered"); }

// Guarded by Store::mu_. `version` and `position` mirror the backend's cursor: exact, since every
// count passes through the host here, but never what a step is planned from.
struct Store::Sequence {
  SequenceId id{};
  OwnerId owner{};
  SlotIndex slot{};
  uint64_t version = 1;
  uint64_t position = 0;
  std::shared_ptr<Step> open;
  std::shared_ptr<Import> importing;
  // What a repeated call is answered from: the last mutation is last_commit or last_rollback, not
  // both.
  std::shared_ptr<Step> last_commit;
  std::shared_ptr<Step> last_abort;
  struct RollbackRecord {
    uint64_t version_before, position;
  };
  std::optional<RollbackRecord> last_rollback;
};

// Guarded by Store::mu_.
struct Store::Import {
  SequenceId sequence{};
  SlotIndex slot{};
  std::vector<bool> layer_done;
  bool open = true;   // false: finished, aborted, or its owner is gone
  bool busy = false;  // a layer is being written outside the lock
};

struct Store::Step {
  enum class Phase { kOpen, kCommitted, kAborted };
  StepId id{};
  StepIndex index{};
  OwnerId owner{};
  StepRequest request;
  OpenStep reply;
  PlanReport report;
  uint64_t token_count() const { return report.draft_tokens + report.padding_tokens; }
  Phase phase = Phase::kOpen;
  std::vector<Sequence*> sequences;  // per row, while open; null for padding
  std::vector<bool> layer_done, layer_busy;
  uint32_t layers_done = 0;
  uint32_t holders = 0;  // sequences that remember this step after its end
  uint32_t verifies_running = 0;
  bool ending = false;             // no new Verify; somebody waits for the running ones
  std::vector<uint32_t> accepted;  // committed
  CommitResult result;             // committed
  std::string why_aborted;         // aborted
};

}  // namespace ssmd
