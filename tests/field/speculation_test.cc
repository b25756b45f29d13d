// Field reports 22-31, 41-46, 54: drafts, accepted counts, rollbacks, and the ring behind them.
#include <xxhash.h>

#include <set>

#include "tests/testing/store_fixture.h"

namespace ssmd {
namespace {

using testing::Fails;
using testing::kAlice;
using testing::kBob;
using testing::TokenLists;

class SpeculationTest : public testing::StoreFixture {
 protected:
  static Geometry WithRollback(uint32_t tokens) {
    Geometry geometry = SmallGeometry();
    geometry.rollback_tokens_min = tokens;
    return geometry;
  }
  void MixedOperations(const Geometry& geometry) {
    Make(geometry);
    Create();
    for (int operation = 0; operation < 5000 && !HasFailure(); ++operation) {
      const SequenceState state = State();
      if (operation % 3 == 0) queue_.RunAll();
      switch (random_() % 5) {
        case 0:
          Decode(1);
          break;
        case 1:  // any depth, down to the floor
          Rollback(state.floor + random_() % (state.position - state.floor + 1));
          break;
        default: {
          const uint32_t drafts = static_cast<uint32_t>(random_() % 5);
          Verify(drafts);
          if (random_() % 6 == 0) {
            Abort();
          } else {
            Commit(static_cast<uint32_t>(random_() % (drafts + 1)));
          }
        }
      }
      if (operation % 25 == 0) ExpectMatchesOracle();
    }
    ExpectMatchesOracle();
  }
  // The largest error of a state element against the oracle, at the tail.
  double ErrorAtTail(SequenceId id) {
    const uint64_t position = State(id).position;
    TokenLists::States oracle = *model_->sequences.at(id).states[position];
    double worst = 0;
    for (uint32_t layer = 0; layer < geometry_.layers.size(); ++layer) {
      const std::vector<float> state = ReadState(id, layer, position);
      for (size_t i = 0; i < state.size(); ++i)
        worst = std::max(worst, std::abs(state[i] - oracle[layer].state()[i]));
    }
    return worst;
  }
};

// Report 22: counts belong to the step they name. The next step cannot begin before them, and an
// older step's counts cannot arrive after them.
TEST_F(SpeculationTest, CountsAreBoundToTheirStep) {
  Make();
  const SequenceId id = Create();
  Batch first = Begin({{id, 4}});
  VerifyLayers(first);
  for (const uint64_t version : {1, 2}) {
    StepRequest next{.rows = {{id, version, 3}}};
    const auto begun = store_->BeginStep(kAlice, next);
    EXPECT_FALSE(begun.ok()) << version;
  }
  Commit(first, {2});
  Batch second = Begin({{id, 4}});
  VerifyLayers(second);
  const std::vector<uint32_t> two = {2}, four = {4};
  EXPECT_TRUE(store_->Commit(kAlice, first.id, two).ok());  // a repeat: answered, not applied
  EXPECT_TRUE(
      Fails(store_->Commit(kAlice, first.id, four), absl::StatusCode::kFailedPrecondition, {}));
  EXPECT_EQ(State().position, 2u);
  Commit(second, {1});
  EXPECT_EQ(State().position, 3u);
  EXPECT_TRUE(Fails(store_->Commit(kAlice, first.id, two), absl::StatusCode::kNotFound, {}));
  Decode(9);
  ExpectMatchesOracle();
}

// Report 24: five thousand operations; every one of them leaves the oracle's state.
TEST_F(SpeculationTest, FiveThousandMixedOperations) {
  Geometry geometry = WithRollback(3);
  geometry.window_records = 12;
  MixedOperations(geometry);
}

// The same while folds run ahead, and are cancelled by rollbacks below what they fold.
TEST_F(SpeculationTest, FiveThousandMixedOperationsWithBackgroundFlushes) {
  Geometry geometry = WithRollback(3);
  geometry.window_records = 12;
  geometry.flush_mode = FlushMode::kBackground;
  MixedOperations(geometry);
  EXPECT_GT(store_->counters().flushes_background, 50u);
}

// Report 25: whatever the acceptance looks like, the state is the accepted stream's.
TEST_F(SpeculationTest, BiasedAcceptancePatterns) {
  const std::vector<std::vector<uint32_t>> patterns = {{0},    {1},       {4},
                                                       {4, 0}, {1, 1, 4}, {3, 0, 0, 2}};
  for (const auto& pattern : patterns) {
    Make(WithRollback(1));
    Create();
    for (int step = 0; step < 60 && !HasFailure(); ++step) {
      Verify(4);
      Commit(pattern[step % pattern.size()]);
    }
    ExpectMatchesOracle();
  }
}

// Report 27: layers advance together or not at all.
TEST_F(SpeculationTest, EveryLayerIsAtTheSamePosition) {
  Make();
  const SequenceId id = Create();
  std::vector<float> state(geometry_.layers[0].state_elements());
  for (uint32_t round = 0; round < 400 && !HasFailure(); ++round) {
    Batch batch = Begin({{id, 1 + round % 4}});
    const uint32_t missing = round % 3;
    for (uint32_t layer = 0; layer < 3; ++layer) {
      if (layer == missing) continue;
      ASSERT_TRUE(VerifyLayer(batch, layer).ok());
    }
    const std::vector<uint32_t> counts = {1};
    const auto early = store_->Commit(kAlice, batch.id, counts);
    ASSERT_EQ(GetDetail(early.status(), detail::kReason), reason::kLayersMissing);
    ASSERT_TRUE(VerifyLayer(batch, missing).ok());
    Commit(batch, {1});
    for (uint32_t layer = 0; layer < 3; ++layer) {
      EXPECT_TRUE(store_->ReadState(kAlice, id, layer, round + 1, absl::MakeSpan(state)).ok());
      EXPECT_FALSE(store_->ReadState(kAlice, id, layer, round + 2, absl::MakeSpan(state)).ok());
    }
  }
  ExpectMatchesOracle();
}

// Report 28: four thousand steps in which every draft is rejected: the error against the oracle
// does not grow, and is no worse than plain decoding's.
TEST_F(SpeculationTest, RejectingEveryDraftDoesNotDrift) {
  Make();
  const SequenceId drafting = Create(), plain = Create();
  double warm = 0, late = 0, late_plain = 0;
  for (int step = 0; step < 4096 && !HasFailure(); ++step) {
    const int token = AnyToken();
    Step({{drafting, 0, {token, AnyToken(), AnyToken(), AnyToken()}}, {plain, 0, {token}}}, {1, 1});
    if (step % 16 != 0) continue;
    if (step < 1024) {
      warm = std::max(warm, ErrorAtTail(drafting));
    } else if (step >= 3072) {
      late = std::max(late, ErrorAtTail(drafting));
      late_plain = std::max(late_plain, ErrorAtTail(plain));
    }
  }
  EXPECT_LE(late, 2 * warm);
  EXPECT_LE(late, 2 * late_plain);
  ExpectMatchesOracle(drafting);
  ExpectMatchesOracle(plain);
}

// Report 29: two owners use every operation in turn; each sees its own sequences only.
TEST_F(SpeculationTest, TwoOwnersInterleaveEveryOperation) {
  Make(SmallGeometry(),
       {.sequences_max = 8, .snapshots_max = 4, .spare_pages = 4, .rows_max = 8, .steps_max = 3});
  const SequenceId a = Create(kAlice), b = Create(kBob);
  for (int round = 0; round < 40 && !HasFailure(); ++round) {
    Batch of_a = Begin({{a, 3}}, kAlice), of_b = Begin({{b, 2}}, kBob);
    for (uint32_t layer = 0; layer < 3; ++layer) {
      ASSERT_TRUE(VerifyLayer(of_a, layer).ok());
      ASSERT_TRUE(VerifyLayer(of_b, layer).ok());
      CheckOutputs(of_a, layer);
      CheckOutputs(of_b, layer);
    }
    Commit(of_b, {1});
    On(b);
    const SequenceId child_b = Fork();
    if (round % 3 == 0) {
      Abort(of_a);
    } else {
      Commit(of_a, {2});
    }
    On(a);
    const SequenceId child_a = Fork(State(a).floor);
    On(child_b);
    Decode(2);
    On(child_a);
    Decode(1);
    for (const SequenceId id : {a, b, child_a, child_b}) ExpectMatchesOracle(id);
    On(b);
    Rollback(State(b).position - 1);
    Free(child_b);
    Free(child_a);
    const std::vector<SequenceId> others = {b};
    EXPECT_FALSE(store_->Release(kAlice, others).ok());
  }
}

// Report 31: snapshots in the middle of speculation, at each accepted length.
TEST_F(SpeculationTest, SnapshotsInsideASpeculativeRun) {
  Make(SmallGeometry(),
       {.sequences_max = 2, .snapshots_max = 1, .spare_pages = 4, .rows_max = 2, .steps_max = 2});
  const SequenceId id = Create();
  for (uint32_t round = 0; round < 40 && !HasFailure(); ++round) {
    On(id);
    Batch before = Begin({{id, 4}});
    VerifyLayers(before);
    Commit(before, {round % 5});
    const uint64_t position = State(id).position;
    Batch open = Begin({{id, 4}});
    VerifyLayers(open);
    On(id);
    Snapshot("s");  // with drafts of the open step behind the tail
    Commit(open, {(round + 2) % 5});
    Restore("s", position);
    ExpectMatchesOracle();
    Decode(9);
    ExpectMatchesOracle();
    Free();
    Forget("s", position);
  }
  ExpectMatchesOracle(id);
}

// Report 41: forks see what is still in the ring, at every fill of it; and the reserved bytes are
// all the bytes.
TEST_F(SpeculationTest, ForksAtEveryRingFill) {
  Make(WithRollback(2));
  if (testing::TestsRunOnCuda()) {  // working memory of the device is reserved, too
    EXPECT_LT(*ReservedBytes(geometry_, capacity_), device_->bytes_used());
  } else {
    EXPECT_EQ(*ReservedBytes(geometry_, capacity_), device_->bytes_used());
  }
  const SequenceId parent = Create();
  for (int fill = 0; fill < 40 && !HasFailure(); ++fill) {
    On(parent);
    Fork();
    const SequenceId child = current();
    On(parent);
    Fork(State(parent).floor + (State(parent).position - State(parent).floor) / 2);
    Decode(6);
    ExpectMatchesOracle();
    Free();
    On(child);
    Decode(6);
    ExpectMatchesOracle();
    Free(child);
    On(parent);
    Decode(1);
    ExpectMatchesOracle();
  }
}

// Report 42: a snapshot at every position of the window; the live sequence does not notice.
TEST_F(SpeculationTest, SnapshotAtEveryPositionOfTheWindow) {
  Make(WithRollback(4),
       {.sequences_max = 2, .snapshots_max = 16, .spare_pages = 4, .rows_max = 1, .steps_max = 1});
  const SequenceId id = Create();
  for (const uint64_t more : {3, 5, 2, 4, 1}) {
    On(id);
    Prefill(more);
    const std::string before = Fingerprint(id);
    const SequenceState state = State(id);
    for (uint64_t p = state.floor; p <= state.position; ++p) Snapshot("w", p);
    EXPECT_EQ(Fingerprint(id), before);
    for (uint64_t p = state.floor; p <= state.position; ++p) {
      Restore("w", p);
      ExpectMatchesOracle();
      Decode(3);
      ExpectMatchesOracle();
      Free();
      Forget("w", p);
    }
    EXPECT_EQ(Fingerprint(id), before);
  }
}

// Report 44: the same flush a thousand times, five shapes, one hash each.
TEST_F(SpeculationTest, AThousandEqualFlushesOneHash) {
  for (const LayerShape& shape :
       {LayerShape{Family::kMamba2, 2, 1, 16, 8}, LayerShape{Family::kGdn, 4, 2, 32, 24},
        LayerShape{Family::kKda, 2, 2, 48, 8}, LayerShape{Family::kGdn, 3, 1, 16, 40},
        LayerShape{Family::kKda, 1, 1, 64, 64}}) {
    Geometry geometry = SmallGeometry();
    geometry.layers = {shape};
    geometry.formats.correction = shape.is_delta_rule() ? Dtype::kFp16 : Dtype::kNone;
    geometry.formats.activation = Dtype::kBf16;
    Make(geometry);
    const SequenceId parent = Create();
    Prefill(7);
    std::set<uint64_t> hashes;
    for (int i = 0; i < 1000 && !HasFailure(); ++i) {
      On(parent);
      const SequenceId child = Fork();
      const std::vector<SequenceId> ids = {child};
      ASSERT_EQ(*store_->Flush(kAlice, ids), 1u);
      ASSERT_EQ(State(child).floor, 7u);
      const std::vector<float> state = ReadState(child, 0, 7);
      hashes.insert(XXH3_64bits(state.data(), state.size() * sizeof(float)));
      if (i == 0) ExpectMatchesOracle(child);
      Free(child);
    }
    EXPECT_EQ(hashes.size(), 1u);
  }
}

// Report 45: records know no ring row. One state imported at every ring origin, the same tokens
// behind it: the same bytes.
TEST_F(SpeculationTest, RingOriginChangesNoBit) {
  Make();
  std::vector<std::vector<float>> states;
  for (const LayerShape& shape : geometry_.layers) {
    states.emplace_back(shape.state_elements());
    for (float& x : states.back()) x = static_cast<float>(random_() % 2000) / 1000 - 1;
  }
  std::vector<std::vector<std::byte>> first;
  for (uint64_t origin = 0; origin <= geometry_.ring_records(); ++origin) {
    const SequenceId id = store_->CreateSequences(kAlice, 1)->ids[0];
    auto import = store_->BeginImport(kAlice, {id, 1});
    ASSERT_TRUE(import.ok());
    for (uint32_t layer = 0; layer < 3; ++layer)
      ASSERT_TRUE((*import)->WriteLayer(layer, origin, states[layer]).ok());
    ASSERT_TRUE((*import)->Finish(origin, {}).ok());
    std::vector<std::vector<std::byte>> outputs;
    for (int step = 0; step < 12; ++step) {
      Batch batch{.owner = kAlice, .tokens = {{step, step + 1, step + 2}}};
      batch.request.rows = {{id, 2 + static_cast<uint64_t>(step), 3}};
      batch.id = store_->BeginStep(kAlice, batch.request)->id;
      for (uint32_t layer = 0; layer < 3; ++layer) ASSERT_TRUE(VerifyLayer(batch, layer).ok());
      for (const auto& output : batch.outputs) outputs.push_back(output);
      const std::vector<uint32_t> two = {2};
      ASSERT_TRUE(store_->Commit(kAlice, batch.id, two).ok());
    }
    if (origin == 0) first = outputs;
    EXPECT_EQ(outputs, first) << "origin " << origin;
    const std::vector<SequenceId> ids = {id};
    ASSERT_TRUE(store_->Release(kAlice, ids).ok());
  }
}

// Report 54: single-token steps, windows and prompts by turns, from a restored state too.
TEST_F(SpeculationTest, ModesAlternate) {
  Make(WithRollback(2));
  Create();
  for (int round = 0; round < 30 && !HasFailure(); ++round) {
    Decode(1 + round % 3);
    Verify(4);
    Commit(round % 5);
    Prefill(5 + round % 7);
    Rollback(State().position - 2);
    Decode(1);
    ExpectMatchesOracle();
    if (round % 10 != 9) continue;
    Snapshot("m");
    const uint64_t position = State().position;
    Free();
    Restore("m", position);
    Forget("m", position);
  }
}

}  // namespace
}  // namespace ssmd
