// Exhausted pools answer RESOURCE_EXHAUSTED and recover; the Verify queue refuses, and never runs
// what nobody waits for.
#include "absl/synchronization/notification.h"
#include "tests/e2e/harness.h"
#include "tests/testing/fake_clock.h"

namespace ssmd::e2e {
namespace {

class LimitsTest : public ::testing::Test {
 protected:
  explicit LimitsTest(const ServerConfig& config = SmallConfig())
      : server_(StartServer(config, {.clock = clock_.AsClock(), .start_sweeper = false})),
        client_(server_->address()) {
    client_.Start();
  }

  testing::FakeClock clock_;
  std::unique_ptr<Server> server_;
  Client client_;
};

TEST_F(LimitsTest, Slots) {
  const std::vector<uint64_t> ids = client_.Create(5);
  auto create = client_.Make<v1::CreateSequencesRequest>();
  create.set_count(2);
  const auto full = client_.Call(&Stub::CreateSequences, create);
  EXPECT_TRUE(Fails(full, grpc::RESOURCE_EXHAUSTED, "NO_SLOT", {"2", "1 of 6"}));
  EXPECT_TRUE(full.retry.has_retry_delay());
  EXPECT_EQ(client_.Sequences().size(), 5u);
  auto fork = client_.Make<v1::ForkSequencesRequest>();
  fork.set_sequence_id(ids[0]);
  fork.set_version(1);
  fork.set_count(2);
  EXPECT_TRUE(
      Fails(client_.Call(&Stub::ForkSequences, fork), grpc::RESOURCE_EXHAUSTED, "NO_SLOT", {}));
  EXPECT_EQ(client_.Sequences().size(), 5u);
  client_.Create(1);  // exactly sequences_max succeed
}

TEST_F(LimitsTest, SnapshotSlots) {
  const uint64_t id = client_.Create(1)[0];
  auto snapshot = client_.Make<v1::CreateSnapshotRequest>();
  snapshot.set_sequence_id(id);
  snapshot.set_version(1);
  for (const char* digest : {"a", "b", "c"}) {
    snapshot.mutable_key()->set_digest(digest);
    const auto reply = client_.Call(&Stub::CreateSnapshot, snapshot);
    if (*digest == 'c') {
      EXPECT_TRUE(
          Fails(reply, grpc::RESOURCE_EXHAUSTED, "NO_SNAPSHOT_SLOT", {"snapshots_max", "2"}));
    } else {
      EXPECT_TRUE(reply.ok());
    }
  }
  EXPECT_EQ(client_.Status().models(0).snapshots(), 2u);
}

// Three sequences, five pages (one spare, one for exports), no snapshot pages: while two steps hold
// the last two pages, the third sequence rides on ring slack, and when that is used up it is told
// so before anything is touched.
TEST(PageLimitTest, MandatoryFoldWithoutAPage) {
  ServerConfig config = SmallConfig();
  config.capacity.snapshots_max = 0;
  const auto server = StartServer(config);
  Client client(server->address());
  v1::RegisterModelRequest model;
  *model.mutable_spec() = testing::SmallSpec();
  model.mutable_capacity()->set_sequences_max(3);
  model.mutable_capacity()->set_spare_pages(1);
  client.model_id = client.Call(&Stub::RegisterModel, model).body.model_id();
  const auto session = client.Call(&Stub::OpenSession, v1::OpenSessionRequest()).body;
  client.epoch = session.server_epoch(), client.session_id = session.session_id();

  const std::vector<uint64_t> ids = client.Create(3);
  std::map<uint64_t, uint64_t> version;
  for (const uint64_t id : ids) version[id] = 1;
  const auto step = [&](uint64_t id) {  // T = 4, everything accepted
    const auto begun = client.Call(&Stub::BeginStep, client.StepOf({{id, version[id], 4}}));
    if (!begun.ok()) return begun;
    client.VerifyAll(begun.body.step_id(), 4);
    client.Commit(begun.body.step_id(), {4});
    ++version[id];
    return begun;
  };
  for (const uint64_t id : ids)  // until each holds a page of its own
    while (step(id).body.flushing_rows() == 0) {
    }
  // Steps of the first two that fold, left open.
  std::vector<uint64_t> open;
  while (open.size() < 2) {
    const uint64_t id = ids[open.size()];
    const auto begun = client.Call(&Stub::BeginStep, client.StepOf({{id, version[id], 4}}));
    ASSERT_TRUE(begun.ok()) << begun.status.error_message();
    if (begun.body.flushing_rows() == 1) {
      open.push_back(begun.body.step_id());
      continue;
    }
    client.VerifyAll(begun.body.step_id(), 4);
    client.Commit(begun.body.step_id(), {4});
    ++version[id];
  }
  Reply<v1::BeginStepResponse> reply;
  int rode = 0;
  while ((reply = step(ids[2])).ok() && rode < 10) ++rode;
  EXPECT_TRUE(Fails(reply, grpc::RESOURCE_EXHAUSTED, "NO_PAGE", {}));
  EXPECT_TRUE(reply.retry.has_retry_delay());
  EXPECT_GE(rode, 1);
  EXPECT_EQ(client.Sequences()[ids[2]].version(), version[ids[2]]);
  EXPECT_EQ(client.Sequences()[ids[2]].open_step_id(), 0u);
  auto abort = client.Make<v1::AbortStepRequest>();
  abort.set_step_id(open[0]);
  EXPECT_TRUE(client.Call(&Stub::AbortStep, abort).ok());
  EXPECT_EQ(step(ids[2]).body.flushing_rows(), 1u);  // the page is back
}

TEST_F(LimitsTest, OpenSteps) {
  const std::vector<uint64_t> ids = client_.Create(4);
  for (int i = 0; i < 3; ++i) client_.Begin({{ids[static_cast<size_t>(i)], 1, 1}});
  const auto full = client_.Call(&Stub::BeginStep, client_.StepOf({{ids[3], 1, 1}}));
  EXPECT_TRUE(Fails(full, grpc::RESOURCE_EXHAUSTED, "LIMIT_REACHED", {"steps_max", "3"}));
  EXPECT_TRUE(full.retry.has_retry_delay());
}

TEST_F(LimitsTest, SessionsAndModels) {
  v1::OpenSessionRequest open;
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(client_.Call(&Stub::OpenSession, open).ok());
  const auto full = client_.Call(&Stub::OpenSession, open);
  EXPECT_TRUE(Fails(full, grpc::RESOURCE_EXHAUSTED, "LIMIT_REACHED", {"sessions_max", "4"}));
  EXPECT_TRUE(full.retry.has_retry_delay());
  v1::RegisterModelRequest model;
  *model.mutable_spec() = testing::SmallSpec();
  model.mutable_spec()->set_name("second");
  *model.mutable_capacity() = SmallCapacity();
  EXPECT_TRUE(client_.Call(&Stub::RegisterModel, model).ok());
  model.mutable_spec()->set_name("third");
  EXPECT_TRUE(Fails(client_.Call(&Stub::RegisterModel, model), grpc::RESOURCE_EXHAUSTED,
                    "LIMIT_REACHED", {"models_max", "2"}));
}

TEST_F(LimitsTest, StepAndLeaseEndByTheClock) {
  const uint64_t id = client_.Create(1)[0];
  v1::BeginStepRequest begin = client_.StepOf({{id, 1, 1}});
  begin.set_step_timeout_ms(1000);
  const uint64_t step = client_.Call(&Stub::BeginStep, begin).body.step_id();
  clock_.Advance(absl::Milliseconds(999));
  server_->Sweep();
  EXPECT_TRUE(client_.Call(&Stub::Verify, client_.VerifyOf(step, 3, 1)).ok());
  clock_.Advance(absl::Milliseconds(1));
  server_->Sweep();
  EXPECT_TRUE(Fails(client_.Call(&Stub::Verify, client_.VerifyOf(step, 3, 1)), grpc::ABORTED,
                    "STEP_ABORTED", {"step_timeout_ms"}));
  EXPECT_EQ(client_.Sequences().at(id).open_step_id(), 0u);

  client_.Begin({{id, 1, 1}});
  clock_.Advance(absl::Milliseconds(SmallConfig().lease_ms_default));
  server_->Sweep();
  EXPECT_TRUE(Fails(client_.Call(&Stub::KeepAlive, client_.Make<v1::KeepAliveRequest>()),
                    grpc::NOT_FOUND, "", {"session"}));
  const v1::GetStatusResponse status = client_.Status();
  EXPECT_EQ(status.sessions(), 0u);
  EXPECT_EQ(status.models(0).sequences(), 0u);
  EXPECT_EQ(status.models(0).open_steps(), 0u);
  EXPECT_EQ(status.models(0).pages_free(), status.models(0).pages_total());
}

// One worker, one place in the queue, and the worker is held by the test.
class QueueTest : public LimitsTest {
 protected:
  explicit QueueTest(const ServerConfig& config = OneWorker()) : LimitsTest(config) {
    id_ = client_.Create(1)[0];
    step_ = client_.Begin({{id_, 1, 1}});
    EXPECT_TRUE(server_->core()
                    .verify_queue
                    .Push([this] {
                      held_.Notify();
                      go_.WaitForNotification();
                    })
                    .ok());
    held_.WaitForNotification();
  }
  ~QueueTest() override {
    if (!go_.HasBeenNotified()) go_.Notify();
  }
  static ServerConfig OneWorker() {
    ServerConfig config = SmallConfig();
    config.verify_workers = 1;
    config.verify_queue_max = 1;
    return config;
  }
  uint64_t LayersVerified() {
    return (*server_->core().models.Find(client_.model_id))->store->counters().layers_verified;
  }
  double CancelledCalls() {
    for (const auto& family : server_->core().metrics.registry()->Collect())
      if (family.name == "ssmd_rpcs_cancelled_total") return family.metric.at(0).counter.value;
    return -1;
  }
  bool QueueIsEmpty() {
    const VerifyQueue& queue = server_->core().verify_queue;
    return queue.depth() == 0 && queue.running() == 0;
  }

