// AdminService: what it changes, whom it concerns, what it refuses.
#include "ssmd/v1/admin_service.grpc.pb.h"
#include "tests/e2e/harness.h"
#include "tests/testing/fake_clock.h"

namespace ssmd::e2e {
namespace {

using Admin = v1::AdminService::Stub;

class AdminTest : public ::testing::Test {
 protected:
  AdminTest()
      : server_(StartServer(SmallConfig(), {.clock = clock_.AsClock(), .start_sweeper = false})),
        client_(server_->address()),
        admin_(v1::AdminService::NewStub(client_.channel)) {}

  template <typename Request, typename Response>
  Reply<Response> Call(grpc::Status (Admin::*method)(grpc::ClientContext*, const Request&,
                                                     Response*),
                       const Request& request) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + Client::kDeadline);
    Reply<Response> reply;
    reply.status = ((*admin_).*method)(&context, request, &reply.body);
    DecodeDetails(reply.status, reply.info, reply.bad_request, reply.retry);
    return reply;
  }
  Reply<v1::DrainResponse> Drain(bool resume = false) {
    v1::DrainRequest request;
    request.set_resume(resume);
    return Call(&Admin::Drain, request);
  }
  std::vector<v1::SessionInfo> Sessions() {
    const auto listed = Call(&Admin::ListSessions, v1::ListSessionsRequest());
    EXPECT_TRUE(listed.ok());
    return {listed.body.sessions().begin(), listed.body.sessions().end()};
  }
  Reply<v1::EvictSessionResponse> Evict(uint64_t session) {
    v1::EvictSessionRequest request;
    request.set_session_id(session);
    return Call(&Admin::EvictSession, request);
  }
  void Snapshot(uint64_t sequence, const std::string& digest) {
    auto request = client_.Make<v1::CreateSnapshotRequest>();
    request.set_sequence_id(sequence);
    request.set_version(1);
    request.mutable_key()->set_digest(digest);
    EXPECT_TRUE(client_.Call(&Stub::CreateSnapshot, request).ok());
  }

  testing::FakeClock clock_;
  std::unique_ptr<Server> server_;
  Client client_;
  std::unique_ptr<Admin> admin_;
};

TEST_F(AdminTest, DrainRefusesTheNewAndKeepsTheLiving) {
  client_.Start();
  const uint64_t id = client_.Create(1)[0];
  const auto drained = Drain();
  ASSERT_TRUE(drained.ok());
  EXPECT_TRUE(drained.body.draining());
  EXPECT_EQ(drained.body.sequences(), 1u);
  EXPECT_EQ(drained.body.sessions(), 1u);
  EXPECT_EQ(drained.body.server_epoch(), client_.epoch);
  EXPECT_TRUE(Drain().ok());  // again
  EXPECT_EQ(Health(client_.channel, ""), 2);
  EXPECT_TRUE(Fails(client_.Call(&Stub::OpenSession, v1::OpenSessionRequest()), grpc::UNAVAILABLE,
                    "DRAINING", {}));
  auto create = client_.Make<v1::CreateSequencesRequest>();
  create.set_count(1);
  EXPECT_TRUE(
      Fails(client_.Call(&Stub::CreateSequences, create), grpc::UNAVAILABLE, "DRAINING", {}));
  const uint64_t step = client_.Begin({{id, 1, 2}});  // lives on
  client_.VerifyAll(step, 2);
  client_.Commit(step, {2});
  EXPECT_TRUE(client_.Status().draining());

  const auto resumed = Drain(/*resume=*/true);
  ASSERT_TRUE(resumed.ok());
  EXPECT_FALSE(resumed.body.draining());
  EXPECT_EQ(Health(client_.channel, ""), 1);
  EXPECT_EQ(Health(client_.channel, "ssmd.v1.StateService"), 1);
  EXPECT_TRUE(client_.Call(&Stub::CreateSequences, create).ok());
}

TEST_F(AdminTest, AServerThatWasToldToStopDoesNotResume) {
  server_->core().Stop();
  EXPECT_TRUE(Fails(Drain(/*resume=*/true), grpc::FAILED_PRECONDITION, "STOPPING", {"stop"}));
  EXPECT_TRUE(client_.Status().draining());
}

