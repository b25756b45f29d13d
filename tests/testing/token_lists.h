// TokenLists: what StoreFixture believes: a sequence is a list of tokens, and the float64 state
// after each of them. Fork, snapshot and rollback copy or cut the list.
//
// post_conv form. The model of the random histories (tests/model/store_model.h) knows more:
// rounding, folds, both forms; this one knows as little as a story needs.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "state_store/store.h"
#include "tests/reference/recurrence.h"

namespace ssmd::testing {

class TokenLists {
 public:
  using States = std::vector<reference::Recurrence>;          // [layer]
  using Inputs = std::vector<std::vector<reference::Token>>;  // [token][layer]

  struct Sequence {
    std::vector<std::shared_ptr<const States>> states;  // [prefix length]
    uint64_t version = 1;
    uint64_t high_water = 0;
    uint64_t floor = 0, folds = 0;  // as observed: how often the floor moved
    uint64_t position() const { return states.size() - 1; }
  };
  struct Row {
    SequenceId id{};
    std::vector<std::shared_ptr<const States>> states;      // after each draft
    std::vector<std::vector<std::vector<double>>> outputs;  // [draft][layer][head * d_v]
  };
  using Step = std::vector<Row>;

  TokenLists(const Geometry& geometry, const Inputs& inputs)
      : u_max(geometry.layers.size(), 0.0),
        inputs_(inputs),
        empty_(std::make_shared<States>(Empty(geometry))),
        rollback_tokens_min_(geometry.rollback_tokens_min) {}

  static States Empty(const Geometry& geometry) {
    States empty;
    for (const LayerShape& shape : geometry.layers) {
      empty.emplace_back(
          FamilyName(shape.family),
          reference::Shape{shape.head_count, shape.key_group_count, shape.d_k, shape.d_v});
    }
    return empty;
  }

  void Create(SequenceId id) { sequences[id] = {.states = {empty_}}; }
  void Fork(SequenceId parent, SequenceId child, uint64_t position) {
    sequences[child] = Prefix(sequences.at(parent), position);
  }
  void Snapshot(SequenceId id, const SnapshotKey& key) {
    snapshots_[{key.digest, key.position}] = Prefix(sequences.at(id), key.position);
  }
  void Restore(const SnapshotKey& key, SequenceId child) {
    sequences[child] = snapshots_.at({key.digest, key.position});
  }
  void Rollback(SequenceId id, uint64_t position) {
    sequences.at(id).states.resize(position + 1);
    ++sequences.at(id).version;
  }

  Step Begin(const std::vector<std::pair<SequenceId, std::vector<int>>>& rows) {
    Step step;
    for (const auto& [id, drafts] : rows) {
      Row row{.id = id};
      States states = *sequences.at(id).states.back();
      for (const int token : drafts) {
        std::vector<std::vector<double>> outputs;
        for (size_t layer = 0; layer < states.size(); ++layer) {
          outputs.push_back(states[layer].Step(inputs_[token][layer]));
          for (const double u : states[layer].u())
            u_max[layer] = std::max(u_max[layer], std::abs(u));
        }
        row.outputs.push_back(std::move(outputs));
        row.states.push_back(std::make_shared<const States>(states));
      }
      step.push_back(std::move(row));
    }
    return step;
  }
  void Commit(const Step& step, const std::vector<uint32_t>& accepted) {
    for (size_t i = 0; i < step.size(); ++i) {
      Sequence& sequence = sequences.at(step[i].id);
      sequence.states.insert(sequence.states.end(), step[i].states.begin(),
                             step[i].states.begin() + accepted[i]);
      sequence.high_water = std::max(sequence.high_water, sequence.position());
      ++sequence.version;
    }
  }

  // "" when the store's answer about a sequence agrees.
  std::string Disagrees(const SequenceState& state) const {
    const Sequence& sequence = sequences.at(state.id);
    const uint64_t kept = std::min<uint64_t>(sequence.high_water, rollback_tokens_min_);
    if (state.version != sequence.version) return "version";
    if (state.position != sequence.position()) return "position";
    if (state.floor > state.position) return "floor above position";
    if (state.floor > sequence.high_water - kept) return "floor breaks rollback_tokens_min";
    return "";
  }
  void Observe(const SequenceState& state) {
    Sequence& sequence = sequences.at(state.id);
    sequence.folds += state.floor != sequence.floor;
    sequence.floor = state.floor;
  }

  std::map<SequenceId, Sequence> sequences;
  std::vector<double> u_max;  // [layer], over everything ever stepped

 private:
  static Sequence Prefix(const Sequence& parent, uint64_t position) {
    Sequence child = parent;
    child.states.resize(position + 1);
    child.version = 1;
    return child;
  }

  const Inputs& inputs_;
  const std::shared_ptr<const States> empty_;
  const uint32_t rollback_tokens_min_;
  std::map<std::pair<std::string, uint64_t>, Sequence> snapshots_;
};

}  // namespace ssmd::testing