  absl::Notification held_, go_;
  uint64_t id_ = 0, step_ = 0;
};

TEST_F(QueueTest, AFullQueueRefusesWithRetry) {
  v1::VerifyRequest first = client_.VerifyOf(step_, 3, 1);
  Reply<v1::VerifyResponse> waiting;
  std::thread waiter([&] { waiting = client_.Call(&Stub::Verify, first); });
  EXPECT_TRUE(Poll(absl::Seconds(30), [&] { return server_->core().verify_queue.depth() == 1; }));
  Client second(server_->address());
  second.epoch = client_.epoch, second.session_id = client_.session_id;
  second.model_id = client_.model_id;
  const auto full = second.Call(&Stub::Verify, second.VerifyOf(step_, 5, 1));
  EXPECT_TRUE(Fails(full, grpc::RESOURCE_EXHAUSTED, "LIMIT_REACHED", {"verify_queue_max", "1"}));
  EXPECT_TRUE(full.retry.has_retry_delay());
  go_.Notify();
  waiter.join();
  EXPECT_TRUE(waiting.ok()) << waiting.status.error_message();
  EXPECT_EQ(LayersVerified(), 1u);
}

class QueueBytesTest : public QueueTest {
 protected:
  QueueBytesTest() : QueueTest(SmallQueue()) {}
  static ServerConfig SmallQueue() {
    ServerConfig config = OneWorker();
    config.verify_queue_max = 8;
    config.verify_queue_bytes_max = 1000;  // one Verify of one token
    return config;
  }
};

TEST_F(QueueBytesTest, WaitingRequestsAreBoundedByTheirBytes) {
  const v1::VerifyRequest first = client_.VerifyOf(step_, 3, 1);
  ASSERT_GT(first.ByteSizeLong(), 500u);
  ASSERT_LT(first.ByteSizeLong(), 1000u);
  Reply<v1::VerifyResponse> waiting;
  std::thread waiter([&] { waiting = client_.Call(&Stub::Verify, first); });
  EXPECT_TRUE(Poll(absl::Seconds(30), [&] { return server_->core().verify_queue.depth() == 1; }));
  EXPECT_EQ(server_->core().verify_queue.bytes(), first.ByteSizeLong());
  const auto full = client_.Call(&Stub::Verify, first);
  EXPECT_TRUE(
      Fails(full, grpc::RESOURCE_EXHAUSTED, "LIMIT_REACHED", {"verify_queue_bytes_max", "1000"}));
  EXPECT_TRUE(full.retry.has_retry_delay());
  go_.Notify();
  waiter.join();
  EXPECT_TRUE(waiting.ok()) << waiting.status.error_message();
  EXPECT_EQ(server_->core().verify_queue.bytes(), 0u);
}

TEST_F(QueueTest, ACallWhoseDeadlinePassedIsNotRun) {
  const auto late =
      client_.Call(&Stub::Verify, client_.VerifyOf(step_, 3, 1), std::chrono::milliseconds(50));
  EXPECT_EQ(late.status.error_code(), grpc::DEADLINE_EXCEEDED);
  // The client's timer and the server's are two: the worker goes on once the server saw the
  // deadline.
  EXPECT_TRUE(Poll(absl::Seconds(30), [&] { return CancelledCalls() == 1; }));
  go_.Notify();
  EXPECT_TRUE(Poll(absl::Seconds(30), [&] { return QueueIsEmpty(); }));
  EXPECT_EQ(LayersVerified(), 0u);
}

TEST_F(QueueTest, ACancelledCallIsNotRun) {
  grpc::ClientContext context;
  const v1::VerifyRequest request = client_.VerifyOf(step_, 3, 1);
  v1::VerifyResponse response;
  grpc::Status status;
  std::thread caller([&] { status = client_.stub->Verify(&context, request, &response); });
  EXPECT_TRUE(Poll(absl::Seconds(30), [&] { return server_->core().verify_queue.depth() == 1; }));
  context.TryCancel();
  caller.join();
  EXPECT_EQ(status.error_code(), grpc::CANCELLED);
  EXPECT_TRUE(Poll(absl::Seconds(30), [&] { return CancelledCalls() == 1; }));
  go_.Notify();
  EXPECT_TRUE(Poll(absl::Seconds(30), [&] { return QueueIsEmpty(); }));
  EXPECT_EQ(LayersVerified(), 0u);
}

TEST_F(QueueTest, ASessionWithAQueuedCallOutlivesItsLeaseAndClosesAfterIt) {
  Reply<v1::VerifyResponse> verified;
  const v1::VerifyRequest request = client_.VerifyOf(step_, 3, 1);
  std::thread verifier([&] { verified = client_.Call(&Stub::Verify, request); });
  EXPECT_TRUE(Poll(absl::Seconds(30), [&] { return server_->core().verify_queue.depth() == 1; }));
  clock_.Advance(absl::Hours(1));
  server_->Sweep();  // the step's deadline passed; the session's lease is held by the call
  EXPECT_EQ(server_->core().sessions.size(), 1u);
  Reply<v1::CloseSessionResponse> closed;
  std::thread closer(
      [&] { closed = client_.Call(&Stub::CloseSession, client_.Make<v1::CloseSessionRequest>()); });
  EXPECT_TRUE(Poll(absl::Seconds(30), [&] { return server_->core().sessions.size() == 0; }));
  EXPECT_EQ(client_.Status().models(0).sequences(), 1u);  // not before the call has ended
  go_.Notify();
  verifier.join();
  closer.join();
  EXPECT_TRUE(Fails(verified, grpc::NOT_FOUND, "", {"session"}));
  EXPECT_TRUE(closed.ok()) << closed.status.error_message();
  EXPECT_EQ(closed.body.sequences_released(), 1u);
  EXPECT_EQ(client_.Status().models(0).sequences(), 0u);
}

}  // namespace
}  // namespace ssmd::e2e
