// StoreFixture: a store, its oracle, and a vocabulary in which tests read as stories:
//
//   Create(); Prefill(5); Verify(4); Commit(2); ExpectMatchesOracle();
//
// Verbs act on the current sequence: the one created, forked or restored last, or named by On().
// Every Verify compares all outputs with the float64 oracle, in whatever test it happens. The
// store poisons what nobody owns, output buffers start as garbage, padding tokens are NaN.
// Tokens come from a vocabulary of made-up inputs; the seed is fixed, so a test always does the
// same.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "kernels/cpu/thread_pool.h"
#include "state_store/store.h"
#include "tests/testing/compare.h"
#include "tests/testing/faulty_backend.h"
#include "tests/testing/layer_inputs.h"
#include "tests/testing/status_is.h"
#include "tests/testing/test_device.h"
#include "tests/testing/token_lists.h"
#include "tests/testing/tolerance.h"

namespace ssmd::testing {

inline constexpr OwnerId kAlice{1}, kBob{2};

// Background work that runs when a test says so.
class ManualQueue : public cpu::TaskQueue {
 public:
  void Post(std::function<void()> task) override { tasks_.push_back(std::move(task)); }
  void RunAll() {
    for (std::vector<std::function<void()>> tasks = std::exchange(tasks_, {}); auto& task : tasks)
      task();
  }

 private:
  std::vector<std::function<void()>> tasks_;
};

class StoreFixture : public ::testing::Test {
 protected:
  static constexpr int kVocabulary = 24;

  // All three families; 16 x 8, so that a test may take thousands of steps.
  static Geometry SmallGeometry() {
    return {.layers = {{Family::kMamba2, 2, 1, 16, 8},
                       {Family::kGdn, 2, 1, 16, 8},
                       {Family::kKda, 2, 1, 16, 8}},
            .formats = {.activation = Dtype::kFp32, .correction = Dtype::kFp32},
            .window_records = 8,
            .draft_tokens_max = 4};
  }
  static Capacity SmallCapacity() {
    return {
        .sequences_max = 4, .snapshots_max = 4, .spare_pages = 4, .rows_max = 8, .steps_max = 3};
  }

  void Make(const Geometry& geometry = SmallGeometry(),
            const Capacity& capacity = SmallCapacity()) {
    geometry_ = geometry;
    capacity_ = capacity;
    inputs_.assign(kVocabulary, {});
    magnitudes_.assign(geometry_.layers.size(), {.alpha = 0});
    for (int token = 0; token < kVocabulary; ++token) {
      for (size_t layer = 0; layer < geometry_.layers.size(); ++layer) {
        inputs_[token].push_back(
            RandomToken(geometry_.layers[layer], geometry_.formats.activation, random_));
      }
    }
    Measure();
    auto store =
        Store::Create({.geometry = geometry_, .capacity = capacity_, .poison_garbage = poison_},
                      [&](const BackendSpec& spec) -> absl::StatusOr<std::unique_ptr<Backend>> {
                        SSMD_ASSIGN_OR_RETURN(auto backend, device_->CreateBackend(spec));
                        return std::make_unique<FaultyBackend>(
                            std::move(backend), [this](const VerifyParams& params) {
                              return before_verify_ ? before_verify_(params) : absl::OkStatus();
                            });
                      });
    SSMD_CHECK(store.ok(), "%s", store.status().ToString().c_str());
    store_ = *std::move(store);
    model_ = std::make_unique<TokenLists>(geometry_, inputs_);
  }

  // The largest values of the vocabulary: what tolerances depend on. After a test changed it, too.
  void Measure() {
    for (size_t layer = 0; layer < geometry_.layers.size(); ++layer) {
      const LayerShape& shape = geometry_.layers[layer];
      Magnitudes m{.alpha = 0};
      for (const auto& token : inputs_) Cover(m, token[layer], shape.d_k);
      magnitudes_[layer] = m;
    }
  }

  // ---- sequences

  SequenceId Create(OwnerId owner = kAlice) {
    const auto created = store_->CreateSequences(owner, 1);
    EXPECT_TRUE(created.ok()) << created.status();
    if (!created.ok()) return {};
    model_->Create(created->ids[0]);
    return Adopt(created->ids[0], owner);
  }
  void On(SequenceId id) { current_ = id; }
  // The store has given the sequence to another owner.
  void NowOwnedBy(SequenceId id, OwnerId owner) { owner_of_.at(id) = owner; }
  SequenceId current() const { return current_; }
  SequenceState State(SequenceId id) {
    const auto state = store_->Get(owner_of_.at(id), id);
    EXPECT_TRUE(state.ok()) << state.status();
    return state.ok() ? *state : SequenceState();
  }
  SequenceState State() { return State(current_); }
  SequenceVersion Versioned(SequenceId id) { return {id, State(id).version}; }

