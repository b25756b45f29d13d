// Real processes that die: a client killed mid-step, a server killed mid-step, a server told to
// stop.
#include <signal.h>

#include "tests/e2e/harness.h"
#include "tests/testing/fake_clock.h"

namespace ssmd::e2e {
namespace {

TEST(ClientDeath, ItsSequencesAreReclaimedAndOthersNeverNotice) {
  constexpr uint32_t kLeaseMs = 500;
  testing::FakeClock clock;  // the sweeper runs as always, the lease when told
  const auto server = StartServer(SmallConfig(), {.clock = clock.AsClock()});
  Client survivor(server->address());
  survivor.Start();
  const uint64_t id = survivor.Create(1)[0];
  uint64_t version = 1;
  const auto step = [&] {
    const uint64_t opened = survivor.Begin({{id, version++, 2}});
    survivor.VerifyAll(opened, 2);
    survivor.Commit(opened, {1});
  };
  ChildProcess victim({SSMD_CRASH_CLIENT, server->address(), absl::StrCat(kLeaseMs)});
  ASSERT_EQ(victim.ReadLine(), "mid-step") << victim.ErrorOutput();
  const v1::ModelStatus held = survivor.Status().models(0);
  EXPECT_EQ(held.sequences(), 3u);
  EXPECT_EQ(held.open_steps(), 1u);
  victim.Signal(SIGKILL);
  EXPECT_EQ(victim.Wait(), 128 + SIGKILL);
  clock.Advance(absl::Milliseconds(kLeaseMs - 1));
  step();
  server->Sweep();
  EXPECT_EQ(survivor.Status().models(0).sequences(), 3u);
  clock.Advance(absl::Milliseconds(1));
  EXPECT_TRUE(Poll(absl::Seconds(30), [&] {
    step();
    return survivor.Status().models(0).sequences() == 1 && survivor.Status().sessions() == 1;
  }));
  step();
  const v1::ModelStatus freed = survivor.Status().models(0);
  EXPECT_EQ(freed.open_steps(), 0u);
  EXPECT_EQ(survivor.Sequences()[id].version(), version);
  EXPECT_GE(freed.pages_free() + 1, freed.pages_total());
}

class ServerBinaryTest : public ::testing::Test {
 protected:
  static std::vector<std::string> Command(std::vector<std::string> flags) {
    flags.insert(flags.begin(), SSMD_SERVER_BINARY);
    return flags;
  }
  // Starts the binary; fills address_ from the line it prints.
  std::unique_ptr<ChildProcess> Start(const std::string& listen = "127.0.0.1:0") {
    auto server = std::make_unique<ChildProcess>(
        Command({"--listen", listen, "--metrics-listen", "127.0.0.1:0", "--state-memory", "16M",
                 "--drain-timeout-ms", "60000"}));
    const std::string line = server->ReadLine();
    const std::string start = "ssmd-server listening on ", middle = ", metrics on ";
    EXPECT_TRUE(absl::StartsWith(line, start)) << line << server->ErrorOutput();
    const size_t comma = line.find(middle);
    if (comma != std::string::npos) {
      address_ = line.substr(start.size(), comma - start.size());
      metrics_address_ = line.substr(comma + middle.size());
    }
    return server;
  }
  // Exit code and stderr of a start that must fail.
  static std::pair<int, std::string> Run(const std::vector<std::string>& flags) {
    ChildProcess server(Command(flags));
    while (!server.ReadLine().empty()) {
    }
    const int code = server.Wait();
    return {code, server.ErrorOutput()};
  }

