// Sequences that outlive their session, and models that are taken away.
#include "tests/e2e/harness.h"
#include "tests/testing/fake_clock.h"

namespace ssmd::e2e {
namespace {

class AdoptionTest : public ::testing::Test {
 protected:
  AdoptionTest()
      : server_(StartServer(SmallConfig(), {.clock = clock_.AsClock(), .start_sweeper = false})),
        old_(server_->address()),
        heir_(server_->address()) {
    heir_.Start();
    old_.Start();
    v1::OpenSessionRequest open;
    open.set_adoption_ms(5000);
    open.set_lease_ms(1000);
    old_.session_id = old_.Call(&Stub::OpenSession, open).body.session_id();
    ids_ = old_.Create(2);
    const uint64_t step = old_.Begin({{ids_[0], 1, 2}});
    old_.VerifyAll(step, 2);
    old_.Commit(step, {2});
  }
  Reply<v1::AdoptSequencesResponse> Adopt(Client& client, const std::vector<uint64_t>& ids = {}) {
    auto request = client.Make<v1::AdoptSequencesRequest>();
    request.set_old_session_id(old_.session_id);
    for (const uint64_t id : ids) request.add_sequence_ids(id);
    return client.Call(&Stub::AdoptSequences, request);
  }
  void KeepAlive() {
    EXPECT_TRUE(heir_.Call(&Stub::KeepAlive, heir_.Make<v1::KeepAliveRequest>()).ok());
  }

