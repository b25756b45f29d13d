// The retry rule of each RPC: a repeat of a call whose reply was lost does what the contract says.
#include "tests/e2e/harness.h"

namespace ssmd::e2e {
namespace {

class RepeatTest : public ::testing::Test {
 protected:
  RepeatTest() : server_(StartServer()), client_(server_->address()) { client_.Start(); }

  std::unique_ptr<Server> server_;
  Client client_;
};

TEST_F(RepeatTest, RegisterModelReturnsWhatIsThere) {
  v1::RegisterModelRequest request;
  *request.mutable_spec() = testing::SmallSpec();
  for (const bool with_capacity : {true, false}) {
    if (with_capacity) *request.mutable_capacity() = SmallCapacity();
    if (!with_capacity) request.clear_capacity();
    const auto again = client_.Call(&Stub::RegisterModel, request);
    ASSERT_TRUE(again.ok()) << again.status.error_message();
    EXPECT_FALSE(again.body.created());
    EXPECT_EQ(again.body.model_id(), client_.model_id);
    EXPECT_EQ(again.body.server_epoch(), client_.epoch);
  }
  EXPECT_EQ(client_.Status().models_size(), 1);
}

TEST_F(RepeatTest, CreateAndForkByRequestId) {
  auto create = client_.Make<v1::CreateSequencesRequest>();
  create.set_count(1);
  create.set_request_id(77);
  const auto first = client_.Call(&Stub::CreateSequences, create);
  const auto second = client_.Call(&Stub::CreateSequences, create);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first.body.SerializeAsString(), second.body.SerializeAsString());
  create.set_count(2);
  EXPECT_TRUE(RefusesField(client_.Call(&Stub::CreateSequences, create), "request_id", {"0x4d"}));

