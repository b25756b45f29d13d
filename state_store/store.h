// Store: the recurrent state of all sequences of one registered model. The facade that the service
// and embedders call.
//
//   CreateSequences -> { BeginStep -> Verify per layer -> Commit | Abort }* -> Release
// A step never modifies committed data: Commit moves pointers, Abort frees pages, and between them
// the sequence is bit for bit what it was. Fork and snapshot share the checkpoint page and copy the
// live records.
//
// Invariants (state_store/README.md lists them all): a row names state only by (sequence, version);
// two rows of a step never name the same sequence; a sequence has at most one open step; `version`
// rises by one per committed step and rollback.
//
// Repeats. A BeginStep with the rows of an open step returns that step; a repeated Commit with
// equal counts, and a repeated Rollback, return their recorded results for as long as no later
// mutation of the sequences replaced them.
//
// Thread-safe. One mutex guards all host state; Verify computes outside it. Ending a step waits for
// its running Verifies. The store reads no clock and starts no thread: times come in as arguments,
// compute runs on the backend's executor.
//
// Errors: the codes and reasons of kernels/status.h and proto/ssmd/v1/state_service.proto. After
// any error the store is unchanged, but for Verify, whose poisoned or failed layer aborts the step.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/mutex.h"
#include "state_store/geometry.h"

namespace ssmd {

inline constexpr size_t kWorkerWindowBytesMax = size_t{1} << 20;
// A caller's digest has at most 64; whoever keeps callers apart puts something before it.
inline constexpr size_t kStoredDigestBytesMax = 72;
// Highest position of an imported state: what steps, windows and drafts add to it never wraps.
inline constexpr uint64_t kPositionMax = uint64_t{1} << 62;

enum class SequenceId : uint64_t {};  // [tag 16 | counter 48]; never reused
enum class StepId : uint64_t {};      // likewise
enum class OwnerId : uint64_t {};     // a session; embedders use any constant
inline constexpr StepId kNoStep{0};
inline constexpr SequenceId kPaddingRow{0};

struct SequenceVersion {
  SequenceId id{};
  uint64_t version = 0;
};

struct SequenceState {
  SequenceId id{};
  uint64_t version = 0;
  uint64_t position = 0;  // committed tokens
  uint64_t floor = 0;     // position of the checkpoint page
  StepId open_step = kNoStep;
};

struct SnapshotKey {
  std::string digest;  // opaque, 1..kStoredDigestBytesMax
  uint64_t position = 0;
  friend bool operator==(const SnapshotKey&, const SnapshotKey&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const SnapshotKey& key) {
    return H::combine(std::move(h), key.digest, key.position);
  }
};

struct SnapshotOptions {
  bool overwrite = false;
  std::string worker_window;  // opaque, at most kWorkerWindowBytesMax
};

struct NewSequences {
  std::string worker_window;  // as given to CreateSnapshot
  std::vector<SequenceId> ids;
  uint64_t version = 1;
  uint64_t position = 0;
};

struct StepRequest {
  struct Row {
    SequenceId sequence{};  // kPaddingRow: tokens that belong to nobody; outputs are zeros
    uint64_t version = 0;
    uint32_t draft_tokens = 0;  // 0..T_max
    bool commit_all = false;    // its accepted count MUST be draft_tokens
    friend bool operator==(const Row&, const Row&) = default;
  };
  std::vector<Row> rows;
  bool auto_commit = false;
  bool allow_partial = false;  // a row with a bad sequence or version becomes padding
  bool SameRows(const StepRequest& other) const {
    return rows == other.rows && auto_commit == other.auto_commit &&
           allow_partial == other.allow_partial;
  }
  absl::Time deadline = absl::InfiniteFuture();  // AbortExpired ends the step after this
};

struct OpenStep {
  StepId id{};
  std::vector<uint64_t> positions;       // per row, before the step; 0 for padding
  std::vector<absl::Status> row_status;  // per row, with allow_partial
  uint32_t folds = 0;
};

struct CommitResult {
  std::vector<uint64_t> versions;  // per row; 0 for padding
  std::vector<uint64_t> positions;
};

struct VerifyRequest {
  StepId step{};
  uint32_t layer = 0;        // index into Geometry::layers
  uint64_t token_count = 0;  // tokens in `inputs`; checked against the step
  VerifyInputs inputs;       // post_conv form
  RawInputs raw;             // raw form
  void* output = nullptr;    // output dtype [token_count, head, d_v]
};

// How full rings are, seen once for each step with live rows (T > 0), when it is planned: their
// committed records over L, the mean of them. Above 1: folds were put off.
struct RingOccupancy {
  static constexpr std::array<double, 9> kBounds = {0.125, 0.25,  0.375, 0.5, 0.625,
                                                    0.75,  0.875, 1,     1.5};
  std::array<uint64_t, kBounds.size() + 1> steps{};  // [i]: above kBounds[i - 1], up to kBounds[i]
  double sum = 0;
  void Observe(double ratio) {
    ++steps[static_cast<size_t>(std::lower_bound(kBounds.begin(), kBounds.end(), ratio) -
                                kBounds.begin())];
    sum += ratio;
  }
};

// Sums since the store was made. Byte counts are what the kernels move, record padding included.
struct StoreCounters {
  uint64_t steps_begun = 0, steps_committed = 0, steps_aborted = 0, steps_expired = 0;
  uint64_t layers_verified = 0;
  uint64_t rows_committed = 0, tokens_drafted = 0, tokens_accepted = 0;  // of committed steps
  std::array<uint64_t, kDraftTokensMax>
      tokens_accepted_at{};  // [i]: rows that accepted more than i tokens
  uint64_t flushes_fused = 0, flushes_background = 0, flushes_requested = 0,
           flushes_deferred = 0;  // of committed steps
  uint64_t rollbacks = 0, forks = 0, snapshots_created = 0, imports = 0, exports = 0;
  uint64_t stale_versions = 0, poisoned_rows = 0;
  RingOccupancy ring_occupancy;
  uint64_t checkpoint_hp_read_bytes = 0, checkpoint_hp_write_bytes = 0;
  uint64_t checkpoint_lp_read_bytes = 0, checkpoint_lp_write_bytes = 0;  // 0: one precision
  uint64_t ring_read_bytes = 0, ring_write_bytes = 0;
  uint64_t ring_copy_bytes = 0;  // by forks, snapshots and restores; no checkpoint is ever copied
  // What an engine that writes the state every token moves for the same Verifies: per row, layer
  // and T tokens one read and T writes of the state (per-draft snapshots; T = 1 is plain decoding).
  uint64_t write_every_step_bytes = 0;
};

struct StoreUsage {
  uint32_t sequences = 0, snapshots = 0, open_steps = 0, imports = 0, exports = 0;
  PageCounts pages;
};

class StateImport;
class StateExport;

class Store {
 public:
  struct Options {
    Geometry geometry;
    Capacity capacity;
    uint16_t id_tag =
        1;  // distinguishes this store's ids from those of others and of earlier epochs
    bool poison_garbage = false;   // fill bytes that nobody owns with NaN
    uint32_t retry_after_ms = 50;  // hint in RESOURCE_EXHAUSTED
    // A sequence or step of another owner answers as one that does not exist (NOT_FOUND), not
    // PERMISSION_DENIED.
    bool foreign_is_unknown = false;
  };

