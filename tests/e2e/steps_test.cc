// The Steps stream where everybody behaves: order, pipelining, numbers, half-close, bounds.
#include <atomic>
#include <limits>
#include <thread>

#include "tests/e2e/steps_client.h"

namespace ssmd::e2e {
namespace {

struct Outcome {
  std::vector<std::string> outputs;
  std::vector<uint64_t> positions;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

constexpr int kRounds = 12;  // a window of 8 folds several times
uint32_t Accepted(int round, int row) { return static_cast<uint32_t>((round * 3 + row) % 4); }

void Note(const v1::CommitResponse& committed, Outcome& outcome) {
  outcome.positions.insert(outcome.positions.end(), committed.positions().begin(),
                           committed.positions().end());
}

Outcome DecodeUnary() {
  const auto server = StartServer();
  Client client(server->address());
  client.Start();
  const auto ids = client.Create(2);
  Outcome outcome;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t version = 1 + static_cast<uint64_t>(round);
    const uint64_t step = client.Begin({{ids[0], version, 4}, {ids[1], version, 3}});
    for (const uint32_t layer_id : kSmallLayers)
      outcome.outputs.push_back(
          client.Call(&Stub::Verify, client.VerifyOf(step, layer_id, 7)).body.output().data());
    Note(client.Commit(step, {Accepted(round, 0), Accepted(round, 1)}), outcome);
  }
  return outcome;
}

// The next BeginStep is sent before the commit that it waits for; or the commit rides on it.
Outcome DecodePipelined(bool commit_first) {
  const auto server = StartServer();
  Client client(server->address());
  client.Start();
  const auto ids = client.Create(2);
  StepsClient steps(client);
  Outcome outcome;
  const auto rows_of = [&](uint64_t version) {
    return client.StepOf({{ids[0], version, 4}, {ids[1], version, 3}});
  };
  uint64_t step = steps.Begin(rows_of(1));
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t next_version = 2 + static_cast<uint64_t>(round);
    const bool last = round + 1 == kRounds;
    uint64_t next_tag = 0;
    if (!commit_first && !last) next_tag = steps.Send(rows_of(next_version));
    for (const std::string& output : steps.VerifyAll(step, 7)) outcome.outputs.push_back(output);
    v1::CommitRequest commit = client.CommitOf(step, {Accepted(round, 0), Accepted(round, 1)});
    if (commit_first && !last) {
      v1::BeginStepRequest begin = rows_of(next_version);
      *begin.mutable_commit_first() = commit;
      const auto begun = steps.Await(steps.Send(begin));
      EXPECT_TRUE(begun.ok()) << begun.status.error_message();
      Note(begun.body.begin().committed(), outcome);
      step = begun.body.begin().step_id();
      continue;
    }
    EXPECT_FALSE(!last && steps.Answered(next_tag)) << "held until the commit";
    Note(steps.Commit(step, {Accepted(round, 0), Accepted(round, 1)}), outcome);
    if (last) break;
    const auto begun = steps.Await(next_tag);
    EXPECT_TRUE(begun.ok()) << begun.status.error_message();
    step = begun.body.begin().step_id();
  }
  steps.HalfClose();
  EXPECT_TRUE(steps.Finish().ok());
  return outcome;
}

TEST(Steps, PipelinedAndRidingCommitsGiveTheBytesOfUnaryCalls) {
  const Outcome unary = DecodeUnary();
  EXPECT_EQ(unary.outputs.size(), size_t{kRounds} * 3);
  EXPECT_EQ(unary.positions.size(), size_t{kRounds} * 2);
  EXPECT_TRUE(DecodePipelined(false) == unary);
  EXPECT_TRUE(DecodePipelined(true) == unary);
}

// A server, a client with two sequences, and a stream.
class StepsFixture : public ::testing::Test {
 protected:
  explicit StepsFixture(const ServerConfig& config = SmallConfig())
      : server(StartServer(config)), client(server->address()) {
    client.Start(20'000);
    ids = client.Create(2);
  }
  void ExpectNothingHeld() {
    const v1::GetStatusResponse status = client.Status();
    EXPECT_EQ(status.models(0).open_steps(), 0u);
    EXPECT_EQ(server->core().streams.held.load(), 0u);
  }

  std::unique_ptr<Server> server;
  Client client;
  std::vector<uint64_t> ids;
};

class StepsStream : public StepsFixture {};

TEST_F(StepsStream, CallsOfOneStepRunInOrderOfArrival) {
  StepsClient steps(client);
  const uint64_t step = steps.Begin({{ids[0], 1, 2}});
  std::vector<uint64_t> tags;
  const auto wrong = client.VerifyOf(step, 3, 2), right = client.VerifyOf(step, 3, 2);
  for (int i = 0; i < 3; ++i) tags.push_back(steps.Send(wrong));
  tags.push_back(steps.Send(right));
  tags.push_back(steps.Send(client.VerifyOf(step, 5, 2)));
  tags.push_back(steps.Send(client.VerifyOf(step, 9, 2)));
  tags.push_back(steps.Send(client.CommitOf(step, {2})));  // waits for all of them
  uint64_t last = 0;
  for (size_t i = 0; i < tags.size(); ++i) {
    const v1::StepsResponse reply = steps.Next();
    EXPECT_EQ(reply.status().code(), 0) << reply.status().message();
    EXPECT_GT(reply.tag(), last);
    last = reply.tag();
  }
  // The last inputs of layer 3 count: a twin that saw only them replays to the same output.
  std::vector<std::string> outputs;
  const auto next = client.VerifyOf(0, 3, 1);
  const auto twin_step = steps.Begin({{ids[1], 1, 2}});
  for (auto request : {right, client.VerifyOf(twin_step, 5, 2), client.VerifyOf(twin_step, 9, 2)}) {
    request.set_step_id(twin_step);
    EXPECT_TRUE(steps.Await(steps.Send(request)).ok());
  }
  steps.Commit(twin_step, {2});
  for (const uint64_t id : ids) {
    const uint64_t probe = steps.Begin({{id, 2, 1}});
    auto request = next;
    request.set_step_id(probe);
    outputs.push_back(steps.Await(steps.Send(request)).body.verify().output().data());
    EXPECT_TRUE(steps.Await(steps.SendAbort(probe)).ok());
  }
  EXPECT_EQ(outputs[0], outputs[1]);
}

TEST_F(StepsStream, StepsOfDifferentLanesOverlap) {
  StepsClient steps(client);
  const uint64_t one = steps.Begin({{ids[0], 1, 1}}), two = steps.Begin({{ids[1], 1, 1}});
  const uint64_t held = steps.Send(client.StepOf({{ids[0], 2, 1}}));  // waits for `one` alone
  steps.VerifyAll(two, 1);
  steps.Commit(two, {1});
  EXPECT_FALSE(steps.Answered(held));
  // A row of each: waits for `one`, though the other row could go.
  const uint64_t both = steps.Send(client.StepOf({{ids[0], 2, 1}, {ids[1], 2, 1}}));
  steps.VerifyAll(one, 1);
  const uint64_t commit = steps.Send(client.CommitOf(one, {1}));
  EXPECT_TRUE(steps.Await(commit).ok());
  EXPECT_TRUE(steps.Await(held).ok());
  const auto late = steps.Await(both);
  EXPECT_TRUE(Fails(late, grpc::FAILED_PRECONDITION, "STEP_OPEN", {"row 0"}));
}

TEST_F(StepsStream, HeldBeginFollowsItsStepHoweverThatEnds) {
  StepsClient steps(client);
  uint64_t version = 1;
  const auto hold = [&](bool auto_commit = false) {
    v1::BeginStepRequest begin = client.StepOf({{ids[0], version, 1}});
    begin.set_auto_commit(auto_commit);
    const uint64_t step = steps.Begin(begin);
    return std::pair(step, steps.Send(client.StepOf({{ids[0], version + 1, 1}})));
  };
  const auto wait_until_held = [&] {
    ASSERT_TRUE(Poll(absl::Seconds(20), [&] { return server->core().streams.held.load() == 1; }));
  };
  const auto expect_begun = [&](uint64_t held) {
    const auto begun = steps.Await(held);
    ASSERT_TRUE(begun.ok()) << begun.status.error_message();
    ++version;
    EXPECT_TRUE(steps.Await(steps.SendAbort(begun.body.begin().step_id())).ok());
  };
  const auto expect_aborted = [&](uint64_t held) {
    EXPECT_TRUE(Fails(steps.Await(held), grpc::ABORTED, "STEP_ABORTED", {}));
  };

  {  // commit on the stream
    const auto [step, held] = hold();
    steps.VerifyAll(step, 1);
    steps.Commit(step, {0});  // a = 0 is a commit too
    expect_begun(held);
  }
  {  // unary commit
    const auto [step, held] = hold();
    wait_until_held();
    client.VerifyAll(step, 1);
    client.Commit(step, {1});
    expect_begun(held);
  }
  {  // auto_commit
    const auto [step, held] = hold(true);
    steps.VerifyAll(step, 1);
    expect_begun(held);
  }
  {  // auto_commit by a unary Verify
    const auto [step, held] = hold(true);
    wait_until_held();
    client.VerifyAll(step, 1);
    expect_begun(held);
  }
  {  // abort on the stream
    const auto [step, held] = hold();
    EXPECT_TRUE(steps.Await(steps.SendAbort(step)).ok());
    expect_aborted(held);
  }
  {  // unary abort
    const auto [step, held] = hold();
    wait_until_held();
    auto abort = client.Make<v1::AbortStepRequest>();
    abort.set_step_id(step);
    EXPECT_TRUE(client.Call(&Stub::AbortStep, abort).ok());
    expect_aborted(held);
  }
  {  // poison
    const auto [step, held] = hold();
    v1::VerifyRequest poison = client.VerifyOf(step, 3, 1);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    poison.mutable_v()->mutable_data()->replace(0, 4, reinterpret_cast<const char*>(&nan), 4);
    EXPECT_TRUE(Fails(steps.Await(steps.Send(poison)), grpc::ABORTED, "STEP_ABORTED", {}));
    expect_aborted(held);
  }
  {  // its timeout
    v1::BeginStepRequest begin = client.StepOf({{ids[0], version, 1}});
    begin.set_step_timeout_ms(50);
    steps.Begin(begin);
    expect_aborted(steps.Send(client.StepOf({{ids[0], version + 1, 1}})));
  }
  {  // known to be aborted when the BeginStep comes: the same answer
    const uint64_t step = steps.Begin({{ids[0], version, 1}});
    EXPECT_TRUE(steps.Await(steps.SendAbort(step)).ok());
    expect_aborted(steps.Send(client.StepOf({{ids[0], version + 1, 1}})));
  }
  EXPECT_EQ(client.Sequences()[ids[0]].version(), version);
  ExpectNothingHeld();
}

TEST_F(StepsStream, CommitFirstFailsWholeOrSaysWhatHappened) {
  StepsClient steps(client);
  const uint64_t step = steps.Begin({{ids[0], 1, 2}});
  v1::BeginStepRequest begin = client.StepOf({{ids[0], 2, 1}});
  *begin.mutable_commit_first() = client.CommitOf(step, {2});
  const auto missing = steps.Await(steps.Send(begin));
  EXPECT_TRUE(Fails(missing, grpc::FAILED_PRECONDITION, "LAYERS_MISSING", {}));
  EXPECT_FALSE(missing.body.has_begin());
  steps.VerifyAll(step, 2);
  begin.set_versions(0, 7);  // the commit is good, the rest is stale
  const auto stale = steps.Await(steps.Send(begin));
  EXPECT_TRUE(Fails(stale, grpc::ABORTED, "VERSION_MISMATCH", {}));
  EXPECT_EQ(stale.body.begin().committed().versions(0), 2u);
  begin.set_versions(0, 2);  // a repeat of the commit, then the step
  const auto begun = steps.Await(steps.Send(begin));
  EXPECT_TRUE(begun.ok()) << begun.status.error_message();
  EXPECT_EQ(begun.body.begin().committed().positions(0), 2u);
  EXPECT_EQ(begun.body.begin().positions(0), 2u);
}

TEST_F(StepsStream, EmptyAndPaddingStepsComplete) {
  StepsClient steps(client);
  const uint64_t empty = steps.Begin({{ids[0], 1, 0}, {ids[1], 1, 0}});
  const v1::CommitResponse nothing = steps.Commit(empty, {0, 0});
  EXPECT_EQ(nothing.versions(0), 2u);
  EXPECT_EQ(nothing.positions(0), 0u);
  const uint64_t padding = steps.Begin({{0, 0, 2}, {0, 0, 1}});
  for (const std::string& output : steps.VerifyAll(padding, 3))
    EXPECT_EQ(output.find_first_not_of('\0'), std::string::npos);
  EXPECT_EQ(steps.Commit(padding, {2, 1}).versions(0), 0u);
  const uint64_t none = steps.Begin({{0, 0, 0}});
  steps.Commit(none, {0});
  ExpectNothingHeld();
}

TEST_F(StepsStream, PartialRowsAndCommitModes) {
  StepsClient steps(client);
  v1::BeginStepRequest begin = client.StepOf({{ids[0], 1, 2}, {ids[1], 9, 1}});
  begin.set_allow_partial(true);
  begin.add_commit_modes(v1::COMMIT_MODE_ALL);
  begin.add_commit_modes(v1::COMMIT_MODE_COUNTS);
  const auto begun = steps.Await(steps.Send(begin));
  ASSERT_TRUE(begun.ok()) << begun.status.error_message();
  EXPECT_EQ(begun.body.begin().row_status(0).code(), 0);
  EXPECT_EQ(begun.body.begin().row_status(1).code(), grpc::ABORTED);
  const uint64_t step = begun.body.begin().step_id();
  steps.VerifyAll(step, 3);
  EXPECT_TRUE(Fails(steps.Await(steps.Send(client.CommitOf(step, {1, 0}))), grpc::OUT_OF_RANGE, "",
                    {"accepted[0]"}));
  EXPECT_EQ(steps.Commit(step, {2, 0}).positions(0), 2u);
}

TEST_F(StepsStream, BrokenFirstMessageEndsTheStreamOthersDoNot) {
  {
    StepsClient steps(client, /*with_context=*/false);
    steps.Send(client.StepOf({{ids[0], 1, 1}}));
    const grpc::Status ended = steps.Finish();
    EXPECT_EQ(ended.error_code(), grpc::INVALID_ARGUMENT);
    EXPECT_TRUE(absl::StrContains(ended.error_message(), "context.server_epoch"));
  }
  {
    StepsClient steps(client, false);
    v1::StepsRequest first;
    first.mutable_context()->set_server_epoch(client.epoch + 1);
    first.mutable_context()->set_session_id(client.session_id);
    *first.mutable_begin() = client.StepOf({{ids[0], 1, 1}});
    steps.Send(first);
    EXPECT_EQ(steps.Finish().error_code(), grpc::FAILED_PRECONDITION);
    EXPECT_EQ(client.Status().models(0).open_steps(), 0u) << "no effect";
  }
  {
    StepsClient steps(client, false);
    v1::StepsRequest first;
    first.mutable_context()->set_server_epoch(client.epoch);
    first.mutable_context()->set_session_id(12345);
    steps.Send(first);
    EXPECT_EQ(steps.Finish().error_code(), grpc::NOT_FOUND);
  }
  StepsClient steps(client);
  EXPECT_TRUE(RefusesField(steps.Await(steps.Send(v1::StepsRequest())), "call", {"none"}));
  v1::StepsRequest other;
  client.FillContext(*other.mutable_context());
  other.mutable_context()->set_session_id(12345);
  *other.mutable_begin() = client.StepOf({{ids[0], 1, 1}});
  EXPECT_TRUE(RefusesField(steps.Await(steps.Send(other)), "context.session_id", {}));
  other.mutable_context()->set_server_epoch(client.epoch + 1);
  EXPECT_TRUE(Fails(steps.Await(steps.Send(other)), grpc::FAILED_PRECONDITION, "STATE_LOST", {}));
  EXPECT_TRUE(RefusesField(steps.Await(steps.Send(client.StepOf({{ids[0], 1, 5}}))),
                           "draft_tokens[0]", {"0..4"}));
  EXPECT_TRUE(Fails(steps.Await(steps.Send(client.VerifyOf(77, 3, 1))), grpc::NOT_FOUND, "", {}));
  steps.Begin({{ids[0], 1, 1}});  // and goes on
}

TEST_F(StepsStream, HalfCloseAnswersWhatWasReadAndKeepsOpenSteps) {
  StepsClient steps(client);
  const uint64_t step = steps.Begin({{ids[0], 1, 1}});
  std::vector<uint64_t> tags;
  for (const uint32_t layer_id : kSmallLayers)
    tags.push_back(steps.Send(client.VerifyOf(step, layer_id, 1)));
  const uint64_t held = steps.Send(client.StepOf({{ids[0], 2, 1}}));
  steps.HalfClose();
  for (const uint64_t tag : tags) EXPECT_TRUE(steps.Await(tag).ok());
  client.Commit(step, {1});  // what the held one waits for may come from elsewhere
  const auto begun = steps.Await(held);
  EXPECT_TRUE(begun.ok()) << begun.status.error_message();
  EXPECT_TRUE(steps.Finish().ok());
  EXPECT_EQ(client.Sequences()[ids[0]].open_step_id(), begun.body.begin().step_id());
  client.VerifyAll(begun.body.begin().step_id(), 1);
  client.Commit(begun.body.begin().step_id(), {1});
  {
    StepsClient silent(client);  // no message at all
    silent.HalfClose();
    EXPECT_TRUE(silent.Finish().ok());
  }
  EXPECT_TRUE(Poll(absl::Seconds(20), [&] { return server->core().streams.size() == 0; }));
}

class TightStream : public StepsFixture {
 protected:
  static ServerConfig Config() {
    ServerConfig config = SmallConfig();
    config.stream_calls_max = 3;
    config.stream_begins_max = 1;
    return config;
  }
  TightStream() : StepsFixture(Config()) {}
};

TEST_F(TightStream, TooManyHeldBeginsAreRefusedAndTheCommitStillGetsThrough) {
  const auto capabilities = client.Call(&Stub::GetCapabilities, v1::GetCapabilitiesRequest());
  EXPECT_EQ(capabilities.body.stream_calls_max(), 3u);
  EXPECT_EQ(capabilities.body.stream_begins_max(), 1u);
  StepsClient steps(client);
  const uint64_t step = steps.Begin({{ids[0], 1, 1}, {ids[1], 1, 1}});
  const uint64_t held = steps.Send(client.StepOf({{ids[0], 2, 1}}));
  const auto refused = steps.Await(steps.Send(client.StepOf({{ids[1], 2, 1}})));
  EXPECT_TRUE(Fails(refused, grpc::RESOURCE_EXHAUSTED, "LIMIT_REACHED", {"stream_begins_max"}));
  EXPECT_TRUE(refused.retry.has_retry_delay());
  steps.VerifyAll(step, 2);
  steps.Commit(step, {1, 1});
  EXPECT_TRUE(steps.Await(held).ok());
}

TEST_F(TightStream, SlowReaderStopsTheServerFromReading) {
  constexpr uint64_t kCalls = 3'000;
  // A transport that keeps little: no window that grows with the bandwidth.
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 64 << 10);
  client.stub = v1::StateService::NewStub(
      grpc::CreateCustomChannel(server->address(), grpc::InsecureChannelCredentials(), arguments));
  StepsClient steps(client);
  const uint64_t step = steps.Begin({{ids[0], 1, 4}, {ids[1], 1, 4}});
  const v1::VerifyRequest verify = client.VerifyOf(step, 3, 8);
  std::thread writer([&] {
    for (uint64_t i = 0; i < kCalls; ++i) steps.Send(verify);
    steps.HalfClose();
  });
  const auto verified = [&] {
    return (*server->core().models.Find(client.model_id))->store->counters().layers_verified;
  };
  uint64_t before = 0, now = 0;  // until nothing moves any more
  do {
    before = now;
    absl::SleepFor(absl::Milliseconds(300));
    now = verified();
  } while (now == 0 || now != before);
  // A reply has 1 KiB. The transport keeps its window's worth, the stream three.
  EXPECT_LT(now, kCalls / 2) << "the server computed ahead of its reader";
  EXPECT_TRUE(Poll(absl::Seconds(20), [&] { return server->core().verify_queue.depth() == 0; }));
  uint64_t answered = 0;
  while (steps.Next().tag() != 0) ++answered;
  writer.join();
  EXPECT_EQ(answered, kCalls);
  EXPECT_EQ(verified(), kCalls);
  EXPECT_TRUE(steps.Finish().ok());
}

TEST_F(StepsStream, UnaryCallsOfTheSessionMayMixIn) {
  StepsClient steps(client);
  std::atomic<bool> done{false};
  std::thread other([&] {
    Client twin(server->address());
    twin.epoch = client.epoch;
    twin.session_id = client.session_id;
    twin.model_id = client.model_id;
    while (!done) {
      for (const auto& [id, info] : twin.Sequences()) {
        if (info.open_step_id() == 0) continue;
        auto request = twin.VerifyOf(info.open_step_id(), 5, 2);
        (void)twin.Call(&Stub::Verify, request);  // may find the step ended
        (void)twin.Call(&Stub::Commit, twin.CommitOf(info.open_step_id(), {1, 0}));
      }
    }
  });
  uint64_t version = 1;
  for (int round = 0; round < 40; ++round) {
    const uint64_t step = steps.Begin({{ids[0], version, 1}, {ids[1], version, 1}});
    const uint64_t next = steps.Send(client.StepOf({{ids[0], version + 1, 1}}));
    for (const uint32_t layer_id : kSmallLayers) {
      // The other may have committed it meanwhile.
      (void)steps.Await(steps.Send(client.VerifyOf(step, layer_id, 2)));
    }
    const auto committed = steps.Await(steps.Send(client.CommitOf(step, {1, 0})));
    EXPECT_TRUE(committed.ok()) << committed.status.error_message();
    const auto begun = steps.Await(next);
    ASSERT_TRUE(begun.ok()) << begun.status.error_message();
    const uint64_t second = begun.body.begin().step_id();
    EXPECT_TRUE(steps.Await(steps.SendAbort(second)).ok());
    ++version;
  }
  done = true;
  other.join();
  ExpectNothingHeld();
}

}  // namespace
}  // namespace ssmd::e2e
