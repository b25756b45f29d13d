#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/ctl/top.h"

namespace ssmd::ctl {
namespace {

v1::GetStatusResponse At(uint64_t uptime_ms, uint64_t tokens, int models = 1) {
  v1::GetStatusResponse status;
  status.set_server_epoch(7);
  status.set_uptime_ms(uptime_ms);
  for (int i = 0; i < models; ++i) {
    v1::ModelStatus& model = *status.add_models();
    model.set_model_id(static_cast<uint64_t>(i) + 1);
    model.set_name(absl::StrCat("model-", i));
    model.set_tokens_accepted(tokens);
    model.set_tokens_drafted(2 * tokens);
    model.set_steps_committed(tokens / 4);
    model.set_flushes(tokens / 8);
    model.set_state_bytes_read(tokens << 20);
    model.set_write_every_step_bytes(tokens << 22);
  }
  return status;
}

TEST(Top, RatesAreOverTheServersOwnTime) {
  const std::string text = TopText(At(10'000, 800), At(14'000, 2'400), "host:1", 80, 24);
  // 1,600 tokens in 4 s.
  for (const char* part : {"tokens/s 400 ", "flushes/s 50.0", "state 400.0 MiB/s",
                           "baseline 1.6 GiB/s (4.0x)", "model-0", "50.0%", "up 14 s"})
    EXPECT_TRUE(absl::StrContains(text, part)) << part << " in\n" << text;
}

TEST(Top, SaysNothingItDoesNotKnow) {
  v1::GetStatusResponse restarted = At(20'000, 100);
  restarted.set_server_epoch(8);
  for (const v1::GetStatusResponse& before : {At(14'000, 2'400), restarted, At(10'000, 800, 0)}) {
    const std::string text = TopText(before, At(14'000, 2'400), "host:1", 80, 24);
    EXPECT_TRUE(absl::StrContains(text, "tokens/s -")) << text;
  }
  EXPECT_TRUE(absl::StrContains(TopText(At(1, 0, 0), At(2, 0, 0), "h:1", 80, 24), "no models"));
}

TEST(Top, FitsTheWindow) {
  for (const int models : {0, 1, 5, 40})
    for (const auto& [width, height] : {std::pair<size_t, size_t>{80, 24}, {40, 10}, {200, 60}}) {
      v1::GetStatusResponse now = At(14'000, 1'000'000'000'000, models);
      for (v1::ModelStatus& model : *now.mutable_models())
        model.set_name(std::string(128, 'n') + "\x1b[31m");
      const std::string text = TopText(At(10'000, 0, models), now, "host:1", width, height);
      EXPECT_FALSE(absl::StrContains(text, "\x1b"));
      const std::vector<std::string> lines = absl::StrSplit(text, '\n');
      EXPECT_LE(lines.size(), height + 1);  // the last is empty
      for (const std::string& line : lines) EXPECT_LE(line.size(), width) << line;
    }
}

}  // namespace
}  // namespace ssmd::ctl