  // Errors: those of ValidateGeometry and ValidateCapacity; the factory's.
  static absl::StatusOr<std::unique_ptr<Store>> Create(const Options& options,
                                                       BackendFactory make_backend);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  const Geometry& geometry() const { return options_.geometry; }
  const Capacity& capacity() const { return options_.capacity; }
  const char* backend_name() const { return backend_->name(); }

  // All or none. Errors: INVALID_ARGUMENT, RESOURCE_EXHAUSTED + NO_SLOT.
  absl::StatusOr<NewSequences> CreateSequences(OwnerId owner, uint32_t count);
  // As above; NOT_FOUND when there is no such snapshot.
  absl::StatusOr<NewSequences> CreateFromSnapshot(OwnerId owner, const SnapshotKey& key,
                                                  uint32_t count);
  // `position` defaults to the parent's tail. Errors: OUT_OF_RANGE + ROLLBACK_FLOOR,
  // RESOURCE_EXHAUSTED + NO_SLOT.
  absl::StatusOr<NewSequences> Fork(OwnerId owner, SequenceVersion parent, uint32_t count,
                                    std::optional<uint64_t> position = std::nullopt);
  // All or none. Errors: INVALID_ARGUMENT for duplicates, NOT_FOUND, FAILED_PRECONDITION +
  // STEP_OPEN.
  absl::Status Release(OwnerId owner, absl::Span<const SequenceId> ids);
  // Folds all but K records of each sequence now; returns how many had any. All are checked before
  // the first is folded. Versions do not change, but a step aborted before a flush may round
  // differently when it is retried after it. Errors: as Release; RESOURCE_EXHAUSTED + NO_PAGE, and
  // then those before it stay folded: nothing but their floor has changed.
  absl::StatusOr<uint32_t> Flush(OwnerId owner, absl::Span<const SequenceId> ids);
  // Gives sequences of one owner to another; ids empty: all. All or none. Errors:
  // FAILED_PRECONDITION + STEP_OPEN.
  absl::StatusOr<std::vector<SequenceState>> ChangeOwner(OwnerId from, OwnerId to,
                                                         absl::Span<const SequenceId> ids);
  absl::StatusOr<SequenceState> Get(OwnerId owner, SequenceId id) const;
  std::vector<SequenceState> GetAll(OwnerId owner) const;  // ascending by id