  auto fork = client_.Make<v1::ForkSequencesRequest>();
  fork.set_sequence_id(first.body.sequence_ids(0));
  fork.set_version(1);
  fork.set_count(2);
  fork.set_request_id(78);
  const auto forked = client_.Call(&Stub::ForkSequences, fork);
  // The parent moves on before the client asks again.
  const uint64_t step = client_.Begin({{fork.sequence_id(), 1, 1}});
  client_.VerifyAll(step, 1);
  client_.Commit(step, {1});
  EXPECT_EQ(client_.Call(&Stub::ForkSequences, fork).body.SerializeAsString(),
            forked.body.SerializeAsString());
  fork.set_request_id(77);
  EXPECT_TRUE(RefusesField(client_.Call(&Stub::ForkSequences, fork), "request_id", {"other"}));
  EXPECT_EQ(client_.Sequences().size(), 3u);
  create.set_request_id(0);
  create.set_count(1);
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(client_.Call(&Stub::CreateSequences, create).ok());
  EXPECT_EQ(client_.Sequences().size(), 5u);  // without an id a retry creates again
}

TEST_F(RepeatTest, StepsAndTheirEnds) {
  const std::vector<uint64_t> ids = client_.Create(2);
  const v1::BeginStepRequest begin = client_.StepOf({{ids[0], 1, 2}, {ids[1], 1, 1}});
  const auto begun = client_.Call(&Stub::BeginStep, begin);
  EXPECT_EQ(client_.Call(&Stub::BeginStep, begin).body.SerializeAsString(),
            begun.body.SerializeAsString());
  const uint64_t step = begun.body.step_id();
  const v1::VerifyRequest verify = client_.VerifyOf(step, 3, 3);
  const std::string output = client_.Call(&Stub::Verify, verify).body.SerializeAsString();
  EXPECT_EQ(client_.Call(&Stub::Verify, verify).body.SerializeAsString(), output);
  client_.VerifyAll(step, 3);

  const v1::CommitRequest commit = client_.CommitOf(step, {1, 1});
  const auto committed = client_.Call(&Stub::Commit, commit);
  ASSERT_TRUE(committed.ok());
  EXPECT_EQ(client_.Call(&Stub::Commit, commit).body.SerializeAsString(),
            committed.body.SerializeAsString());
  EXPECT_TRUE(Fails(client_.Call(&Stub::Commit, client_.CommitOf(step, {2, 1})),
                    grpc::FAILED_PRECONDITION, "", {"other accepted counts"}));
  auto abort = client_.Make<v1::AbortStepRequest>();
  abort.set_step_id(step);
  EXPECT_TRUE(
      Fails(client_.Call(&Stub::AbortStep, abort), grpc::FAILED_PRECONDITION, "", {"committed"}));
  EXPECT_TRUE(Fails(client_.Call(&Stub::Verify, verify), grpc::FAILED_PRECONDITION, "", {}));
  EXPECT_EQ(client_.Sequences()[ids[0]].version(), 2u);
  // The stale begin is not a repeat any more.
  EXPECT_TRUE(Fails(client_.Call(&Stub::BeginStep, begin), grpc::ABORTED, "VERSION_MISMATCH", {}));

  const uint64_t dropped = client_.Begin({{ids[0], 2, 1}});
  abort.set_step_id(dropped);
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(client_.Call(&Stub::AbortStep, abort).ok());
}

TEST_F(RepeatTest, VerifyAfterAutoCommitIsFailedPrecondition) {
  const uint64_t id = client_.Create(1)[0];
  const uint64_t step = client_.Begin({{id, 1, 1}}, /*auto_commit=*/true);
  client_.VerifyAll(step, 1);
  EXPECT_TRUE(Fails(client_.Call(&Stub::Verify, client_.VerifyOf(step, 9, 1)),
                    grpc::FAILED_PRECONDITION, "", {"committed"}));
  EXPECT_EQ(client_.Sequences()[id].version(), 2u);
  EXPECT_EQ(client_.Sequences()[id].position(), 1u);
}

TEST_F(RepeatTest, StepWithoutTokensCommits) {
  const uint64_t id = client_.Create(1)[0];
  const uint64_t step = client_.Begin({{id, 1, 0}});
  EXPECT_EQ(client_.Commit(step, {0}).versions(0), 2u);
}

TEST_F(RepeatTest, RollbackAndSnapshots) {
  const uint64_t id = client_.Create(1)[0];
  const uint64_t step = client_.Begin({{id, 1, 3}});
  client_.VerifyAll(step, 3);
  client_.Commit(step, {3});
  auto rollback = client_.Make<v1::RollbackRequest>();
  rollback.set_sequence_id(id);
  rollback.set_version(2);
  rollback.set_position(1);
  const auto moved = client_.Call(&Stub::Rollback, rollback);
  ASSERT_TRUE(moved.ok());
  EXPECT_EQ(client_.Call(&Stub::Rollback, rollback).body.SerializeAsString(),
            moved.body.SerializeAsString());
  rollback.set_position(0);
  EXPECT_TRUE(
      Fails(client_.Call(&Stub::Rollback, rollback), grpc::ABORTED, "VERSION_MISMATCH", {}));

  auto snapshot = client_.Make<v1::CreateSnapshotRequest>();
  snapshot.set_sequence_id(id);
  snapshot.set_version(3);
  snapshot.mutable_key()->set_digest("k");
  snapshot.mutable_key()->set_position(1);
  EXPECT_TRUE(client_.Call(&Stub::CreateSnapshot, snapshot).body.created());
  const auto kept = client_.Call(&Stub::CreateSnapshot, snapshot);
  EXPECT_TRUE(kept.ok());
  EXPECT_FALSE(kept.body.created());
  snapshot.set_overwrite(true);
  EXPECT_TRUE(client_.Call(&Stub::CreateSnapshot, snapshot).body.created());
  EXPECT_EQ(client_.Status().models(0).snapshots(), 1u);
  auto drop = client_.Make<v1::DeleteSnapshotRequest>();
  *drop.mutable_key() = snapshot.key();
  EXPECT_TRUE(client_.Call(&Stub::DeleteSnapshot, drop).ok());
  EXPECT_TRUE(Fails(client_.Call(&Stub::DeleteSnapshot, drop), grpc::NOT_FOUND, "", {}));
}

TEST_F(RepeatTest, SessionsEndOnceAndSnapshotsStay) {
  const std::vector<uint64_t> ids = client_.Create(3);
  auto snapshot = client_.Make<v1::CreateSnapshotRequest>();
  snapshot.set_sequence_id(ids[0]);
  snapshot.set_version(1);
  snapshot.mutable_key()->set_digest("k");
  EXPECT_TRUE(client_.Call(&Stub::CreateSnapshot, snapshot).ok());
  client_.Begin({{ids[0], 1, 1}});
  EXPECT_TRUE(client_.Call(&Stub::KeepAlive, client_.Make<v1::KeepAliveRequest>()).ok());
  const auto close = client_.Make<v1::CloseSessionRequest>();
  const auto closed = client_.Call(&Stub::CloseSession, close);
  ASSERT_TRUE(closed.ok());
  EXPECT_EQ(closed.body.sequences_released(), 3u);
  EXPECT_EQ(closed.body.steps_aborted(), 1u);
  EXPECT_TRUE(Fails(client_.Call(&Stub::CloseSession, close), grpc::NOT_FOUND, "", {"session"}));
  EXPECT_EQ(client_.Status().models(0).sequences(), 0u);
  EXPECT_EQ(client_.Status().models(0).snapshots(), 1u);
}

}  // namespace
}  // namespace ssmd::e2e
