// The streams ImportState and ExportState: reactors around service/state_transfer.h.
//
// `caller` may make the call; each message asks again whether its token is still good.
//
// Life. A stream enters its session for each message and leaves it before the next one: progress
// renews the lease, a stalled peer does not hold it. When the session ends, so does the stream, and
// what the store lent it (the import's page, the export's slot) goes back at once. The same happens
// when the peer cancels, stops early or makes a mistake.
//
// Backpressure. An import reads the next message when the last one is worked in; an export makes
// the next chunk when the last one is written.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include "service/core.h"
#include "ssmd/v1/state_service.pb.h"

namespace ssmd {

// Reactors own themselves. `core` outlives them; the other arguments are gRPC's and do too.
grpc::ServerReadReactor<v1::ImportStateRequest>* ServeImport(ServiceCore& core,
                                                             const Principal& caller,
                                                             grpc::CallbackServerContext* context,
                                                             v1::ImportStateResponse* response);
grpc::ServerWriteReactor<v1::ExportStateResponse>* ServeExport(
    ServiceCore& core, const Principal& caller, grpc::CallbackServerContext* context,
    const v1::ExportStateRequest* request);

}  // namespace ssmd
