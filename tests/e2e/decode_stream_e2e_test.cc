// The client's DecodeStream against a real server: a step, a pipelined begin, a commit that rides.
#include "client/client.h"
#include "client/decode_stream.h"
#include "client/session.h"
#include "tests/e2e/harness.h"

namespace ssmd::e2e {
namespace {

class DecodeStreamE2eTest : public ::testing::Test {
 protected:
  DecodeStreamE2eTest() : server_(StartServer()), packer_(server_->address()) {
    client_ = client::Client::Connect(server_->address()).value();
    model_id_ = client_->RegisterModel(testing::SmallSpec(), SmallCapacity())->model_id();
    session_ = client_->OpenSession({.client_name = "e2e"}).value();
    stream_ = client::DecodeStream::Open(*session_, model_id_).value();
    sequence_ = session_->CreateSequences(model_id_, 1)->sequence_ids(0);
  }

  client::StepRow Row(uint64_t version, uint32_t tokens) const {
    return {{sequence_, version}, tokens};
  }
  // Every layer, random tokens, all calls at once.
  void VerifyAll(uint64_t step, uint32_t tokens) {
    std::vector<client::Pending<v1::VerifyResponse>> pending;
    for (const uint32_t layer : kSmallLayers)
      pending.push_back(stream_->SendVerify(packer_.VerifyOf(step, layer, tokens)));
    for (auto& each : pending) {
      const auto verified = each.Wait();
      ASSERT_TRUE(verified.ok()) << verified.status();
      EXPECT_EQ(verified->output().shape(0), tokens);
    }
  }
  v1::SequenceInfo Info() { return session_->GetSequences(model_id_)->sequences(0); }

  std::unique_ptr<Server> server_;
  Client packer_;  // makes requests only
  std::unique_ptr<client::Client> client_;
  uint64_t model_id_ = 0, sequence_ = 0;
  std::unique_ptr<client::Session> session_;
  std::unique_ptr<client::DecodeStream> stream_;
};

TEST_F(DecodeStreamE2eTest, APipelinedBeginIsAnsweredWhenTheStepBeforeItHasEnded) {
  const auto first = stream_->Begin({Row(1, 3)});
  ASSERT_TRUE(first.ok()) << first.status();
  auto second = stream_->SendBegin({Row(2, 2)});  // version 2 is what the first will make
  VerifyAll(first->step_id(), 3);
  const auto committed = stream_->Commit(first->step_id(), {2});
  ASSERT_TRUE(committed.ok()) << committed.status();
  EXPECT_EQ(committed->versions(0), 2u);
  const auto begun = second.Wait();
  ASSERT_TRUE(begun.ok()) << begun.status();
  EXPECT_EQ(begun->positions(0), 2u);
  VerifyAll(begun->step_id(), 2);

  // The second step's commit rides on the third's begin.
  const auto third =
      stream_->Begin({Row(3, 1)}, {.commit_first = client::StepCommit{begun->step_id(), {1}}});
  ASSERT_TRUE(third.ok()) << third.status();
  EXPECT_EQ(third->committed().versions(0), 3u);
  EXPECT_EQ(third->positions(0), 3u);
  EXPECT_TRUE(stream_->Abort(third->step_id()).ok());
  EXPECT_TRUE(stream_->Finish().ok());
  EXPECT_EQ(Info().version(), 3u);
  EXPECT_EQ(Info().position(), 3u);
}

TEST_F(DecodeStreamE2eTest, AnAbortTakesThePipelinedBeginWithIt) {
  const auto first = stream_->Begin({Row(1, 3)});
  ASSERT_TRUE(first.ok()) << first.status();
  auto second = stream_->SendBegin({Row(2, 2)});
  EXPECT_TRUE(stream_->Abort(first->step_id()).ok());
  EXPECT_TRUE(absl::IsAborted(second.Wait().status()));
  EXPECT_EQ(Info().version(), 1u);
}

TEST_F(DecodeStreamE2eTest, ACancelledStreamLeavesNoOpenStep) {
  ASSERT_TRUE(stream_->Begin({Row(1, 3)}).ok());
  EXPECT_NE(Info().open_step_id(), 0u);
  stream_->Cancel();
  EXPECT_TRUE(absl::IsCancelled(stream_->Commit(1, {1}).status()));
  EXPECT_TRUE(Poll(absl::Seconds(20), [&] { return Info().open_step_id() == 0; }));
  EXPECT_TRUE(session_->status().ok());
  auto again = client::DecodeStream::Open(*session_, model_id_);
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE((*again)->Begin({Row(1, 1)}).ok());
}

TEST_F(DecodeStreamE2eTest, ErrorsHaveTheirDetails) {
  const absl::Status stale = stream_->Begin({Row(7, 1)}).status();
  EXPECT_TRUE(absl::IsAborted(stale)) << stale;
  EXPECT_EQ(client::ErrorReason(stale), "VERSION_MISMATCH");
  EXPECT_TRUE(absl::IsNotFound(stream_->Commit(99, {1}).status()));
}

}  // namespace
}  // namespace ssmd::e2e
