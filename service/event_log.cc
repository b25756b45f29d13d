#include "service/event_log.h"

#include <utility>

namespace ssmd {

const char* LogKindName(LogKind kind) {
  static constexpr const char* kNames[] = {"session", "expired", "refused", "failed", "slow_step"};
  static_assert(std::size(kNames) == kLogKindCount);
  return kNames[static_cast<size_t>(kind)];
}

bool EventLog::Admits(LogKind kind, spdlog::level::level_enum level) {
  if (!spdlog::should_log(level)) return false;
  const absl::Time now = clock_();
  absl::MutexLock lock(&mu_);
  Budget& budget = budgets_[static_cast<size_t>(kind)];
  if (now - budget.second >= absl::Seconds(1)) {
    budget.second = now;
    budget.written = 0;
  }
  if (budget.written < kLogMessagesMax) {
    ++budget.written;
    return true;
  }
  ++budget.suppressed;
  return false;
}

void EventLog::Write(LogKind kind, spdlog::level::level_enum level, LogIds ids,
                     const std::string& message) {
  ids.insert(ids.begin(), {"kind", LogKindName(kind)});
  LogWithIds(level, ids, message);
}

void EventLog::ReportSuppressed() {
  for (size_t i = 0; i < kLogKindCount; ++i) {
    uint64_t count = 0;
    {
      absl::MutexLock lock(&mu_);
      Budget& budget = budgets_[i];
      if (clock_() - budget.second < absl::Seconds(1)) continue;  // more of this second may come
      count = budget.suppressed - budget.reported;
      budget.reported = budget.suppressed;
    }
    if (count > 0)
      Write(static_cast<LogKind>(i), spdlog::level::warn, {},
            std::to_string(count) + " messages were suppressed");
  }
}

EventLog::Counts EventLog::suppressed() const {
  absl::MutexLock lock(&mu_);
  Counts counts{};
  for (size_t i = 0; i < kLogKindCount; ++i) counts[i] = budgets_[i].suppressed;
  return counts;
}

}  // namespace ssmd
