// AdminService: what each RPC does, and its gRPC edge. None takes a session.
#pragma once

#include <memory>

#include "service/core.h"
#include "ssmd/v1/admin_service.grpc.pb.h"

namespace ssmd {

namespace handlers {

absl::Status Drain(ServiceCore&, const v1::DrainRequest&, v1::DrainResponse&);
absl::Status SetLogLevel(ServiceCore&, const v1::SetLogLevelRequest&, v1::SetLogLevelResponse&);
absl::Status ListSessions(ServiceCore&, const v1::ListSessionsRequest&, v1::ListSessionsResponse&);
absl::Status EvictSnapshots(ServiceCore&, const v1::EvictSnapshotsRequest&,
                            v1::EvictSnapshotsResponse&);

}  // namespace handlers

// `core` outlives the service and every call of it.
std::unique_ptr<v1::AdminService::CallbackService> MakeAdminService(ServiceCore* core);

}  // namespace ssmd
