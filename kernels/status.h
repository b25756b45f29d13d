// Statuses with machine-readable details, for every layer below the RPC edge.
//
// A Status carries up to five payloads beside its code and message; service/status_map.cc is the
// only reader and turns them into google.rpc details:
//   reason          one of the names in ErrorReason below         -> ErrorInfo.reason
//   field           the request field at fault                    -> BadRequest.field_violations
//   floor, tail     decimal positions, with kRollbackFloor        -> ErrorInfo.metadata
//   retry_after_ms  decimal milliseconds, when waiting may help   -> RetryInfo
// Messages say what, expected, actual, whose: "Commit: accepted 5 > drafts 4 (row 0, sequence 0x..,
// version 7)".
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"

#define SSMD_STATUS_CONCAT_INNER(a, b) a##b
#define SSMD_STATUS_CONCAT(a, b) SSMD_STATUS_CONCAT_INNER(a, b)
#define SSMD_RETURN_IF_ERROR(expression)                                                \
  do {                                                                                  \
    if (absl::Status ssmd_status = (expression); !ssmd_status.ok()) return ssmd_status; \
  } while (0)
#define SSMD_ASSIGN_OR_RETURN_IMPL(holder, target, expression) \
  auto holder = (expression);                                  \
  if (!holder.ok()) return std::move(holder).status();         \
  target = *std::move(holder)
#define SSMD_ASSIGN_OR_RETURN(target, expression) \
  SSMD_ASSIGN_OR_RETURN_IMPL(SSMD_STATUS_CONCAT(ssmd_statusor_, __LINE__), target, expression)

namespace ssmd {

// Reasons a caller may branch on. Text, not numbers: they travel in ErrorInfo.reason.
namespace reason {
inline constexpr absl::string_view kVersionMismatch = "VERSION_MISMATCH";
inline constexpr absl::string_view kStepAborted = "STEP_ABORTED";
inline constexpr absl::string_view kStateLost = "STATE_LOST";
// The session is unknown, closed or expired; everything of it is gone or kept for adoption.
inline constexpr absl::string_view kSessionExpired = "SESSION_EXPIRED";
inline constexpr absl::string_view kStepOpen = "STEP_OPEN";
inline constexpr absl::string_view kImportOpen = "IMPORT_OPEN";
inline constexpr absl::string_view kLayersMissing = "LAYERS_MISSING";
inline constexpr absl::string_view kRollbackFloor = "ROLLBACK_FLOOR";
inline constexpr absl::string_view kNoSlot = "NO_SLOT";
inline constexpr absl::string_view kNoPage = "NO_PAGE";
inline constexpr absl::string_view kNoSnapshotSlot = "NO_SNAPSHOT_SLOT";
inline constexpr absl::string_view kNoMemory = "NO_MEMORY";
inline constexpr absl::string_view kLimit = "LIMIT_REACHED";
inline constexpr absl::string_view kDraining = "DRAINING";
inline constexpr absl::string_view kStopping = "STOPPING";
}  // namespace reason

namespace detail {
inline constexpr absl::string_view kReason = "ssmd/reason";
inline constexpr absl::string_view kField = "ssmd/field";
inline constexpr absl::string_view kFloor = "ssmd/floor";
inline constexpr absl::string_view kTail = "ssmd/tail";
inline constexpr absl::string_view kRetryAfterMs = "ssmd/retry_after_ms";
}  // namespace detail

inline absl::Status WithDetail(absl::Status status, absl::string_view key,
                               absl::string_view value) {
  status.SetPayload(key, absl::Cord(value));
  return status;
}

// The value of a detail, or "" when the status does not carry it.
inline std::string GetDetail(const absl::Status& status, absl::string_view key) {
  auto payload = status.GetPayload(key);
  return payload.has_value() ? std::string(*payload) : std::string();
}

inline absl::Status ErrorWithReason(absl::StatusCode code, absl::string_view why,
                                    absl::string_view message) {
  return WithDetail(absl::Status(code, message), detail::kReason, why);
}

// A position outside a sequence's window [floor, tail].
inline absl::Status OutsideWindow(absl::string_view message, uint64_t floor, uint64_t tail) {
  absl::Status status =
      ErrorWithReason(absl::StatusCode::kOutOfRange, reason::kRollbackFloor, message);
  return WithDetail(WithDetail(status, detail::kFloor, std::to_string(floor)), detail::kTail,
                    std::to_string(tail));
}

inline absl::Status InvalidField(absl::string_view field, absl::string_view message) {
  return WithDetail(absl::InvalidArgumentError(message), detail::kField, field);
}

// RESOURCE_EXHAUSTED that waiting may cure: says how long to wait before trying again.
inline absl::Status Exhausted(absl::string_view why, absl::string_view message,
                              uint32_t retry_after_ms) {
  return WithDetail(ErrorWithReason(absl::StatusCode::kResourceExhausted, why, message),
                    detail::kRetryAfterMs, std::to_string(retry_after_ms));
}

}  // namespace ssmd
