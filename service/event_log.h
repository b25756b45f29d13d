// EventLog: log messages that carry ids and that load can make many of, limited per kind.
//
// At most kLogMessagesMax messages of a kind are written in each second of the clock. What is above
// is counted, named once a second (ReportSuppressed, by the sweeper) and in the metric
// ssmd_log_messages_suppressed_total: nothing is dropped silently. Messages below the log level
// count for nothing.
//
// Thread-safe.
#pragma once

#include <spdlog/spdlog.h>

#include <array>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "service/clock.h"
#include "service/log.h"

namespace ssmd {

inline constexpr uint32_t kLogMessagesMax = 20;

enum class LogKind : uint8_t { kSession, kExpired, kRefused, kFailed, kSlowStep };
inline constexpr size_t kLogKindCount = 5;
const char* LogKindName(LogKind kind);  // "session", ...: a label value

class EventLog {
 public:
  using Counts = std::array<uint64_t, kLogKindCount>;

  explicit EventLog(Clock clock) : clock_(std::move(clock)) {}

  // Whether a message of this kind may be written now; it then counts as written. Ask before it is
  // made.
  bool Admits(LogKind kind, spdlog::level::level_enum level);
  // An admitted message.
  static void Write(LogKind kind, spdlog::level::level_enum level, LogIds ids,
                    const std::string& message);

  // Says how many were suppressed since it was last said.
  void ReportSuppressed();
  Counts suppressed() const;  // ever, by kind

 private:
  struct Budget {
    absl::Time second = absl::InfinitePast();
    uint32_t written = 0;
    uint64_t suppressed = 0, reported = 0;
  };
  const Clock clock_;
  mutable absl::Mutex mu_;
  std::array<Budget, kLogKindCount> budgets_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ssmd
