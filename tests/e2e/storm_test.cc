// Ten thousand calls that end early: random deadlines and cancels of every RPC, unary and streamed,
// against a loaded server, while one client decodes in peace. Afterwards nothing is held, every
// step was counted once, and the client in peace got the numbers of a quiet server.
//
// Made for the sanitizers. SSMD_STORM_SEED replays a run.
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "absl/synchronization/notification.h"
#include "service/log.h"
#include "tests/e2e/steps_client.h"

namespace ssmd::e2e {
namespace {

constexpr int kThreads = 3;
constexpr int kActsPerThread = 3'500;
constexpr int kControlSteps = 40;

using Async = v1::StateService::StubInterface::async_interface;

ServerConfig StormConfig() {
  ServerConfig config = SmallConfig();
  config.sessions_max = 32;
  config.lease_ms_min = 50;
  config.sweep_interval_ms = 1;
  config.verify_queue_max = 4;
  config.stream_calls_max = 6;
  config.stream_begins_max = 2;
  config.state_bytes_max = 64u << 20;
  return config;
}

// One client that does what it can and leaves when it likes.
class Stormer {
 public:
  Stormer(const std::string& address, uint64_t model_id, uint64_t seed)
      : client_(address), random_(seed) {
    client_.model_id = model_id;
    client_.random.seed(seed);
  }

  struct Tally {
    int spoiled = 0;  // calls that were given a random deadline or a cancel
    int early = 0;    // calls that did not get their answer for it
  };
  Tally Run(int acts) {
    Open();
    for (int i = 0; i < acts; ++i) {
      if (i % 25 == 0) Learn();
      Act();
    }
    client_.Call(&Stub::CloseSession, client_.Make<v1::CloseSessionRequest>());
    return tally_;
  }

 private:
  uint64_t Below(uint64_t bound) { return random_() % bound; }

