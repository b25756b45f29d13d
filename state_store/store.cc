#include "state_store/store.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "state_store/store_internal.h"

namespace ssmd {

absl::StatusOr<std::unique_ptr<Store>> Store::Create(const Options& options,
                                                     BackendFactory make_backend) {
  SSMD_RETURN_IF_ERROR(ValidateGeometry(options.geometry));
  SSMD_RETURN_IF_ERROR(ValidateCapacity(options.capacity));
  SSMD_RETURN_IF_ERROR(ReservedBytes(options.geometry, options.capacity).status());
  SSMD_ASSIGN_OR_RETURN(
      std::unique_ptr<Backend> backend,
      make_backend(MakeBackendSpec(options.geometry, options.capacity, options.poison_garbage)));
  return std::unique_ptr<Store>(new Store(options, std::move(backend)));
}

Store::Store(const Options& options, std::unique_ptr<Backend> backend)
    : options_(options), backend_(std::move(backend)) {
  const uint32_t slots =
      options_.capacity.sequences_max + options_.capacity.snapshots_max + kExportSlots;
  for (uint32_t slot = slots; slot > 0; --slot) free_slots_.push_back(SlotIndex{slot - 1});
  for (uint32_t step = options_.capacity.steps_max; step > 0; --step)
    free_steps_.push_back(StepIndex{step - 1});
}

Store::~Store() = default;

// ---- look-ups

absl::StatusOr<Store::Sequence*> Store::Find(OwnerId owner, SequenceId id) const {
  auto found = sequences_.find(id);
  const bool foreign = found != sequences_.end() && found->second->owner != owner;
  if (found == sequences_.end() || (foreign && options_.foreign_is_unknown))
    return absl::NotFoundError(absl::StrCat(Name(id), " is unknown or released"));
  if (foreign)
    return absl::PermissionDeniedError(absl::StrCat(Name(id), " belongs to another session"));
  return found->second.get();
}

absl::StatusOr<Store::Sequence*> Store::FindVersion(OwnerId owner, SequenceVersion wanted) {
  SSMD_ASSIGN_OR_RETURN(Sequence * sequence, Find(owner, wanted.id));
  if (sequence->version == wanted.version) return sequence;
  ++counters_.stale_versions;
  return ErrorWithReason(absl::StatusCode::kAborted, reason::kVersionMismatch,
                         absl::StrCat(Name(wanted.id), " has version ", sequence->version,
                                      ", request expected ", wanted.version));
}

absl::StatusOr<std::shared_ptr<Store::Step>> Store::FindStep(OwnerId owner, StepId id) const {
  std::shared_ptr<Step> step;
  if (auto open = open_steps_.find(id); open != open_steps_.end()) {
    step = open->second;
  } else if (auto ended = ended_steps_.find(id); ended != ended_steps_.end()) {
    step = ended->second;
  }
  const bool foreign = step != nullptr && step->owner != owner;
  if (step == nullptr || (foreign && options_.foreign_is_unknown)) {
    return absl::NotFoundError(
        absl::StrCat(Name(id), " is unknown, or ended and its sequences have moved on"));
  }
  if (foreign)
    return absl::PermissionDeniedError(absl::StrCat(Name(id), " belongs to another session"));
  return step;
}

// ---- slots

absl::Status Store::CheckRoom(uint32_t count) const {
  if (retired_) return Retired();
  const uint32_t limit = options_.capacity.sequences_max;
  if (count == 0 || count > limit) {
    return InvalidField(
        "count", absl::StrCat("count: expected 1..", limit, " (sequences_max), got ", count));
  }
  const uint64_t live = sequences_.size();
  if (count <= limit - live) return absl::OkStatus();
  return Exhausted(reason::kNoSlot,
                   absl::StrCat("sequences_max: ", count, " sequences asked, ", limit - live,
                                " of ", limit, " free"),
                   options_.retry_after_ms);
}

// Slots of sequences and snapshots come from one list; CheckRoom and CreateSnapshot keep each
// within its own limit.
SlotIndex Store::TakeSlot() {
  SSMD_CHECK(!free_slots_.empty(), "a slot was taken beyond the limits");
  const SlotIndex slot = free_slots_.back();
  free_slots_.pop_back();
  return slot;
}

void Store::ReturnSlot(SlotIndex slot) {
  backend_->ReleaseSlot(slot);
  free_slots_.push_back(slot);
}

uint64_t Store::NextId() {
  constexpr int kTagShift = 48;
  return uint64_t{options_.id_tag} << kTagShift | next_id_++;
}

uint32_t Store::NextWindow() {
  const Geometry& geometry = options_.geometry;
  const uint32_t shortest = geometry.rollback_tokens_min + geometry.draft_tokens_max;
  const uint32_t phases = geometry.window_records - shortest + 1;
  return geometry.window_records - next_phase_++ % phases;
}

Store::Sequence& Store::AddSequence(OwnerId owner, SlotIndex slot, uint64_t position) {
  auto sequence = std::make_unique<Sequence>();
  sequence->id = SequenceId{NextId()};
  sequence->owner = owner;
  sequence->slot = slot;
  sequence->position = position;
  Sequence& added = *sequence;
  sequences_.emplace(added.id, std::move(sequence));
  return added;
}

// ---- sequences

absl::StatusOr<NewSequences> Store::CreateSequences(OwnerId owner, uint32_t count) {
  MutexLock lock(&mu_);
  SSMD_RETURN_IF_ERROR(CheckRoom(count));
  NewSequences created;
  for (uint32_t i = 0; i < count; ++i) {
    const SlotIndex slot = TakeSlot();
    backend_->ClearSlot(slot, NextWindow(), next_rounding_key_++);
    created.ids.push_back(AddSequence(owner, slot, 0).id);
  }
  return created;
}

void Store::CountCopy(SlotIndex child) {
  const SlotCursor cursor = backend_->ReadCursor(child);
  counters_.ring_copy_bytes += (cursor.tail - cursor.base) * options_.geometry.record_bytes();
}

absl::StatusOr<NewSequences> Store::CopyToNew(OwnerId owner, SlotIndex source, uint64_t position,
                                              uint32_t count) {
  NewSequences created{.position = position};
  for (uint32_t i = 0; i < count; ++i) {
    const SlotIndex slot = TakeSlot();
    absl::Status copied = backend_->CopySlot({.source = source,
                                              .target = slot,
                                              .position = position,
                                              .window = NextWindow(),
                                              .rounding_key = next_rounding_key_++});
    if (!copied.ok()) {  // only a position outside the window fails, and it fails at the first copy
      SSMD_CHECK(i == 0, "copy %u failed after copy 0 succeeded", i);
      free_slots_.push_back(slot);
      return copied;
    }
    CountCopy(slot);
    created.ids.push_back(AddSequence(owner, slot, position).id);
  }
  return created;
}

absl::StatusOr<NewSequences> Store::CreateFromSnapshot(OwnerId owner, const SnapshotKey& key,
                                                       uint32_t count) {
  MutexLock lock(&mu_);
  auto snapshot = snapshots_.find(key);
  if (snapshot == snapshots_.end()) {
    return absl::NotFoundError(
        absl::StrCat("from_snapshot: no snapshot with this digest at position ", key.position));
  }
  SSMD_RETURN_IF_ERROR(CheckRoom(count));
  SSMD_ASSIGN_OR_RETURN(NewSequences created,
                        CopyToNew(owner, snapshot->second.slot, key.position, count));
  created.worker_window = snapshot->second.worker_window;
  return created;
}

absl::StatusOr<NewSequences> Store::Fork(OwnerId owner, SequenceVersion parent, uint32_t count,
                                         std::optional<uint64_t> position) {
  MutexLock lock(&mu_);
  SSMD_ASSIGN_OR_RETURN(Sequence * sequence, FindVersion(owner, parent));
  SSMD_RETURN_IF_ERROR(CheckRoom(count));
  auto created = CopyToNew(owner, sequence->slot, position.value_or(sequence->position), count);
  if (!created.ok()) return Annotate(created.status(), Name(parent.id));
  counters_.forks += count;
  return created;
}

void Store::Record(std::shared_ptr<Step>& record, const std::shared_ptr<Step>& step) {
  if (record != nullptr && --record->holders == 0) ended_steps_.erase(record->id);
  record = step;
  if (record != nullptr) ++record->holders;
}

void Store::DropSequence(Sequence& sequence) {
  SSMD_CHECK(sequence.open == nullptr, "sequence dropped with an open step");
  Record(sequence.last_commit, nullptr);
  Record(sequence.last_abort, nullptr);
  ReturnSlot(sequence.slot);
  sequences_.erase(sequence.id);
}

absl::Status Store::CheckIdle(const Sequence& sequence) {
  if (sequence.open != nullptr) {
    return ErrorWithReason(
        absl::StatusCode::kFailedPrecondition, reason::kStepOpen,
        absl::StrCat(Name(sequence.id), " has ", Name(sequence.open->id), " open"));
  }
  if (sequence.importing != nullptr) {
    return ErrorWithReason(absl::StatusCode::kFailedPrecondition, reason::kImportOpen,
                           absl::StrCat(Name(sequence.id), " has an import open"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Store::Sequence*>> Store::FindIdle(
    OwnerId owner, absl::Span<const SequenceId> ids) const {
  absl::flat_hash_set<SequenceId> seen;
  std::vector<Sequence*> found;
  for (const SequenceId id : ids) {
    if (!seen.insert(id).second) {
      return InvalidField("sequence_ids",
                          absl::StrCat("sequence_ids: ", Name(id), " appears twice"));
    }
    SSMD_ASSIGN_OR_RETURN(Sequence * sequence, Find(owner, id));
    SSMD_RETURN_IF_ERROR(CheckIdle(*sequence));
    found.push_back(sequence);
  }
  return found;
}

absl::Status Store::Release(OwnerId owner, absl::Span<const SequenceId> ids) {
  MutexLock lock(&mu_);
  SSMD_ASSIGN_OR_RETURN(const std::vector<Sequence*> found, FindIdle(owner, ids));
  for (Sequence* sequence : found) DropSequence(*sequence);
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> Store::Flush(OwnerId owner, absl::Span<const SequenceId> ids) {
  MutexLock lock(&mu_);
  SSMD_ASSIGN_OR_RETURN(const std::vector<Sequence*> found, FindIdle(owner, ids));
  uint32_t flushed = 0;
  for (const Sequence* sequence : found) {
    auto folded = backend_->FlushSlot(sequence->slot);
    if (!folded.ok()) {
      return WithDetail(Annotate(folded.status(), Name(sequence->id)), detail::kRetryAfterMs,
                        absl::StrCat(options_.retry_after_ms));
    }
    flushed += *folded;
    counters_.flushes_requested += *folded;
  }
  return flushed;
}

absl::StatusOr<std::vector<SequenceState>> Store::ChangeOwner(OwnerId from, OwnerId to,
                                                              absl::Span<const SequenceId> ids) {
  MutexLock lock(&mu_);
  std::vector<SequenceId> all(ids.begin(), ids.end());
  if (ids.empty()) {
    for (const auto& [id, sequence] : sequences_) {
      if (sequence->owner == from) all.push_back(id);
    }
    std::sort(all.begin(), all.end());
  }
  SSMD_ASSIGN_OR_RETURN(const std::vector<Sequence*> found, FindIdle(from, all));
  std::vector<SequenceState> states;
  for (Sequence* sequence : found) {
    sequence->owner = to;
    states.push_back(StateOf(*sequence));
  }
  return states;
}

uint32_t Store::CountOwned(OwnerId owner) const {
  MutexLock lock(&mu_);
  uint32_t count = 0;
  for (const auto& [id, sequence] : sequences_) count += sequence->owner == owner;
  return count;
}

SequenceState Store::StateOf(const Sequence& sequence) const {
  return {.id = sequence.id,
          .version = sequence.version,
          .position = sequence.position,
          .floor = backend_->ReadCursor(sequence.slot).base,
          .open_step = sequence.open ? sequence.open->id : kNoStep};
}

absl::StatusOr<SequenceState> Store::Get(OwnerId owner, SequenceId id) const {
  MutexLock lock(&mu_);
  SSMD_ASSIGN_OR_RETURN(const Sequence* sequence, Find(owner, id));
  return StateOf(*sequence);
}

std::vector<SequenceState> Store::GetAll(OwnerId owner) const {
  std::vector<SequenceId> ids;
  {
    MutexLock lock(&mu_);
    for (const auto& [id, sequence] : sequences_) {
      if (sequence->owner == owner) ids.push_back(id);
    }
  }
  std::sort(ids.begin(), ids.end());
  std::vector<SequenceState> states;
  for (const SequenceId id : ids) {
    if (auto state = Get(owner, id); state.ok())
      states.push_back(*state);  // released meanwhile: not there
  }
  return states;
}

// ---- rollback, snapshots, owners

absl::StatusOr<SequenceState> Store::Rollback(OwnerId owner, SequenceVersion wanted,
                                              uint64_t position) {
  MutexLock lock(&mu_);
  SSMD_ASSIGN_OR_RETURN(Sequence * sequence, Find(owner, wanted.id));
  const auto& last = sequence->last_rollback;
  const bool is_repeat = last.has_value() && last->version_before == wanted.version &&
                         last->position == position && sequence->version == wanted.version + 1;
  if (!is_repeat) {
    SSMD_RETURN_IF_ERROR(FindVersion(owner, wanted).status());
    SSMD_RETURN_IF_ERROR(CheckIdle(*sequence));
    absl::Status moved = backend_->Rollback(sequence->slot, wanted.version, position);
    if (!moved.ok()) return Annotate(moved, Name(wanted.id));
    ++sequence->version;
    sequence->position = position;
    Record(sequence->last_commit, nullptr);
    sequence->last_rollback = {wanted.version, position};
    ++counters_.rollbacks;
  }
  return StateOf(*sequence);
}

// Aborts the owner's steps and imports; returns how many steps.
uint32_t Store::EndOwned(OwnerId owner) {
  uint32_t steps = 0;
  auto open_step = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) -> std::shared_ptr<Step> {
    for (const auto& [id, step] : open_steps_) {
      if (step->owner == owner) return step;
    }
    return nullptr;
  };
  while (std::shared_ptr<Step> step =
             open_step()) {  // waiting lets others run, so look again each time
    AbortLocked(step, "its session ended");
    ++steps;
  }
  auto open_import = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) -> std::shared_ptr<Import> {
    for (const auto& [id, sequence] : sequences_) {
      if (sequence->owner == owner && sequence->importing != nullptr) return sequence->importing;
    }
    return nullptr;
  };
  while (std::shared_ptr<Import> import = open_import()) EndImport(*import);
  return steps;
}

Store::Released Store::DetachOwner(OwnerId owner) {
  MutexLock lock(&mu_);
  Released kept{.steps = EndOwned(owner)};
  for (const auto& [id, sequence] : sequences_) kept.sequences += sequence->owner == owner;
  return kept;
}

Store::Released Store::ReleaseOwner(OwnerId owner) {
  MutexLock lock(&mu_);
  Released released{.steps = EndOwned(owner)};
  std::vector<Sequence*> sequences;
  for (const auto& [id, sequence] : sequences_) {
    if (sequence->owner == owner) sequences.push_back(sequence.get());
  }
  for (Sequence* sequence : sequences) DropSequence(*sequence);
  released.sequences = static_cast<uint32_t>(sequences.size());
  return released;
}

absl::StatusOr<uint32_t> Store::Retire() {
  MutexLock lock(&mu_);
  if (!sequences_.empty() || !open_steps_.empty() || imports_ + exports_ > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the model is in use: ", sequences_.size(), " sequences, ", open_steps_.size(),
                     " steps, ", imports_, " imports, ", exports_, " exports"));
  }
  const auto dropped = static_cast<uint32_t>(snapshots_.size());
  for (const auto& [key, entry] : snapshots_) ReturnSlot(entry.slot);
  snapshots_.clear();
  retired_ = true;
  return dropped;
}

absl::Status Store::ReadState(OwnerId owner, SequenceId id, uint32_t layer, uint64_t position,
                              absl::Span<float> state) const {
  MutexLock lock(&mu_);
  SSMD_ASSIGN_OR_RETURN(const Sequence* sequence, Find(owner, id));
  return backend_->ReadState(sequence->slot, layer, position, state);
}

StoreCounters Store::counters() const {
  MutexLock lock(&mu_);
  StoreCounters counters = counters_;
  const BackgroundBytes background = backend_->ReadBackgroundBytes();
  counters.checkpoint_hp_read_bytes += background.checkpoint_hp_read;
  counters.checkpoint_hp_write_bytes += background.checkpoint_hp_write;
  counters.checkpoint_lp_write_bytes += background.checkpoint_lp_write;
  counters.ring_read_bytes += background.ring_read;
  return counters;
}

StoreUsage Store::usage() const {
  MutexLock lock(&mu_);
  return {.sequences = static_cast<uint32_t>(sequences_.size()),
          .snapshots = static_cast<uint32_t>(snapshots_.size()),
          .open_steps = static_cast<uint32_t>(open_steps_.size()),
          .imports = imports_,
          .exports = exports_,
          .pages = backend_->ReadPageCounts()};
}

}  // namespace ssmd
