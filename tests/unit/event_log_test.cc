// Logs: limits per kind, ids in both formats, and the times of slow steps.
#include "service/event_log.h"

#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "service/step_times.h"
#include "tests/testing/fake_clock.h"

namespace ssmd {
namespace {

using nlohmann::json;

class EventLogTest : public ::testing::Test {
 protected:
  // The default logger writes into text_ for as long as the test runs.
  void LogTo(const std::string& format) {
    auto logger = std::make_shared<spdlog::logger>(
        "", std::make_shared<spdlog::sinks::ostream_sink_mt>(text_));
    logger->set_formatter(MakeLogFormatter(format));
    spdlog::set_default_logger(std::move(logger));
  }
  ~EventLogTest() override { spdlog::set_default_logger(before_); }

  std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
  std::ostringstream text_;
  testing::FakeClock clock_;
  EventLog log_{clock_.AsClock()};
};

TEST_F(EventLogTest, IdsStandBesideTheMessage) {
  LogTo("json");
  EventLog::Write(LogKind::kRefused, spdlog::level::info,
                  {{"session", LogId(0xab)}, {"request", "a \"b\"\n"}}, "no \\ way");
  spdlog::info("plain");
  std::istringstream lines(text_.str());
  std::string first, second;
  std::getline(lines, first);
  std::getline(lines, second);
  const json object = json::parse(first);
  EXPECT_EQ(object["kind"], "refused");
  EXPECT_EQ(object["session"], "0x00000000000000ab");
  EXPECT_EQ(object["request"], "a \"b\"\n");
  EXPECT_EQ(object["message"], "no \\ way");
  EXPECT_EQ(json::parse(second).size(), 3u);  // time, level, message
}

TEST_F(EventLogTest, TextNamesThemBehindIt) {
  LogTo("text");
  EventLog::Write(LogKind::kExpired, spdlog::level::warn, {{"model", LogId(1)}}, "late");
  EXPECT_NE(text_.str().find(" warning late kind=expired model=0x0000000000000001\n"),
            std::string::npos)
      << text_.str();
}

TEST_F(EventLogTest, EveryKindHasItsLimitAndNothingIsDroppedSilently) {
  LogTo("text");
  for (uint32_t i = 0; i < kLogMessagesMax; ++i)
    EXPECT_TRUE(log_.Admits(LogKind::kRefused, spdlog::level::info));
  for (int i = 0; i < 7; ++i) EXPECT_FALSE(log_.Admits(LogKind::kRefused, spdlog::level::info));
  EXPECT_TRUE(log_.Admits(LogKind::kFailed, spdlog::level::err));
  EXPECT_FALSE(log_.Admits(LogKind::kSession, spdlog::level::debug));  // below the level: uncounted
  EventLog::Counts counts{};
  counts[static_cast<size_t>(LogKind::kRefused)] = 7;
  EXPECT_EQ(log_.suppressed(), counts);
  log_.ReportSuppressed();  // the second is not over
  EXPECT_EQ(text_.str(), "");
  clock_.Advance(absl::Seconds(1));
  log_.ReportSuppressed();
  log_.ReportSuppressed();  // once
  EXPECT_EQ(text_.str().find("7 messages were suppressed kind=refused"),
            text_.str().rfind("7 messages"));
  EXPECT_NE(text_.str().find("7 messages"), std::string::npos);
  EXPECT_TRUE(log_.Admits(LogKind::kRefused, spdlog::level::info));
  EXPECT_EQ(log_.suppressed(), counts);
}

TEST(StepTimes, AddUpAndAreGoneWithTheStep) {
  const absl::Time start = absl::UnixEpoch();
  StepTimes times(absl::Milliseconds(100));
  times.Begin(1, {.begun = start, .rows = 2});
  times.Begin(1, {.begun = start + absl::Seconds(9)});  // a repeat
  times.AddVerify(1, absl::Milliseconds(3), absl::Milliseconds(5));
  times.AddVerify(1, absl::Milliseconds(4), absl::Milliseconds(6));
  times.AddVerify(2, absl::Milliseconds(4), absl::Milliseconds(6));  // unknown
  const std::optional<StepTime> slow = times.End(1, start + absl::Milliseconds(100));
  ASSERT_TRUE(slow.has_value());
  EXPECT_EQ(slow->rows, 2u);
  EXPECT_EQ(slow->verifies, 2u);
  EXPECT_EQ(slow->queued, absl::Milliseconds(7));
  EXPECT_EQ(slow->computed, absl::Milliseconds(11));
  EXPECT_FALSE(times.End(1, start + absl::Seconds(9)).has_value());
  times.Begin(3, {.begun = start});
  EXPECT_FALSE(times.End(3, start + absl::Milliseconds(99)).has_value());  // quick
  times.Begin(4, {.begun = start});
  times.Forget(4);
  times.Begin(5, {.begun = start});
  times.Begin(6, {.begun = start + absl::Seconds(2)});
  times.ForgetBefore(start + absl::Seconds(1));
  EXPECT_EQ(times.size(), 1u);
}

TEST(StepTimes, AreBoundedAndOff) {
  StepTimes times(absl::Milliseconds(1)), off(absl::ZeroDuration());
  for (uint64_t step = 0; step < kTimedStepsMax + 10; ++step) {
    times.Begin(step, {});
    off.Begin(step, {});
  }
  EXPECT_EQ(times.size(), kTimedStepsMax);
  EXPECT_EQ(off.size(), 0u);
}

}  // namespace
}  // namespace ssmd
