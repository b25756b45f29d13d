// The whole life of sequences over real stubs, against the float64 reference: ragged steps, random
// acceptance, fork, rollback, snapshot, restore, auto_commit, abort; then everything is released.
#include "tests/e2e/harness.h"
#include "tests/reference/recurrence.h"
#include "tests/testing/compare.h"
#include "tests/testing/layer_inputs.h"

namespace ssmd::e2e {
namespace {

using reference::Token;
using TokenOfLayer = std::map<uint32_t, Token>;  // one position's inputs, by layer id

// FP32 inputs, records and outputs: what remains is the rounding of sums, of the order of
// 16 keys * 2^-24 * (|state| of order 1), with two digits to spare.
constexpr double kTolerance = 2e-4;

// A sequence as the client knows it: its accepted tokens are all that its state depends on.
struct Mirror {
  uint64_t id = 0, version = 1;
  std::vector<TokenOfLayer> accepted;
};

class LifeTest : public ::testing::Test {
 protected:
  LifeTest() : server_(StartServer()), client_(server_->address()) { client_.Start(); }

  static reference::Shape RefShape(uint32_t layer_id) {
    const LayerShape shape = ShapeOf(layer_id);
    return {shape.head_count, shape.key_group_count, shape.d_k, shape.d_v};
  }

  // Outputs of `drafts` after the sequence's accepted tokens, token after token.
  static std::vector<double> Expected(uint32_t layer_id, const Mirror& mirror,
                                      const std::vector<TokenOfLayer>& drafts) {
    reference::Recurrence recurrence(FamilyName(ShapeOf(layer_id).family), RefShape(layer_id));
    for (const TokenOfLayer& token : mirror.accepted) recurrence.Step(token.at(layer_id));
    std::vector<double> outputs;
    for (const TokenOfLayer& token : drafts)
      for (const double value : recurrence.Step(token.at(layer_id))) outputs.push_back(value);
    return outputs;
  }

  TokenOfLayer NewToken() {
    TokenOfLayer token;
    for (const uint32_t layer_id : kSmallLayers)
      token[layer_id] = testing::RandomToken(ShapeOf(layer_id), Dtype::kFp32, client_.random);
    return token;
  }

  struct OpenRow {
    Mirror* mirror;
    std::vector<TokenOfLayer> drafts;
  };

  // Opens a step and verifies every layer against the reference, in a random order.
  uint64_t BeginAndVerify(std::vector<OpenRow>& rows, bool auto_commit = false) {
    std::vector<Client::Row> step_rows;
    for (OpenRow& row : rows)
      step_rows.push_back(
          {row.mirror->id, row.mirror->version, static_cast<uint32_t>(row.drafts.size())});
    const uint64_t step = client_.Begin(step_rows, auto_commit);
    std::vector<uint32_t> layers(std::begin(kSmallLayers), std::end(kSmallLayers));
    std::shuffle(layers.begin(), layers.end(), client_.random);
    for (const uint32_t layer_id : layers) {
      std::vector<Token> tokens;
      std::vector<double> expected;
      for (const OpenRow& row : rows) {
        for (const TokenOfLayer& token : row.drafts) tokens.push_back(token.at(layer_id));
        for (const double value : Expected(layer_id, *row.mirror, row.drafts))
          expected.push_back(value);
      }
      const auto verified = client_.Call(&Stub::Verify, client_.VerifyOf(step, layer_id, tokens));
      EXPECT_TRUE(verified.ok()) << verified.status.error_message();
      EXPECT_EQ(verified.body.server_epoch(), client_.epoch);
      EXPECT_EQ(verified.body.committed(), auto_commit && layer_id == layers.back());
      std::vector<float> actual(verified.body.output().data().size() / sizeof(float));
      std::memcpy(actual.data(), verified.body.output().data().data(),
                  actual.size() * sizeof(float));
      EXPECT_TRUE(testing::Near(actual, expected, kTolerance)) << "layer " << layer_id;
    }
    return step;
  }

  static void Accept(OpenRow& row, uint32_t count) {
    row.mirror->accepted.insert(row.mirror->accepted.end(), row.drafts.begin(),
                                row.drafts.begin() + count);
    ++row.mirror->version;
  }

