// Model files: a RegisterModelRequest as a text proto, for models that are there from the start.
//
//   spec { name: "qwen3.5-4b" ... }
//   capacity { sequences_max: 64 }     optional, as in the RPC
//
// deploy/models/ holds some.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "ssmd/v1/state_service.pb.h"

namespace ssmd {

// Errors: NOT_FOUND naming the file; INVALID_ARGUMENT "FILE:LINE:COLUMN: ..." for text that is not
// a RegisterModelRequest. What the fields say is RegisterModel's to check.
absl::StatusOr<v1::RegisterModelRequest> ReadModelFile(const std::string& path);

}  // namespace ssmd
