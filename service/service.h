// The gRPC edge: reactors around service/handlers.h and service/admin_handlers.h.
#pragma once

#include <memory>

#include "service/core.h"
#include "ssmd/v1/admin_service.grpc.pb.h"
#include "ssmd/v1/state_service.grpc.pb.h"

namespace ssmd {

// `core` outlives the services and every call of them; `door`: the address that they are for.
std::unique_ptr<v1::StateService::CallbackService> MakeStateService(ServiceCore* core,
                                                                    Door door = Door::kOnly);
std::unique_ptr<v1::AdminService::CallbackService> MakeAdminService(ServiceCore* core,
                                                                    Door door = Door::kOnly);

}  // namespace ssmd
