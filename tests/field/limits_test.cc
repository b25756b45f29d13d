// Field reports 7, 47, 50, 51, 90, 91, 95, 96, 100: every limit is a named answer, every number up
// to it works.
#include "tests/testing/raw_inputs.h"
#include "tests/testing/store_fixture.h"

namespace ssmd {
namespace {

using testing::Fails;
using testing::kAlice;
using testing::RefusesField;

class BoundsTest : public testing::StoreFixture {
 protected:
  // What a machine will not give is no failure of ours.
  bool MakeIfThereIsMemory(const Geometry& geometry, const Capacity& capacity) {
    const auto device = testing::MakeTestDevice(uint64_t{1} << 42, &pool_);
    const auto probe = device->CreateBackend(MakeBackendSpec(geometry, capacity, false));
    return !absl::IsResourceExhausted(probe.status());
  }
};

// Report 47: shapes whose records do not fill their rows: the padding between them is NaN.
TEST_F(BoundsTest, OddStrides) {
  for (const Dtype activation : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
    Geometry geometry = SmallGeometry();
    geometry.layers = {
        {Family::kMamba2, 3, 1, 48, 40}, {Family::kGdn, 5, 5, 16, 8}, {Family::kKda, 3, 3, 80, 24}};
    geometry.formats.activation = activation;
    geometry.formats.correction = Dtype::kFp16;
    geometry.formats.checkpoint_lp = Dtype::kFp16;
    const RingLayout ring =
        MakeRingLayout(geometry.layers[0], geometry.formats, geometry.ring_records());
    ASSERT_GT(ring.log_alpha.row_bytes, 3 * sizeof(float));  // there is padding
    Make(geometry);
    const SequenceId a = Create(), b = Create();
    for (uint32_t round = 0; round < 20 && !HasFailure(); ++round)
      Step({{b, 1 + round % 4}, {a, 4}}, {1, round % 5});
    ExpectMatchesOracle(a);
    ExpectMatchesOracle(b);
  }
}

// Report 50: whatever registration accepts runs: create, three steps, snapshot, restore, free.
TEST_F(BoundsTest, EveryModeStarts) {
  int modes = 0;
  for (const Family family : {Family::kMamba2, Family::kGdn, Family::kKda}) {
    for (const Dtype activation : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp16}) {
      for (const Dtype output : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp16}) {
        for (const Dtype correction : {Dtype::kNone, Dtype::kFp16, Dtype::kFp32}) {
          for (const auto& [hp, lp] : {std::pair{Dtype::kFp32, Dtype::kNone},
                                       {Dtype::kFp32, Dtype::kFp16},
                                       {Dtype::kFp16, Dtype::kNone},
                                       {Dtype::kFp16, Dtype::kFp16}}) {
            for (const auto& [window, drafts, kept] :
                 {std::tuple{1u, 1u, 0u}, {4u, 4u, 0u}, {16u, 8u, 8u}, {32u, 1u, 5u}}) {
              const bool background = modes % 2 == 1;
              Geometry geometry{.layers = {{family, 2, 1, 16, 8}},
                                .formats = {.activation = activation,
                                            .correction = correction,
                                            .output = output,
                                            .checkpoint_hp = hp,
                                            .checkpoint_lp = lp},
                                .window_records = window,
                                .draft_tokens_max = drafts,
                                .rollback_tokens_min = kept};
              if (background) geometry.flush_mode = FlushMode::kBackground;
              if (!ValidateGeometry(geometry).ok()) continue;
              SCOPED_TRACE(absl::StrCat(FamilyName(family), " ", DtypeName(activation), " ",
                                        DtypeName(output), " ", DtypeName(correction), " ",
                                        DtypeName(hp), "/", DtypeName(lp), " L ", window, " T ",
                                        drafts, " background ", background));
              ++modes;
              Make(geometry);
              if (HasFatalFailure()) return;
              Create();
              for (int step = 0; step < 3; ++step) {
                Verify(drafts);
                Commit(1);
              }
              Snapshot("s");
              Free();
              Restore("s", 3);
              Decode(2);
              ExpectMatchesOracle();
              Free();
              Forget("s", 3);
              ExpectNothingHeld();
              if (HasFailure()) return;
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(modes, 3 * 3 * 4 * 4 * (1 + 2 + 2));
}

// Report 51: windows, drafts and rollbacks that cannot work are refused when a model is registered.
TEST_F(BoundsTest, WindowsAreCheckedAtRegistration) {
  struct Case {
    uint32_t window, drafts, kept;
    const char* field;
  };
  for (const Case& c : {Case{8, 9, 0, "draft_tokens_max"},
                        {8, 0, 0, "draft_tokens_max"},
                        {0, 1, 0, "window_records"},
                        {8, 4, 5, "draft_tokens_max"},
                        {kWindowRecordsMax + 1, 1, 0, "window_records"}}) {
    Geometry geometry = SmallGeometry();
    geometry.window_records = c.window;
    geometry.draft_tokens_max = c.drafts;
    geometry.rollback_tokens_min = c.kept;
    EXPECT_TRUE(RefusesField(ValidateGeometry(geometry), c.field, {}));
    EXPECT_TRUE(RefusesField(
        Store::Create({.geometry = geometry, .capacity = SmallCapacity()},
                      [&](const BackendSpec& spec) { return device_->CreateBackend(spec); }),
        c.field, {}));
  }
}

// Report 90: 70,000 rows are refused by name; as many as are allowed are right to the last one.
TEST_F(BoundsTest, MoreRowsThanAGridHasBlocks) {
  Geometry geometry = SmallGeometry();
  geometry.layers = {geometry.layers[1]};
  Capacity capacity = SmallCapacity();
  capacity.rows_max = 70000;
  EXPECT_TRUE(RefusesField(ValidateCapacity(capacity), "capacity.rows_max", {"65536"}));
  capacity.rows_max = kRowsMax;
  Make(geometry, capacity);
  const SequenceId first = Create(), last = Create();
  StepRequest request;
  request.rows.assign(70000, {kPaddingRow, 0, 1});
  EXPECT_TRUE(RefusesField(store_->BeginStep(kAlice, request), "sequence_ids", {"70000"}));
  std::vector<Row> rows(kRowsMax, Row{kPaddingRow, 1});
  rows.front() = {first, 2};
  rows.back() = {last, 3};
  std::vector<uint32_t> accepted(kRowsMax, 0);
  accepted.front() = 1;
  accepted.back() = 2;
  Step(rows, accepted);
  ExpectMatchesOracle(first);
  ExpectMatchesOracle(last);
  EXPECT_EQ(State(last).position, 2u);
}

// Report 91: the last slot of rings of more than 2^31 elements.
TEST_F(BoundsTest, LastSlotOfALargeRingPool) {
  Geometry geometry = SmallGeometry();
  geometry.layers = {{Family::kGdn, 256, 1, 16, 256}};
  geometry.window_records = 32;
  Capacity capacity = SmallCapacity();
  const RingLayout ring =
      MakeRingLayout(geometry.layers[0], geometry.formats, geometry.ring_records());
  capacity.sequences_max = static_cast<uint32_t>((uint64_t{1} << 33) / ring.slot_bytes + 2);
  poison_ = false;  // the pool is reserved, not written
  if (!MakeIfThereIsMemory(geometry, capacity)) GTEST_SKIP() << "the machine refused the mapping";
  Make(geometry, capacity);
  // Nearly full rings where a wrapped offset would lead: slots 0 and 1.
  const std::vector<SequenceId> low = store_->CreateSequences(kAlice, 2)->ids;
  for (uint64_t step = 0; step < 7; ++step) {
    Batch batch{.owner = kAlice, .tokens = {{0, 1, 2, 3}, {4, 5, 6, 7}}};
    batch.request.rows = {{low[0], step + 1, 4}, {low[1], step + 1, 4}};
    batch.id = store_->BeginStep(kAlice, batch.request)->id;
    ASSERT_TRUE(VerifyLayer(batch, 0).ok());
    const std::vector<uint32_t> all = {4, 4};
    ASSERT_TRUE(store_->Commit(kAlice, batch.id, all).ok());
  }
  std::vector<float> before[2], after(geometry_.layers[0].state_elements());
  for (int i = 0; i < 2; ++i) {
    before[i] = after;
    ASSERT_TRUE(store_->ReadState(kAlice, low[i], 0, 28, absl::MakeSpan(before[i])).ok());
  }
  ASSERT_TRUE(store_->CreateSequences(kAlice, capacity.sequences_max - 3).ok());
  const SequenceId last = Create();
  ASSERT_GT((capacity.sequences_max - 1) * ring.slot_bytes, uint64_t{1} << 33);
  Prefill(5);
  ExpectMatchesOracle(last);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(store_->ReadState(kAlice, low[i], 0, 28, absl::MakeSpan(after)).ok());
    EXPECT_EQ(after, before[i]);
  }
}

// Report 91: the last pages of a checkpoint pool of more than 2^31 elements. Open imports hold all
// the others.
TEST_F(BoundsTest, LastPageOfALargeCheckpointPool) {
  Geometry geometry = SmallGeometry();
  geometry.layers = {{Family::kMamba2, 8, 1, 256, 256}};
  geometry.formats.correction = Dtype::kNone;
  geometry.window_records = 2;
  geometry.draft_tokens_max = 2;
  Capacity capacity = SmallCapacity();
  const uint64_t page_bytes = MakePageLayout(geometry.layers[0], geometry.formats).page_bytes;
  capacity.sequences_max = static_cast<uint32_t>((uint64_t{1} << 33) / page_bytes + 4);
  capacity.snapshots_max = 0;
  poison_ = false;
  if (!MakeIfThereIsMemory(geometry, capacity)) GTEST_SKIP() << "the machine refused the mapping";
  Make(geometry, capacity);
  const auto filler = store_->CreateSequences(kAlice, capacity.sequences_max - 1);
  ASSERT_TRUE(filler.ok());
  std::vector<std::unique_ptr<StateImport>> imports;
  for (const SequenceId id : filler->ids) {
    auto import = store_->BeginImport(kAlice, {id, 1});
    ASSERT_TRUE(import.ok()) << import.status();
    imports.push_back(*std::move(import));
  }
  const SequenceId last = Create();
  Prefill(4);
  EXPECT_GT(State(last).floor, 0u);  // it is on a page
  EXPECT_GT(uint64_t{store_->usage().pages.total - store_->usage().pages.free} * page_bytes / 4,
            uint64_t{1} << 31);
  ExpectMatchesOracle(last);
}

// Reports 95, 96: capacity is what it says, to the last one, and beyond it nothing changes.
TEST_F(BoundsTest, CapacityIsExactAndExhaustionIsAnAnswer) {
  for (const uint32_t sequences : {1u, 2u, 7u}) {
    Make(SmallGeometry(), {.sequences_max = sequences,
                           .snapshots_max = 2,
                           .spare_pages = 1,
                           .rows_max = 8,
                           .steps_max = 2});
    std::vector<SequenceId> ids;
    for (uint32_t i = 0; i < sequences; ++i) {
      ids.push_back(Create());
      Prefill(11);  // each on a page of its own
      if (i < 2) Snapshot(absl::StrCat("s", i), 11);
      if (i == 0) Prefill(9);
    }
    std::vector<std::string> before;
    for (const SequenceId id : ids) before.push_back(Fingerprint(id));
    const StoreUsage usage = store_->usage();
    const auto exhausted = [&](const absl::Status& status) {
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
      EXPECT_NE(GetDetail(status, detail::kRetryAfterMs), "");
    };
    exhausted(store_->CreateSequences(kAlice, 1).status());
    exhausted(store_->Fork(kAlice, Versioned(ids[0]), 1).status());
    exhausted(store_->CreateFromSnapshot(kAlice, {"s0", 11}, 1).status());
    if (sequences >= 2) {
      EXPECT_EQ(store_->CreateSnapshot(kAlice, Versioned(ids[1]), {"more", 11}).status().code(),
                absl::StatusCode::kResourceExhausted);
    }
    EXPECT_EQ(store_->usage().pages.free, usage.pages.free);
    EXPECT_EQ(store_->usage().sequences, sequences);
    for (uint32_t i = 0; i < sequences; ++i) {
      EXPECT_EQ(Fingerprint(ids[i]), before[i]);
      On(ids[i]);
      Decode(12);
      ExpectMatchesOracle();
    }
  }
}

// Report 100: a rollback that cannot be exact is refused and changes nothing.
TEST_F(BoundsTest, RollbackBeyondTheWindowIsRefused) {
  Geometry geometry = SmallGeometry();
  geometry.rollback_tokens_min = 3;
  Make(geometry);
  const SequenceId id = Create();
  for (int round = 0; round < 30 && !HasFailure(); ++round) {
    Prefill(4);
    const SequenceState state = State();
    const std::string before = Fingerprint(id);
    ASSERT_LE(state.floor + 3, state.position);  // what is guaranteed
    for (const uint64_t outside : {state.position + 1, ~uint64_t{0},
                                   state.floor == 0 ? state.position + 2 : state.floor - 1}) {
      const auto refused = store_->Rollback(kAlice, {id, state.version}, outside);
      EXPECT_EQ(refused.status().code(), absl::StatusCode::kOutOfRange);
      EXPECT_EQ(GetDetail(refused.status(), detail::kFloor), absl::StrCat(state.floor));
    }
    EXPECT_EQ(Fingerprint(id), before);
    Rollback(state.position - 3);
    ExpectMatchesOracle();
  }
}

}  // namespace
}  // namespace ssmd
