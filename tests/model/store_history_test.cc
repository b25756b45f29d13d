// Thousands of random histories. A failing seed is printed and replays with
// SSMD_HISTORY_SEED=<seed>; SSMD_HISTORIES=<n> runs more of them.
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/model/history.h"

namespace ssmd::testing {
namespace {

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

TEST(StoreHistory, AgreesWithModelAndOracle) {
  if (const uint64_t seed = FromEnvironment("SSMD_HISTORY_SEED", ~uint64_t{0});
      seed != ~uint64_t{0}) {
    EXPECT_EQ(RunHistory(seed).error, "") << "seed " << seed;
    return;
  }
  std::map<std::string, int> did;
  const uint64_t count = FromEnvironment("SSMD_HISTORIES", 3000);
  for (uint64_t seed = 0; seed < count; ++seed) {
    const HistoryResult result = RunHistory(seed);
    ASSERT_EQ(result.error, "") << "replay with SSMD_HISTORY_SEED=" << seed;
    for (const auto& [what, times] : result.did) did[what] += times;
  }
  // Every kind of operation must have happened, or the test tests less than it says.
  for (const char* what :
       {"create",        "create refused",  "begin",        "begin with fold", "begin refused",
        "begin invalid", "verify",          "commit",       "abort",           "retry",
        "fork",          "fork in step",    "fork refused", "rollback",        "rollback refused",
        "snapshot",      "delete snapshot", "restore",      "release",         "release refused",
        "import",        "import dropped",  "flush"}) {
    EXPECT_GT(did[what], 10) << what;
    RecordProperty(what, did[what]);
    std::printf("  %-18s %d\n", what, did[what]);
  }
}

// Whenever the background work runs, and whether it runs at all before it is needed: the same bits.
TEST(StoreHistory, BackgroundFlushTimingChangesNothing) {
  int used = 0;
  for (uint64_t seed = 0; seed < FromEnvironment("SSMD_HISTORIES", 3000) / 3; ++seed) {
    HistoryResult first;
    for (uint64_t timing = 1; timing <= 3; ++timing) {
      const HistoryResult result = RunHistory(seed, {.background = true, .timing_seed = timing});
      ASSERT_EQ(result.error, "") << "seed " << seed << ", timing " << timing;
      if (timing == 1) first = result;
      ASSERT_EQ(result.digest, first.digest) << "seed " << seed << ", timing " << timing;
    }
    used += first.did.count("background flush used") > 0;
  }
  EXPECT_GT(used, FromEnvironment("SSMD_HISTORIES", 3000) / 60);
}

// A comparison that cannot fail proves nothing: each mistake in the model must be noticed.
TEST(StoreHistory, NoticesAWrongModel) {
  for (const ModelFault fault : {ModelFault::kForgetsLastAccepted, ModelFault::kSkipsRollback,
                                 ModelFault::kForkSeesDrafts}) {
    int noticed = 0;
    for (uint64_t seed = 0; seed < 100; ++seed)
      noticed += !RunHistory(seed, {.fault = fault}).error.empty();
    EXPECT_GT(noticed, 5) << "fault " << static_cast<int>(fault);
  }
}

}  // namespace
}  // namespace ssmd::testing
