// How a Steps stream ends when somebody does not behave: cancel at every point, lost sessions,
// drain. Whatever happens, its open steps are aborted once, and nothing is held.
#include <atomic>
#include <thread>

#include "tests/e2e/steps_client.h"
#include "tests/testing/fake_clock.h"

namespace ssmd::e2e {
namespace {

class StepsEnd : public ::testing::Test {
 protected:
  StepsEnd()
      : server(StartServer(SmallConfig(), {.clock = clock.AsClock()})), client(server->address()) {
    client.Start(20'000);
    ids = client.Create(2);
  }

  ~StepsEnd() override {
    if (server->core().draining) return;
    store().ReleaseOwner(OwnerId{client.session_id});
    const StoreUsage usage = store().usage();
    EXPECT_EQ(usage.pages.free, usage.pages.total);
  }

  Store& store() { return *(*server->core().models.Find(client.model_id))->store; }

  // Streams are gone, no step is open, all pages are back, and every step ended exactly once. A
  // stream that was cancelled before the server saw it may still come afterwards: hence all at
  // once.
  void ExpectClean() {
    EXPECT_TRUE(Poll(absl::Seconds(20),
                     [&] {
                       const StoreUsage usage = store().usage();
                       const StoreCounters counters = store().counters();
                       return server->core().streams.size() == 0 &&
                              server->core().streams.held.load() == 0 && usage.open_steps == 0 &&
                              usage.pages.step_targets == 0 &&
                              counters.steps_begun ==
                                  counters.steps_committed + counters.steps_aborted;
                     }))
        << server->core().streams.size() << " streams, " << store().usage().open_steps << " steps, "
        << store().usage().pages.step_targets << " target pages";
  }
  // The sequence takes its next step as if nothing had been: at once, or when a late stream's step
  // has been aborted. T = 3 is nobody else's: an equal BeginStep would be answered as a repeat.
  void ExpectUsable(uint64_t version) {
    Reply<v1::BeginStepResponse> begun;
    ASSERT_TRUE(Poll(absl::Seconds(20), [&] {
      begun = client.Call(&Stub::BeginStep, client.StepOf({{ids[0], version, 3}}));
      return begun.ok();
    })) << begun.status.error_message();
    client.VerifyAll(begun.body.step_id(), 3);
    client.Commit(begun.body.step_id(), {0});
  }

  testing::FakeClock clock;
  std::unique_ptr<Server> server;
  Client client;
  std::vector<uint64_t> ids;
};

TEST_F(StepsEnd, CancelAtEveryPoint) {
  uint64_t version = 1;
  constexpr int kPoints = 12;
  for (int point = 0; point < kPoints; ++point) {
    SCOPED_TRACE(point);
    {
      StepsClient steps(client);
      auto reached = [&, here = 0]() mutable { return here++ == point; };
      [&] {
        if (reached()) return;  // 0: no message
        const uint64_t first = steps.Send(client.StepOf({{ids[0], version, 2}}));
        if (reached()) return;  // 1: BeginStep on its way
        const auto begun = steps.Await(first);
        const uint64_t step = begun.body.begin().step_id();
        if (reached()) return;  // 2: begun
        const uint64_t held = steps.Send(client.StepOf({{ids[0], version + 1, 1}}));
        if (reached()) return;  // 3: another on its way or held
        steps.Send(client.VerifyOf(step, 3, 2));
        if (reached()) return;  // 4: Verify queued or running
        for (int i = 0; i < 6; ++i) steps.Send(client.VerifyOf(step, 5, 2));
        if (reached()) return;  // 5: a lane full of them
        steps.Await(steps.Send(client.VerifyOf(step, 9, 2)));
        if (reached()) return;  // 6: all verified
        const uint64_t commit = steps.Send(client.CommitOf(step, {1}));
        if (reached()) {  // 7: Commit on its way: it may or may not have happened
          steps.context.TryCancel();
          steps.Finish();
          EXPECT_TRUE(Poll(absl::Seconds(20), [&] { return store().usage().open_steps == 0; }));
          version = client.Sequences()[ids[0]].version();
          return;
        }
        EXPECT_TRUE(steps.Await(commit).ok());
        ++version;
        if (reached()) return;  // 8: committed; the held one begins
        const auto second = steps.Await(held);
        EXPECT_TRUE(second.ok()) << second.status.error_message();
        if (reached()) return;  // 9: and has begun
        steps.SendAbort(second.body.begin().step_id());
        if (reached()) return;  // 10: AbortStep on its way
        steps.HalfClose();
        steps.context.TryCancel();  // 11: half-closed and cancelled: steps open or not
      }();
      steps.context.TryCancel();
      // gRPC drops the cancel of a call that has ended.
      EXPECT_TRUE(point == kPoints - 1 || steps.Finish().error_code() == grpc::CANCELLED);
    }
    ExpectClean();
    ExpectUsable(version);
    ++version;
  }
}

TEST_F(StepsEnd, CancelAtRandomTimes) {
  uint64_t version = client.Sequences()[ids[0]].version();
  for (int round = 0; round < 60; ++round) {
    StepsClient steps(client);
    std::thread canceller([&, delay = client.random() % 2'000] {
      absl::SleepFor(absl::Microseconds(static_cast<int64_t>(delay)));
      steps.context.TryCancel();
    });
    const uint64_t tag = steps.Send(client.StepOf({{ids[0], version, 2}}));
    steps.Send(client.StepOf({{ids[0], version + 1, 2}}));
    v1::StepsResponse reply = steps.Next();
    if (reply.tag() == tag) {
      const uint64_t step = reply.begin().step_id();
      for (const uint32_t layer_id : kSmallLayers) steps.Send(client.VerifyOf(step, layer_id, 2));
      v1::BeginStepRequest next = client.StepOf({{ids[0], version + 1, 1}});
      *next.mutable_commit_first() = client.CommitOf(step, {1});
      steps.Send(next);
    }
    canceller.join();
    steps.Finish();
    ExpectClean();
    version = client.Sequences()[ids[0]].version();
  }
  ExpectUsable(version);
}

TEST_F(StepsEnd, LostConnectionAborts) {
  auto lost = std::make_unique<Client>(server->address());
  lost->epoch = client.epoch;
  lost->session_id = client.session_id;
  lost->model_id = client.model_id;
  {
    StepsClient steps(*lost);
    steps.Begin({{ids[0], 1, 2}});
    steps.Send(lost->StepOf({{ids[0], 2, 2}}));
    lost->stub.reset();
    lost->channel.reset();  // the call lives on until the cancel in ~StepsClient
  }
  lost.reset();
  ExpectClean();
  ExpectUsable(1);
}

TEST_F(StepsEnd, StepsOfOtherCallersSurviveACancel) {
  const uint64_t unary = client.Begin({{ids[1], 1, 1}});
  {
    StepsClient steps(client);
    const uint64_t mine = steps.Begin({{ids[0], 1, 1}});
    client.VerifyAll(mine, 1);
    client.Commit(mine, {1});  // not the stream's any more
  }
  EXPECT_TRUE(Poll(absl::Seconds(20), [&] { return server->core().streams.size() == 0; }));
  EXPECT_EQ(client.Sequences()[ids[1]].open_step_id(), unary);
  EXPECT_EQ(client.Sequences()[ids[0]].version(), 2u);
  client.VerifyAll(unary, 1);
  client.Commit(unary, {1});
  ExpectClean();
}

TEST_F(StepsEnd, CloseSessionEndsItsStepsAndAnswersWhatIsHeld) {
  StepsClient steps(client);
  steps.Begin({{ids[0], 1, 1}});
  const uint64_t held = steps.Send(client.StepOf({{ids[0], 2, 1}}));
  ASSERT_TRUE(Poll(absl::Seconds(20), [&] { return server->core().streams.held.load() == 1; }));
  const auto closed = client.Call(&Stub::CloseSession, client.Make<v1::CloseSessionRequest>());
  ASSERT_TRUE(closed.ok()) << closed.status.error_message();
  EXPECT_EQ(closed.body.steps_aborted(), 1u);
  EXPECT_TRUE(Fails(steps.Await(held), grpc::NOT_FOUND, "", {"session"}));
  EXPECT_TRUE(Fails(steps.Await(steps.Send(client.StepOf({{ids[0], 1, 1}}))), grpc::NOT_FOUND, "",
                    {"session"}));
  steps.HalfClose();
  EXPECT_TRUE(steps.Finish().ok());
}

TEST_F(StepsEnd, SilenceEndsTheSessionCallsKeepIt) {
  Client brief(server->address());
  brief.Start(/*lease_ms=*/300);
  const auto own = brief.Create(1);
  StepsClient steps(brief);
  uint64_t version = 1;
  for (int i = 0; i < 9; ++i) {  // three leases long
    const uint64_t step = steps.Begin({{own[0], version, 1}});
    clock.Advance(absl::Milliseconds(100));
    server->Sweep();
    EXPECT_TRUE(steps.Await(steps.SendAbort(step)).ok());
  }
  steps.Begin({{own[0], version, 1}});
  const uint64_t held = steps.Send(brief.StepOf({{own[0], version + 1, 1}}));
  ASSERT_TRUE(Poll(absl::Seconds(20), [&] { return server->core().streams.held.load() == 1; }));
  clock.Advance(absl::Milliseconds(300));
  EXPECT_TRUE(Fails(steps.Await(held), grpc::NOT_FOUND, "", {"session"})) << "the lease ran out";
  EXPECT_EQ(store().usage().open_steps, 0u);
}

TEST_F(StepsEnd, DrainEndsStreamsCleanly) {
  StepsClient idle(client), busy(client);
  const uint64_t step = busy.Begin({{ids[0], 1, 1}});
  const uint64_t held = busy.Send(client.StepOf({{ids[0], 2, 1}}));
  EXPECT_TRUE(idle.Await(idle.Send(client.StepOf({{ids[1], 1, 1}}))).ok());
  ASSERT_TRUE(Poll(absl::Seconds(20), [&] { return server->core().streams.held.load() == 1; }));
  server->BeginDrain();
  busy.VerifyAll(step, 1);  // live sequences go on
  std::thread stop([&] { server->Shutdown(absl::ZeroDuration()); });
  EXPECT_TRUE(Fails(busy.Await(held), grpc::UNAVAILABLE, "DRAINING", {}));
  for (StepsClient* steps : {&busy, &idle}) {
    const grpc::Status ended = steps->Finish();
    EXPECT_EQ(ended.error_code(), grpc::UNAVAILABLE) << ended.error_message();
    EXPECT_TRUE(absl::StrContains(ended.error_message(), "draining")) << ended.error_message();
  }
  stop.join();
  EXPECT_EQ(store().usage().open_steps, 0u);
  const StoreCounters counters = store().counters();
  EXPECT_EQ(counters.steps_begun, counters.steps_committed + counters.steps_aborted);
}

TEST_F(StepsEnd, ShutdownDoesNotWaitForAReaderWhoSleeps) {
  StepsClient steps(client);
  const uint64_t step = steps.Begin({{ids[0], 1, 4}, {ids[1], 1, 4}});
  const v1::VerifyRequest verify = client.VerifyOf(step, 3, 8);
  std::thread writer([&] {
    v1::StepsRequest request;
    *request.mutable_verify() = verify;
    for (int i = 0; i < 2'000 && steps.stream->Write(request); ++i) {
    }
  });
  absl::SleepFor(absl::Milliseconds(200));
  server->Shutdown(absl::ZeroDuration());
  writer.join();
  EXPECT_FALSE(steps.Finish().ok());
  EXPECT_EQ(store().usage().open_steps, 0u);
}

}  // namespace
}  // namespace ssmd::e2e
