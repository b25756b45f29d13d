// Field reports 12-20, 49, 92: rows that are padding, idle, empty or bad beside rows that are not.
#include <limits>

#include "tests/testing/store_fixture.h"

namespace ssmd {
namespace {

using testing::Fails;
using testing::kAlice;

class PaddingTest : public testing::StoreFixture {
 protected:
  static Capacity RoomFor(uint32_t sequences, uint32_t rows) {
    return {.sequences_max = sequences,
            .snapshots_max = 0,
            .spare_pages = 8,
            .rows_max = rows,
            .steps_max = 3};
  }
};

// Reports 12, 13, 14, 17: every slot of the pool is live, first and last included; batches that are
// up to nine tenths padding change nothing but the rows they name.
TEST_F(PaddingTest, PaddingTouchesNoLiveSlot) {
  Make(SmallGeometry(), RoomFor(6, 20));
  std::vector<SequenceId> ids;
  std::vector<std::string> before;
  for (int i = 0; i < 6; ++i) {
    ids.push_back(Create());
    Prefill(3 + 2 * i);
  }
  EXPECT_FALSE(store_->CreateSequences(kAlice, 1).ok());
  for (const SequenceId id : ids) before.push_back(Fingerprint(id));
  for (uint32_t padding = 1; padding <= 18; ++padding) {
    const size_t live = padding % ids.size();
    std::vector<Row> rows(padding, Row{kPaddingRow, 1 + padding % 4});
    rows.insert(rows.begin() + padding / 2, Row{ids[live], 2});
    std::vector<uint32_t> accepted(rows.size(), 0);
    accepted[padding / 2] = 2;
    Step(rows, accepted);
    for (size_t i = 0; i < ids.size(); ++i) {
      if (i == live) {
        EXPECT_NE(Fingerprint(ids[i]), before[i]);
        before[i] = Fingerprint(ids[i]);
      } else {
        ASSERT_EQ(Fingerprint(ids[i]), before[i]) << "sequence " << i << ", padding " << padding;
      }
    }
  }
  for (const SequenceId id : ids) ExpectMatchesOracle(id);
}

// Report 13: numbers beside the valid ids are refused, not wrapped into the pool.
TEST_F(PaddingTest, NumbersBesideTheIdsAreRefused) {
  Make(SmallGeometry(), RoomFor(2, 4));
  const uint64_t first = static_cast<uint64_t>(Create()), last = static_cast<uint64_t>(Create());
  for (const uint64_t id : {~uint64_t{0}, uint64_t{0xffffffff}, uint64_t{1}, first - 1, last + 1,
                            first & 0xffff, ~first + 1}) {
    EXPECT_TRUE(Fails(store_->BeginStep(kAlice, {.rows = {{SequenceId{id}, 1, 1}}}),
                      absl::StatusCode::kNotFound, {}))
        << id;
  }
  EXPECT_TRUE(Fails(store_->BeginStep(kAlice, {.rows = {{kPaddingRow, 1, 1}}}),
                    absl::StatusCode::kInvalidArgument, {"padding"}));
}

// Reports 15, 16: whatever the output buffer held, the reply is the same bytes; padding is zeros.
TEST_F(PaddingTest, OutputsDoNotDependOnWhatTheBufferHeld) {
  Make(SmallGeometry(), RoomFor(3, 6));
  const SequenceId a = Create(), b = Create();
  Step({{a, 4}, {b, 3}}, {3, 1});
  Batch batch = Begin({{kPaddingRow, 2}, {a, 3}, {kPaddingRow, 0}, {b, 1}, {kPaddingRow, 4}});
  VerifyLayers(batch, 0x00);
  const auto first = batch.outputs;
  for (const int fill : {0xff, 0x7f, 0x80}) {
    VerifyLayers(batch, fill);
    EXPECT_EQ(batch.outputs, first) << fill;
  }
  Commit(batch, {0, 1, 0, 1, 0});
}

// Report 17: a random half of the sequences steps, the other half is bit for bit what it was.
TEST_F(PaddingTest, RandomHalvesLeaveTheOtherHalfAlone) {
  Make(SmallGeometry(), RoomFor(8, 8));
  std::vector<SequenceId> ids;
  for (int i = 0; i < 8; ++i) {
    ids.push_back(Create());
    Prefill(2 + i);
  }
  for (int round = 0; round < 60 && !HasFailure(); ++round) {
    std::shuffle(ids.begin(), ids.end(), random_);
    std::vector<std::string> before;
    for (size_t i = 4; i < 8; ++i) before.push_back(Fingerprint(ids[i]));
    std::vector<Row> rows;
    std::vector<uint32_t> accepted;
    for (size_t i = 0; i < 4; ++i) {
      rows.push_back({ids[i], static_cast<uint32_t>(random_() % 5)});
      accepted.push_back(static_cast<uint32_t>(random_() % (rows.back().drafts + 1)));
    }
    Step(rows, accepted);
    for (size_t i = 4; i < 8; ++i) ASSERT_EQ(Fingerprint(ids[i]), before[i - 4]) << round;
  }
  for (const SequenceId id : ids) ExpectMatchesOracle(id);
}

// Report 19: one row is fed infinity. The step is refused as a whole and names it; repeated without
// that row the others are right, and the bad one's slot is clean for its next owner.
TEST_F(PaddingTest, InfiniteRowHarmsNobody) {
  Make(SmallGeometry(), RoomFor(3, 3));
  const SequenceId good = Create(), bad = Create(), fine = Create();
  Step({{good, 4}, {bad, 4}, {fine, 4}}, {4, 4, 3});
  const double healthy = inputs_[5][1].v[3];
  const std::vector<double> u_max = model_->u_max;
  inputs_[5][1].v[3] = std::numeric_limits<double>::infinity();
  Batch batch = Begin({{good, 2}, {bad, 0, {5, 5}}, {fine, 1}});
  EXPECT_TRUE(VerifyLayer(batch, 0).ok());
  EXPECT_TRUE(Fails(VerifyLayer(batch, 1), absl::StatusCode::kAborted, {"row 1", "infinite"}));
  inputs_[5][1].v[3] = healthy;
  model_->u_max = u_max;  // the model stepped over the infinity too
  Step({{good, 2}, {fine, 1}}, {2, 1});
  Free(bad);
  const SequenceId next = Create();
  for (int i = 0; i < 5; ++i) Step({{good, 3}, {next, 3}, {fine, 3}}, {3, 2, 1});
  for (const SequenceId id : {good, next, fine}) ExpectMatchesOracle(id);
}

// Report 20: each row advances by its own length.
TEST_F(PaddingTest, RaggedRowsAdvanceByTheirOwnLength) {
  Make(SmallGeometry(), RoomFor(5, 5));
  std::vector<SequenceId> ids;
  for (int i = 0; i < 5; ++i) ids.push_back(Create());
  std::vector<uint64_t> expected(5, 0);
  for (uint32_t round = 0; round < 12; ++round) {
    std::vector<Row> rows;
    std::vector<uint32_t> accepted;
    for (uint32_t i = 0; i < 5; ++i) {
      rows.push_back({ids[i], (round + i) % 5});
      accepted.push_back((round + i) % 5);
      expected[i] += accepted[i];
    }
    Step(rows, accepted);
    for (uint32_t i = 0; i < 5; ++i) EXPECT_EQ(State(ids[i]).position, expected[i]);
  }
  for (const SequenceId id : ids) ExpectMatchesOracle(id);
}

// Report 49: the last token of a prompt, alone, beside rows that speculate.
TEST_F(PaddingTest, OneTokenPromptTailBesideDecodes) {
  Make(SmallGeometry(), RoomFor(4, 4));
  const SequenceId prompt = Create();
  Prefill(9);
  const SequenceId a = Create(), b = Create();
  Step({{a, 4}, {b, 4}}, {2, 3});
  Batch batch = Begin({{a, 4}, {prompt, 1}, {b, 1}});
  VerifyLayers(batch);
  Commit(batch, {1, 1, 1});
  // The same row as one that must keep everything it sends.
  StepRequest request{.rows = {{prompt, State(prompt).version, 1, true}}};
  const auto step = store_->BeginStep(kAlice, request);
  ASSERT_TRUE(step.ok());
  const std::vector<uint32_t> none = {0};
  Batch tail{.id = step->id, .owner = kAlice, .request = request, .tokens = {{7}}};
  tail.model = model_->Begin({{prompt, {7}}});
  VerifyLayers(tail);
  EXPECT_TRUE(Fails(store_->Commit(kAlice, step->id, none), absl::StatusCode::kOutOfRange, {}));
  Commit(tail, {1});
  for (const SequenceId id : {prompt, a, b}) ExpectMatchesOracle(id);
}

// Report 92: no tokens is no change, wherever the empty row stands.
TEST_F(PaddingTest, EmptyRowsFirstMiddleLastAndAll) {
  Make(SmallGeometry(), RoomFor(3, 3));
  const SequenceId a = Create(), b = Create(), c = Create();
  Step({{a, 4}, {b, 3}, {c, 2}}, {4, 3, 2});
  for (int empty = 0; empty < 4; ++empty) {  // 3: all
    std::vector<Row> rows = {{a, 2}, {b, 2}, {c, 2}};
    std::vector<uint32_t> accepted(3, 1);
    for (int i = 0; i < 3; ++i) {
      if (empty == i || empty == 3) rows[i].drafts = accepted[i] = 0;
    }
    std::vector<std::vector<float>> before;
    for (const Row& row : rows) before.push_back(ReadState(row.id, 1, State(row.id).position));
    Step(rows, accepted);
    for (int i = 0; i < 3; ++i) {
      const bool same = ReadState(rows[i].id, 1, State(rows[i].id).position) == before[i];
      EXPECT_EQ(same, empty == i || empty == 3);
    }
  }
  for (const SequenceId id : {a, b, c}) ExpectMatchesOracle(id);
}

}  // namespace
}  // namespace ssmd