  absl::StatusOr<OpenStep> BeginStep(OwnerId owner, const StepRequest& request);
  // Checks that a Verify may run and says how many tokens its tensors must hold.
  absl::StatusOr<uint64_t> StepTokenCount(OwnerId owner, StepId step) const;
  // Returns the commit's result when auto_commit took effect.
  absl::StatusOr<std::optional<CommitResult>> Verify(OwnerId owner, const VerifyRequest& request);
  absl::StatusOr<CommitResult> Commit(OwnerId owner, StepId step,
                                      absl::Span<const uint32_t> accepted);
  absl::Status Abort(OwnerId owner, StepId step);
  // Aborts every step whose deadline has passed; returns how many.
  uint32_t AbortExpired(absl::Time now);

  absl::StatusOr<SequenceState> Rollback(OwnerId owner, SequenceVersion sequence,
                                         uint64_t position);

  // Returns false when the key was there and was kept.
  absl::StatusOr<bool> CreateSnapshot(OwnerId owner, SequenceVersion sequence,
                                      const SnapshotKey& key, const SnapshotOptions& options = {});
  absl::Status DeleteSnapshot(const SnapshotKey& key);
  // Stored keys with these digests up to a position, ascending by position.
  struct Prefixes {
    std::vector<SnapshotKey> keys;
    uint32_t too_long = 0;  // stored beyond the position
  };
  Prefixes LookupPrefix(absl::Span<const std::string> digests, uint64_t position_max) const;
  // Up to `count` keys after `after` (by digest, then position); nullopt: from the start.
  std::vector<SnapshotKey> ListSnapshots(const std::optional<SnapshotKey>& after,
                                         uint32_t count) const;

  // Replaces a sequence's state through the returned handle; see StateImport.
  // Errors: those of FindVersion; FAILED_PRECONDITION + STEP_OPEN or IMPORT_OPEN;
  // RESOURCE_EXHAUSTED + NO_PAGE.
  absl::StatusOr<std::unique_ptr<StateImport>> BeginImport(OwnerId owner, SequenceVersion sequence);
  // A private copy of a sequence (at its tail) or of a snapshot; see StateExport.
  // Errors: RESOURCE_EXHAUSTED + LIMIT_REACHED while another export runs.
  absl::StatusOr<std::unique_ptr<StateExport>> BeginExport(OwnerId owner, SequenceVersion sequence);
  absl::StatusOr<std::unique_ptr<StateExport>> BeginExport(const SnapshotKey& key);

  struct Released {
    uint32_t sequences = 0, steps = 0;
  };
  // Aborts the owner's steps and releases its sequences. Snapshots stay.
  Released ReleaseOwner(OwnerId owner);

  // As ReleaseOwner, but the sequences stay and keep their owner; `sequences` counts them.
  Released DetachOwner(OwnerId owner);

  // Drops every snapshot and refuses whatever would make a sequence or a step from here on; returns
  // how many snapshots there were. Errors: FAILED_PRECONDITION while sequences live or steps,
  // imports or exports are open.
  absl::StatusOr<uint32_t> Retire();

  // Sequences of an owner, without looking at them.
  uint32_t CountOwned(OwnerId owner) const;

  // The state of one layer at `position` of the window, FP32 [head, d_v, d_k], by replay; nothing
  // changes.
  absl::Status ReadState(OwnerId owner, SequenceId id, uint32_t layer, uint64_t position,
                         absl::Span<float> state) const;

  StoreCounters counters() const;
  StoreUsage usage() const;

 private:
  friend class StateImport;
  friend class StateExport;
  struct Sequence;
  struct Step;
  struct Import;
  struct SnapshotEntry {
    SlotIndex slot{};
    std::string worker_window;
  };

  Store(const Options& options, std::unique_ptr<Backend> backend);

