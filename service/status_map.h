// The one error table: statuses of the layers below -> gRPC statuses with google.rpc details.
//
//   absl code                 -> the gRPC code of the same number
//   detail "reason"           -> ErrorInfo.reason, domain "ssmd"; without one, the name of the code
//   detail "field"            -> BadRequest.field_violations
//   detail "retry_after_ms"   -> RetryInfo.retry_delay
//   any other "ssmd/<name>"   -> ErrorInfo.metadata["<name>"] (floor, tail, server_epoch)
//
// The details travel as a serialized google.rpc.Status in grpc-status-details-bin. Messages are cut
// at kErrorMessageBytesMax: both copies must fit the 8 KiB that peers allow for trailers.
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "google/rpc/status.pb.h"

namespace ssmd {

inline constexpr size_t kErrorMessageBytesMax = 1024;
inline constexpr absl::string_view kErrorDomain = "ssmd";

grpc::Status ToGrpcStatus(const absl::Status& status);

// The same as a message, for the item of a batch or of a stream; OK is code 0 and nothing else.
google::rpc::Status ToRpcStatus(const absl::Status& status);

// "OK", "INVALID_ARGUMENT", ...: label values and default reasons.
const char* CodeName(absl::StatusCode code);

}  // namespace ssmd
