// What a history does to sequences and snapshots outside of steps.
#include "tests/model/history_run.h"

#include "absl/strings/str_cat.h"

namespace ssmd::testing {

void History::Create() {
  const uint32_t count = 1 + static_cast<uint32_t>(Below(2));
  const bool fits = model_->sequences.size() + count <= capacity_.sequences_max;
  const auto created = store_->CreateSequences(kOwner, count);
  if (!Expect(created.status(), fits ? absl::StatusCode::kOk : absl::StatusCode::kResourceExhausted,
              "create"))
    return;
  if (!fits) return Did("create refused");
  for (const SequenceId id : created->ids) model_->Create(id);
  Did("create");
}

void History::Fork() {
  const auto parent = AnySequence(false);
  if (!parent) return;
  const auto state = store_->Get(kOwner, *parent);
  if (!state.ok()) return Fail(state.status().ToString());
  const uint64_t position = state->floor + Below(state->position - state->floor + 1);
  const auto forked = store_->Fork(kOwner, {*parent, state->version}, 1, position);
  if (model_->sequences.size() == capacity_.sequences_max) {
    Expect(forked.status(), absl::StatusCode::kResourceExhausted, "fork beyond capacity");
    return Did("fork refused");
  }
  if (!Expect(forked.status(), absl::StatusCode::kOk, "fork")) return;
  model_->Fork(*parent, forked->ids[0], position);
  StoreModel::Sequence& child = model_->sequences.at(forked->ids[0]);
  if (fault_ == ModelFault::kForkSeesDrafts && state->open_step != kNoStep &&
      steps_.count(state->open_step) > 0) {
    for (const auto& row : steps_.at(state->open_step).model.rows) {
      if (row.id != *parent || row.drafts.empty()) continue;
      child.tokens.push_back(row.drafts[0]);
      child.states.push_back(row.states[0]);
    }
  }
  CheckState(forked->ids[0]);
  Did(state->open_step == kNoStep ? "fork" : "fork in step");
}

void History::Rollback() {
  const auto id = AnySequence(true);
  if (!id) return;
  const auto state = store_->Get(kOwner, *id);
  if (!state.ok()) return Fail(state.status().ToString());
  const SequenceVersion at{*id, state->version};
  if (OneIn(4)) {
    const uint64_t outside = state->floor > 0 ? state->floor - 1 : state->position + 1;
    Expect(store_->Rollback(kOwner, at, outside).status(), absl::StatusCode::kOutOfRange,
           "rollback outside");
    return Did("rollback refused");
  }
  const uint64_t position = state->floor + Below(state->position - state->floor + 1);
  if (!Expect(store_->Rollback(kOwner, at, position).status(), absl::StatusCode::kOk, "rollback") ||
      !Expect(store_->Rollback(kOwner, at, position).status(), absl::StatusCode::kOk,
              "repeated rollback")) {
    return;
  }
  if (fault_ != ModelFault::kSkipsRollback) model_->Rollback(*id, position);
  CheckState(*id);
  Did("rollback");
}

// A sequence takes over the exact state of another; a third of the imports stop half way.
void History::Import() {
  const auto target = AnySequence(true), source = AnySequence(false);
  if (!target || !source) return;
  const auto before = Fingerprint(*target);
  auto import = store_->BeginImport(kOwner, {*target, VersionOf(*target)});
  if (absl::IsResourceExhausted(import.status())) return Did("import refused");
  if (!Expect(import.status(), absl::StatusCode::kOk, "import")) return;
  StepRequest request;
  request.rows = {{*target, VersionOf(*target), 1}};
  Expect(store_->BeginStep(kOwner, request).status(), absl::StatusCode::kFailedPrecondition,
         "step during an import");
  const StoreModel::Sequence& from = model_->sequences.at(*source);
  LayerStates oracle = *from.states.back();
  const size_t stop = OneIn(3) ? Below(oracle.size()) : oracle.size();
  std::vector<std::vector<std::byte>> windows;
  for (uint32_t layer = 0; layer < stop; ++layer) {
    const std::vector<double>& state = oracle[layer].recurrence().state();
    const std::vector<float> values(state.begin(), state.end());
    Expect((*import)->WriteLayer(layer, from.position(), values), absl::StatusCode::kOk,
           "import layer");
  }
  for (uint32_t layer = 0; layer < geometry_.raw.size(); ++layer) {
    const auto& window = std::get<RawOracle>(oracle[layer].any).form.window;
    const uint32_t rows = geometry_.layers[layer].conv_width - 1;
    std::vector<std::byte>& bytes = windows.emplace_back();
    for (uint32_t row = 0; row < rows; ++row) {
      const bool exists = row + window.size() >= rows;
      for (uint32_t channel = 0; channel < geometry_.layers[layer].conv_channels(); ++channel) {
        const double value = exists ? window[row + window.size() - rows][channel] : 0;
        AppendAs(geometry_.formats.activation, static_cast<float>(value), bytes);
      }
    }
  }
  if (stop < oracle.size()) {
    Expect((*import)->Finish(from.position(), windows).status(),
           absl::StatusCode::kFailedPrecondition, "import with layers missing");
    import->reset();
    if (Fingerprint(*target) != before) Fail("an unfinished import changed its sequence");
    return Did("import dropped");
  }
  if (!Expect((*import)->Finish(from.position(), windows).status(), absl::StatusCode::kOk,
              "import finish"))
    return;
  const uint64_t folds = model_->sequences.at(*source).folds + 1;
  model_->Import(*source, *target);
  model_->sequences.at(*target).floor = model_->sequences.at(*target).position();
  model_->sequences.at(*target).folds = folds;
  CheckState(*target);
  Did("import");
}

void History::Flush() {
  const auto id = AnySequence(true);
  if (!id) return;
  const auto before = store_->Get(kOwner, *id);
  const std::vector<SequenceId> ids = {*id};
  const auto flushed = store_->Flush(kOwner, ids);
  if (absl::IsResourceExhausted(flushed.status())) return Did("flush refused");
  if (!Expect(flushed.status(), absl::StatusCode::kOk, "flush")) return;
  const auto after = store_->Get(kOwner, *id);
  if (!before.ok() || !after.ok()) return Fail("a sequence vanished in a flush");
  const uint64_t kept = geometry_.rollback_tokens_min;
  const bool had_records = before->position - before->floor > kept;
  if (*flushed != had_records) Fail("flushed count");
  if (after->floor != (had_records ? before->position - kept : before->floor))
    Fail("floor after a flush");
  // A flush that a caller asks for moves the checkpoint without a new version: a step aborted
  // before it may round differently when it is retried after it.
  std::erase_if(aborted_, [&](const OpenedStep& step) { return step.before.count(*id) > 0; });
  model_->Observe(*after);
  CheckState(*id);
  Did(had_records ? "flush" : "flush of nothing");
}

void History::Snapshot() {
  const auto id = AnySequence(false);
  if (!id) return;
  const auto state = store_->Get(kOwner, *id);
  if (!state.ok()) return Fail(state.status().ToString());
  const SnapshotKey key{absl::StrCat("key", next_key_++),
                        state->floor + Below(state->position - state->floor + 1)};
  const auto created = store_->CreateSnapshot(kOwner, {*id, state->version}, key);
  if (keys_.size() == capacity_.snapshots_max) {
    Expect(created.status(), absl::StatusCode::kResourceExhausted, "snapshot beyond capacity");
    if (keys_.empty()) return;
    const size_t victim = Below(keys_.size());
    Expect(store_->DeleteSnapshot(keys_[victim]), absl::StatusCode::kOk, "delete snapshot");
    Expect(store_->DeleteSnapshot(keys_[victim]), absl::StatusCode::kNotFound, "repeated delete");
    keys_.erase(keys_.begin() + static_cast<ptrdiff_t>(victim));
    return Did("delete snapshot");
  }
  if (!Expect(created.status(), absl::StatusCode::kOk, "snapshot")) return;
  model_->Snapshot(*id, key);
  keys_.push_back(key);
  Did("snapshot");
}

void History::Restore() {
  if (keys_.empty() || model_->sequences.size() == capacity_.sequences_max) return;
  const SnapshotKey& key = keys_[Below(keys_.size())];
  const auto restored = store_->CreateFromSnapshot(kOwner, key, 1);
  if (!Expect(restored.status(), absl::StatusCode::kOk, "restore")) return;
  if (restored->position != key.position) Fail("restored at another position");
  model_->Restore(key, restored->ids[0]);
  CheckState(restored->ids[0]);
  Did("restore");
}

void History::Release() {
  const auto id = AnySequence(false);
  if (!id || model_->sequences.size() < 2) return;
  const std::vector<SequenceId> ids = {*id};
  if (model_->sequences.at(*id).open) {
    Expect(store_->Release(kOwner, ids), absl::StatusCode::kFailedPrecondition,
           "release with an open step");
    return Did("release refused");
  }
  Expect(store_->Release(kOwner, ids), absl::StatusCode::kOk, "release");
  Expect(store_->Release(kOwner, ids), absl::StatusCode::kNotFound, "repeated release");
  model_->sequences.erase(*id);
  Did("release");
}

}  // namespace ssmd::testing