  void Free(SequenceId id) {
    const std::vector<SequenceId> ids = {id};
    ASSERT_TRUE(store_->Release(owner_of_.at(id), ids).ok());
    model_->sequences.erase(id);
    owner_of_.erase(id);
  }
  void Free() { Free(current_); }

  SequenceId Fork(std::optional<uint64_t> position = std::nullopt) {
    const SequenceId parent = current_;
    const auto forked = store_->Fork(owner_of_.at(parent), Versioned(parent), 1, position);
    EXPECT_TRUE(forked.ok()) << forked.status();
    if (!forked.ok()) return {};
    model_->Fork(parent, forked->ids[0], forked->position);
    return Adopt(forked->ids[0], owner_of_.at(parent));
  }
  void Rollback(uint64_t position) {
    const auto state = store_->Rollback(owner_of_.at(current_), Versioned(current_), position);
    ASSERT_TRUE(state.ok()) << state.status();
    model_->Rollback(current_, position);
  }
  void Snapshot(const std::string& digest, std::optional<uint64_t> position = std::nullopt) {
    const SnapshotKey key{digest, position.value_or(State().position)};
    const auto created = store_->CreateSnapshot(owner_of_.at(current_), Versioned(current_), key);
    ASSERT_TRUE(created.ok()) << created.status();
    ASSERT_TRUE(*created);
    model_->Snapshot(current_, key);
  }
  SequenceId Restore(const std::string& digest, uint64_t position) {
    const SnapshotKey key{digest, position};
    const auto restored = store_->CreateFromSnapshot(kAlice, key, 1);
    EXPECT_TRUE(restored.ok()) << restored.status();
    if (!restored.ok()) return {};
    EXPECT_EQ(restored->position, position);
    model_->Restore(key, restored->ids[0]);
    return Adopt(restored->ids[0], kAlice);
  }
  void Forget(const std::string& digest, uint64_t position) {
    ASSERT_TRUE(store_->DeleteSnapshot({digest, position}).ok());
  }

  // ---- steps

  struct Row {
    SequenceId id{};  // kPaddingRow: padding
    uint32_t drafts = 0;
    std::vector<int> tokens{};  // empty: random ones
  };
  struct Batch {
    StepId id{};
    OwnerId owner{};
    StepRequest request;
    std::vector<std::vector<int>> tokens;         // [row]
    TokenLists::Step model;                       // live rows, in order
    std::vector<std::vector<std::byte>> outputs;  // [layer]
    uint32_t folds = 0;
    uint64_t token_count() const {
      uint64_t count = 0;
      for (const auto& row : request.rows) count += row.draft_tokens;
      return count;
    }
  };

  int AnyToken() { return static_cast<int>(random_() % kVocabulary); }

  Batch Begin(const std::vector<Row>& rows, OwnerId owner = kAlice) {
    Batch batch{.owner = owner};
    std::vector<std::pair<SequenceId, std::vector<int>>> live;
    for (const Row& row : rows) {
      std::vector<int> tokens = row.tokens;
      const bool padding = row.id == kPaddingRow;
      for (size_t i = tokens.size(); i < row.drafts; ++i) tokens.push_back(AnyToken());
      batch.request.rows.push_back(
          {row.id, padding ? 0 : State(row.id).version, static_cast<uint32_t>(tokens.size())});
      if (!padding) live.emplace_back(row.id, tokens);
      batch.tokens.push_back(std::move(tokens));
    }
    const auto opened = store_->BeginStep(owner, batch.request);
    EXPECT_TRUE(opened.ok()) << opened.status();
    if (!opened.ok()) return batch;
    batch.id = opened->id;
    batch.folds = opened->folds;
    batch.model = model_->Begin(live);
    return batch;
  }

  PackedInputs Pack(const Batch& batch, uint32_t layer) const {
    PackedInputs packed;
    reference::Token hole = inputs_[0][layer];  // what padding carries: NaN throughout
    for (auto* values :
         {&hole.q, &hole.k, &hole.v, &hole.log_alpha, &hole.beta, &hole.value_scale}) {
      for (double& x : *values) x = std::numeric_limits<double>::quiet_NaN();
    }
    for (size_t i = 0; i < batch.request.rows.size(); ++i) {
      for (const int token : batch.tokens[i]) {
        packed.Append(batch.request.rows[i].sequence == kPaddingRow ? hole : inputs_[token][layer],
                      geometry_.formats.activation);
      }
    }
    return packed;
  }

