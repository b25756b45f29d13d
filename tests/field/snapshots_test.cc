// Field reports 56-67, 78, 81, 97-99, 125: snapshots, forks, exports: what is stored, when, and of
// which position.
#include <memory>

#include "tests/testing/store_fixture.h"

namespace ssmd {
namespace {

using testing::Fails;
using testing::kAlice;
using testing::kBob;

class SnapshotsTest : public testing::StoreFixture {
 protected:
  static Capacity Room(uint32_t sequences, uint32_t snapshots) {
    return {.sequences_max = sequences,
            .snapshots_max = snapshots,
            .spare_pages = 4,
            .rows_max = 8,
            .steps_max = 3};
  }
  absl::StatusOr<std::vector<std::vector<float>>> Export(SequenceId id) {
    SSMD_ASSIGN_OR_RETURN(auto reader, store_->BeginExport(kAlice, Versioned(id)));
    std::vector<std::vector<float>> layers;
    for (uint32_t layer = 0; layer < geometry_.layers.size(); ++layer) {
      layers.emplace_back(geometry_.layers[layer].state_elements());
      SSMD_RETURN_IF_ERROR(reader->ReadLayer(layer, absl::MakeSpan(layers.back())));
    }
    return layers;
  }
};

// Report 56: no hit on what a step has not committed yet.
TEST_F(SnapshotsTest, WriterAndReaderOfOneKeyInOneStep) {
  Make();
  const SequenceId writer = Create(), other = Create();
  Batch step = Begin({{writer, 4}, {other, 2}});
  VerifyLayers(step);
  const SequenceVersion named = Versioned(writer);
  EXPECT_TRUE(
      Fails(store_->CreateSnapshot(kAlice, named, {"k", 4}), absl::StatusCode::kOutOfRange, {}));
  EXPECT_TRUE(
      Fails(store_->CreateFromSnapshot(kAlice, {"k", 4}, 1), absl::StatusCode::kNotFound, {}));
  const std::vector<std::string> digests = {"k"};
  EXPECT_TRUE(store_->LookupPrefix(digests, 100).keys.empty());
  Commit(step, {4, 1});
  On(writer);
  Snapshot("k", 4);
  Restore("k", 4);
  Decode(3);
  ExpectMatchesOracle();
}

// Report 57: drafts are never stored; a key can be replaced and deleted.
TEST_F(SnapshotsTest, OnlyCommittedStateIsStoredAndKeysCanBeReplaced) {
  Make();
  const SequenceId id = Create();
  Prefill(5);
  Batch open = Begin({{id, 4}});
  VerifyLayers(open);
  On(id);
  Snapshot("k", 5);
  Abort(open);
  Rollback(State().floor);
  Prefill(5 - State().floor);  // other tokens at the same position
  EXPECT_FALSE(*store_->CreateSnapshot(kAlice, Versioned(id), {"k", 5}));  // kept
  EXPECT_TRUE(*store_->CreateSnapshot(kAlice, Versioned(id), {"k", 5}, {.overwrite = true}));
  model_->Snapshot(id, {"k", 5});
  const SequenceId restored = Restore("k", 5);
  ExpectMatchesOracle();
  Decode(4);
  ExpectMatchesOracle();
  Free(restored);
  Forget("k", 5);
  EXPECT_TRUE(
      Fails(store_->CreateFromSnapshot(kAlice, {"k", 5}, 1), absl::StatusCode::kNotFound, {}));
}

// Reports 58, 125: a restored state says where it is; a token cannot be applied twice, and more
// than is there cannot be had.
TEST_F(SnapshotsTest, RestoredPositionIsExact) {
  Make();
  Create();
  Prefill(6);
  Snapshot("p", 5);
  EXPECT_TRUE(
      Fails(store_->CreateFromSnapshot(kAlice, {"p", 6}, 1), absl::StatusCode::kNotFound, {"6"}));
  const auto restored = store_->CreateFromSnapshot(kAlice, {"p", 5}, 1);
  ASSERT_TRUE(restored.ok());
  EXPECT_EQ(restored->position, 5u);
  const SequenceId id = restored->ids[0];
  const auto begun = store_->BeginStep(kAlice, {.rows = {{id, restored->version, 1}}});
  ASSERT_TRUE(begun.ok());
  EXPECT_EQ(begun->positions, std::vector<uint64_t>{5});
  EXPECT_TRUE(store_->Abort(kAlice, begun->id).ok());
  EXPECT_TRUE(Fails(store_->Rollback(kAlice, {id, restored->version}, 6),
                    absl::StatusCode::kOutOfRange, {}));
  EXPECT_TRUE(
      Fails(store_->Fork(kAlice, {id, restored->version - 1}, 1), absl::StatusCode::kAborted, {}));
  // The step that led here, sent again by somebody who believes it was lost.
  EXPECT_TRUE(Fails(store_->BeginStep(kAlice, {.rows = {{id, restored->version - 1, 1}}}),
                    absl::StatusCode::kAborted, {}));
}

// Report 59: eight prompts of odd lengths in one batch, a snapshot of each.
TEST_F(SnapshotsTest, PositionsArePerSequence) {
  Make(SmallGeometry(), Room(8, 8));
  std::vector<SequenceId> ids;
  std::vector<uint64_t> left = {1, 3, 5, 7, 9, 11, 13, 15};
  for (int i = 0; i < 8; ++i) ids.push_back(Create());
  while (*std::max_element(left.begin(), left.end()) > 0) {
    std::vector<Row> rows;
    std::vector<uint32_t> accepted;
    for (int i = 0; i < 8; ++i) {
      const uint32_t now = static_cast<uint32_t>(std::min<uint64_t>(left[i], 4));
      rows.push_back({ids[i], now});
      accepted.push_back(now);
      left[i] -= now;
    }
    Step(rows, accepted);
  }
  for (int i = 0; i < 8; ++i) {
    On(ids[i]);
    Snapshot(absl::StrCat("prompt", i));
    Free();
  }
  for (int i = 0; i < 8; ++i) {
    Restore(absl::StrCat("prompt", i), 1 + 2 * i);
    ExpectMatchesOracle();
    Decode(2);
    ExpectMatchesOracle();
  }
}

// Report 60: ten thousand times a snapshot straight behind a step, with background flushes that run
// at the worst moment.
TEST_F(SnapshotsTest, StraightBehindAStep) {
  Geometry geometry = SmallGeometry();
  geometry.layers.resize(2);
  geometry.flush_mode = FlushMode::kBackground;
  Make(geometry, Room(2, 1));
  SequenceId id = Create();
  for (int round = 0; round < 10000 && !HasFailure(); ++round) {
    On(id);
    Batch step = Begin({{id, 2}});
    VerifyLayers(step);
    Commit(step, {1});
    const uint64_t position = State(id).position;
    Snapshot("s");
    if (round % 3 == 0) queue_.RunAll();
    if (round % 50 == 0) {
      Restore("s", position);
      ExpectMatchesOracle();
      Free();
    }
    Forget("s", position);
    if (position < 300) continue;  // the oracle keeps every prefix
    Free(id);
    id = Create();
  }
  EXPECT_GT(store_->counters().flushes_background, 500u);
}

// Report 61: a snapshot is a copy. A thousand steps later it is what it was.
TEST_F(SnapshotsTest, LiveSequenceGoesOnAndTheSnapshotStays) {
  Make();
  const SequenceId id = Create();
  Prefill(13);
  ASSERT_GT(State().floor, 0u);  // it is on a page of its own
  Snapshot("s");
  const SequenceId first = Restore("s", 13);
  const std::string before = Fingerprint(first);
  Free(first);
  On(id);
  for (int step = 0; step < 1000 && !HasFailure(); ++step) {
    Verify(1 + step % 3);
    if (step % 5 == 0) {
      Abort();
    } else {
      Commit(1);
    }
  }
  Restore("s", 13);
  EXPECT_EQ(Fingerprint(current()), before);
  ExpectMatchesOracle();
}

// Report 61: a failed step publishes nothing, in a snapshot or anywhere.
TEST_F(SnapshotsTest, AFailedStepPublishesNothing) {
  Make();
  const SequenceId id = Create();
  Prefill(5);
  const std::string before = Fingerprint(id);
  Batch step = Begin({{id, 3}});
  ASSERT_TRUE(VerifyLayer(step, 0).ok());
  before_verify_ = [](const VerifyParams&) { return absl::InternalError("device lost"); };
  EXPECT_FALSE(VerifyLayer(step, 1).ok());
  before_verify_ = nullptr;
  EXPECT_FALSE(store_->CreateSnapshot(kAlice, Versioned(id), {"s", 8}).ok());
  EXPECT_EQ(store_->usage().snapshots, 0u);
  EXPECT_EQ(Fingerprint(id), before);
}

// Report 62: every boundary of a long prompt restores exactly, with drafts in flight all the while.
TEST_F(SnapshotsTest, EveryPromptBoundaryWithDraftsOn) {
  Make(SmallGeometry(), Room(2, 12));
  const SequenceId id = Create();
  std::vector<uint64_t> boundaries;
  for (int chunk = 0; chunk < 12 && !HasFailure(); ++chunk) {
    On(id);
    Batch step = Begin({{id, 4}});
    VerifyLayers(step);
    boundaries.push_back(State(id).position);
    Snapshot(absl::StrCat("b", chunk));
    Commit(step, {4});
  }
  for (int chunk = 0; chunk < 12; ++chunk) {
    Restore(absl::StrCat("b", chunk), boundaries[chunk]);
    ExpectMatchesOracle();
    Verify(4);
    Commit(2);
    ExpectMatchesOracle();
    Free();
  }
}

// Report 63: 1,500 shared and 700 own tokens: the hit is at 1,500, because the caller said so.
TEST_F(SnapshotsTest, SnapshotPointsAreTheCallers) {
  Geometry geometry = SmallGeometry();
  geometry.layers.resize(2);
  Make(geometry, Room(3, 2));
  const SequenceId id = Create();
  Prefill(1500);
  Snapshot("shared");
  Prefill(700);
  Snapshot("own");
  Free(id);
  const std::vector<std::string> digests = {"shared", "absent"};
  const Store::Prefixes hit = store_->LookupPrefix(digests, 2200);
  ASSERT_EQ(hit.keys.size(), 1u);
  EXPECT_EQ(hit.keys[0].position, 1500u);
  EXPECT_EQ(store_->LookupPrefix(digests, 1499).too_long, 1u);
  Restore("shared", 1500);
  Prefill(700);
  ExpectMatchesOracle();
}

// Report 67: restore behind, then replay only the gap.
TEST_F(SnapshotsTest, RestoreAndReplayTheGap) {
  Make();
  const SequenceId id = Create();
  Prefill(9);
  Snapshot("g");
  std::vector<int> gap;
  for (int i = 0; i < 8; ++i) gap.push_back(AnyToken());
  const std::vector<int> half(gap.begin(), gap.begin() + 4), rest(gap.begin() + 4, gap.end());
  for (const SequenceId on : {id, Restore("g", 9)}) {
    On(on);
    for (const auto& part : {half, rest}) {
      VerifyTokens(part);
      Commit(4);
    }
    EXPECT_EQ(State().position, 17u);
    ExpectMatchesOracle();
  }
}

// Report 78: an import that lacks a layer is refused, and changes nothing.
TEST_F(SnapshotsTest, ImportWithoutALayerIsRefused) {
  Make();
  const SequenceId id = Create();
  Prefill(6);
  const std::string before = Fingerprint(id);
  const auto layers = Export(id);
  ASSERT_TRUE(layers.ok());
  for (uint32_t missing = 0; missing < 3; ++missing) {
    auto import = store_->BeginImport(kAlice, Versioned(id));
    ASSERT_TRUE(import.ok());
    for (uint32_t layer = 0; layer < 3; ++layer) {
      if (layer == missing) continue;
      ASSERT_TRUE((*import)->WriteLayer(layer, 6, (*layers)[layer]).ok());
    }
    EXPECT_TRUE(Fails((*import)->Finish(6, {}), absl::StatusCode::kFailedPrecondition,
                      {absl::StrCat("layer index ", missing)}));
    import->reset();
    EXPECT_EQ(Fingerprint(id), before);
  }
}

// Report 81: an export while drafts are in the ring is the committed state, one per layer.
TEST_F(SnapshotsTest, ExportBesideDraftsIsTheCommittedState) {
  Make();
  const SequenceId id = Create();
  for (int round = 0; round < 10; ++round) {
    Batch step = Begin({{id, 4}});
    VerifyLayers(step);
    const auto layers = Export(id);
    ASSERT_TRUE(layers.ok()) << layers.status();
    for (uint32_t layer = 0; layer < 3; ++layer)
      EXPECT_EQ((*layers)[layer], ReadState(id, layer, State(id).position));
    Commit(step, {static_cast<uint32_t>(round % 5)});
    ExpectMatchesOracle(id);
  }
}

// Report 97: four beams, reordered, two dropped: each goes on as if it had always been alone.
TEST_F(SnapshotsTest, BeamsForkReorderAndDrop) {
  Make(SmallGeometry(), Room(4, 0));
  std::vector<SequenceId> beams = {Create()};
  Prefill(10);
  for (int i = 1; i < 4; ++i) {
    On(beams[0]);
    beams.push_back(Fork());
  }
  for (int round = 0; round < 12 && !HasFailure(); ++round) {
    std::vector<Row> rows;
    for (const SequenceId id : beams) rows.push_back({id, 1});
    Step(rows, {1, 1, 1, 1});
    Free(beams[3]);
    Free(beams[1]);
    On(beams[2]);
    beams[1] = Fork();
    On(beams[0]);
    beams[3] = Fork();
    std::swap(beams[0], beams[2]);
    for (const SequenceId id : beams) ExpectMatchesOracle(id);
  }
}

// Report 98: out to the caller, slot reused, back into another sequence: it goes on.
TEST_F(SnapshotsTest, SuspendedAndResumedElsewhere) {
  Make(SmallGeometry(), Room(2, 0));
  const SequenceId id = Create();
  Prefill(11);
  const std::vector<SequenceId> ids = {id};
  ASSERT_TRUE(store_->Flush(kAlice, ids).ok());  // so that the state is a page's, bit for bit
  const auto layers = Export(id);
  ASSERT_TRUE(layers.ok());
  const auto history = model_->sequences.at(id);
  std::vector<std::vector<std::byte>> expected;
  std::vector<int> text;
  for (int i = 0; i < 4; ++i) text.push_back(AnyToken());
  Batch uninterrupted = Begin({{id, 0, text}});
  VerifyLayers(uninterrupted);
  expected = uninterrupted.outputs;
  Abort(uninterrupted);
  Free(id);
  const SequenceId squatter = Create();
  Prefill(5);
  Free(squatter);
  const SequenceId resumed = Create();
  auto import = store_->BeginImport(kAlice, Versioned(resumed));
  ASSERT_TRUE(import.ok());
  for (uint32_t layer = 0; layer < 3; ++layer)
    ASSERT_TRUE((*import)->WriteLayer(layer, 11, (*layers)[layer]).ok());
  const auto state = (*import)->Finish(11, {});
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_EQ(state->position, 11u);
  model_->sequences.at(resumed) = history;
  model_->sequences.at(resumed).version = state->version;
  Batch again = Begin({{resumed, 0, text}});
  VerifyLayers(again);
  EXPECT_EQ(again.outputs, expected);
  Commit(again, {4});
  ExpectMatchesOracle();
}

// Report 99: handles around a tool call: branch, diverge, drop; their number is bounded.
TEST_F(SnapshotsTest, HandlesAroundAToolCall) {
  Make(SmallGeometry(), Room(3, 2));
  const SequenceId id = Create();
  Prefill(7);
  Snapshot("before call");
  Decode(5);
  Snapshot("after call");
  EXPECT_TRUE(Fails(store_->CreateSnapshot(kAlice, Versioned(id), {"one more", 12}),
                    absl::StatusCode::kResourceExhausted, {"snapshots_max"}));
  const SequenceId retry = Restore("before call", 7);
  Decode(3);
  const SequenceId branch = Fork(State().floor);
  Decode(4);
  for (const SequenceId each : {id, retry, branch}) ExpectMatchesOracle(each);
  EXPECT_TRUE(Fails(store_->CreateFromSnapshot(kAlice, {"after call", 12}, 1),
                    absl::StatusCode::kResourceExhausted, {"sequences_max"}));
  Free(branch);
  Restore("after call", 12);
  ExpectMatchesOracle();
  Forget("before call", 7);
  EXPECT_TRUE(store_->CreateSnapshot(kAlice, Versioned(id), {"one more", 12}).ok());
}

}  // namespace
}  // namespace ssmd
