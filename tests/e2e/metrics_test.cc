// The Prometheus page over HTTP: exact counts after a scripted workload, and gauges that come back.
#include <algorithm>
#include <fstream>
#include <numeric>
#include <thread>

#include "absl/strings/str_split.h"
#include "service/metric_families.h"
#include "tests/e2e/steps_client.h"

namespace ssmd::e2e {
namespace {

class MetricsTest : public ::testing::Test {
 protected:
  MetricsTest() : server_(StartServer(WithMetrics())), client_(server_->address()) {
    client_.Start();
    labels_ = absl::StrCat("model=\"small\",model_id=\"",
                           absl::StrCat(absl::Hex(client_.model_id, absl::kZeroPad16)), "\"");
  }
  static ServerConfig WithMetrics() {
    ServerConfig config = SmallConfig();
    config.metrics_listen = "127.0.0.1:0";
    return config;
  }
  std::map<std::string, double> Scrape() {
    page_ = HttpGet(server_->metrics_address(), "/metrics");
    return ParseMetrics(page_);
  }
  // Series of the model: name, and one more label or none.
  std::string Of(const std::string& name, const std::string& label = "") {
    return absl::StrCat(name, "{", labels_, label.empty() ? "" : ",", label, "}");
  }

  // h of the sequence over L: what a step planned now adds to the occupancy.
  double OccupancyOf(uint64_t id) {
    return client_.Sequences()[id].committed_records() /
           static_cast<double>(testing::SmallSpec().window_records());
  }