  uint64_t OutputBytes(uint32_t layer) const {
    const LayerShape& shape = geometry_.layers[layer];
    return uint64_t{shape.head_count} * shape.d_v * DtypeBytes(geometry_.formats.output);
  }

  // Runs one layer; its outputs start as `fill` bytes.
  absl::Status VerifyLayer(Batch& batch, uint32_t layer, int fill = 0xab) {
    const PackedInputs packed = Pack(batch, layer);
    batch.outputs.resize(geometry_.layers.size());
    batch.outputs[layer].assign(batch.token_count() * OutputBytes(layer), std::byte(fill));
    return store_
        ->Verify(batch.owner, {.step = batch.id,
                               .layer = layer,
                               .token_count = batch.token_count(),
                               .inputs = packed.view(),
                               .output = batch.outputs[layer].data()})
        .status();
  }
  void VerifyLayers(Batch& batch, int fill = 0xab) {
    for (uint32_t layer = 0; layer < geometry_.layers.size(); ++layer) {
      const absl::Status status = VerifyLayer(batch, layer, fill);
      ASSERT_TRUE(status.ok()) << status;
      CheckOutputs(batch, layer);
    }
  }

  void CheckOutputs(const Batch& batch, uint32_t layer) {
    const std::byte* at = batch.outputs[layer].data();
    size_t live = 0;
    for (size_t i = 0; i < batch.request.rows.size(); ++i) {
      const bool padding = batch.request.rows[i].sequence == kPaddingRow;
      for (size_t draft = 0; draft < batch.tokens[i].size(); ++draft, at += OutputBytes(layer)) {
        if (padding) {
          EXPECT_EQ(std::count(at, at + OutputBytes(layer), std::byte{0}),
                    static_cast<ptrdiff_t>(OutputBytes(layer)))
              << "padding row " << i << " is not zero";
          continue;
        }
        const TokenLists::Row& row = batch.model[live];
        std::vector<float> values;
        for (uint64_t b = 0; b < OutputBytes(layer); b += DtypeBytes(geometry_.formats.output))
          values.push_back(LoadAs(geometry_.formats.output, at + b));
        const TokenLists::Sequence& sequence = model_->sequences.at(row.id);
        const Tolerance bound = MakeTolerance(layer, sequence.position() + draft + 1,
                                              batch.tokens[i].size(), sequence.folds + 1);
        ASSERT_TRUE(Near(values, row.outputs[draft][layer],
                         [&](double exact) { return bound.output(exact); }))
            << "row " << i << ", draft " << draft << ", layer " << layer << ", position "
            << sequence.position();
      }
      live += !padding;
    }
  }

  // Accepted counts per row; those of padding rows are passed on and mean nothing.
  void Commit(Batch& batch, const std::vector<uint32_t>& accepted) {
    const auto committed = store_->Commit(batch.owner, batch.id, accepted);
    ASSERT_TRUE(committed.ok()) << committed.status();
    std::vector<uint32_t> live;
    for (size_t i = 0; i < accepted.size(); ++i) {
      if (batch.request.rows[i].sequence != kPaddingRow) live.push_back(accepted[i]);
    }
    model_->Commit(batch.model, live);
    for (const TokenLists::Row& row : batch.model) {
      const SequenceState state = State(row.id);
      EXPECT_EQ(model_->Disagrees(state), "");
      model_->Observe(state);
    }
  }
  void Abort(Batch& batch) { ASSERT_TRUE(store_->Abort(batch.owner, batch.id).ok()); }
  void Step(const std::vector<Row>& rows, const std::vector<uint32_t>& accepted,
            OwnerId owner = kAlice) {
    Batch batch = Begin(rows, owner);
    VerifyLayers(batch);
    Commit(batch, accepted);
  }

