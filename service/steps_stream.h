// The Steps RPC: the step calls of one client on one bidirectional stream.
//
// Order. Calls are taken in order of arrival. Those that name one step (a BeginStep with
// commit_first: that step) run one after the other; calls of different steps overlap. Replies go
// out as calls complete.
//
// Pipelining. A BeginStep with a row that names version v + 1 of a sequence whose step of version
// v, begun on this stream, is open is held until every such step has ended, whoever ended it, and
// is planned then; if one of them was aborted, so is the held BeginStep. While it is held it does
// not keep the session's lease.
//
// Bounds. At most stream_calls_max calls are between intake and the end of the write of their
// reply, so also replies wait for a slow reader; the stream is not read while they are. At most
// stream_begins_max BeginSteps are held: above it RESOURCE_EXHAUSTED, since not reading would keep
// the commit that they wait for outside.
//
// End. Half-close: what was read is answered, then OK; open steps stay open. Cancel, a lost
// connection or the server's end: when the last call in work has ended, the steps that this stream
// began and that are still open are aborted, once.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include "service/core.h"
#include "ssmd/v1/state_service.pb.h"

namespace ssmd {

// The reactor of a new stream; owns itself. `core` outlives it. `caller` may open it; each call
// asks again whether its token is still good.
grpc::ServerBidiReactor<v1::StepsRequest, v1::StepsResponse>* ServeSteps(ServiceCore& core,
                                                                         const Principal& caller);

}  // namespace ssmd
