// StoreCollector: the metrics that somebody else already keeps, read when the page is scraped.
//
// Per model (labels model and model_id; at most models_max of them): the store's counters and
// usage. Per server: the process, sessions, the Verify queue, memory. Never a label per sequence or
// session.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <functional>
#include <vector>

#include "service/event_log.h"
#include "service/models.h"

namespace ssmd {

// One reading of the numbers of the whole server.
struct ServerGauges {
  uint32_t sessions = 0;
  uint32_t sessions_max = 0;
  uint32_t sessions_kept = 0;
  uint64_t sessions_opened = 0;
  uint64_t lease_expirations = 0;
  uint64_t sessions_evicted = 0;
  uint32_t verify_queue_depth = 0;
  uint32_t verify_queue_depth_max = 0;
  uint64_t verify_queue_bytes = 0;
  uint32_t verify_running = 0;
  uint32_t steps_streams = 0;
  uint32_t held_begins = 0;
  uint64_t state_bytes_reserved = 0;
  uint64_t state_bytes_max = 0;
  bool draining = false;
  EventLog::Counts log_suppressed{};  // by LogKind
};

class StoreCollector : public prometheus::Collectable {
 public:
  // `models` outlives the collector; `read_gauges` is called from scraping threads.
  StoreCollector(const ModelTable* models, std::function<ServerGauges()> read_gauges)
      : models_(models), read_gauges_(std::move(read_gauges)) {}

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const ModelTable* const models_;
  const std::function<ServerGauges()> read_gauges_;
};

}  // namespace ssmd