  absl::StatusOr<Sequence*> Find(OwnerId owner, SequenceId id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<Sequence*> FindVersion(OwnerId owner, SequenceVersion sequence)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<std::shared_ptr<Step>> FindStep(OwnerId owner, StepId id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  static absl::Status CheckIdle(const Sequence& sequence);
  absl::StatusOr<std::vector<Sequence*>> FindIdle(OwnerId owner,
                                                  absl::Span<const SequenceId> ids) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  SequenceState StateOf(const Sequence& sequence) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckRows(const StepRequest& request) const;
  absl::StatusOr<Sequence*> FindRow(OwnerId owner, const StepRequest::Row& row)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<std::unique_ptr<StateExport>> ExportSlot(SlotIndex source, uint64_t position,
                                                          std::string worker_window)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint32_t EndOwned(OwnerId owner) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndImport(Import& import) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckRoom(uint32_t count) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  SlotIndex TakeSlot() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReturnSlot(SlotIndex slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint64_t NextId() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Sequence& AddSequence(OwnerId owner, SlotIndex slot, uint64_t position)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<NewSequences> CopyToNew(OwnerId owner, SlotIndex source, uint64_t position,
                                         uint32_t count) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DropSequence(Sequence& sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CloseStep(const std::shared_ptr<Step>& step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<CommitResult> CommitLocked(const std::shared_ptr<Step>& step,
                                            absl::Span<const uint32_t> accepted)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AbortLocked(const std::shared_ptr<Step>& step, absl::string_view why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Replaces what a sequence remembers; an ended step that nobody remembers is gone.
  void Record(std::shared_ptr<Step>& record, const std::shared_ptr<Step>& step)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CountVerify(const Step& step, uint32_t layer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CountCopy(SlotIndex child) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint32_t NextWindow() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  const std::unique_ptr<Backend> backend_;

  mutable Mutex mu_;
  std::vector<SlotIndex> free_slots_ ABSL_GUARDED_BY(mu_);
  std::vector<StepIndex> free_steps_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<SequenceId, std::unique_ptr<Sequence>> sequences_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<StepId, std::shared_ptr<Step>> open_steps_ ABSL_GUARDED_BY(mu_);
  // Ended steps that some sequence still holds as its last one: what a repeated call is answered
  // from.
  absl::flat_hash_map<StepId, std::shared_ptr<Step>> ended_steps_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<SnapshotKey, SnapshotEntry> snapshots_ ABSL_GUARDED_BY(mu_);
  uint32_t imports_ ABSL_GUARDED_BY(mu_) = 0;
  uint32_t exports_ ABSL_GUARDED_BY(mu_) = 0;
  bool retired_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t next_rounding_key_ ABSL_GUARDED_BY(mu_) = 1;  // of sequences, in order of creation
  std::shared_ptr<Step> last_padding_step_ ABSL_GUARDED_BY(mu_);
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;  // of sequences and steps
  uint32_t next_phase_ ABSL_GUARDED_BY(mu_) = 0;
  StoreCounters counters_ ABSL_GUARDED_BY(mu_);
};

// An import under way: all or nothing. Destroying it before Finish leaves the sequence as it was.
//
// While it lives the sequence accepts no step, rollback, flush or release; fork and snapshot see
// the old state. If its owner's session ends, calls answer ABORTED. Thread-compatible; outlived by
// the store.
class StateImport {
 public:
  ~StateImport();
  // `state`: FP32 [head, d_v, d_k] of one layer at `position`, the same in every call.
  // Errors, here and in Finish: INVALID_ARGUMENT for a position above kPositionMax.
  absl::Status WriteLayer(uint32_t layer, uint64_t position, absl::Span<const float> state);
  // `windows`, raw form: per layer [w - 1, channels] in activation dtype; else empty.
  // Errors: FAILED_PRECONDITION + LAYERS_MISSING; INVALID_ARGUMENT for windows.
  absl::StatusOr<SequenceState> Finish(uint64_t position,
                                       absl::Span<const std::vector<std::byte>> windows);

 private:
  friend class Store;
  StateImport(Store* store, std::shared_ptr<Store::Import> import)
      : store_(store), import_(std::move(import)) {}
  Store* const store_;
  const std::shared_ptr<Store::Import> import_;
};

// A frozen copy of committed state, for reading out. Thread-compatible; outlived by the store.
class StateExport {
 public:
  ~StateExport();
  uint64_t position() const { return position_; }
  const std::string& worker_window() const { return worker_window_; }  // of a snapshot
  absl::Status ReadLayer(uint32_t layer, absl::Span<float> state) const;
  absl::Status ReadWindow(uint32_t layer, absl::Span<std::byte> window) const;  // raw form

 private:
  friend class Store;
  StateExport(Store* store, SlotIndex slot, uint64_t position, std::string worker_window)
      : store_(store), slot_(slot), position_(position), worker_window_(std::move(worker_window)) {}
  Store* const store_;
  const SlotIndex slot_;
  const uint64_t position_;
  const std::string worker_window_;
};

}  // namespace ssmd
