#include "service/fence.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ssmd {

absl::Status CheckEpoch(const ServiceCore& core, bool has_context, const v1::CallContext& context) {
  if (!has_context || context.server_epoch() == 0)
    return InvalidField("context.server_epoch",
                        "context.server_epoch: expected the epoch of OpenSession, got none");
  if (context.server_epoch() == core.epoch) return absl::OkStatus();
  return WithDetail(
      ErrorWithReason(absl::StatusCode::kFailedPrecondition, reason::kStateLost,
                      absl::StrFormat("context.server_epoch: expected 0x%016x, got 0x%016x: the "
                                      "server was restarted and holds nothing of yours",
                                      core.epoch, context.server_epoch())),
      "ssmd/server_epoch", absl::StrCat(core.epoch));
}

absl::StatusOr<SessionCall> Fence(ServiceCore& core, const Principal& caller, bool has_context,
                                  const v1::CallContext& context) {
  SSMD_RETURN_IF_ERROR(CheckEpoch(core, has_context, context));
  return core.sessions.Enter(OwnerId{context.session_id()}, caller.tenant);
}

absl::StatusOr<SessionCall> Reenter(ServiceCore& core, const Principal& caller, Method method,
                                    OwnerId session) {
  SSMD_RETURN_IF_ERROR(core.auth.Recheck(caller, method));
  return core.sessions.Enter(session, caller.tenant);
}

}  // namespace ssmd