  // One random step of `mirrors`, as long as what is accepted fits.
  void Step(const std::vector<Mirror*>& mirrors) {
    std::vector<OpenRow> rows;
    for (Mirror* mirror : mirrors) {
      OpenRow row{mirror, {}};
      for (uint64_t t = client_.random() % 5; t > 0; --t) row.drafts.push_back(NewToken());
      rows.push_back(std::move(row));
    }
    if (rows[0].drafts.empty()) rows[0].drafts.push_back(NewToken());
    const uint64_t kind = client_.random() % 6;
    const uint64_t step = BeginAndVerify(rows, kind == 0);
    if (kind == 1) {  // an aborted step leaves no trace
      auto abort = client_.Make<v1::AbortStepRequest>();
      abort.set_step_id(step);
      EXPECT_TRUE(client_.Call(&Stub::AbortStep, abort).ok());
      return;
    }
    if (kind == 0) {
      for (OpenRow& row : rows) Accept(row, static_cast<uint32_t>(row.drafts.size()));
      return;
    }
    std::vector<uint32_t> accepted;
    for (OpenRow& row : rows) {
      accepted.push_back(static_cast<uint32_t>(client_.random() % (row.drafts.size() + 1)));
      Accept(row, accepted.back());
    }
    const v1::CommitResponse committed = client_.Commit(step, accepted);
    for (size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(committed.versions(static_cast<int>(i)), rows[i].mirror->version);
      EXPECT_EQ(committed.positions(static_cast<int>(i)), rows[i].mirror->accepted.size());
    }
  }

