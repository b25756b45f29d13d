// Many clients at once, some of whom leave in the middle of everything: no call fails for another's
// sake, and at the end nothing is held. Made for the sanitizers.
#include <thread>

#include "tests/e2e/harness.h"

namespace ssmd::e2e {
namespace {

TEST(Stress, ClientsComeWorkAndLeave) {
  ServerConfig config = SmallConfig();
  config.sessions_max = 16;
  config.sweep_interval_ms = 1;
  config.metrics_listen = "127.0.0.1:0";
  const auto server = StartServer(config);
  {
    Client first(server->address());  // the model, before the race for it
    first.Start();
    first.Call(&Stub::CloseSession, first.Make<v1::CloseSessionRequest>());
  }
  std::atomic<bool> done{false};
  std::vector<std::thread> workers;
  for (uint64_t seed = 0; seed < 3; ++seed) {
    workers.emplace_back([&, seed] {
      for (int life = 0; life < 10; ++life) {
        Client client(server->address());
        client.random.seed(100 * seed + static_cast<uint64_t>(life));
        client.Start();
        const std::vector<uint64_t> ids = client.Create(2);
        uint64_t version = 1;
        for (int i = 0; i < 5; ++i, ++version) {
          const uint64_t step = client.Begin({{ids[0], version, 3}, {ids[1], version, 1}});
          client.VerifyAll(step, 4);
          client.Commit(step, {static_cast<uint32_t>(client.random() % 4), 1});
        }
        // Leaves while a Verify of its own is on the way.
        const uint64_t step = client.Begin({{ids[0], version, 4}});
        const v1::VerifyRequest last = client.VerifyOf(step, 3, 4);
        grpc::ClientContext context;
        v1::VerifyResponse response;
        std::thread verify([&] { (void)client.stub->Verify(&context, last, &response); });
        if (life % 3 == 0) context.TryCancel();
        const auto closed =
            client.Call(&Stub::CloseSession, client.Make<v1::CloseSessionRequest>());
        EXPECT_TRUE(closed.ok()) << closed.status.error_message();
        EXPECT_EQ(closed.body.sequences_released(), 2u);
        verify.join();
      }
    });
  }
  std::thread scraper([&] {
    while (!done) EXPECT_NE(HttpGet(server->metrics_address(), "/metrics"), "");
  });
  for (std::thread& worker : workers) worker.join();
  done = true;
  scraper.join();
  Client client(server->address());
  const v1::GetStatusResponse status = client.Status();
  EXPECT_EQ(status.sessions(), 0u);
  EXPECT_EQ(status.models(0).sequences(), 0u);
  EXPECT_EQ(status.models(0).open_steps(), 0u);
  EXPECT_EQ(status.models(0).pages_free(), status.models(0).pages_total());
}

}  // namespace
}  // namespace ssmd::e2e
