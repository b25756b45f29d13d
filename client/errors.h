// What a failed call says beyond its code and message.
//
// The service answers errors with google.rpc.Status details; the client turns them into payloads of
// the absl::Status that a call returns, and the functions below read them. All of them accept any
// status and are free of side effects.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace grpc {
class Status;
}
namespace google::rpc {
class Status;
}

namespace ssmd::client {

// The reason of ErrorInfo ("VERSION_MISMATCH", "STATE_LOST", ...; state_service.proto lists them),
// or "".
std::string ErrorReason(const absl::Status& status);

// The request field at fault, from BadRequest, or "".
std::string ErrorField(const absl::Status& status);

// A value of ErrorInfo's metadata, or "".
std::string ErrorMetadata(const absl::Status& status, absl::string_view key);

// The lowest position that Rollback, Fork and CreateSnapshot reach, with reason ROLLBACK_FLOOR.
std::optional<uint64_t> ErrorFloor(const absl::Status& status);

// How long the server asks to wait before the next attempt (RetryInfo).
std::optional<absl::Duration> ErrorRetryAfter(const absl::Status& status);

// The server was restarted and holds nothing of this session: open a new one, create every sequence
// again (from snapshots made after the restart, or by sending its tokens again).
bool IsStateLost(const absl::Status& status);

// The lease ended: open a new session. Its sequences are released, or may be adopted for a while.
bool IsSessionExpired(const absl::Status& status);

// A status with reason STATE_LOST, as the server sends it.
absl::Status StateLostError(absl::string_view message);

// Code, message ("<method>: ...") and details of a gRPC status.
absl::Status FromGrpcStatus(const grpc::Status& status, absl::string_view method);

// The same of a status that travels inside a message (the Steps stream, a row's status).
absl::Status FromRpcStatus(const google::rpc::Status& status, absl::string_view method);

}  // namespace ssmd::client
