// What the metrics port serves beside /metrics: probes, the status page and its JSON.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "service/status_pages.h"
#include "tests/e2e/harness.h"
#include "tests/testing/fake_clock.h"

namespace ssmd::e2e {
namespace {

using nlohmann::json;

std::unique_ptr<Server> StartWithPages(ServerOptions options = {}) {
  ServerConfig config = SmallConfig();
  config.metrics_listen = "127.0.0.1:0";
  return StartServer(config, std::move(options));
}

TEST(Pages, ProbesFollowStartAndDrain) {
  const testing::FakeClock clock;
  ServiceCore core(SmallConfig(), clock.AsClock());
  const HttpServer::Pages pages = StatusPages(&core);
  const auto code = [&](const char* path) { return pages.at(path)().status; };
  EXPECT_EQ(code("/healthz"), 200);
  EXPECT_EQ(code("/startupz"), 503);
  EXPECT_EQ(code("/readyz"), 503);
  EXPECT_EQ(pages.at("/readyz")().body, "starting\n");
  core.serving = true;
  EXPECT_EQ(code("/startupz"), 200);
  EXPECT_EQ(code("/readyz"), 200);
  core.draining = true;
  EXPECT_EQ(code("/startupz"), 200);
  EXPECT_EQ(code("/healthz"), 200);
  EXPECT_EQ(code("/readyz"), 503);
  EXPECT_EQ(pages.at("/readyz")().body, "draining\n");
  EXPECT_EQ(json::parse(StatusJson(core))["state"], "draining");
}

TEST(Pages, AreServedOverHttp) {
  const auto server = StartWithPages();
  const auto get = [&](const char* path) { return HttpGet(server->metrics_address(), path); };
  EXPECT_EQ(get("/healthz"), "ok\n");
  EXPECT_EQ(get("/readyz"), "ok\n");
  EXPECT_EQ(get("/startupz"), "ok\n");
  EXPECT_EQ(get("/nothing"), "no such page\n");
  EXPECT_EQ(get("/metrics/more"), "no such page\n");
  EXPECT_TRUE(absl::StartsWith(get("/"), "<!doctype html>"));
  EXPECT_TRUE(absl::EndsWith(get("/"), "</html>\n"));  // whole
  EXPECT_GE(ParseMetrics(get("/metrics")).size(), 50u);
  server->BeginDrain();
  EXPECT_EQ(get("/readyz"), "draining\n");
  EXPECT_EQ(get("/healthz"), "ok\n");
}

TEST(Pages, TheJsonSaysWhatGetStatusSays) {
  testing::FakeClock clock;
  const auto server = StartWithPages({.clock = clock.AsClock(), .start_sweeper = false});
  const auto read = [&] {
    return json::parse(HttpGet(server->metrics_address(), "/status.json"), nullptr, false);
  };
  EXPECT_EQ(read()["models"].size(), 0u);
  Client client(server->address());
  v1::OpenSessionRequest named;
  named.set_client_name("<b>\"worker\"</b>");
  ASSERT_TRUE(client.Call(&Stub::OpenSession, named).ok());
  client.Start();
  const uint64_t id = client.Create(2)[0];
  const uint64_t step = client.Begin({{id, 1, 3}});
  client.VerifyAll(step, 3);
  client.Commit(step, {2});
  clock.Advance(absl::Seconds(7));

  const json page = read();
  EXPECT_EQ(page["state"], "serving");
  EXPECT_EQ(page["uptime_ms"], 7000);
  EXPECT_EQ(page["sessions"]["open"], 2);
  uint32_t sequences = 0;
  bool seen = false;
  for (const json& session : page["sessions"]["list"]) {
    sequences += session["sequences"].get<uint32_t>();
    seen = seen || session["client"] == named.client_name();
    EXPECT_EQ(session["age_ms"], 7000);
  }
  EXPECT_EQ(sequences, 2u);
  EXPECT_TRUE(seen);
  // Session ids are credentials: none is on the page.
  EXPECT_FALSE(absl::StrContains(page.dump(), absl::StrCat(absl::Hex(client.session_id))));
  EXPECT_FALSE(absl::StrContains(page.dump(), absl::StrCat(client.session_id)));

  const v1::ModelStatus status = client.Status().models(0);
  const json& model = page["models"][0];
  EXPECT_EQ(model["id"], absl::StrCat(absl::Hex(client.model_id, absl::kZeroPad16)));
  EXPECT_EQ(model["sequences"], 2);
  EXPECT_EQ(model["pages_total"], status.pages_total());
  EXPECT_EQ(model["pages_free"], status.pages_free());
  EXPECT_EQ(model["tokens_drafted"], 3);
  EXPECT_EQ(model["tokens_accepted"], 2);
  EXPECT_EQ(model["tokens_accepted_by_position"], json({1, 1, 0, 0}));
  // One read of every layer's state, and what three tokens would have written (metrics_test.cc).
  EXPECT_EQ(model["write_every_step_bytes"], (1 + 3) * 1280 * 4);
  const StoreCounters counters = server->core().models.All()[0]->store->counters();
  EXPECT_EQ(model["state_bytes_read"], counters.checkpoint_hp_read_bytes +
                                           counters.checkpoint_lp_read_bytes +
                                           counters.ring_read_bytes + counters.ring_copy_bytes);
  EXPECT_EQ(model["state_bytes_written"], status.state_bytes_written());
  EXPECT_EQ(model["snapshots"][0]["tier"], "pages");
}

}  // namespace
}  // namespace ssmd::e2e
