// What a BeginStep may ask for beyond plain rows: padding, commit modes, partial steps, a commit
// that rides on it.
#include "tests/e2e/harness.h"

namespace ssmd::e2e {
namespace {

class BeginTest : public ::testing::Test {
 protected:
  BeginTest() : server_(StartServer()), client_(server_->address()) {
    client_.Start();
    ids_ = client_.Create(3);
  }

  std::unique_ptr<Server> server_;
  Client client_;
  std::vector<uint64_t> ids_;
};

TEST_F(BeginTest, PaddingRowsAreZerosAndTouchNobody) {
  const uint64_t step = client_.Begin({{0, 0, 2}, {ids_[0], 1, 1}, {0, 0, 1}});
  const std::string idle = client_.Sequences()[ids_[1]].ShortDebugString();
  v1::VerifyRequest request = client_.VerifyOf(step, 3, 4);
  // What padding tokens hold is nobody's business: even NaN.
  request.mutable_q()->mutable_data()->replace(0, 4, "\xff\xff\xff\xff", 4);
  const auto verified = client_.Call(&Stub::Verify, request);
  ASSERT_TRUE(verified.ok()) << verified.status.error_message();
  const std::string& output = verified.body.output().data();
  const size_t token = output.size() / 4;
  EXPECT_EQ(output.substr(0, 2 * token), std::string(2 * token, '\0'));
  EXPECT_NE(output.substr(2 * token, token), std::string(token, '\0'));
  EXPECT_EQ(output.substr(3 * token), std::string(token, '\0'));
  client_.VerifyAll(step, 4);
  const v1::CommitResponse committed = client_.Commit(step, {0, 1, 0});
  EXPECT_EQ(committed.versions(0), 0u);
  EXPECT_EQ(committed.versions(1), 2u);
  EXPECT_EQ(committed.positions(1), 1u);
  EXPECT_EQ(client_.Sequences()[ids_[1]].ShortDebugString(), idle);

  const uint64_t only_padding = client_.Begin({{0, 0, 3}});
  client_.VerifyAll(only_padding, 3);
  client_.Commit(only_padding, {3});
}

TEST_F(BeginTest, ARowThatCommitsAllTakesNoOtherCount) {
  v1::BeginStepRequest begin = client_.StepOf({{ids_[0], 1, 3}, {ids_[1], 1, 3}});
  begin.add_commit_modes(v1::COMMIT_MODE_ALL);
  begin.add_commit_modes(v1::COMMIT_MODE_UNSPECIFIED);
  const auto begun = client_.Call(&Stub::BeginStep, begin);
  ASSERT_TRUE(begun.ok()) << begun.status.error_message();
  client_.VerifyAll(begun.body.step_id(), 6);
  EXPECT_TRUE(Fails(client_.Call(&Stub::Commit, client_.CommitOf(begun.body.step_id(), {2, 1})),
                    grpc::OUT_OF_RANGE, "", {"accepted[0]", "all of its 3", "got 2"}));
  EXPECT_EQ(client_.Sequences()[ids_[0]].version(), 1u);
  EXPECT_EQ(client_.Commit(begun.body.step_id(), {3, 1}).positions(0), 3u);
}

TEST_F(BeginTest, PartialStepsSayWhyARowIsPadding) {
  Client other(server_->address());
  other.Start();
  const uint64_t foreign = other.Create(1)[0];
  const std::string before = other.Sequences()[foreign].ShortDebugString();
  v1::BeginStepRequest begin =
      client_.StepOf({{ids_[0], 1, 1}, {ids_[1], 9, 1}, {foreign, 1, 1}, {12345, 1, 1}});
  EXPECT_FALSE(client_.Call(&Stub::BeginStep, begin).ok());
  begin.set_allow_partial(true);
  const auto begun = client_.Call(&Stub::BeginStep, begin);
  ASSERT_TRUE(begun.ok()) << begun.status.error_message();
  ASSERT_EQ(begun.body.row_status_size(), 4);
  EXPECT_EQ(begun.body.row_status(0).code(), 0);
  EXPECT_EQ(begun.body.row_status(0).message(), "");
  EXPECT_EQ(begun.body.row_status(1).code(), grpc::ABORTED);
  EXPECT_EQ(begun.body.row_status(2).code(), grpc::PERMISSION_DENIED);
  EXPECT_EQ(begun.body.row_status(3).code(), grpc::NOT_FOUND);
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(begun.body.row_status(1).details(0).UnpackTo(&info));
  EXPECT_EQ(info.reason(), "VERSION_MISMATCH");
  EXPECT_TRUE(absl::StrContains(begun.body.row_status(1).message(), "row 1")) << "message";
  EXPECT_EQ(client_.Call(&Stub::BeginStep, begin).body.SerializeAsString(),
            begun.body.SerializeAsString());  // a repeat

  const uint64_t step = begun.body.step_id();
  client_.VerifyAll(step, 4);
  const v1::CommitResponse committed = client_.Commit(step, {1, 0, 0, 0});
  EXPECT_EQ(committed.versions(0), 2u);
  EXPECT_EQ(committed.versions(1), 0u);
  EXPECT_EQ(client_.Sequences()[ids_[1]].version(), 1u);
  EXPECT_EQ(other.Sequences()[foreign].ShortDebugString(), before);
  // Malformed requests still fail.
  begin.set_draft_tokens(2, 5);
  EXPECT_TRUE(
      RefusesField(client_.Call(&Stub::BeginStep, begin), "draft_tokens[2]", {"0..4", "got 5"}));
}

TEST_F(BeginTest, ACommitRidesOnABegin) {
  const uint64_t first = client_.Begin({{ids_[0], 1, 2}});
  v1::BeginStepRequest begin = client_.StepOf({{ids_[0], 2, 3}});
  begin.mutable_commit_first()->set_step_id(first);
  begin.mutable_commit_first()->add_accepted(1);
  // The commit fails: nothing begins, and the first step is still open.
  EXPECT_TRUE(Fails(client_.Call(&Stub::BeginStep, begin), grpc::FAILED_PRECONDITION,
                    "LAYERS_MISSING", {"commit_first", "0 of 3"}));
  EXPECT_EQ(client_.Sequences()[ids_[0]].open_step_id(), first);
  client_.VerifyAll(first, 2);
  // A malformed begin commits nothing.
  v1::BeginStepRequest malformed = begin;
  malformed.set_draft_tokens(0, 5);
  EXPECT_TRUE(
      RefusesField(client_.Call(&Stub::BeginStep, malformed), "draft_tokens[0]", {"got 5"}));
  malformed = begin;
  malformed.mutable_commit_first()->set_model_id(99);
  EXPECT_TRUE(
      RefusesField(client_.Call(&Stub::BeginStep, malformed), "commit_first.model_id", {"63"}));
  EXPECT_EQ(client_.Sequences()[ids_[0]].version(), 1u);

  const auto both = client_.Call(&Stub::BeginStep, begin);
  ASSERT_TRUE(both.ok()) << both.status.error_message();
  EXPECT_EQ(both.body.committed().versions(0), 2u);
  EXPECT_EQ(both.body.committed().positions(0), 1u);
  EXPECT_EQ(both.body.committed().server_epoch(), client_.epoch);
  EXPECT_EQ(both.body.positions(0), 1u);
  EXPECT_EQ(client_.Call(&Stub::BeginStep, begin).body.SerializeAsString(),
            both.body.SerializeAsString());  // the reply was lost: the same answers
  EXPECT_EQ(client_.Sequences()[ids_[0]].version(), 2u);

  // The begin fails after the commit: the commit stands and can be repeated.
  client_.VerifyAll(both.body.step_id(), 3);
  begin.mutable_commit_first()->set_step_id(both.body.step_id());
  begin.set_versions(0, 7);
  EXPECT_TRUE(
      Fails(client_.Call(&Stub::BeginStep, begin), grpc::ABORTED, "VERSION_MISMATCH", {"row 0"}));
  EXPECT_EQ(client_.Sequences()[ids_[0]].version(), 3u);
  EXPECT_EQ(client_.Commit(both.body.step_id(), {1}).versions(0), 3u);
}

}  // namespace
}  // namespace ssmd::e2e