TEST_F(AdminTest, LogLevelIsOneOfSix) {
  v1::SetLogLevelRequest request;
  request.set_level("loud");
  EXPECT_TRUE(RefusesField(Call(&Admin::SetLogLevel, request), "level", {"'loud'", "debug"}));
  request.set_level("warn");
  const auto first = Call(&Admin::SetLogLevel, request);
  ASSERT_TRUE(first.ok());
  request.set_level(first.body.previous());
  const auto second = Call(&Admin::SetLogLevel, request);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second.body.previous(), "warn");
}

TEST_F(AdminTest, SessionsAreListedInPages) {
  EXPECT_TRUE(Sessions().empty());
  client_.Start();
  client_.Create(2);
  std::vector<uint64_t> ids = {client_.session_id};
  for (int i = 0; i < 3; ++i) {
    v1::OpenSessionRequest open;
    open.set_client_name("other");
    open.set_lease_ms(5000);
    ids.push_back(client_.Call(&Stub::OpenSession, open).body.session_id());
  }
  std::sort(ids.begin(), ids.end());
  clock_.Advance(absl::Seconds(3));
  const std::vector<v1::SessionInfo> all = Sessions();
  ASSERT_EQ(all.size(), 4u);
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].session_id(), ids[i]);
    EXPECT_EQ(all[i].age_ms(), 3000u);
    EXPECT_FALSE(all[i].kept());
    const bool mine = ids[i] == client_.session_id;
    EXPECT_EQ(all[i].sequences(), mine ? 2u : 0u);
    if (!mine) {
      EXPECT_EQ(all[i].client_name(), "other");
      EXPECT_EQ(all[i].remaining_ms(), 2000u);
    }
  }
  v1::ListSessionsRequest page;
  page.set_page_size(3);
  const auto first = Call(&Admin::ListSessions, page);
  EXPECT_EQ(first.body.sessions_size(), 3);
  EXPECT_EQ(first.body.next_after(), ids[2]);
  page.set_after(first.body.next_after());
  const auto last = Call(&Admin::ListSessions, page);
  ASSERT_EQ(last.body.sessions_size(), 1);
  EXPECT_EQ(last.body.sessions(0).session_id(), ids[3]);
  EXPECT_EQ(last.body.next_after(), 0u);
  page.set_page_size(1001);
  EXPECT_TRUE(RefusesField(Call(&Admin::ListSessions, page), "page_size", {"1001"}));
}

TEST_F(AdminTest, AnEvictedSessionIsGoneWithAllItHas) {
  client_.Start();
  const uint64_t id = client_.Create(2)[0];
  const uint64_t step = client_.Begin({{id, 1, 1}});
  Client other(server_->address());
  other.Start();
  const uint64_t others = other.Create(1)[0];
  const auto evicted = Evict(client_.session_id);
  ASSERT_TRUE(evicted.ok()) << evicted.status.error_message();
  EXPECT_EQ(evicted.body.sequences_released(), 2u);
  EXPECT_EQ(evicted.body.steps_aborted(), 1u);
  EXPECT_TRUE(Fails(client_.Call(&Stub::Verify, client_.VerifyOf(step, 3, 1)), grpc::NOT_FOUND,
                    "SESSION_EXPIRED", {}));
  EXPECT_TRUE(Fails(Evict(client_.session_id), grpc::NOT_FOUND, "SESSION_EXPIRED", {"session_id"}));
  EXPECT_TRUE(Fails(Evict(0), grpc::NOT_FOUND, "SESSION_EXPIRED", {}));
  EXPECT_EQ(other.Sequences().count(others), 1u);
  EXPECT_EQ(other.Status().sessions(), 1u);
  EXPECT_EQ(server_->core().sessions.evicted_count(), 1u);
}

