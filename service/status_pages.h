// What --metrics-listen serves:
//   /            the status page: one HTML file that reads /status.json again and again
//   /status.json models, pages, slots, counters, sessions (no session ids: those are credentials)
//   /metrics     Prometheus' text format
//   /healthz     200 while the process runs: nothing of the server's work is asked
//   /startupz    200 once the models of --model are registered and gRPC is served
//   /readyz      200 while new sessions and sequences are accepted: not while starting or draining
// Probes answer 503 and one word otherwise.
#pragma once

#include "service/core.h"
#include "service/http_server.h"

namespace ssmd {

inline constexpr uint32_t kStatusSessionsMax = 20;  // listed in /status.json

// `core` outlives the server.
HttpServer::Pages StatusPages(ServiceCore* core);

// What /status.json says.
std::string StatusJson(ServiceCore& core);

}  // namespace ssmd
