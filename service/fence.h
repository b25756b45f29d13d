// The fence that every call of a session passes before anything else and before any effect.
#pragma once

#include "service/core.h"
#include "ssmd/v1/state_service.pb.h"

namespace ssmd {

// The epoch alone. Errors: INVALID_ARGUMENT without one; FAILED_PRECONDITION + STATE_LOST.
absl::Status CheckEpoch(const ServiceCore& core, bool has_context, const v1::CallContext& context);

// The epoch, then the session, which cannot expire before the result ends.
// Errors: those of CheckEpoch and SessionTable::Enter.
absl::StatusOr<SessionCall> Fence(ServiceCore& core, bool has_context,
                                  const v1::CallContext& context);

}  // namespace ssmd
