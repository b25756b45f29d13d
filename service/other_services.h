// The fence of the services that are gRPC's own (health, reflection, channelz). Our handlers call
// the Authorizer and answer its error; into those services only an interceptor can reach, and all
// that it can do is to cancel: a refused caller sees CANCELLED.
#pragma once

#include <grpcpp/support/server_interceptor.h>

#include <memory>

#include "service/auth.h"

namespace ssmd {

// Calls of our own services get no interceptor, and cost nothing. `authorizer` outlives the server.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> GuardOtherServices(
    const Authorizer* authorizer, Door door);

}  // namespace ssmd
