// The fence that every call of a session passes before anything else and before any effect.
#pragma once

#include "service/core.h"
#include "ssmd/v1/state_service.pb.h"

namespace ssmd {

// The epoch alone. Errors: INVALID_ARGUMENT without one; FAILED_PRECONDITION + STATE_LOST.
absl::Status CheckEpoch(const ServiceCore& core, bool has_context, const v1::CallContext& context);

// The epoch, then the session, which cannot expire before the result ends. Whose call it is, and
// that it may be made, the Authorizer has said before.
// Errors: those of CheckEpoch and SessionTable::Enter.
absl::StatusOr<SessionCall> Fence(ServiceCore& core, const Principal& caller, bool has_context,
                                  const v1::CallContext& context);

// The same for a later message of a stream. Errors: those of Authorizer::Recheck and
// SessionTable::Enter.
absl::StatusOr<SessionCall> Reenter(ServiceCore& core, const Principal& caller, Method method,
                                    OwnerId session);

}  // namespace ssmd