  void Open() {
    v1::OpenSessionRequest open;
    open.set_lease_ms(2'000);
    open.set_adoption_ms(Below(2) == 0 ? 0 : 100);
    const auto opened = client_.Call(&Stub::OpenSession, open);
    if (!opened.ok()) return;  // too many at the moment: goes on with the old one
    client_.epoch = opened.body.server_epoch();
    client_.session_id = opened.body.session_id();
  }

  // What really is, by calls that are waited for.
  void Learn() {
    const auto listed = client_.Call(&Stub::GetSequences, client_.Make<v1::GetSequencesRequest>());
    if (listed.status.error_code() == grpc::NOT_FOUND) Open();
    sequences_.assign(listed.body.sequences().begin(), listed.body.sequences().end());
    if (!sequences_.empty()) return;
    auto create = client_.Make<v1::CreateSequencesRequest>();
    create.set_count(2);
    client_.Call(&Stub::CreateSequences, create);
  }

  // A deadline, or a cancel after a while, or (one in eight) neither.
  template <typename Request, typename Response>
  void Spoil(void (Async::*method)(grpc::ClientContext*, const Request*, Response*,
                                   std::function<void(grpc::Status)>),
             const Request& request, Response* reply = nullptr) {
    grpc::ClientContext context;
    const uint64_t kind = Below(8);
    tally_.spoiled += kind < 7;
    const auto wait = std::chrono::microseconds(Below(1'500));
    context.set_deadline(std::chrono::system_clock::now() +
                         (kind < 4 ? wait : std::chrono::microseconds(20'000'000)));
    Response response;
    absl::Notification done;
    grpc::Status status;
    (client_.stub->async()->*method)(&context, &request, &response, [&](grpc::Status s) {
      status = std::move(s);
      done.Notify();
    });
    if (kind >= 4 && kind < 7) {
      if (Below(2) == 0) std::this_thread::sleep_for(wait / 2);
      context.TryCancel();
    }
    done.WaitForNotification();
    Count(status);
    if (reply != nullptr && status.ok()) *reply = response;
  }
  void Count(const grpc::Status& status) {
    EXPECT_NE(status.error_code(), grpc::INTERNAL) << status.error_message();
    tally_.early +=
        status.error_code() == grpc::CANCELLED || status.error_code() == grpc::DEADLINE_EXCEEDED;
  }

  v1::SequenceInfo Some() {
    if (sequences_.empty()) return {};
    return sequences_[Below(sequences_.size())];
  }
  template <typename Request>
  Request Of(const v1::SequenceInfo& info) {
    auto request = client_.Make<Request>();
    request.set_sequence_id(info.sequence_id());
    request.set_version(info.version());
    return request;
  }
  v1::SnapshotKey Key(uint64_t position) {
    v1::SnapshotKey key;
    key.set_digest(std::string(1, static_cast<char>('a' + Below(3))));
    key.set_position(position);
    return key;
  }

  void Act() {
    const v1::SequenceInfo one = Some();
    switch (Below(40)) {
      case 0: {
        v1::OpenSessionRequest open;
        open.set_lease_ms(50);
        return Spoil(&Async::OpenSession, open);
      }
      case 1:
        if (Below(4) != 0) return;
        return Spoil(&Async::CloseSession, client_.Make<v1::CloseSessionRequest>());
      case 2:
        return Spoil(&Async::KeepAlive, client_.Make<v1::KeepAliveRequest>());
      case 3:
        return Spoil(&Async::GetStatus, v1::GetStatusRequest());
      case 4: {
        v1::GetCapabilitiesRequest request;
        request.set_model_id(client_.model_id);
        return Spoil(&Async::GetCapabilities, request);
      }
      case 5: {
        v1::RegisterModelRequest request;  // a second model that comes and goes
        *request.mutable_spec() = testing::SmallSpec();
        request.mutable_spec()->set_name("guest");
        *request.mutable_capacity() = SmallCapacity();
        v1::RegisterModelResponse reply;
        Spoil(&Async::RegisterModel, request, &reply);
        if (reply.model_id() != 0) guest_ = reply.model_id();
        return;
      }
      case 6: {
        auto request = client_.Make<v1::UnregisterModelRequest>();
        request.set_model_id(guest_);
        return Spoil(&Async::UnregisterModel, request);
      }
      case 7: {
        auto request = client_.Make<v1::CreateSequencesRequest>();
        request.set_count(1);
        request.set_request_id(Below(4));
        if (Below(3) == 0) *request.mutable_from_snapshot() = Key(Below(4));
        return Spoil(&Async::CreateSequences, request);
      }
      case 8: {
        auto request = Of<v1::ForkSequencesRequest>(one);
        request.set_count(1);
        return Spoil(&Async::ForkSequences, request);
      }
      case 9: {
        auto request = client_.Make<v1::ReleaseSequencesRequest>();
        request.add_sequence_ids(one.sequence_id());
        return Spoil(&Async::ReleaseSequences, request);
      }
      case 10: {
        auto request = client_.Make<v1::AdoptSequencesRequest>();
        request.set_old_session_id(client_.session_id + Below(2));
        return Spoil(&Async::AdoptSequences, request);
      }
      case 11: {
        auto request = client_.Make<v1::FlushSequencesRequest>();
        request.add_sequence_ids(one.sequence_id());
        return Spoil(&Async::FlushSequences, request);
      }
      case 12: {
        auto request = Of<v1::RollbackRequest>(one);
        request.set_position(one.position() - Below(2));
        return Spoil(&Async::Rollback, request);
      }
      case 13: {
        auto request = Of<v1::CreateSnapshotRequest>(one);
        *request.mutable_key() = Key(one.position());
        return Spoil(&Async::CreateSnapshot, request);
      }
      case 14: {
        auto request = client_.Make<v1::DeleteSnapshotRequest>();
        *request.mutable_key() = Key(one.position());
        return Spoil(&Async::DeleteSnapshot, request);
      }
      case 15: {
        auto request = client_.Make<v1::LookupPrefixRequest>();
        request.add_digests("a");
        request.set_position_max(100);
        return Spoil(&Async::LookupPrefix, request);
      }
      case 16:
        return Spoil(&Async::ListSnapshots, client_.Make<v1::ListSnapshotsRequest>());
      case 17:
        return Spoil(&Async::GetSequences, client_.Make<v1::GetSequencesRequest>());
      case 18:
      case 19:
        return Export(one);
      case 20:
      case 21:
        return Import(one);
      case 22:
      case 23:
      case 24:
      case 25:
      case 26:
      case 27:
        return Stream(one);
      default:
        return Step(one);
    }
  }

  void Step(const v1::SequenceInfo& one) {
    v1::BeginStepRequest begin =
        client_.StepOf({{one.sequence_id(), one.version(), static_cast<uint32_t>(Below(5))}});
    begin.set_allow_partial(Below(4) == 0);
    begin.set_auto_commit(Below(4) == 0);
    if (Below(4) == 0) begin.set_step_timeout_ms(1 + static_cast<uint32_t>(Below(3)));
    v1::BeginStepResponse begun;
    Spoil(&Async::BeginStep, begin, &begun);
    const uint64_t step = begun.step_id() != 0 ? begun.step_id() : one.open_step_id();
    for (const uint32_t layer_id : kSmallLayers)
      if (Below(8) != 0 && begin.draft_tokens(0) > 0)
        Spoil(&Async::Verify, client_.VerifyOf(step, layer_id, begin.draft_tokens(0)));
    if (Below(2) == 0)
      Spoil(&Async::Commit,
            client_.CommitOf(step, {static_cast<uint32_t>(Below(begin.draft_tokens(0) + 1))}));
    if (Below(2) == 0) {
      auto request = client_.Make<v1::AbortStepRequest>();
      request.set_step_id(step);
      Spoil(&Async::AbortStep, request);
    }
  }

  void Stream(const v1::SequenceInfo& one) {
    ++tally_.spoiled;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::microseconds(Below(2) == 0 ? Below(8'000) : 20'000'000));
    const auto stream = client_.stub->Steps(&context);
    v1::StepsRequest first;
    client_.FillContext(*first.mutable_context());
    *first.mutable_begin() = client_.StepOf({{one.sequence_id(), one.version(), 2}});
    bool open = stream->Write(first);
    v1::StepsResponse reply;
    if (open && Below(4) != 0) open = stream->Read(&reply);
    const uint64_t step = reply.begin().step_id();
    for (uint64_t i = Below(8); open && i > 0; --i) {
      v1::StepsRequest next;
      switch (Below(5)) {
        case 0:
          *next.mutable_begin() = client_.StepOf({{one.sequence_id(), one.version() + 1, 1}});
          break;
        case 1:
          *next.mutable_commit() = client_.CommitOf(step, {1});
          break;
        case 2:
          *next.mutable_begin() = client_.StepOf({{one.sequence_id(), one.version() + 1, 1}});
          *next.mutable_begin()->mutable_commit_first() = client_.CommitOf(step, {2});
          break;
        default:
          *next.mutable_verify() = client_.VerifyOf(step, kSmallLayers[Below(3)], 2);
      }
      open = stream->Write(next);
      if (open && Below(3) == 0) open = stream->Read(&reply);
    }
    switch (Below(3)) {
      case 0:
        context.TryCancel();
        break;
      case 1:
        std::this_thread::sleep_for(std::chrono::microseconds(Below(1'000)));
        context.TryCancel();
        break;
      default:
        if (Below(2) == 0) {
          stream->WritesDone();
          std::this_thread::sleep_for(std::chrono::microseconds(Below(500)));
        }
        context.TryCancel();  // a held BeginStep would wait for its step
    }
    while (stream->Read(&reply)) {
    }
    Count(stream->Finish());
  }

  void Export(const v1::SequenceInfo& one) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::microseconds(Below(2) == 0 ? Below(3'000) : 20'000'000));
    auto request = client_.Make<v1::ExportStateRequest>();
    request.set_sequence_id(one.sequence_id());
    request.set_version(one.version());
    const auto stream = client_.stub->ExportState(&context, request);
    std::vector<v1::ExportStateResponse> messages(1);
    while (stream->Read(&messages.back())) {
      if (Below(10) == 0) context.TryCancel();
      messages.emplace_back();
    }
    messages.pop_back();
    const grpc::Status status = stream->Finish();
    Count(status);
    if (status.ok()) exported_ = std::move(messages);
  }

  void Import(const v1::SequenceInfo& one) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::microseconds(Below(2) == 0 ? Below(3'000) : 20'000'000));
    v1::ImportStateResponse response;
    const auto stream = client_.stub->ImportState(&context, &response);
    v1::ImportStateRequest message;
    auto& header = *message.mutable_header();
    client_.FillContext(*header.mutable_context());
    header.set_model_id(client_.model_id);
    header.set_sequence_id(one.sequence_id());
    header.set_version(one.version());
    bool open = true;
    for (const v1::ExportStateResponse& part : exported_) {
      if (part.has_state()) *header.mutable_state() = part.state();
      if (part.has_state()) open = open && stream->Write(message);
      if (Below(12) == 0) context.TryCancel();
      v1::ImportStateRequest next;
      if (part.has_chunk()) *next.mutable_chunk() = part.chunk();
      if (part.has_finish()) next.mutable_finish()->set_checksum(part.finish().checksum());
      if (!part.has_state()) open = open && stream->Write(next);
    }
    if (exported_.empty() && Below(2) == 0) stream->Write(message);
    stream->WritesDone();
    Count(stream->Finish());
  }

  Client client_;
  std::mt19937_64 random_;
  std::vector<v1::SequenceInfo> sequences_;
  std::vector<v1::ExportStateResponse> exported_;
  uint64_t guest_ = 1;
  Tally tally_;
};

// Retries while the storm has the queue, the pages or the steps.
template <typename Request, typename Response>
Reply<Response> Insist(Client& client,
                       grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                    Response*),
                       const Request& request) {
  while (true) {
    auto reply = client.Call(method, request);
    if (reply.status.error_code() != grpc::RESOURCE_EXHAUSTED) return reply;
    absl::SleepFor(absl::Milliseconds(1));
  }
}

// The first sequence of a fresh server, so its numbers do not depend on who else comes.
class Control {
 public:
  explicit Control(Server& server) : client_(server.address()) {
    v1::RegisterModelRequest model;
    *model.mutable_spec() = testing::SmallSpec();
    *model.mutable_capacity() = SmallCapacity();
    model.mutable_capacity()->set_sequences_max(12);
    model.mutable_capacity()->set_snapshots_max(4);
    model.mutable_capacity()->set_spare_pages(6);
    model.mutable_capacity()->set_steps_max(12);
    client_.model_id = client_.Call(&Stub::RegisterModel, model).body.model_id();
    v1::OpenSessionRequest open;
    open.set_lease_ms(120'000);
    const auto opened = client_.Call(&Stub::OpenSession, open);
    client_.epoch = opened.body.server_epoch();
    client_.session_id = opened.body.session_id();
    id_ = client_.Create(1)[0];
  }

  std::vector<float> Decode(const std::function<void()>& between) {
    std::vector<float> outputs;
    uint64_t version = 1;
    for (int i = 0; i < kControlSteps; ++i, ++version) {
      const auto begun = Insist(client_, &Stub::BeginStep, client_.StepOf({{id_, version, 3}}));
      EXPECT_TRUE(begun.ok()) << begun.status.error_message();
      for (const uint32_t layer_id : kSmallLayers) {
        const auto request = client_.VerifyOf(begun.body.step_id(), layer_id, 3);
        const auto verified = Insist(client_, &Stub::Verify, request);
        EXPECT_TRUE(verified.ok()) << verified.status.error_message();
        const std::string& data = verified.body.output().data();
        const size_t old = outputs.size();
        outputs.resize(old + data.size() / sizeof(float));
        std::memcpy(outputs.data() + old, data.data(), data.size());
      }
      client_.Commit(begun.body.step_id(), {static_cast<uint32_t>(i % 4)});
      between();
    }
    return outputs;
  }
  Client& client() { return client_; }

 private:
  Client client_;
  uint64_t id_ = 0;
};

TEST(Storm, TenThousandDeadlinesAndCancelsLeaveNothingBehind) {
  uint64_t seed = std::random_device()();
  if (const char* fixed = std::getenv("SSMD_STORM_SEED")) seed = std::strtoull(fixed, nullptr, 10);
  InitLogging("off", "text");
  std::printf("SSMD_STORM_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);

  std::vector<float> quiet;
  {
    const auto server = StartServer(StormConfig());
    quiet = Control(*server).Decode([] {});
  }
  const auto server = StartServer(StormConfig());
  ServiceCore& core = server->core();
  Control control(*server);
  const uint64_t model_id = control.client().model_id;
  Store& store = *(*core.models.Find(model_id))->store;

  std::atomic<int> spoiled{0}, early{0}, running{kThreads};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const auto tally = Stormer(server->address(), model_id, seed + t).Run(kActsPerThread);
      spoiled += tally.spoiled;
      early += tally.early;
      --running;
    });
  }
  const std::vector<float> stormy = control.Decode([&] {
    if (running > 0) absl::SleepFor(absl::Milliseconds(50));
  });
  for (std::thread& thread : threads) thread.join();
  std::printf("%d calls with a random deadline or cancel, %d ended by it\n", spoiled.load(),
              early.load());
  EXPECT_GE(spoiled.load(), 10'000);
  EXPECT_GE(early.load(), 1'000);  // how many: this machine's speed

  // A fold that had to wait for a page rounds at another position; nothing else may differ.
  ASSERT_EQ(stormy.size(), quiet.size());
  for (size_t i = 0; i < quiet.size(); ++i)
    ASSERT_LE(std::abs(stormy[i] - quiet[i]), 1e-4f * (1 + std::abs(quiet[i]))) << i;

  EXPECT_TRUE(control.client()
                  .Call(&Stub::CloseSession, control.client().Make<v1::CloseSessionRequest>())
                  .ok());
  // Sessions whose OpenSession was cancelled end with their leases, kept sequences after that.
  EXPECT_TRUE(Poll(absl::Seconds(20), [&] {
    const StoreUsage usage = store.usage();
    return core.sessions.size() == 0 && core.streams.size() == 0 && usage.sequences == 0 &&
           usage.open_steps == 0 && usage.imports == 0 && usage.exports == 0 &&
           core.verify_queue.depth() == 0 && core.verify_queue.running() == 0;
  }));
  for (const SnapshotKey& key : store.ListSnapshots(std::nullopt, 1'000))
    EXPECT_TRUE(store.DeleteSnapshot(key).ok());
  const StoreUsage usage = store.usage();
  EXPECT_EQ(usage.sequences, 0u);
  EXPECT_EQ(usage.open_steps, 0u);
  EXPECT_EQ(usage.imports, 0u);
  EXPECT_EQ(usage.exports, 0u);
  EXPECT_EQ(usage.snapshots, 0u);
  EXPECT_EQ(usage.pages.free, usage.pages.total);
  EXPECT_EQ(core.streams.held.load(), 0u);
  EXPECT_EQ(core.verify_queue.bytes(), 0u);
  const StoreCounters counters = store.counters();
  EXPECT_EQ(counters.steps_begun, counters.steps_committed + counters.steps_aborted);
  EXPECT_GT(counters.steps_committed, uint64_t{kControlSteps});
}

}  // namespace
}  // namespace ssmd::e2e
