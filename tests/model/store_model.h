// StoreModel: what a store must answer, in the plainest terms: a sequence is a list of tokens.
//
// A version counter and the float64 state after every prefix are all there is to a sequence; fork,
// snapshot and rollback copy or cut the list. It knows nothing of pages, rings, windows or slots;
// `floor`, the one thing that depends on them, is only bounded.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "state_store/store.h"
#include "tests/reference/recurrence.h"
#include "tests/testing/raw_inputs.h"

namespace ssmd::testing {

// One layer after some prefix, in either input form. Copyable: a copy is the same sequence.
struct LayerOracle {
  std::variant<reference::Recurrence, RawOracle> any;
  reference::Recurrence& recurrence() {
    auto* raw = std::get_if<RawOracle>(&any);
    return raw == nullptr ? std::get<reference::Recurrence>(any) : raw->recurrence;
  }
};
using LayerStates = std::vector<LayerOracle>;  // [layer]

// The inputs of one (token, layer) of a made-up model, as the service sees them, in the form that
// is used.
struct LayerInput {
  reference::Token post_conv;
  reference::RawToken raw;
};
struct TokenInputs {
  std::vector<std::vector<LayerInput>> of;  // [token][layer]
};

class StoreModel {
 public:
  struct Sequence {
    std::vector<int> tokens;
    std::vector<std::shared_ptr<const LayerStates>> states;  // [prefix length]
    uint64_t version = 1;
    uint64_t high_water = 0;
    uint64_t import_floor = 0;      // nothing below it exists
    uint64_t floor = 0, folds = 0;  // as observed: how often the floor moved
    bool open = false;
    uint64_t position() const { return tokens.size(); }
  };
  struct Row {
    SequenceId id{};
    std::vector<int> drafts;
    std::vector<std::shared_ptr<const LayerStates>> states;  // after each draft
    std::vector<std::vector<std::vector<double>>> outputs;   // [draft][layer][head * d_v]
  };
  struct Step {
    std::vector<Row> rows;
  };

  StoreModel(const TokenInputs& inputs, LayerStates empty, uint32_t rollback_tokens_min)
      : u_max(empty.size(), 0.0),
        inputs_(inputs),
        empty_(std::make_shared<const LayerStates>(std::move(empty))),
        rollback_tokens_min_(rollback_tokens_min) {}

  void Create(SequenceId id) { sequences[id] = {.states = {empty_}}; }

  void Fork(SequenceId parent, SequenceId child, uint64_t position) {
    sequences[child] = Prefix(sequences.at(parent), position);
  }

  void Snapshot(SequenceId id, const SnapshotKey& key) {
    snapshots[Name(key)] = Prefix(sequences.at(id), key.position);
  }
  void Restore(const SnapshotKey& key, SequenceId child) {
    sequences[child] = snapshots.at(Name(key));
  }

  // The target takes over the source's whole state.
  void Import(SequenceId source, SequenceId target) {
    const uint64_t version = sequences.at(target).version + 1;
    Sequence imported = Prefix(sequences.at(source), sequences.at(source).position());
    imported.version = version;
    imported.high_water = imported.import_floor = imported.position();
    sequences[target] = std::move(imported);
  }

  void Rollback(SequenceId id, uint64_t position) {
    Sequence& sequence = sequences.at(id);
    sequence.tokens.resize(position);
    sequence.states.resize(position + 1);
    ++sequence.version;
  }

  Step Begin(const std::vector<std::pair<SequenceId, std::vector<int>>>& rows) {
    Step step;
    for (const auto& [id, drafts] : rows) {
      Sequence& sequence = sequences.at(id);
      sequence.open = true;
      Row row{.id = id, .drafts = drafts};
      LayerStates states = *sequence.states.back();
      for (const int token : drafts) {
        std::vector<std::vector<double>> outputs;
        for (size_t layer = 0; layer < states.size(); ++layer) {
          const LayerInput& input = inputs_.of[token][layer];
          auto* raw = std::get_if<RawOracle>(&states[layer].any);
          outputs.push_back(raw ? raw->Step(input.raw)
                                : states[layer].recurrence().Step(input.post_conv));
          for (const double u : states[layer].recurrence().u())
            u_max[layer] = std::max(u_max[layer], std::abs(u));
        }
        row.outputs.push_back(std::move(outputs));
        row.states.push_back(std::make_shared<const LayerStates>(states));
      }
      step.rows.push_back(std::move(row));
    }
    return step;
  }

  void Commit(const Step& step, const std::vector<uint32_t>& accepted) {
    for (size_t i = 0; i < step.rows.size(); ++i) {
      const Row& row = step.rows[i];
      Sequence& sequence = sequences.at(row.id);
      for (uint32_t t = 0; t < accepted[i]; ++t) {
        sequence.tokens.push_back(row.drafts[t]);
        sequence.states.push_back(row.states[t]);
      }
      sequence.high_water = std::max(sequence.high_water, sequence.position());
      ++sequence.version;
      sequence.open = false;
    }
  }

  void Abort(const Step& step) {
    for (const Row& row : step.rows) sequences.at(row.id).open = false;
  }

  // "" when the store's answer about a sequence agrees.
  std::string Disagrees(const SequenceState& state) const {
    const Sequence& sequence = sequences.at(state.id);
    const uint64_t kept =
        std::min<uint64_t>(sequence.high_water - sequence.import_floor, rollback_tokens_min_);
    if (state.version != sequence.version) return "version";
    if (state.position != sequence.position()) return "position";
    if (state.floor > state.position) return "floor above position";
    if (state.floor > sequence.high_water - kept) return "floor breaks rollback_tokens_min";
    if ((state.open_step != kNoStep) != sequence.open) return "open step";
    return "";
  }

  // Notes a floor that the store reported.
  void Observe(const SequenceState& state) {
    Sequence& sequence = sequences.at(state.id);
    sequence.folds += state.floor != sequence.floor;
    sequence.floor = state.floor;
  }

  static std::string Name(const SnapshotKey& key) {
    return key.digest + "@" + std::to_string(key.position);
  }

  std::map<SequenceId, Sequence> sequences;
  std::map<std::string, Sequence> snapshots;
  std::vector<double> u_max;  // [layer], over everything ever stepped

 private:
  static Sequence Prefix(const Sequence& parent, uint64_t position) {
    Sequence child = parent;
    child.tokens.resize(position);
    child.states.resize(position + 1);
    child.version = 1;
    child.open = false;
    return child;
  }

  const TokenInputs& inputs_;
  const std::shared_ptr<const LayerStates> empty_;
  const uint32_t rollback_tokens_min_;
};

}  // namespace ssmd::testing