  std::unique_ptr<Server> server_;
  Client client_;
  std::string labels_, page_;
};

bool IsGauge(const std::string& series) {
  for (const char* name :
       {"ssmd_pages", "ssmd_slots", "ssmd_open_imports", "ssmd_sessions_kept",
        "ssmd_verify_queue_bytes", "ssmd_open_steps", "ssmd_sessions{", "ssmd_verify_queue_depth",
        "ssmd_verify_running", "ssmd_models", "ssmd_state_bytes_reserved", "ssmd_draining",
        "ssmd_steps_streams", "ssmd_held_begins", "ssmd_process_start_time_seconds"})
    if (absl::StartsWith(series, name)) return true;
  return series == "ssmd_sessions";
}

TEST_F(MetricsTest, CountsAScriptedWorkloadExactly) {
  const std::map<std::string, double> start = Scrape();
  EXPECT_EQ(start.at("ssmd_sessions"), 1);
  EXPECT_EQ(start.at("ssmd_models"), 1);
  EXPECT_EQ(
      start.at(absl::StrCat("ssmd_build_info{backend=\"cpu\",version=\"", ServerVersion(), "\"}")),
      1);

  // 6 steps of 4 tokens, all accepted: 24 tokens against L = 8 must fold. Then 3 of 4, 0 of 2.
  const uint64_t id = client_.Create(1)[0];
  uint64_t version = 1;
  std::vector<double> occupancy;
  for (int i = 0; i < 6; ++i) {
    occupancy.push_back(OccupancyOf(id));
    const uint64_t step = client_.Begin({{id, version++, 4}});
    client_.VerifyAll(step, 4);
    client_.Commit(step, {4});
  }
  occupancy.push_back(OccupancyOf(id));
  uint64_t step = client_.Begin({{id, version++, 4}});
  client_.VerifyAll(step, 4);
  client_.Commit(step, {3});
  occupancy.push_back(OccupancyOf(id));
  step = client_.Begin({{id, version++, 2}});
  client_.VerifyAll(step, 2);
  client_.Commit(step, {0});
  // Aborted, stale, poisoned, rolled back, forked, stored.
  occupancy.insert(occupancy.end(), 2, OccupancyOf(id));
  step = client_.Begin({{id, version, 1}});
  auto abort = client_.Make<v1::AbortStepRequest>();
  abort.set_step_id(step);
  EXPECT_TRUE(client_.Call(&Stub::AbortStep, abort).ok());
  EXPECT_FALSE(client_.Call(&Stub::BeginStep, client_.StepOf({{id, 1, 1}})).ok());
  step = client_.Begin({{id, version, 1}});
  v1::VerifyRequest poisoned = client_.VerifyOf(step, 3, 1);
  poisoned.mutable_q()->mutable_data()->replace(0, 4, "\xff\xff\xff\xff", 4);
  EXPECT_FALSE(client_.Call(&Stub::Verify, poisoned).ok());
  auto rollback = client_.Make<v1::RollbackRequest>();
  rollback.set_sequence_id(id);
  rollback.set_version(version++);
  rollback.set_position(26);
  EXPECT_TRUE(client_.Call(&Stub::Rollback, rollback).ok());
  auto fork = client_.Make<v1::ForkSequencesRequest>();
  fork.set_sequence_id(id);
  fork.set_version(version);
  fork.set_count(2);
  EXPECT_TRUE(client_.Call(&Stub::ForkSequences, fork).ok());
  auto snapshot = client_.Make<v1::CreateSnapshotRequest>();
  snapshot.set_sequence_id(id);
  snapshot.set_version(version);
  snapshot.mutable_key()->set_digest("k");
  snapshot.mutable_key()->set_position(26);
  EXPECT_TRUE(client_.Call(&Stub::CreateSnapshot, snapshot).ok());

  const std::map<std::string, double> now = Scrape();
  EXPECT_EQ(now.at(Of("ssmd_steps_begun_total")), 10);
  EXPECT_EQ(now.at(Of("ssmd_steps_total", "result=\"committed\"")), 8);
  EXPECT_EQ(now.at(Of("ssmd_steps_total", "result=\"aborted\"")), 2);
  EXPECT_EQ(now.at(Of("ssmd_steps_total", "result=\"expired\"")), 0);
  EXPECT_EQ(now.at(Of("ssmd_layers_verified_total")), 24);
  EXPECT_EQ(now.at(Of("ssmd_rows_committed_total")), 8);
  EXPECT_EQ(now.at(Of("ssmd_tokens_drafted_total")), 30);
  EXPECT_EQ(now.at(Of("ssmd_tokens_accepted_total")), 27);
  EXPECT_EQ(now.at(Of("ssmd_tokens_accepted_by_position_total", "position=\"0\"")), 7);
  EXPECT_EQ(now.at(Of("ssmd_tokens_accepted_by_position_total", "position=\"2\"")), 7);
  EXPECT_EQ(now.at(Of("ssmd_tokens_accepted_by_position_total", "position=\"3\"")), 6);
  EXPECT_FALSE(now.contains(Of("ssmd_tokens_accepted_by_position_total", "position=\"4\"")));
  EXPECT_GE(now.at(Of("ssmd_flushes_total", "reason=\"fused\"")), 3);
  EXPECT_EQ(now.at(Of("ssmd_flushes_total", "reason=\"background\"")), 0);
  EXPECT_EQ(now.at(Of("ssmd_flushes_total", "reason=\"requested\"")), 0);
  const v1::ModelStatus status = client_.Status().models(0);  // has the same counts
  EXPECT_EQ(status.tokens_drafted(), 30u);
  EXPECT_EQ(status.tokens_accepted(), 27u);
  EXPECT_EQ(status.flushes_fused(), now.at(Of("ssmd_flushes_total", "reason=\"fused\"")));
  EXPECT_EQ(status.flushes(), status.flushes_fused());
  EXPECT_EQ(status.flushes_deferred(), now.at(Of("ssmd_flushes_deferred_total")));
  EXPECT_GT(now.at(Of("ssmd_state_bytes_total", "kind=\"ring_copy\"")), 0);
  EXPECT_EQ(now.at(Of("ssmd_ring_occupancy_ratio_count")), 10);  // a stale one is not planned
  EXPECT_EQ(now.at(Of("ssmd_ring_occupancy_ratio_sum")),
            std::accumulate(occupancy.begin(), occupancy.end(), 0.0));
  EXPECT_GT(now.at(Of("ssmd_ring_occupancy_ratio_sum")), 0);
  for (const auto& [le, bound] : {std::pair{"0.25", 0.25}, {"0.75", 0.75}, {"1", 1.0}})
    EXPECT_EQ(now.at(Of("ssmd_ring_occupancy_ratio_bucket", absl::StrCat("le=\"", le, "\""))),
              std::count_if(occupancy.begin(), occupancy.end(),
                            [bound = bound](double ratio) { return ratio <= bound; }));
  EXPECT_EQ(now.at(Of("ssmd_ring_occupancy_ratio_bucket", "le=\"+Inf\"")), 10);
  EXPECT_EQ(now.at(Of("ssmd_imports_total")), 0);
  EXPECT_EQ(now.at(Of("ssmd_exports_total")), 0);
  EXPECT_EQ(now.at("ssmd_prefix_lookups_total{result=\"hit\"}"), 0);
  EXPECT_EQ(now.at("ssmd_sessions_kept"), 0);
  EXPECT_EQ(now.at(Of("ssmd_stale_versions_total")), 1);
  EXPECT_EQ(now.at(Of("ssmd_poisoned_rows_total")), 1);
  EXPECT_EQ(now.at(Of("ssmd_rollbacks_total")), 1);
  EXPECT_EQ(now.at(Of("ssmd_forks_total")), 2);
  EXPECT_EQ(now.at(Of("ssmd_snapshots_created_total")), 1);
  // One read of every layer's state per live row and Verify: 2 * 4 * 16 * 8 + 2 * 16 * 8 floats.
  EXPECT_EQ(now.at(Of("ssmd_state_bytes_total", "kind=\"checkpoint_hp_read\"")), 8 * 1280 * 4);
  EXPECT_EQ(now.at(Of("ssmd_state_bytes_total", "kind=\"checkpoint_hp_write\"")),
            now.at(Of("ssmd_flushes_total", "reason=\"fused\"")) * 1280 * 4);
  EXPECT_EQ(now.at(Of("ssmd_write_every_step_bytes_total")), (8 + 30) * 1280 * 4);
  EXPECT_GT(now.at(Of("ssmd_state_bytes_total", "kind=\"ring_write\"")), 0);
  EXPECT_EQ(now.at(Of("ssmd_slots", "kind=\"sequences\"")), 3);
  EXPECT_EQ(now.at(Of("ssmd_slots", "kind=\"snapshots\"")), 1);
  EXPECT_EQ(now.at(Of("ssmd_slots", "kind=\"free\"")), 5);
  EXPECT_EQ(now.at(Of("ssmd_pages", "kind=\"live\"")), 1);  // shared by all four
  EXPECT_EQ(now.at(Of("ssmd_pages", "kind=\"free\"")), 11);
  EXPECT_EQ(now.at("ssmd_rpcs_total{code=\"OK\",method=\"Commit\"}"), 8);
  EXPECT_EQ(now.at("ssmd_rpcs_total{code=\"OK\",method=\"Verify\"}"), 24);
  EXPECT_EQ(now.at("ssmd_rpcs_total{code=\"ABORTED\",method=\"Verify\"}"), 1);
  EXPECT_EQ(now.at("ssmd_rpcs_total{code=\"ABORTED\",method=\"BeginStep\"}"), 1);
  EXPECT_EQ(now.at("ssmd_rpc_duration_seconds_count{method=\"Verify\"}"), 25);
  EXPECT_EQ(now.at("ssmd_verify_phase_seconds_count{phase=\"queue\"}"), 25);
  EXPECT_EQ(now.at("ssmd_verify_phase_seconds_count{phase=\"compute\"}"), 25);

  auto drop = client_.Make<v1::DeleteSnapshotRequest>();
  *drop.mutable_key() = snapshot.key();
  EXPECT_TRUE(client_.Call(&Stub::DeleteSnapshot, drop).ok());
  EXPECT_TRUE(client_.Call(&Stub::CloseSession, client_.Make<v1::CloseSessionRequest>()).ok());
  // A worker counts as running until it is back from a call that was answered already.
  std::map<std::string, double> end;
  EXPECT_TRUE(Poll(absl::Seconds(20), [&] {
    end = Scrape();
    return end.at("ssmd_verify_running") == 0;
  }));
  EXPECT_EQ(end.at("ssmd_sessions"), 0);
  for (const auto& [series, value] : start) {
    if (IsGauge(series) && series != "ssmd_sessions") {
      EXPECT_EQ(end.at(series), value) << series;
    }
  }
}

TEST_F(MetricsTest, OpenStreamsAndHeldBegins) {
  const uint64_t id = client_.Create(1)[0];
  std::map<std::string, double> now = Scrape();
  EXPECT_EQ(now.at("ssmd_steps_streams"), 0);
  {
    StepsClient idle(client_), steps(client_);
    const uint64_t step = steps.Begin({{id, 1, 1}});
    const uint64_t held = steps.Send(client_.StepOf({{id, 2, 1}}));
    idle.Await(idle.SendAbort(step ^ 1));  // NOT_FOUND: the stream is there
    EXPECT_TRUE(Poll(absl::Seconds(20), [&] { return Scrape().at("ssmd_held_begins") == 1; }));
    EXPECT_EQ(Scrape().at("ssmd_steps_streams"), 2);
    EXPECT_TRUE(steps.Await(steps.SendAbort(step)).ok());
    EXPECT_FALSE(steps.Await(held).ok());
    EXPECT_EQ(Scrape().at("ssmd_held_begins"), 0);
  }
  EXPECT_TRUE(Poll(absl::Seconds(20), [&] { return Scrape().at("ssmd_steps_streams") == 0; }));
}

// Threads that step at once, through sessions of their own: nothing is counted twice or lost.
TEST_F(MetricsTest, CountsAreExactUnderConcurrency) {
  constexpr int kThreads = 3, kSteps = 40;
  const auto work = [&](int index) {
    Client client(server_->address());
    client.Start();
    const uint64_t id = client.Create(1)[0];
    uint64_t version = 1;
    for (int i = 0; i < kSteps; ++i) {
      const uint64_t step = client.Begin({{id, version++, 4}});
      client.VerifyAll(step, 4);
      client.Commit(step, {static_cast<uint32_t>(index + 1)});
      EXPECT_FALSE(client.Call(&Stub::BeginStep, client.StepOf({{id, 1, 1}})).ok());  // stale
    }
  };
  std::vector<std::thread> threads;
  for (int index = 0; index < kThreads; ++index) threads.emplace_back(work, index);
  for (std::thread& thread : threads) thread.join();
  const std::map<std::string, double> now = Scrape();
  constexpr int kAll = kThreads * kSteps;
  EXPECT_EQ(now.at(Of("ssmd_steps_begun_total")), kAll);
  EXPECT_EQ(now.at(Of("ssmd_steps_total", "result=\"committed\"")), kAll);
  EXPECT_EQ(now.at(Of("ssmd_layers_verified_total")), 3 * kAll);
  EXPECT_EQ(now.at(Of("ssmd_rows_committed_total")), kAll);
  EXPECT_EQ(now.at(Of("ssmd_tokens_drafted_total")), 4 * kAll);
  EXPECT_EQ(now.at(Of("ssmd_tokens_accepted_total")), (1 + 2 + 3) * kSteps);
  for (int position = 0; position < 4; ++position)
    EXPECT_EQ(now.at(Of("ssmd_tokens_accepted_by_position_total",
                        absl::StrCat("position=\"", position, "\""))),
              (kThreads - position) * kSteps);
  EXPECT_EQ(now.at(Of("ssmd_stale_versions_total")), kAll);
  EXPECT_EQ(now.at(Of("ssmd_ring_occupancy_ratio_count")), kAll);
  EXPECT_EQ(now.at(Of("ssmd_write_every_step_bytes_total")), kAll * (1 + 4) * 1280 * 4);
  EXPECT_EQ(now.at("ssmd_sessions_opened_total"), 1 + kThreads);
  EXPECT_EQ(now.at("ssmd_rpcs_total{code=\"OK\",method=\"Verify\"}"), 3 * kAll);
  EXPECT_EQ(now.at("ssmd_rpcs_total{code=\"OK\",method=\"BeginStep\"}"), kAll);
  EXPECT_EQ(now.at("ssmd_rpcs_total{code=\"ABORTED\",method=\"BeginStep\"}"), kAll);
  EXPECT_EQ(now.at("ssmd_verify_phase_seconds_count{phase=\"compute\"}"), 3 * kAll);
}

// Two precisions: rows that fold read and write both copies, all others read the small one.
TEST_F(MetricsTest, BytesOfTwoPrecisions) {
  v1::ModelSpec spec = testing::SmallSpec();
  spec.set_name("two");
  spec.set_checkpoint_lp_dtype(v1::DATA_TYPE_FP16);
  Client client(server_->address());
  client.Start(0, spec);
  labels_ = absl::StrCat("model=\"two\",model_id=\"",
                         absl::StrCat(absl::Hex(client.model_id, absl::kZeroPad16)), "\"");
  const uint64_t id = client.Create(1)[0];
  for (uint64_t version = 1; version <= 9; ++version) {
    const uint64_t step = client.Begin({{id, version, 4}});
    client.VerifyAll(step, 4);
    client.Commit(step, {4});
  }
  const std::map<std::string, double> now = Scrape();
  const double folds = now.at(Of("ssmd_flushes_total", "reason=\"fused\""));
  EXPECT_GE(folds, 3);
  EXPECT_LT(folds, 9);
  const auto bytes = [&](const std::string& kind) {
    return now.at(Of("ssmd_state_bytes_total", absl::StrCat("kind=\"", kind, "\"")));
  };
  EXPECT_EQ(bytes("checkpoint_hp_read"), folds * 1280 * 4);
  EXPECT_EQ(bytes("checkpoint_hp_write"), folds * 1280 * 4);
  EXPECT_EQ(bytes("checkpoint_lp_read"), (9 - folds) * 1280 * 2);
  EXPECT_EQ(bytes("checkpoint_lp_write"), folds * 1280 * 2);
}

// What Prometheus itself would refuse: a family twice, a series twice, a counter without _total.
TEST_F(MetricsTest, ThePageIsWellFormed) {
  v1::RegisterModelRequest model;  // same name, another shard: its series must stay apart
  *model.mutable_spec() = testing::SmallSpec();
  model.mutable_spec()->set_tp_size(2);
  model.mutable_spec()->set_rollback_tokens_min(4);
  *model.mutable_capacity() = SmallCapacity();
  ASSERT_TRUE(client_.Call(&Stub::RegisterModel, model).ok());
  Scrape();
  std::map<std::string, int> families, series;
  for (const absl::string_view line : absl::StrSplit(page_, '\n')) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    if (absl::StartsWith(line, "# TYPE ")) {
      EXPECT_EQ(++families[words.at(2)], 1) << line;
      if (absl::StartsWith(words.at(2), "ssmd_")) {
        EXPECT_EQ(words.at(3) == "counter", absl::EndsWith(words.at(2), "_total")) << line;
      }
    } else if (!line.empty() && line[0] != '#') {
      EXPECT_EQ(++series[std::string(line.substr(0, line.rfind(' ')))], 1) << line;
    }
  }
  // The list of families is the page's, both ways, with types and help texts.
  for (const MetricInfo& family : kMetricFamilies) {
    EXPECT_EQ(families.count(family.name), 1u) << family.name;
    EXPECT_TRUE(
        absl::StrContains(page_, absl::StrCat("# HELP ", family.name, " ", family.meaning, "\n")))
        << family.name;
    families.erase(family.name);
    constexpr const char* kTypes[] = {"counter", "gauge", "summary", "untyped", "histogram"};
    EXPECT_TRUE(absl::StrContains(
        page_,
        absl::StrCat("# TYPE ", family.name, " ", kTypes[static_cast<size_t>(family.type)], "\n")))
        << family.name;
  }
  for (const auto& [name, count] : families)
    EXPECT_TRUE(absl::StartsWith(name, "exposer_")) << name << " is not in kMetricFamilies";
  EXPECT_EQ(ParseMetrics(page_).at("ssmd_models"), 2);
}

TEST(MetricsPage, IsWhatTheListSays) {
  std::ifstream file(SSMD_SOURCE_DIR "/service/METRICS.md");
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(page, DescribeMetrics())
      << "run: build/dev/service/ssmd-server --print-metrics > service/METRICS.md";
}

}  // namespace
}  // namespace ssmd::e2e
