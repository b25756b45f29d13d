// When a failed call is sent again. One table for all RPCs, pure decisions, no clock of its own.
//
// A failure is one of three kinds:
//   refused    RESOURCE_EXHAUSTED with RetryInfo: the server did nothing and says when to come
//   back.
//              Every method may be sent again, not before that time.
//   lost       UNAVAILABLE without a reason: the connection failed, the call may have taken effect.
//              Sent again where the table says that a repeat is harmless.
//   final      everything else: INVALID_ARGUMENT, ABORTED, ..., DEADLINE_EXCEEDED (the time of the
//              call is used up), and UNAVAILABLE / DRAINING (choose another server).
// Between attempts: 20 ms, doubled each time up to 2 s, times a random factor of 0.5..1, but never
// less than RetryInfo asks. A wait that would pass the call's deadline is not begun.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ssmd::client {

enum class Method : uint8_t {
  kRegisterModel,
  kUnregisterModel,
  kGetCapabilities,
  kOpenSession,
  kKeepAlive,
  kCloseSession,
  kCreateSequences,
  kForkSequences,
  kReleaseSequences,
  kAdoptSequences,
  kFlushSequences,
  kGetSequences,
  kBeginStep,
  kVerify,
  kCommit,
  kAbortStep,
  kRollback,
  kCreateSnapshot,
  kDeleteSnapshot,
  kLookupPrefix,
  kListSnapshots,
  kImportState,
  kExportState,
  kSteps,
  kGetStatus,
  // AdminService
  kDrain,
  kSetLogLevel,
  kListSessions,
  kEvictSession,
  kEvictSnapshots,
};
inline constexpr size_t kMethodCount = static_cast<size_t>(Method::kEvictSnapshots) + 1;

// May a call be sent again when it is lost?
enum class Resend : uint8_t {
  kAlways,         // a repeat has no further effect, or returns the recorded reply
  kWithRequestId,  // only with a nonzero request_id
  kNever,          // the caller decides
};

struct RetryRule {
  Method method;
  const char* name;  // as in the proto
  Resend resend;
  // The method ends something, and NOT_FOUND to a repeat says that the lost call did it: success.
  bool gone_means_done;
  int attempts_max;
};

const RetryRule& RuleOf(Method method);

// Time and chance, replaceable in tests. Every function is set.
struct RetryEnvironment {
  std::function<absl::Time()> now;
  std::function<void(absl::Duration)> sleep;
  std::function<double()> uniform;  // 0 <= x < 1; called by any thread
};
RetryEnvironment SystemRetryEnvironment();

// The attempts of one call.
class RetrySchedule {
 public:
  RetrySchedule(const RetryRule& rule, bool has_request_id, absl::Time deadline)
      : rule_(rule), has_request_id_(has_request_id), deadline_(deadline) {}

  // How long to wait before the next attempt after one that failed with `status`; nothing: give up.
  std::optional<absl::Duration> Next(const absl::Status& status,
                                     const RetryEnvironment& environment);

  // Whether `status`, the answer to the latest attempt, means that an earlier, lost one succeeded.
  bool EarlierSucceeded(const absl::Status& status) const {
    return rule_.gone_means_done && lost_ && absl::IsNotFound(status);
  }

  int attempts() const { return attempts_; }  // failed ones

 private:
  const RetryRule& rule_;
  const bool has_request_id_;
  const absl::Time deadline_;
  int attempts_ = 0;
  bool lost_ = false;  // some attempt was lost
};

}  // namespace ssmd::client