  std::string address_, metrics_address_;
};

TEST_F(ServerBinaryTest, KilledMidStepItSaysStateLostAndNeverZeros) {
  auto server = Start();
  Client client(address_);
  client.Start();
  const uint64_t id = client.Create(1)[0];
  const uint64_t done = client.Begin({{id, 1, 2}});
  client.VerifyAll(done, 2);
  client.Commit(done, {2});
  const uint64_t step = client.Begin({{id, 2, 1}});
  EXPECT_TRUE(client.Call(&Stub::Verify, client.VerifyOf(step, 3, 1)).ok());
  server->Signal(SIGKILL);
  EXPECT_EQ(server->Wait(), 128 + SIGKILL);
  EXPECT_EQ(client.Call(&Stub::Verify, client.VerifyOf(step, 5, 1)).status.error_code(),
            grpc::UNAVAILABLE);

  server = Start(address_);
  // Until the channel has connected again: UNAVAILABLE, and nothing else.
  Reply<v1::VerifyResponse> reply;
  EXPECT_TRUE(Poll(absl::Seconds(30), [&] {
    reply = client.Call(&Stub::Verify, client.VerifyOf(step, 5, 1));
    return reply.status.error_code() != grpc::UNAVAILABLE;
  }));
  EXPECT_TRUE(Fails(reply, grpc::FAILED_PRECONDITION, "STATE_LOST", {"restarted"}));
  EXPECT_TRUE(Fails(client.Call(&Stub::BeginStep, client.StepOf({{id, 2, 1}})),
                    grpc::FAILED_PRECONDITION, "STATE_LOST", {}));
  const uint64_t old_epoch = client.epoch;
  client.Start();
  EXPECT_NE(client.epoch, old_epoch);
  EXPECT_TRUE(Fails(client.Call(&Stub::BeginStep, client.StepOf({{id, 2, 1}})), grpc::NOT_FOUND, "",
                    {"unknown"}));  // an id of an earlier life names nothing
  server->Signal(SIGTERM);
  EXPECT_EQ(server->Wait(), 0);
}

TEST_F(ServerBinaryTest, SigtermDrainsThenExitsWithZero) {
  auto server = Start();
  Client client(address_);
  client.Start();
  const uint64_t id = client.Create(1)[0];
  const uint64_t step = client.Begin({{id, 1, 2}});
  EXPECT_EQ(Health(client.channel, ""), 1);
  server->Signal(SIGTERM);
  EXPECT_TRUE(Poll(absl::Seconds(30), [&] { return Health(client.channel, "") == 2; }));
  EXPECT_EQ(Health(client.channel, "ssmd.v1.StateService"), 2);
  // Nothing new; what lives goes on.
  const auto refused = client.Call(&Stub::OpenSession, v1::OpenSessionRequest());
  EXPECT_TRUE(Fails(refused, grpc::UNAVAILABLE, "DRAINING", {"draining"}));
  EXPECT_TRUE(refused.retry.has_retry_delay());
  auto create = client.Make<v1::CreateSequencesRequest>();
  create.set_count(1);
  EXPECT_TRUE(
      Fails(client.Call(&Stub::CreateSequences, create), grpc::UNAVAILABLE, "DRAINING", {}));
  EXPECT_TRUE(client.Status().draining());
  EXPECT_EQ(ParseMetrics(HttpGet(metrics_address_, "/metrics")).at("ssmd_draining"), 1);
  client.VerifyAll(step, 2);
  client.Commit(step, {2});
  EXPECT_TRUE(client.Call(&Stub::CloseSession, client.Make<v1::CloseSessionRequest>()).ok());
  EXPECT_EQ(server->Wait(), 0);  // well before the drain timeout of a minute
}

TEST_F(ServerBinaryTest, SigintAndDrainTimeoutEndItToo) {
  std::string folder = absl::StrCat(::testing::TempDir(), "/ssmd_XXXXXX");
  ASSERT_NE(mkdtemp(folder.data()), nullptr);  // closed to others: who may enter it may call
  ChildProcess server(Command({"--listen", absl::StrCat("unix:", folder, "/socket"),
                               "--metrics-listen", "", "--drain-timeout-ms", "50"}));
  const std::string line = server.ReadLine();
  ASSERT_TRUE(absl::StrContains(line, "listening on unix:")) << line;
  ASSERT_TRUE(absl::EndsWith(line, ", metrics on none")) << line;
  const std::string address =
      line.substr(line.find("unix:"), line.find(", metrics") - line.find("unix:"));
  Client client(address);
  client.Start();
  client.Create(1);  // never released
  server.Signal(SIGINT);
  EXPECT_EQ(server.Wait(), 0);
  unlink(absl::StrCat(folder, "/socket").c_str());
  rmdir(folder.c_str());
}

TEST_F(ServerBinaryTest, WrongFlagsExitWithTwoAndOneLine) {
  const auto [code, text] = Run({"--sessions-max", "lots"});
  EXPECT_EQ(code, 2);
  EXPECT_EQ(text,
            "ssmd-server: --sessions-max: expected an integer 1..65536, got 'lots' (see --help)\n");
  EXPECT_EQ(Run({"--nonsense"}).first, 2);
}

TEST_F(ServerBinaryTest, PortsInUseExitWithOneAndNameTheFlag) {
  auto server = Start();
  const auto [code, text] = Run({"--listen", address_, "--metrics-listen", ""});
  EXPECT_EQ(code, 1);
  EXPECT_TRUE(absl::StrContains(text, absl::StrCat("--listen: cannot listen on '", address_)))
      << text;
  const auto [metrics_code, metrics_text] =
      Run({"--listen", "127.0.0.1:0", "--metrics-listen", metrics_address_});
  EXPECT_EQ(metrics_code, 1);
  EXPECT_TRUE(absl::StrContains(metrics_text, "--metrics-listen: cannot listen")) << metrics_text;
  server->Signal(SIGTERM);
  EXPECT_EQ(server->Wait(), 0);
}

}  // namespace
}  // namespace ssmd::e2e