  std::unique_ptr<Server> server_;
  Client client_;
};

TEST_F(LifeTest, EveryOperationMatchesTheReference) {
  const v1::GetStatusResponse before = client_.Status();
  const std::vector<uint64_t> ids = client_.Create(3);
  std::vector<std::unique_ptr<Mirror>> mirrors;
  for (const uint64_t id : ids) mirrors.push_back(std::make_unique<Mirror>(Mirror{id, 1, {}}));
  const auto some = [&] {
    std::vector<Mirror*> chosen;
    for (const auto& mirror : mirrors)
      if (chosen.size() < 4 && client_.random() % 4 != 0) chosen.push_back(mirror.get());
    if (chosen.empty()) chosen.push_back(mirrors[0].get());
    return chosen;
  };
  for (int i = 0; i < 20; ++i) Step(some());

  // Fork at the tail and one token back.
  for (const uint64_t back : {0, 1}) {
    const Mirror& parent = *mirrors[0];
    const uint64_t position = parent.accepted.size() - back;
    auto fork = client_.Make<v1::ForkSequencesRequest>();
    fork.set_sequence_id(parent.id);
    fork.set_version(parent.version);
    fork.set_count(1);
    if (back > 0) fork.set_position(position);
    const auto forked = client_.Call(&Stub::ForkSequences, fork);
    ASSERT_TRUE(forked.ok()) << forked.status.error_message();
    EXPECT_EQ(forked.body.position(), position);
    auto child = std::make_unique<Mirror>(Mirror{forked.body.sequence_ids(0), 1, parent.accepted});
    child->accepted.resize(position);
    mirrors.push_back(std::move(child));
  }
  for (int i = 0; i < 15; ++i) Step(some());

  // Snapshot here, roll back to the floor, go on; then a new sequence from the snapshot.
  Mirror& one = *mirrors[1];
  auto snapshot = client_.Make<v1::CreateSnapshotRequest>();
  snapshot.set_sequence_id(one.id);
  snapshot.set_version(one.version);
  snapshot.mutable_key()->set_digest("prefix");
  snapshot.mutable_key()->set_position(one.accepted.size());
  const auto taken = client_.Call(&Stub::CreateSnapshot, snapshot);
  ASSERT_TRUE(taken.ok()) << taken.status.error_message();
  EXPECT_TRUE(taken.body.created());
  const std::vector<TokenOfLayer> at_snapshot = one.accepted;

  auto rollback = client_.Make<v1::RollbackRequest>();
  rollback.set_sequence_id(one.id);
  rollback.set_version(one.version);
  rollback.set_position(client_.Sequences()[one.id].floor());
  const auto moved = client_.Call(&Stub::Rollback, rollback);
  ASSERT_TRUE(moved.ok()) << moved.status.error_message();
  one.accepted.resize(rollback.position());
  one.version = moved.body.version();
  for (int i = 0; i < 10; ++i) Step(some());

  auto restore = client_.Make<v1::CreateSequencesRequest>();
  restore.set_count(1);
  *restore.mutable_from_snapshot() = snapshot.key();
  const auto restored = client_.Call(&Stub::CreateSequences, restore);
  ASSERT_TRUE(restored.ok()) << restored.status.error_message();
  EXPECT_EQ(restored.body.position(), at_snapshot.size());
  mirrors.push_back(
      std::make_unique<Mirror>(Mirror{restored.body.sequence_ids(0), 1, at_snapshot}));
  Step({mirrors.back().get()});
  for (int i = 0; i < 15; ++i) Step(some());

  for (const auto& [id, info] : client_.Sequences()) EXPECT_EQ(info.open_step_id(), 0u) << id;
  auto release = client_.Make<v1::ReleaseSequencesRequest>();
  for (const auto& mirror : mirrors) release.add_sequence_ids(mirror->id);
  EXPECT_TRUE(client_.Call(&Stub::ReleaseSequences, release).ok());
  auto drop = client_.Make<v1::DeleteSnapshotRequest>();
  *drop.mutable_key() = snapshot.key();
  EXPECT_TRUE(client_.Call(&Stub::DeleteSnapshot, drop).ok());

  const v1::ModelStatus after = client_.Status().models(0);
  EXPECT_EQ(after.sequences(), 0u);
  EXPECT_EQ(after.snapshots(), 0u);
  EXPECT_EQ(after.open_steps(), 0u);
  EXPECT_EQ(after.pages_free(), before.models(0).pages_free());
  EXPECT_EQ(after.pages_free(), after.pages_total());
  EXPECT_GT(after.flushes(), 0u);
}

// Shows that the comparison above can fail.
TEST_F(LifeTest, ATokenThatWasNotAcceptedIsNoticed) {
  Mirror mirror{client_.Create(1)[0], 1, {}};
  std::vector<OpenRow> rows = {{&mirror, {NewToken()}}};
  client_.Commit(BeginAndVerify(rows), {1});
  Accept(rows[0], 1);
  const TokenOfLayer next = NewToken();
  const uint64_t step = client_.Begin({{mirror.id, mirror.version, 1}});
  const auto verified = client_.Call(&Stub::Verify, client_.VerifyOf(step, 3, {next.at(3)}));
  std::vector<float> actual(verified.body.output().data().size() / sizeof(float));
  std::memcpy(actual.data(), verified.body.output().data().data(), actual.size() * sizeof(float));
  EXPECT_TRUE(testing::Near(actual, Expected(3, mirror, {next}), kTolerance));
  EXPECT_FALSE(testing::Near(actual, Expected(3, Mirror{}, {next}), kTolerance));
}

TEST_F(LifeTest, CapabilitiesNameEveryLimit) {
  v1::GetCapabilitiesRequest request;
  request.set_model_id(client_.model_id);
  const auto reply = client_.Call(&Stub::GetCapabilities, request);
  ASSERT_TRUE(reply.ok());
  EXPECT_EQ(reply.body.spec().SerializeAsString(), testing::SmallSpec().SerializeAsString());
  EXPECT_EQ(reply.body.capacity().SerializeAsString(), SmallCapacity().SerializeAsString());
  EXPECT_EQ(reply.body.footprint().ring_records(), 16u);
  EXPECT_EQ(reply.body.backend(), "cpu");
  EXPECT_EQ(reply.body.state_bytes_used(), reply.body.footprint().reserved_bytes());
  EXPECT_EQ(reply.body.message_bytes_max(), SmallConfig().message_bytes_max);
  EXPECT_EQ(Health(client_.channel, ""), 1);
  EXPECT_EQ(Health(client_.channel, "ssmd.v1.StateService"), 1);
}

}  // namespace
}  // namespace ssmd::e2e
