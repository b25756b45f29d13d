// Field reports 3-10: what a slot's next owner may find in it.
#include <set>

#include "tests/testing/store_fixture.h"

namespace ssmd {
namespace {

using testing::Fails;
using testing::kAlice;
using testing::kBob;

class LifecycleTest : public testing::StoreFixture {};

// Report 3: a sequence that starts again at token 0 starts from nothing.
TEST_F(LifecycleTest, RestartFromTokenZeroEqualsTheFirstRun) {
  Make();
  std::vector<int> text;
  for (int i = 0; i < 50; ++i) text.push_back(AnyToken());
  std::vector<std::vector<std::byte>> first, second;
  for (auto* outputs : {&first, &second}) {
    const SequenceId id = Create();
    for (const int token : text) {
      Batch batch = Begin({{id, 0, {token}}});
      VerifyLayers(batch);
      for (const auto& layer : batch.outputs) outputs->push_back(layer);
      Commit(batch, {1});
    }
    ExpectMatchesOracle();
    Free();
  }
  ASSERT_EQ(first.size(), second.size());
  // Equal to the oracle within its bound both times; and bit for bit until the first fold, whose
  // phase differs from admission to admission.
  for (size_t i = 0; i < 4 * geometry_.layers.size(); ++i) EXPECT_EQ(first[i], second[i]) << i;
}

// Report 4: thousands of owners of three slots. Rings, cursors, page and window start over.
TEST_F(LifecycleTest, TenThousandOwnersOfThreeSlots) {
  Geometry geometry = SmallGeometry();
  geometry.layers.resize(2);
  geometry.window_records = 5;
  geometry.draft_tokens_max = 3;
  geometry.rollback_tokens_min = 1;
  Make(geometry,
       {.sequences_max = 3, .snapshots_max = 0, .spare_pages = 2, .rows_max = 1, .steps_max = 1});
  const SequenceId neighbour = Create();
  Decode(7);
  const std::string before = Fingerprint(neighbour);
  const uint32_t free_pages = store_->usage().pages.free;
  for (int cycle = 0; cycle < 10000 && !HasFailure(); ++cycle) {
    Create();
    for (uint64_t steps = random_() % 6; steps > 0; --steps) {
      const uint32_t drafts = static_cast<uint32_t>(random_() % 4);
      Verify(drafts);
      if (random_() % 8 == 0) {
        Abort();
      } else {
        Commit(static_cast<uint32_t>(random_() % (drafts + 1)));
      }
    }
    if (cycle % 100 == 0) {
      Prefill(13);
      ExpectMatchesOracle();
    }
    Free();
  }
  EXPECT_EQ(store_->usage().pages.free, free_pages);
  EXPECT_EQ(Fingerprint(neighbour), before);
}

// Report 5: freed at each ring phase, with and without a fold behind it; the next owner's first L
// outputs are those of an empty sequence.
TEST_F(LifecycleTest, FreedInEveryRingPhase) {
  Make(SmallGeometry(),
       {.sequences_max = 1, .snapshots_max = 0, .spare_pages = 1, .rows_max = 1, .steps_max = 1});
  for (uint64_t phase = 0; phase <= 2 * geometry_.ring_records(); ++phase) {
    Create();
    Prefill(phase);
    Free();
    Create();
    EXPECT_EQ(State().position, 0u);
    EXPECT_EQ(State().floor, 0u);
    EXPECT_EQ(State().version, 1u);
    Decode(geometry_.window_records);
    ExpectMatchesOracle();
    Free();
    if (HasFailure()) FAIL() << "phase " << phase;
  }
  ExpectNothingHeld();
}

// Report 6: not in the batch is neither preempted nor finished.
TEST_F(LifecycleTest, IdleForAThousandStepsOfOthers) {
  Make();
  const SequenceId idle = Create();
  Prefill(11);
  const std::string before = Fingerprint(idle);
  const SequenceId busy = Create(), other = Create();
  for (int step = 0; step < 1000 && !HasFailure(); ++step) {
    const uint32_t drafts = 1 + step % 4;
    Step({{busy, drafts}, {other, 1}}, {1, 1});
  }
  EXPECT_EQ(Fingerprint(idle), before);
  On(idle);
  Decode(20);
  ExpectMatchesOracle();
}

// Report 7: whatever refuses a Create or a Fork gives back what it had taken.
TEST_F(LifecycleTest, RefusedCreatesAndForksTakeNothing) {
  Make();
  const SequenceId id = Create();
  Prefill(10);
  Verify(2);  // leaves an open step: forks are allowed, and must be as harmless
  const StoreUsage before = store_->usage();
  const SequenceState state = State();
  const OwnerId a = kAlice;
  for (int round = 0; round < 50; ++round) {
    EXPECT_FALSE(store_->CreateSequences(a, 0).ok());
    EXPECT_FALSE(store_->CreateSequences(a, 4).ok());  // three are free: all or none
    EXPECT_FALSE(store_->CreateFromSnapshot(a, {"nothing", 3}, 1).ok());
    EXPECT_FALSE(store_->Fork(a, {id, state.version + 1}, 1).ok());
    EXPECT_FALSE(store_->Fork(a, {id, state.version}, 1, state.position + 1).ok());
    EXPECT_FALSE(store_->Fork(a, {id, state.version}, 2, state.floor - 1).ok());
    EXPECT_FALSE(store_->Fork(a, {id, state.version}, 4).ok());
    EXPECT_FALSE(store_->Fork(kBob, {id, state.version}, 1).ok());
  }
  EXPECT_EQ(store_->usage().sequences, before.sequences);
  EXPECT_EQ(store_->usage().pages.free, before.pages.free);
  EXPECT_TRUE(store_->CreateSequences(a, 3).ok());  // exactly what was said to be free
  Commit(1);
  ExpectMatchesOracle(id);
}

// Report 8: five thousand owners come, fork, snapshot and leave; a second end changes nothing.
TEST_F(LifecycleTest, FiveThousandOwnersLeaveNothingBehind) {
  Make();
  const SequenceId neighbour = Create(kBob);
  Decode(9);
  const std::string before = Fingerprint(neighbour);
  const StoreUsage start = store_->usage();
  for (uint64_t i = 0; i < 5000 && !HasFailure(); ++i) {
    const OwnerId owner{100 + i};
    const auto created = store_->CreateSequences(owner, 1);
    ASSERT_TRUE(created.ok());
    const SequenceId id = created->ids[0];
    ASSERT_TRUE(store_->Fork(owner, {id, 1}, 2).ok());
    ASSERT_TRUE(store_->CreateSnapshot(owner, {id, 1}, {"s", 0}).ok());
    ASSERT_TRUE(store_->BeginStep(owner, {.rows = {{id, 1, 1}}}).ok());
    if (i % 2 == 0) {
      auto import = store_->BeginImport(owner, {SequenceId{static_cast<uint64_t>(id) + 1}, 1});
      ASSERT_TRUE(import.ok());
      EXPECT_EQ(store_->ReleaseOwner(owner).sequences, 3u);  // under the open import
    } else {
      EXPECT_EQ(store_->ReleaseOwner(owner).sequences, 3u);
    }
    EXPECT_EQ(store_->ReleaseOwner(owner).sequences, 0u);
    ASSERT_TRUE(store_->DeleteSnapshot({"s", 0}).ok());
    EXPECT_FALSE(store_->DeleteSnapshot({"s", 0}).ok());
    const StoreUsage now = store_->usage();
    ASSERT_EQ(now.sequences + now.snapshots + now.open_steps + now.imports, start.sequences);
    ASSERT_EQ(now.pages.free, start.pages.free);
  }
  EXPECT_EQ(Fingerprint(neighbour), before);
}

// Report 9: a fork whose parent went away never copies from whoever has its slot now.
TEST_F(LifecycleTest, ForkRetriedAfterItsParentIsGone) {
  Make(SmallGeometry(),
       {.sequences_max = 2, .snapshots_max = 0, .spare_pages = 2, .rows_max = 2, .steps_max = 1});
  const SequenceId parent = Create();
  Prefill(6);
  const SequenceVersion named = Versioned(parent);
  const SequenceId other = Create();
  EXPECT_TRUE(Fails(store_->Fork(kAlice, named, 1), absl::StatusCode::kResourceExhausted, {}));
  Free(parent);
  const SequenceId thief = Create();  // takes the parent's slot, at its version even
  Prefill(6);
  EXPECT_TRUE(Fails(store_->Fork(kAlice, named, 1), absl::StatusCode::kNotFound, {}));
  Free(other);
  EXPECT_TRUE(Fails(store_->Fork(kAlice, named, 1), absl::StatusCode::kNotFound, {}));
  EXPECT_EQ(store_->usage().sequences, 1u);
  On(thief);
  Decode(3);
  ExpectMatchesOracle();
}

// Report 10: pools that start as NaN. The first use of every slot is finite and right, and padding
// reads none of it.
TEST_F(LifecycleTest, FirstUseOfEverySlotInPoisonedMemory) {
  ASSERT_TRUE(poison_);
  Make();
  Batch padding = Begin({{kPaddingRow, 4}, {kPaddingRow, 1}});
  VerifyLayers(padding);
  Commit(padding, {0, 0});
  std::vector<Row> rows;
  for (int i = 0; i < 4; ++i) rows.push_back({Create(), 3});
  Step(rows, {3, 0, 1, 2});
  for (int step = 0; step < 12; ++step) Step(rows, {3, 1, 2, 3});
  for (const Row& row : rows) ExpectMatchesOracle(row.id);
}

// Report 71: replies and repeats that arrive after the slot has another owner find nobody.
TEST_F(LifecycleTest, LateMessagesNeverReachTheNextOwner) {
  Make(SmallGeometry(),
       {.sequences_max = 1, .snapshots_max = 0, .spare_pages = 1, .rows_max = 1, .steps_max = 1});
  const SequenceId old = Create();
  Verify(3);
  Commit(2);
  Batch last = Begin({{old, 2}});
  VerifyLayers(last);
  Commit(last, {1});
  const SequenceVersion named = Versioned(old);
  Free(old);
  const SequenceId id = Create();
  Prefill(3);
  const std::string before = Fingerprint(id);
  const std::vector<SequenceId> ids = {old};
  const std::vector<uint32_t> one = {1};
  for (int round = 0; round < 3; ++round) {
    EXPECT_TRUE(Fails(store_->Release(kAlice, ids), absl::StatusCode::kNotFound, {}));
    EXPECT_TRUE(Fails(store_->Commit(kAlice, last.id, one), absl::StatusCode::kNotFound, {}));
    EXPECT_TRUE(Fails(store_->Abort(kAlice, last.id), absl::StatusCode::kNotFound, {}));
    EXPECT_TRUE(Fails(store_->Rollback(kAlice, named, 0), absl::StatusCode::kNotFound, {}));
    EXPECT_TRUE(Fails(store_->BeginStep(kAlice, last.request), absl::StatusCode::kNotFound, {}));
    EXPECT_TRUE(Fails(VerifyLayer(last, 0), absl::StatusCode::kNotFound, {}));
  }
  EXPECT_EQ(Fingerprint(id), before);
}

}  // namespace
}  // namespace ssmd
