// Snapshots, and whole states that come in (import) or go out (export). None of it touches a live
// sequence's bytes: a snapshot and an export are copies in slots of their own, an import fills a
// page of its own.
#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "kernels/check.h"
#include "state_store/store_internal.h"

namespace ssmd {

absl::StatusOr<bool> Store::CreateSnapshot(OwnerId owner, SequenceVersion wanted,
                                           const SnapshotKey& key, const SnapshotOptions& options) {
  MutexLock lock(&mu_);
  if (key.digest.empty() || key.digest.size() > kStoredDigestBytesMax) {
    return InvalidField("key.digest",
                        absl::StrCat("key.digest: expected 1..", kStoredDigestBytesMax,
                                     " bytes, got ", key.digest.size()));
  }
  if (options.worker_window.size() > kWorkerWindowBytesMax) {
    return InvalidField("worker_window",
                        absl::StrCat("worker_window: expected at most ", kWorkerWindowBytesMax,
                                     " bytes, got ", options.worker_window.size()));
  }
  auto existing = snapshots_.find(key);
  const bool replaces = existing != snapshots_.end();
  if (replaces && !options.overwrite) return false;
  SSMD_ASSIGN_OR_RETURN(Sequence * sequence, FindVersion(owner, wanted));
  if (!replaces && snapshots_.size() >= options_.capacity.snapshots_max) {
    return ErrorWithReason(absl::StatusCode::kResourceExhausted, reason::kNoSnapshotSlot,
                           absl::StrCat("snapshots_max: all ", options_.capacity.snapshots_max,
                                        " are in use; delete one"));
  }
  const SlotCursor cursor = backend_->ReadCursor(sequence->slot);
  if (key.position < cursor.base || key.position > cursor.tail) {
    return OutsideWindow(absl::StrCat("key.position ", key.position, ": ", Name(wanted.id),
                                      " holds positions ", cursor.base, "..", cursor.tail),
                         cursor.base, cursor.tail);
  }
  if (replaces) {  // validated: from here on nothing fails
    ReturnSlot(existing->second.slot);
    snapshots_.erase(existing);
  }
  const SlotIndex slot = TakeSlot();
  const absl::Status copied = backend_->CopySlot({.source = sequence->slot,
                                                  .target = slot,
                                                  .position = key.position,
                                                  .window = options_.geometry.window_records});
  SSMD_CHECK(copied.ok(), "snapshot copy failed after its check: %s", copied.ToString().c_str());
  CountCopy(slot);
  snapshots_.emplace(
      key,
      SnapshotEntry{slot, options.worker_window});  // visible only now that its bytes are complete
  ++counters_.snapshots_created;
  return true;
}

absl::Status Store::DeleteSnapshot(const SnapshotKey& key) {
  MutexLock lock(&mu_);
  auto found = snapshots_.find(key);
  if (found == snapshots_.end()) {
    return absl::NotFoundError(
        absl::StrCat("key: no snapshot with this digest at position ", key.position));
  }
  ReturnSlot(found->second.slot);
  snapshots_.erase(found);
  return absl::OkStatus();
}

Store::Prefixes Store::LookupPrefix(absl::Span<const std::string> digests,
                                    uint64_t position_max) const {
  const absl::flat_hash_set<std::string> wanted(digests.begin(), digests.end());
  Prefixes result;
  MutexLock lock(&mu_);
  for (const auto& [key, entry] : snapshots_) {
    if (!wanted.contains(key.digest)) continue;
    if (key.position > position_max) {
      ++result.too_long;
    } else {
      result.keys.push_back(key);
    }
  }
  std::sort(result.keys.begin(), result.keys.end(), [](const SnapshotKey& a, const SnapshotKey& b) {
    return std::tie(a.position, a.digest) < std::tie(b.position, b.digest);
  });
  return result;
}

std::vector<SnapshotKey> Store::ListSnapshots(const std::optional<SnapshotKey>& after,
                                              uint32_t count) const {
  auto order = [](const SnapshotKey& a, const SnapshotKey& b) {
    return std::tie(a.digest, a.position) < std::tie(b.digest, b.position);
  };
  std::vector<SnapshotKey> keys;
  {
    MutexLock lock(&mu_);
    for (const auto& [key, entry] : snapshots_) {
      if (!after.has_value() || order(*after, key)) keys.push_back(key);
    }
  }
  std::sort(keys.begin(), keys.end(), order);
  if (keys.size() > count) keys.resize(count);
  return keys;
}

// ---- import

absl::StatusOr<std::unique_ptr<StateImport>> Store::BeginImport(OwnerId owner,
                                                                SequenceVersion wanted) {
  MutexLock lock(&mu_);
  SSMD_ASSIGN_OR_RETURN(Sequence * sequence, FindVersion(owner, wanted));
  SSMD_RETURN_IF_ERROR(CheckIdle(*sequence));
  absl::Status begun = backend_->BeginImport(sequence->slot, wanted.version);
  if (!begun.ok())
    return WithDetail(begun, detail::kRetryAfterMs, absl::StrCat(options_.retry_after_ms));
  auto import = std::make_shared<Import>();
  import->sequence = wanted.id;
  import->slot = sequence->slot;
  import->layer_done.assign(options_.geometry.layers.size(), false);
  sequence->importing = import;
  ++imports_;
  return std::unique_ptr<StateImport>(new StateImport(this, std::move(import)));
}

// Gives the page back unless the import is over. Waits for a layer that is being written.
void Store::EndImport(Import& import) {
  auto quiet = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !import.busy; };
  mu_.Await(absl::Condition(&quiet));
  if (!std::exchange(import.open, false)) return;
  backend_->AbortImport(import.slot);
  sequences_.at(import.sequence)->importing.reset();
  --imports_;
}