  testing::FakeClock clock_;
  std::unique_ptr<Server> server_;
  Client old_, heir_;
  std::vector<uint64_t> ids_;
};

TEST_F(AdoptionTest, AfterTheLeaseRanOut) {
  const uint64_t open = old_.Begin({{ids_[1], 1, 1}});
  EXPECT_TRUE(Fails(Adopt(heir_), grpc::PERMISSION_DENIED, "", {"old_session_id", "lives"}));
  clock_.Advance(absl::Milliseconds(1000));
  server_->Sweep();
  EXPECT_EQ(heir_.Status().models(0).sequences(), 2u);
  EXPECT_EQ(heir_.Status().models(0).open_steps(), 0u);
  const auto adopted = Adopt(heir_);
  ASSERT_TRUE(adopted.ok()) << adopted.status.error_message();
  ASSERT_EQ(adopted.body.sequences_size(), 2);
  EXPECT_EQ(adopted.body.sequences(0).sequence_id(), ids_[0]);
  EXPECT_EQ(adopted.body.sequences(0).version(), 2u);  // versions do not change
  EXPECT_EQ(adopted.body.sequences(0).position(), 2u);
  EXPECT_EQ(Adopt(heir_).body.SerializeAsString(), adopted.body.SerializeAsString());  // a repeat
  // The old session is fenced off; its step is gone.
  EXPECT_TRUE(Fails(old_.Call(&Stub::BeginStep, old_.StepOf({{ids_[0], 2, 1}})), grpc::NOT_FOUND,
                    "SESSION_EXPIRED", {"session"}));
  EXPECT_FALSE(heir_.Call(&Stub::Commit, heir_.CommitOf(open, {1})).ok());
  // The new owner goes on where the old one stopped.
  const uint64_t step = heir_.Begin({{ids_[0], 2, 1}, {ids_[1], 1, 1}});
  heir_.VerifyAll(step, 2);
  EXPECT_EQ(heir_.Commit(step, {1, 1}).positions(0), 3u);
  // They are the heir's now: the time of adoption does not end them.
  for (int i = 0; i < 10; ++i) {
    clock_.Advance(absl::Milliseconds(1000));
    KeepAlive();
    server_->Sweep();
  }
  EXPECT_EQ(heir_.Sequences().size(), 2u);
  EXPECT_TRUE(Fails(Adopt(heir_), grpc::NOT_FOUND, "", {"old_session_id"}));
  EXPECT_TRUE(Adopt(heir_, ids_).ok());
}

TEST_F(AdoptionTest, AfterCloseAndOnlySome) {
  const auto closed = old_.Call(&Stub::CloseSession, old_.Make<v1::CloseSessionRequest>());
  ASSERT_TRUE(closed.ok());
  EXPECT_EQ(closed.body.sequences_released(), 0u);
  EXPECT_TRUE(Fails(Adopt(heir_, {ids_[0], 12345}), grpc::NOT_FOUND, "", {"sequence"}));
  EXPECT_TRUE(heir_.Sequences().empty());  // all or none
  EXPECT_TRUE(RefusesField(Adopt(heir_, {ids_[0], ids_[0]}), "sequence_ids[1]", {"duplicates"}));
  EXPECT_EQ(Adopt(heir_, {ids_[1]}).body.sequences_size(), 1);
  clock_.Advance(absl::Milliseconds(5000));
  KeepAlive();
  server_->Sweep();
  EXPECT_EQ(heir_.Status().models(0).sequences(), 1u);  // nobody came for the other one
  EXPECT_TRUE(Fails(Adopt(heir_, {ids_[0]}), grpc::NOT_FOUND, "", {"old_session_id"}));
  Client stranger(server_->address());
  stranger.Start();
  EXPECT_TRUE(Fails(Adopt(stranger), grpc::NOT_FOUND, "", {}));
  EXPECT_EQ(heir_.Sequences().size(), 1u);
}

TEST_F(AdoptionTest, LimitsAndUnknownSessions) {
  v1::OpenSessionRequest open;
  open.set_adoption_ms(SmallConfig().adoption_ms_max + 1);
  EXPECT_TRUE(
      RefusesField(heir_.Call(&Stub::OpenSession, open), "adoption_ms", {"0..600000", "600001"}));
  EXPECT_EQ(heir_.Call(&Stub::GetCapabilities, v1::GetCapabilitiesRequest()).body.adoption_ms_max(),
            600'000u);
  old_.session_id ^= 2;
  EXPECT_TRUE(Fails(Adopt(heir_), grpc::NOT_FOUND, "", {"old_session_id"}));
}

class UnregisterTest : public AdoptionTest {
 protected:
  Reply<v1::UnregisterModelResponse> Unregister() {
    return heir_.Call(&Stub::UnregisterModel, heir_.Make<v1::UnregisterModelRequest>());
  }
};

TEST_F(UnregisterTest, RefusedWhileInUseThenTheMemoryComesBack) {
  EXPECT_TRUE(Fails(Unregister(), grpc::FAILED_PRECONDITION, "", {"in use", "2 sequences"}));
  auto snapshot = old_.Make<v1::CreateSnapshotRequest>();
  snapshot.set_sequence_id(ids_[0]);
  snapshot.set_version(2);
  snapshot.mutable_key()->set_digest("k");
  snapshot.mutable_key()->set_position(2);
  EXPECT_TRUE(old_.Call(&Stub::CreateSnapshot, snapshot).ok());
  EXPECT_TRUE(old_.Call(&Stub::CloseSession, old_.Make<v1::CloseSessionRequest>()).ok());
  EXPECT_TRUE(Fails(Unregister(), grpc::FAILED_PRECONDITION, "", {"2 sequences"}));  // kept
  clock_.Advance(absl::Milliseconds(5000));
  KeepAlive();
  server_->Sweep();
  const uint64_t padding = heir_.Begin({{0, 0, 1}});
  EXPECT_TRUE(Fails(Unregister(), grpc::FAILED_PRECONDITION, "", {"1 steps"}));
  auto abort = heir_.Make<v1::AbortStepRequest>();
  abort.set_step_id(padding);
  EXPECT_TRUE(heir_.Call(&Stub::AbortStep, abort).ok());

  EXPECT_GT(heir_.Status().state_bytes_used(), 0u);
  const auto gone = Unregister();
  ASSERT_TRUE(gone.ok()) << gone.status.error_message();
  EXPECT_EQ(gone.body.snapshots_dropped(), 1u);
  EXPECT_EQ(heir_.Status().state_bytes_used(), 0u);
  EXPECT_EQ(heir_.Status().models_size(), 0);
  EXPECT_TRUE(Fails(Unregister(), grpc::NOT_FOUND, "", {"model_id"}));
  // Ids of the old life name nothing in the next one.
  v1::RegisterModelRequest again;
  *again.mutable_spec() = testing::SmallSpec();
  *again.mutable_capacity() = SmallCapacity();
  EXPECT_TRUE(heir_.Call(&Stub::RegisterModel, again).body.created());
  heir_.Create(2);
  EXPECT_TRUE(Fails(heir_.Call(&Stub::BeginStep, heir_.StepOf({{ids_[0], 2, 1}})), grpc::NOT_FOUND,
                    "", {}));
}

// Creates, steps and scrapes race with registrations; nothing is lost or touched after its end.
TEST_F(UnregisterTest, RacesWithCallsInFlight) {
  EXPECT_TRUE(old_.Call(&Stub::CloseSession, old_.Make<v1::CloseSessionRequest>()).ok());
  clock_.Advance(absl::Milliseconds(5000));
  KeepAlive();
  server_->Sweep();
  std::atomic<bool> stop{false};
  std::atomic<int> created{0}, unregistered{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      Client client(server_->address());
      client.Start();
      while (!stop) {
        auto create = client.Make<v1::CreateSequencesRequest>();
        create.set_count(1);
        const auto reply = client.Call(&Stub::CreateSequences, create);
        if (!reply.ok()) {
          EXPECT_EQ(reply.status.error_code(), grpc::NOT_FOUND) << reply.status.error_message();
          continue;
        }
        ++created;
        const uint64_t id = reply.body.sequence_ids(0);
        const uint64_t step = client.Begin({{id, 1, 1}});
        client.VerifyAll(step, 1);
        client.Commit(step, {1});
        auto release = client.Make<v1::ReleaseSequencesRequest>();
        release.add_sequence_ids(id);
        EXPECT_TRUE(client.Call(&Stub::ReleaseSequences, release).ok());
      }
    });
  }
  threads.emplace_back([&] {
    while (!stop) {
      server_->core().collector.Collect();
      heir_.Status();
    }
  });
  Client registrar(server_->address());
  registrar.epoch = heir_.epoch, registrar.session_id = heir_.session_id;
  registrar.model_id = heir_.model_id;
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while ((unregistered < 5 || created < 5) && absl::Now() < end) {
    const auto reply =
        registrar.Call(&Stub::UnregisterModel, registrar.Make<v1::UnregisterModelRequest>());
    unregistered += reply.ok();
    v1::RegisterModelRequest again;
    *again.mutable_spec() = testing::SmallSpec();
    *again.mutable_capacity() = SmallCapacity();
    const auto registered = registrar.Call(&Stub::RegisterModel, again);
    EXPECT_TRUE(registered.ok()) << registered.status.error_message();
    absl::SleepFor(absl::Milliseconds(2));
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(unregistered, 0);
  EXPECT_GT(created, 0);
  EXPECT_EQ(heir_.Status().models(0).sequences(), 0u);
}

}  // namespace
}  // namespace ssmd::e2e