TEST_F(AdminTest, EvictionKeepsNothingForAdoption) {
  client_.Start();
  v1::OpenSessionRequest open;
  open.set_lease_ms(1000);
  open.set_adoption_ms(60'000);
  open.set_client_name("kept");
  const uint64_t evicted_alive = client_.Call(&Stub::OpenSession, open).body.session_id();
  const uint64_t evicted_kept = client_.Call(&Stub::OpenSession, open).body.session_id();
  const uint64_t mine = client_.session_id;
  for (const uint64_t session : {evicted_alive, evicted_kept}) {
    client_.session_id = session;
    client_.Create(2);
  }
  client_.session_id = mine;
  const auto released = Evict(evicted_alive);
  ASSERT_TRUE(released.ok());
  EXPECT_EQ(released.body.sequences_released(), 2u);

  clock_.Advance(absl::Seconds(2));
  server_->Sweep();  // the other lease ran out
  std::vector<v1::SessionInfo> listed = Sessions();
  const auto kept = std::find_if(listed.begin(), listed.end(),
                                 [&](const auto& s) { return s.session_id() == evicted_kept; });
  ASSERT_NE(kept, listed.end());
  EXPECT_TRUE(kept->kept());
  EXPECT_EQ(kept->client_name(), "kept");
  EXPECT_EQ(kept->sequences(), 2u);
  EXPECT_EQ(kept->remaining_ms(), 60'000u);
  const auto again = Evict(evicted_kept);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again.body.sequences_released(), 2u);
  auto adopt = client_.Make<v1::AdoptSequencesRequest>();
  adopt.set_old_session_id(evicted_kept);
  EXPECT_TRUE(Fails(client_.Call(&Stub::AdoptSequences, adopt), grpc::NOT_FOUND, "", {}));
  EXPECT_EQ(client_.Status().models(0).sequences(), 0u);
  EXPECT_EQ(Sessions().size(), 1u);
}

TEST_F(AdminTest, SnapshotsAreEvictedByKeyOrAll) {
  client_.Start();
  const uint64_t id = client_.Create(1)[0];
  Snapshot(id, "a");
  Snapshot(id, "b");
  v1::EvictSnapshotsRequest request;
  request.set_model_id(client_.model_id);
  EXPECT_TRUE(RefusesField(Call(&Admin::EvictSnapshots, request), "keys", {"1..1000"}));
  request.add_keys()->set_digest("a");
  request.add_keys()->set_digest("absent");
  request.set_all(true);
  EXPECT_TRUE(RefusesField(Call(&Admin::EvictSnapshots, request), "keys", {"2 keys and `all`"}));
  request.set_all(false);
  request.add_keys();
  EXPECT_TRUE(RefusesField(Call(&Admin::EvictSnapshots, request), "keys[2].digest", {}));
  EXPECT_EQ(client_.Status().models(0).snapshots(), 2u);  // a mistake drops none
  request.mutable_keys()->RemoveLast();
  const auto one = Call(&Admin::EvictSnapshots, request);
  ASSERT_TRUE(one.ok());
  EXPECT_EQ(one.body.evicted(), 1u);
  EXPECT_EQ(one.body.absent(), 1u);
  Snapshot(id, "c");
  request.clear_keys();
  request.set_all(true);
  const auto all = Call(&Admin::EvictSnapshots, request);
  ASSERT_TRUE(all.ok());
  EXPECT_EQ(all.body.evicted(), 2u);
  EXPECT_EQ(client_.Status().models(0).snapshots(), 0u);
  EXPECT_EQ(client_.Sequences().count(id), 1u);
  request.set_model_id(1);
  EXPECT_TRUE(Fails(Call(&Admin::EvictSnapshots, request), grpc::NOT_FOUND, "", {"model"}));
}

// Evict races with calls in flight of the same session: each call succeeds or says that the session
// is gone, and nothing is left behind.
TEST_F(AdminTest, EvictionAmidCallsLeavesNothing) {
  for (int round = 0; round < 20; ++round) {
    client_.Start();
    std::thread caller([&] {
      auto create = client_.Make<v1::CreateSequencesRequest>();
      create.set_count(1);
      while (true) {
        const auto made = client_.Call(&Stub::CreateSequences, create);
        if (made.status.error_code() == grpc::RESOURCE_EXHAUSTED) continue;
        if (made.ok()) continue;
        EXPECT_TRUE(Fails(made, grpc::NOT_FOUND, "SESSION_EXPIRED", {}));
        return;
      }
    });
    EXPECT_TRUE(Evict(client_.session_id).ok());
    caller.join();
    EXPECT_EQ(client_.Status().models(0).sequences(), 0u);
    EXPECT_EQ(client_.Status().sessions(), 0u);
  }
}

}  // namespace
}  // namespace ssmd::e2e
