#include "tests/model/history.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/model/history_run.h"
#include "tests/testing/compare.h"
#include "tests/testing/tolerance.h"

namespace ssmd::testing {

void History::Operate() {
  const uint64_t dice = Below(100);
  if (model_->sequences.empty() || dice < 4) return Create();
  if (dice < 24) return Begin(nullptr);
  if (dice < 27) return RefusedBegin();
  if (dice < 64) return Verify();
  if (dice < 82) return End();
  if (dice < 85 && !aborted_.empty()) {
    const OpenedStep retry = aborted_[Below(aborted_.size())];
    return Begin(&retry);
  }
  if (dice < 87) return Rollback();
  if (dice < 88) return OneIn(2) ? Import() : Flush();
  if (dice < 91) return Fork();
  if (dice < 94) return Snapshot();
  if (dice < 97) return Restore();
  return Release();
}

std::optional<SequenceId> History::AnySequence(bool idle) {
  std::vector<SequenceId> candidates;
  for (const auto& [id, sequence] : model_->sequences) {
    if (!idle || !sequence.open) candidates.push_back(id);
  }
  if (candidates.empty()) return std::nullopt;
  return candidates[Below(candidates.size())];
}

// Everything about a sequence that a client could ever see, bit for bit.
std::vector<std::byte> History::Fingerprint(SequenceId id) {
  std::vector<std::byte> bytes;
  auto append = [&](const void* from, size_t size) {
    const auto* begin = static_cast<const std::byte*>(from);
    bytes.insert(bytes.end(), begin, begin + size);
  };
  const auto state = store_->Get(kOwner, id);
  if (!state.ok()) {
    Fail(state.status().ToString());
    return bytes;
  }
  append(&state->version, sizeof(state->version));
  append(&state->position, sizeof(state->position));
  append(&state->floor, sizeof(state->floor));
  for (uint32_t layer = 0; layer < geometry_.layers.size(); ++layer) {
    std::vector<float> values(geometry_.layers[layer].state_elements());
    for (const uint64_t position : {state->floor, state->position}) {
      if (!Expect(store_->ReadState(kOwner, id, layer, position, absl::MakeSpan(values)),
                  absl::StatusCode::kOk, "ReadState")) {
        return bytes;
      }
      append(values.data(), values.size() * sizeof(float));
    }
  }
  Digest(bytes);
  return bytes;
}

// `oracle` is the layer at the end of what is compared.
Tolerance History::MakeTolerance(uint32_t layer, const LayerOracle& oracle, uint64_t records,
                                 uint64_t drafts, uint64_t folds) const {
  const bool two_precision = geometry_.formats.two_precision();
  const auto* raw = std::get_if<RawOracle>(&oracle.any);
  Magnitudes m = raw != nullptr ? raw->magnitudes : magnitudes_[layer];
  if (raw == nullptr) {
    const double n = m.alpha < 1 ? std::min(static_cast<double>(records), 1 / (1 - m.alpha))
                                 : static_cast<double>(records);
    m.u_mass = n * model_->u_max[layer];
  }
  return Tolerance({.is_delta_rule = geometry_.layers[layer].is_delta_rule(),
                    .d_k = geometry_.layers[layer].d_k,
                    .records = records,
                    .draft_tokens = drafts + (two_precision ? geometry_.ring_records() : 0),
                    .folds = folds,
                    .ring_records = geometry_.ring_records(),
                    .raw = raw != nullptr,
                    .correction = geometry_.formats.correction,
                    .output = geometry_.formats.output,
                    .checkpoint_hp = geometry_.formats.checkpoint_hp,
                    .checkpoint_lp = geometry_.formats.checkpoint_lp,
                    .magnitudes = m});
}

// The checkpoint and the state at the tail against the oracle.
void History::CheckState(SequenceId id) {
  const auto state = store_->Get(kOwner, id);
  if (!state.ok()) return Fail(state.status().ToString());
  const StoreModel::Sequence& sequence = model_->sequences.at(id);
  for (uint32_t layer = 0; layer < geometry_.layers.size(); ++layer) {
    std::vector<float> values(geometry_.layers[layer].state_elements());
    for (const uint64_t position : {state->floor, state->position}) {
      if (!Expect(store_->ReadState(kOwner, id, layer, position, absl::MakeSpan(values)),
                  absl::StatusCode::kOk, "ReadState")) {
        return;
      }
      if (position >= sequence.states.size())
        return Fail("the model has not reached this position");
      LayerStates oracle = *sequence.states[position];
      const Tolerance bound = MakeTolerance(layer, oracle[layer], std::max<uint64_t>(position, 1),
                                            0, sequence.folds + 1);
      const auto near = Near(values, oracle[layer].recurrence().state(), bound.state());
      if (!near) Fail(absl::StrCat("state at ", position, ", layer ", layer, ": ", near.message()));
    }
  }
}

void History::CheckAll() {
  const StoreUsage usage = store_ == nullptr ? StoreUsage() : store_->usage();
  if (usage.sequences != model_->sequences.size()) Fail("sequence count");
  if (usage.snapshots != keys_.size()) Fail("snapshot count");
  if (usage.open_steps != steps_.size()) Fail("open step count");
  for (const SequenceState& state : store_->GetAll(kOwner)) {
    if (model_->sequences.count(state.id) == 0) return Fail("a sequence that should not exist");
    const std::string what = model_->Disagrees(state);
    if (!what.empty()) Fail(absl::StrCat("the store and the model disagree on ", what));
  }
}

// Whatever happened, everything comes back.
void History::Drain() {
  if (store_ == nullptr) return;
  for (const SnapshotKey& key : keys_)
    Expect(store_->DeleteSnapshot(key), absl::StatusCode::kOk, "final delete");
  store_->ReleaseOwner(kOwner);
  if (store_->counters().flushes_background > 0) Did("background flush used");
  const StoreUsage usage = store_->usage();
  if (usage.sequences + usage.snapshots + usage.open_steps > 0)
    Fail("something is left after release");
  if (usage.pages.free != usage.pages.total) Fail("pages leaked");
}

HistoryResult RunHistory(uint64_t seed, const HistoryOptions& options) {
  return History(seed, options).Run();
}

}  // namespace ssmd::testing
