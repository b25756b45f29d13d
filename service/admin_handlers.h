// What each RPC of AdminService does. None takes a session; all are thread-safe.
#pragma once

#include <functional>

#include "service/core.h"
#include "ssmd/v1/admin_service.pb.h"

namespace ssmd::handlers {

inline constexpr int kEvictKeysMax = 1000;

absl::Status Drain(ServiceCore&, const Principal&, const v1::DrainRequest&, v1::DrainResponse&);
absl::Status SetLogLevel(ServiceCore&, const Principal&, const v1::SetLogLevelRequest&,
                         v1::SetLogLevelResponse&);
absl::Status ListSessions(ServiceCore&, const Principal&, const v1::ListSessionsRequest&,
                          v1::ListSessionsResponse&);
// `done` runs when the session has ended: now, or on the thread that ends its last call. Never
// after an error.
absl::Status EvictSession(ServiceCore&, const v1::EvictSessionRequest&,
                          std::function<void(Store::Released)> done);
// Named keys are those of the caller's tenant; `all` are everybody's.
absl::Status EvictSnapshots(ServiceCore&, const Principal& caller, const v1::EvictSnapshotsRequest&,
                            v1::EvictSnapshotsResponse&);

}  // namespace ssmd::handlers
