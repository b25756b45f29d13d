// The gRPC edge of StateService: reactors around service/handlers.h.
#pragma once

#include <memory>

#include "service/core.h"
#include "ssmd/v1/state_service.grpc.pb.h"

namespace ssmd {

// `core` outlives the service and every call of it; `door`: the address that it is for.
std::unique_ptr<v1::StateService::CallbackService> MakeStateService(ServiceCore* core,
                                                                    Door door = Door::kOnly);

}  // namespace ssmd