StateImport::~StateImport() {
  MutexLock lock(&store_->mu_);
  store_->EndImport(*import_);
}

namespace {
absl::Status CheckPosition(uint64_t position) {
  if (position <= kPositionMax) return absl::OkStatus();
  return InvalidField("descriptor.position", absl::StrCat("descriptor.position: expected at most ",
                                                          kPositionMax, ", got ", position));
}

absl::Status ImportEnded(SequenceId id) {
  return absl::AbortedError(
      absl::StrCat("the import into ", Name(id), " was ended: its session is gone"));
}
}  // namespace

absl::Status StateImport::WriteLayer(uint32_t layer, uint64_t position,
                                     absl::Span<const float> state) {
  SSMD_RETURN_IF_ERROR(CheckPosition(position));
  const Geometry& geometry = store_->geometry();
  if (layer >= geometry.layers.size() || state.size() != geometry.layers[layer].state_elements()) {
    return InvalidField(
        "chunk", absl::StrCat("layer index ", layer, ": state of ", state.size(), " elements"));
  }
  {
    MutexLock lock(&store_->mu_);
    if (!import_->open) return ImportEnded(import_->sequence);
    import_->busy = true;
  }
  store_->backend_->WriteImport(import_->slot, layer, position, state);
  MutexLock lock(&store_->mu_);
  import_->busy = false;
  import_->layer_done[layer] = true;
  return absl::OkStatus();
}

absl::StatusOr<SequenceState> StateImport::Finish(
    uint64_t position, absl::Span<const std::vector<std::byte>> windows) {
  SSMD_RETURN_IF_ERROR(CheckPosition(position));
  const Geometry& geometry = store_->geometry();
  const bool raw = !geometry.raw.empty();
  if (windows.size() != (raw ? geometry.layers.size() : 0)) {
    return InvalidField("chunk", absl::StrCat("expected ", raw ? geometry.layers.size() : 0,
                                              " convolution windows, got ", windows.size()));
  }
  for (size_t i = 0; i < windows.size(); ++i) {
    const LayerShape& layer = geometry.layers[i];
    const uint64_t expected = uint64_t{layer.conv_width - 1} * layer.conv_channels() *
                              DtypeBytes(geometry.formats.activation);
    if (windows[i].size() != expected) {
      return InvalidField("chunk", absl::StrCat("layer index ", i, ": convolution window of ",
                                                windows[i].size(), " bytes, expected ", expected));
    }
  }
  MutexLock lock(&store_->mu_);
  if (!import_->open) return ImportEnded(import_->sequence);
  for (size_t i = 0; i < import_->layer_done.size(); ++i) {
    if (import_->layer_done[i]) continue;
    return ErrorWithReason(absl::StatusCode::kFailedPrecondition, reason::kLayersMissing,
                           absl::StrCat("import: layer index ", i, " has no state"));
  }
  store_->backend_->EndImport(import_->slot, position, windows);
  import_->open = false;
  --store_->imports_;
  Store::Sequence& sequence = *store_->sequences_.at(import_->sequence);
  sequence.importing.reset();
  ++sequence.version;
  sequence.position = position;
  store_->Record(sequence.last_commit, nullptr);
  sequence.last_rollback.reset();
  ++store_->counters_.imports;
  return store_->StateOf(sequence);
}

// ---- export

absl::StatusOr<std::unique_ptr<StateExport>> Store::ExportSlot(SlotIndex source, uint64_t position,
                                                               std::string worker_window) {
  if (exports_ >= kExportSlots) {
    return Exhausted(reason::kLimit,
                     absl::StrCat("exports: ", exports_, " of ", kExportSlots, " are running"),
                     options_.retry_after_ms);
  }
  const SlotIndex slot = TakeSlot();
  const absl::Status copied = backend_->CopySlot({.source = source,
                                                  .target = slot,
                                                  .position = position,
                                                  .window = options_.geometry.window_records});
  SSMD_CHECK(copied.ok(), "export copy failed: %s", copied.ToString().c_str());
  CountCopy(slot);
  ++exports_;
  ++counters_.exports;
  return std::unique_ptr<StateExport>(
      new StateExport(this, slot, position, std::move(worker_window)));
}

absl::StatusOr<std::unique_ptr<StateExport>> Store::BeginExport(OwnerId owner,
                                                                SequenceVersion wanted) {
  MutexLock lock(&mu_);
  SSMD_ASSIGN_OR_RETURN(const Sequence* sequence, FindVersion(owner, wanted));
  return ExportSlot(sequence->slot, sequence->position, "");
}

absl::StatusOr<std::unique_ptr<StateExport>> Store::BeginExport(const SnapshotKey& key) {
  MutexLock lock(&mu_);
  auto found = snapshots_.find(key);
  if (found == snapshots_.end()) {
    return absl::NotFoundError(
        absl::StrCat("snapshot: none with this digest at position ", key.position));
  }
  return ExportSlot(found->second.slot, key.position, found->second.worker_window);
}

StateExport::~StateExport() {
  MutexLock lock(&store_->mu_);
  store_->ReturnSlot(slot_);
  --store_->exports_;
}

absl::Status StateExport::ReadLayer(uint32_t layer, absl::Span<float> state) const {
  return store_->backend_->ReadState(slot_, layer, position_, state);
}

absl::Status StateExport::ReadWindow(uint32_t layer, absl::Span<std::byte> window) const {
  return store_->backend_->ReadWindow(slot_, layer, position_, window);
}

}  // namespace ssmd
