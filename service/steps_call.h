// StepsCall: one message of a Steps stream, from its intake to the end of the write of its reply.
//
// Owned by one thread at a time: who runs it. It is handed on through a lane, the Verify queue, the
// held BeginSteps or the stream's replies, whose locks order what the threads do. Only
// `predecessors` may be read by others, while the call is held.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "service/begun_steps.h"
#include "service/handlers.h"
#include "service/metrics.h"
#include "service/sessions.h"
#include "ssmd/v1/state_service.pb.h"

namespace ssmd {

struct StepsCall {
  v1::StepsRequest request;  // emptied when the reply is complete
  v1::StepsResponse response;
  SessionCall session;  // empty while the call is held, and when the reply is complete
  Method method = Method::kBeginStep;
  absl::Time begun, queued;
  std::optional<handlers::PreparedVerify> prepared;  // points into `request`
  std::vector<BegunSteps::Step> predecessors;        // what a BeginStep waits for
};
using StepsCallRef = std::shared_ptr<StepsCall>;

}  // namespace ssmd
