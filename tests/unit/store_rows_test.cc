// Kinds of rows (padding, all-or-count commits, partial steps), and the calls around sequences:
// adoption, flush on request, look-up and listing of snapshots, export.
#include <gmock/gmock.h>

#include "tests/testing/store_fixture.h"

namespace ssmd::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class StoreRowsTest : public StoreFixture {};

TEST_F(StoreRowsTest, RowsThatCommitAllAcceptNoOtherCount) {
  Make();
  const SequenceId id = Create();
  StepRequest request;
  request.rows = {{.sequence = id, .version = 1, .draft_tokens = 3, .commit_all = true}};
  Batch batch{.owner = kAlice, .request = request, .tokens = {{1, 2, 3}}};
  batch.id = store_->BeginStep(kAlice, request)->id;
  batch.model = model_->Begin({{id, {1, 2, 3}}});
  VerifyLayers(batch);
  const std::vector<uint32_t> two = {2}, three = {3};
  const absl::Status refused = store_->Commit(kAlice, batch.id, two).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("all of its 3 tokens, got 2"));
  Commit(batch, three);
  ExpectMatchesOracle();
}

TEST_F(StoreRowsTest, PartialStepsTurnBadRowsIntoPadding) {
  Make();
  const SequenceId good = Create(), stale = Create(), foreign = Create(kBob);
  On(stale);
  Decode(1);
  StepRequest request;
  request.rows = {{.sequence = stale, .version = 1, .draft_tokens = 2},
                  {.sequence = good, .version = 1, .draft_tokens = 1},
                  {.sequence = foreign, .version = 1, .draft_tokens = 1},
                  {.sequence = SequenceId{12345}, .version = 1, .draft_tokens = 1}};
  const std::string before = Fingerprint(stale);
  EXPECT_EQ(store_->BeginStep(kAlice, request).status().code(), absl::StatusCode::kAborted);
  request.allow_partial = true;
  const auto opened = store_->BeginStep(kAlice, request);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->row_status[0].code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(opened->row_status[1].ok());
  EXPECT_EQ(opened->row_status[2].code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(opened->row_status[3].code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->BeginStep(kAlice, request)->id, opened->id) << "a repeat";

  Batch batch{
      .id = opened->id, .owner = kAlice, .request = request, .tokens = {{1, 2}, {5}, {6}, {7}}};
  for (const size_t i : {0, 2, 3}) batch.request.rows[i].sequence = kPaddingRow;
  batch.model = model_->Begin({{good, {5}}});
  VerifyLayers(batch);  // padding rows: zeros
  Commit(batch, {0, 1, 0, 0});
  EXPECT_EQ(Fingerprint(stale), before);
  ExpectMatchesOracle(good);
}

TEST_F(StoreRowsTest, StepsOfPaddingAloneEndAndRepeat) {
  Make();
  Create();
  for (int round = 0; round < 20; ++round) {  // more than there are step entries
    StepRequest request;
    request.rows = {{.sequence = kPaddingRow, .draft_tokens = 2}, {.sequence = kPaddingRow}};
    Batch batch{.owner = kAlice, .request = request, .tokens = {{1, 2}, {}}};
    batch.id = store_->BeginStep(kAlice, request)->id;
    VerifyLayers(batch);
    const std::vector<uint32_t> counts = {round % 2 == 0 ? 2u : 0u, 0u};
    const auto committed = store_->Commit(kAlice, batch.id, counts);
    ASSERT_TRUE(committed.ok()) << committed.status();
    EXPECT_THAT(committed->versions, ElementsAre(0, 0));
    EXPECT_TRUE(store_->Commit(kAlice, batch.id, counts).ok()) << "a repeat";
  }
  EXPECT_EQ(store_->usage().open_steps, 0u);
  StepRequest wrong;
  wrong.rows = {{.sequence = kPaddingRow, .version = 7, .draft_tokens = 1}};
  EXPECT_EQ(store_->BeginStep(kAlice, wrong).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(StoreRowsTest, OwnersHandOverIdleSequencesAllOrNone) {
  Make();
  const SequenceId first = Create();
  Prefill(5);
  const SequenceId second = Create();
  Batch open = Begin({{second, 1}});
  EXPECT_EQ(store_->ChangeOwner(kAlice, kBob, {}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(store_->CountOwned(kAlice), 2u);
  Abort(open);
  const auto moved = store_->ChangeOwner(kAlice, kBob, {});
  ASSERT_TRUE(moved.ok()) << moved.status();
  ASSERT_EQ(moved->size(), 2u);
  EXPECT_EQ((*moved)[0].position, 5u);
  EXPECT_EQ(store_->Get(kAlice, first).status().code(), absl::StatusCode::kPermissionDenied);
  NowOwnedBy(first, kBob);
  NowOwnedBy(second, kBob);
  On(first);
  Decode(20);
  ExpectMatchesOracle();
}

TEST_F(StoreRowsTest, FlushOnRequestFoldsAllButK) {
  Geometry geometry = SmallGeometry();
  geometry.rollback_tokens_min = 2;
  Make(geometry);
  const SequenceId id = Create();
  Prefill(6);
  const std::vector<SequenceId> ids = {id};
  const uint64_t version = State().version;
  EXPECT_EQ(*store_->Flush(kAlice, ids), 1u);
  model_->Observe(State());
  EXPECT_EQ(State().floor, 4u);
  EXPECT_EQ(State().version, version);
  EXPECT_EQ(*store_->Flush(kAlice, ids), 0u);
  ExpectMatchesOracle();
  Batch open = Begin({{id, 1}});
  EXPECT_EQ(GetDetail(store_->Flush(kAlice, ids).status(), detail::kReason), reason::kStepOpen);
  Abort(open);
  Decode(20);
  ExpectMatchesOracle();
}

TEST_F(StoreRowsTest, SnapshotsAreLookedUpAndListedInOrder) {
  Make();
  Create();
  Prefill(3);
  Snapshot("b");
  Prefill(1);
  Snapshot("b");
  Snapshot("a");
  const std::vector<std::string> digests = {"b", "nobody's"};
  const Store::Prefixes found = store_->LookupPrefix(digests, 3);
  ASSERT_EQ(found.keys.size(), 1u);
  EXPECT_EQ(found.keys[0], (SnapshotKey{"b", 3}));
  EXPECT_EQ(found.too_long, 1u);
  const auto page = store_->ListSnapshots(std::nullopt, 2);
  EXPECT_THAT(page, ElementsAre(SnapshotKey{"a", 4}, SnapshotKey{"b", 3}));
  EXPECT_THAT(store_->ListSnapshots(page.back(), 2), ElementsAre(SnapshotKey{"b", 4}));
}

TEST_F(StoreRowsTest, AnExportIsFrozenAndBounded) {
  Make();
  const SequenceId id = Create();
  Prefill(7);
  Snapshot("s");
  auto exported = store_->BeginExport(kAlice, Versioned(id));
  ASSERT_TRUE(exported.ok()) << exported.status();
  EXPECT_EQ(GetDetail(store_->BeginExport(SnapshotKey{"s", 7}).status(), detail::kReason),
            reason::kLimit);
  const std::vector<float> before = ReadState(id, 0, 7);
  Decode(30);
  Forget("s", 7);
  std::vector<float> read(before.size());
  EXPECT_EQ((*exported)->position(), 7u);
  ASSERT_TRUE((*exported)->ReadLayer(0, absl::MakeSpan(read)).ok());
  EXPECT_EQ(read, before);
  exported->reset();
  EXPECT_EQ(store_->usage().exports, 0u);
  EXPECT_EQ(store_->BeginExport(SnapshotKey{"s", 7}).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(StoreRowsTest, ImportAtAPositionThatWouldWrapIsRefused) {
  Make();
  const SequenceId id = Create();
  Prefill(3);
  const std::string before = Fingerprint(id);
  for (const uint64_t position : {~uint64_t{0}, kPositionMax + 1}) {
    auto import = store_->BeginImport(kAlice, Versioned(id));
    ASSERT_TRUE(import.ok()) << import.status();
    const std::vector<float> state(geometry_.layers[0].state_elements());
    const absl::Status refused = (*import)->WriteLayer(0, position, state);
    EXPECT_EQ(GetDetail(refused, detail::kField), "descriptor.position");
    EXPECT_EQ((*import)->Finish(position, {}).status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(Fingerprint(id), before);
  Decode(20);
  ExpectMatchesOracle();
}

}  // namespace
}  // namespace ssmd::testing