  // The same for the current sequence alone.
  void Verify(uint32_t drafts) {
    open_ = Begin({{current_, drafts}}, owner_of_.at(current_));
    VerifyLayers(open_);
  }
  void VerifyTokens(const std::vector<int>& tokens) {
    open_ = Begin({{current_, 0, tokens}}, owner_of_.at(current_));
    VerifyLayers(open_);
  }
  void Commit(uint32_t accepted) { Commit(open_, {accepted}); }
  void Abort() { Abort(open_); }
  void Decode(uint64_t tokens) {
    for (uint64_t i = 0; i < tokens && !HasFatalFailure(); ++i) {
      Verify(1);
      Commit(1);
    }
  }
  // In as few steps as there can be, every token kept.
  void Prefill(uint64_t tokens) {
    while (tokens > 0 && !HasFatalFailure()) {
      const uint32_t now =
          static_cast<uint32_t>(std::min<uint64_t>(tokens, geometry_.draft_tokens_max));
      Verify(now);
      Commit(now);
      tokens -= now;
    }
  }

  // ---- expectations

  // The state at the checkpoint and at the tail.
  void ExpectMatchesOracle(SequenceId id) {
    const SequenceState state = State(id);
    const TokenLists::Sequence& sequence = model_->sequences.at(id);
    ASSERT_EQ(model_->Disagrees(state), "");
    for (uint32_t layer = 0; layer < geometry_.layers.size(); ++layer) {
      for (const uint64_t position : {state.floor, state.position}) {
        TokenLists::States oracle = *sequence.states[position];
        const Tolerance bound =
            MakeTolerance(layer, std::max<uint64_t>(position, 1), 0, sequence.folds + 1);
        EXPECT_TRUE(Near(ReadState(id, layer, position), oracle[layer].state(), bound.state()))
            << "layer " << layer << ", position " << position;
      }
    }
  }
  void ExpectMatchesOracle() { ExpectMatchesOracle(current_); }

  std::vector<float> ReadState(SequenceId id, uint32_t layer, uint64_t position) {
    std::vector<float> values(geometry_.layers[layer].state_elements());
    const absl::Status read =
        store_->ReadState(owner_of_.at(id), id, layer, position, absl::MakeSpan(values));
    EXPECT_TRUE(read.ok()) << read;
    return values;
  }

  // Everything about a sequence that a client could ever see, bit for bit.
  std::string Fingerprint(SequenceId id) {
    const SequenceState state = State(id);
    std::string bytes = absl::StrCat(state.version, " ", state.position, " ", state.floor, ":");
    for (uint32_t layer = 0; layer < geometry_.layers.size(); ++layer) {
      for (uint64_t position = state.floor; position <= state.position; ++position) {
        const std::vector<float> values = ReadState(id, layer, position);
        bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
      }
    }
    return bytes;
  }

  // Every page and slot is back.
  void ExpectNothingHeld() {
    const StoreUsage usage = store_->usage();
    EXPECT_EQ(usage.sequences + usage.snapshots + usage.open_steps + usage.imports + usage.exports,
              0u);
    EXPECT_EQ(usage.pages.free, usage.pages.total);
  }

  Tolerance MakeTolerance(uint32_t layer, uint64_t records, uint64_t drafts, uint64_t folds) const {
    Magnitudes m = magnitudes_[layer];
    const double n = m.alpha < 1 ? std::min(static_cast<double>(records), 1 / (1 - m.alpha))
                                 : static_cast<double>(records);
    m.u_mass = n * model_->u_max[layer];
    return Tolerance({.is_delta_rule = geometry_.layers[layer].is_delta_rule(),
                      .d_k = geometry_.layers[layer].d_k,
                      .records = records,
                      .draft_tokens = drafts,
                      .folds = folds,
                      .ring_records = geometry_.ring_records(),
                      .correction = geometry_.formats.correction,
                      .output = geometry_.formats.output,
                      .checkpoint_hp = geometry_.formats.checkpoint_hp,
                      .checkpoint_lp = geometry_.formats.checkpoint_lp,
                      .magnitudes = m});
  }

  std::mt19937_64 random_{20261130};
  bool poison_ = true;
  ManualQueue queue_;
  cpu::ThreadPool pool_{1};
  // On a CPU reserved, not touched.
  const std::unique_ptr<Device> device_ = MakeTestDevice(uint64_t{1} << 42, &pool_, &queue_);
  Geometry geometry_;
  Capacity capacity_;
  TokenLists::Inputs inputs_;
  std::vector<Magnitudes> magnitudes_;  // [layer]
  std::function<absl::Status(const VerifyParams&)> before_verify_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<TokenLists> model_;

 private:
  SequenceId Adopt(SequenceId id, OwnerId owner) {
    owner_of_[id] = owner;
    return current_ = id;
  }
  std::map<SequenceId, OwnerId> owner_of_;
  SequenceId current_{};
  Batch open_;
};

}  // namespace ssmd::testing
