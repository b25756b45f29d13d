#include "client/retry.h"

#include <algorithm>
#include <array>

#include "absl/random/random.h"
#include "absl/time/clock.h"
#include "client/errors.h"

namespace ssmd::client {
namespace {

constexpr absl::Duration kDelayFirst = absl::Milliseconds(20);
constexpr absl::Duration kDelayMax = absl::Seconds(2);

// In the order of Method.
constexpr std::array<RetryRule, kMethodCount> kRules = {{
    // method                    name                resend                  gone    attempts
    {Method::kRegisterModel, "RegisterModel", Resend::kAlways, false, 8},
    {Method::kUnregisterModel, "UnregisterModel", Resend::kAlways, true, 3},
    {Method::kGetCapabilities, "GetCapabilities", Resend::kAlways, false, 8},
    {Method::kOpenSession, "OpenSession", Resend::kAlways, false, 8},  // a lost one expires
    {Method::kKeepAlive, "KeepAlive", Resend::kAlways, false, 3},      // sent again soon anyway
    {Method::kCloseSession, "CloseSession", Resend::kAlways, true, 3},
    {Method::kCreateSequences, "CreateSequences", Resend::kWithRequestId, false, 8},
    {Method::kForkSequences, "ForkSequences", Resend::kWithRequestId, false, 8},
    {Method::kReleaseSequences, "ReleaseSequences", Resend::kAlways, true, 8},
    {Method::kAdoptSequences, "AdoptSequences", Resend::kAlways, false, 8},  // ours: accepted
    {Method::kFlushSequences, "FlushSequences", Resend::kAlways, false, 8},  // nothing left to fold
    {Method::kGetSequences, "GetSequences", Resend::kAlways, false, 8},
    {Method::kBeginStep, "BeginStep", Resend::kAlways, false, 8},  // equal rows: the open step
    {Method::kVerify, "Verify", Resend::kAlways, false, 8},        // recomputed, equal bytes
    {Method::kCommit, "Commit", Resend::kAlways, false, 8},        // equal counts: recorded reply
    {Method::kAbortStep, "AbortStep", Resend::kAlways, false, 8},
    {Method::kRollback, "Rollback", Resend::kAlways, false, 8},  // recorded reply
    {Method::kCreateSnapshot, "CreateSnapshot", Resend::kAlways, false, 8},
    {Method::kDeleteSnapshot, "DeleteSnapshot", Resend::kAlways, true, 8},
    {Method::kLookupPrefix, "LookupPrefix", Resend::kAlways, false, 8},
    {Method::kListSnapshots, "ListSnapshots", Resend::kAlways, false, 8},
    {Method::kImportState, "ImportState", Resend::kNever, false, 8},  // may have been installed
    {Method::kExportState, "ExportState", Resend::kAlways, false, 8},
    {Method::kSteps, "Steps", Resend::kNever, false, 1},  // a stream is opened again by its owner
    {Method::kGetStatus, "GetStatus", Resend::kAlways, false, 8},
    {Method::kDrain, "Drain", Resend::kAlways, false, 8},
    {Method::kSetLogLevel, "SetLogLevel", Resend::kAlways, false, 8},
    {Method::kListSessions, "ListSessions", Resend::kAlways, false, 8},
    {Method::kEvictSession, "EvictSession", Resend::kAlways, true, 3},
    {Method::kEvictSnapshots, "EvictSnapshots", Resend::kAlways, false, 8},
}};

constexpr bool InOrder() {
  for (size_t i = 0; i < kRules.size(); ++i)
    if (kRules[i].method != static_cast<Method>(i)) return false;
  return true;
}
static_assert(InOrder(), "kRules must be in the order of Method");

}  // namespace

const RetryRule& RuleOf(Method method) { return kRules[static_cast<size_t>(method)]; }

RetryEnvironment SystemRetryEnvironment() {
  return {[] { return absl::Now(); }, [](absl::Duration delay) { absl::SleepFor(delay); },
          [] {
            thread_local absl::BitGen random;
            return absl::Uniform(random, 0.0, 1.0);
          }};
}

std::optional<absl::Duration> RetrySchedule::Next(const absl::Status& status,
                                                  const RetryEnvironment& environment) {
  ++attempts_;
  const std::optional<absl::Duration> asked = ErrorRetryAfter(status);
  const bool refused = absl::IsResourceExhausted(status) && asked.has_value();
  const bool lost = absl::IsUnavailable(status) && ErrorReason(status).empty();
  if (lost) lost_ = true;
  const bool resendable = rule_.resend == Resend::kAlways ||
                          (rule_.resend == Resend::kWithRequestId && has_request_id_);
  if (!refused && !(lost && resendable)) return std::nullopt;
  if (attempts_ >= rule_.attempts_max) return std::nullopt;

  absl::Duration delay = kDelayFirst;
  for (int i = 1; i < attempts_ && delay < kDelayMax; ++i) delay *= 2;
  delay = std::min(delay, kDelayMax) * (0.5 + 0.5 * environment.uniform());
  if (asked.has_value()) delay = std::max(delay, *asked);
  if (environment.now() + delay >= deadline_) return std::nullopt;
  return delay;
}

}  // namespace ssmd::client
