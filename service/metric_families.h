// Every metric family that ssmd exports: the one list. Help texts on the page, METRICS.md and the
// tests come from it; whoever registers a family takes it from here by name, at compile time.
#pragma once

#include <prometheus/metric_type.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace ssmd {

struct MetricInfo {
  const char* name;
  prometheus::MetricType type;
  const char* unit;
  const char* labels;  // comma-separated; "" none; "MODEL" stands for model, model_id
  const char* meaning;
};

namespace metric_internal {
inline constexpr auto kCounter = prometheus::MetricType::Counter;
inline constexpr auto kGauge = prometheus::MetricType::Gauge;
inline constexpr auto kHistogram = prometheus::MetricType::Histogram;
}  // namespace metric_internal

inline constexpr MetricInfo kMetricFamilies[] = {
#define COUNTER metric_internal::kCounter
#define GAUGE metric_internal::kGauge
#define HISTOGRAM metric_internal::kHistogram
    // The process.
    {"ssmd_build_info", GAUGE, "1", "version, backend",
     "Always 1; what is running is in the labels"},
    {"ssmd_process_start_time_seconds", GAUGE, "s", "", "When the process started, Unix time"},
    {"ssmd_process_cpu_seconds_total", COUNTER, "s", "", "Processor time, user and system"},
    {"ssmd_process_resident_bytes", GAUGE, "bytes", "", "Memory of the process that is in RAM"},
    {"ssmd_draining", GAUGE, "0, 1", "", "1 while the server is stopping"},
    {"ssmd_log_messages_suppressed_total", COUNTER, "messages",
     "kind = session, expired, refused, failed, slow_step",
     "Log messages above the limit of their kind, not written"},
    // Calls.
    {"ssmd_rpcs_total", COUNTER, "calls", "method, code",
     "RPCs answered by a handler; calls that gRPC refuses itself are not in it"},
    {"ssmd_rpcs_cancelled_total", COUNTER, "calls", "",
     "Calls whose client or deadline did not wait for the answer"},
    {"ssmd_rpc_duration_seconds", HISTOGRAM, "s", "method",
     "From the parsed request to its reply being handed to gRPC"},
    {"ssmd_verify_phase_seconds", HISTOGRAM, "s", "phase = queue, compute",
     "Time of a Verify that ran: waiting for a worker; in the store and its kernels"},
    {"ssmd_verify_queue_depth", GAUGE, "calls", "", "Verify calls waiting for a worker"},
    {"ssmd_verify_queue_depth_max", GAUGE, "calls", "", "Most that may wait (--verify-queue-max)"},
    {"ssmd_verify_queue_bytes", GAUGE, "bytes", "",
     "Memory of the requests of waiting Verify calls"},
    {"ssmd_verify_running", GAUGE, "calls", "", "Verify calls being computed"},
    {"ssmd_steps_streams", GAUGE, "streams", "", "Open Steps streams"},
    {"ssmd_held_begins", GAUGE, "calls", "",
     "BeginStep calls that wait for an open step of their stream"},
    // Sessions and memory.
    {"ssmd_sessions", GAUGE, "sessions", "", "Open sessions"},
    {"ssmd_sessions_max", GAUGE, "sessions", "", "Most open sessions (--sessions-max)"},
    {"ssmd_sessions_kept", GAUGE, "sessions", "",
     "Ended sessions whose sequences wait for adoption"},
    {"ssmd_sessions_opened_total", COUNTER, "sessions", "", "Sessions opened"},
    {"ssmd_lease_expirations_total", COUNTER, "sessions", "",
     "Sessions ended because their lease ran out"},
    {"ssmd_sessions_evicted_total", COUNTER, "sessions", "",
     "Sessions ended by EvictSession, or kept sequences released by it"},
    {"ssmd_models", GAUGE, "models", "", "Registered models"},
    {"ssmd_state_bytes_reserved", GAUGE, "bytes", "", "Memory of all pools"},
    {"ssmd_state_bytes_max", GAUGE, "bytes", "", "Memory that pools may take (--state-memory)"},
    // Steps of a model.
    {"ssmd_steps_begun_total", COUNTER, "steps", "MODEL", "Steps planned"},
    {"ssmd_steps_total", COUNTER, "steps", "MODEL, result = committed, aborted, expired",
     "Steps ended; those that passed their timeout are expired, not aborted"},
    {"ssmd_layers_verified_total", COUNTER, "calls", "MODEL", "Verify calls that computed a layer"},
    {"ssmd_rows_committed_total", COUNTER, "rows", "MODEL",
     "Rows of committed steps: sequences, each with one token or more"},
    {"ssmd_tokens_drafted_total", COUNTER, "tokens", "MODEL",
     "Tokens of committed steps, accepted or not"},
    {"ssmd_tokens_accepted_total", COUNTER, "tokens", "MODEL", "Tokens that entered the state"},
    {"ssmd_tokens_accepted_by_position_total", COUNTER, "rows", "MODEL, position",
     "Rows of committed steps that accepted the token at this position, from 0"},
    {"ssmd_open_steps", GAUGE, "steps", "MODEL", "Steps between BeginStep and their end"},
    {"ssmd_stale_versions_total", COUNTER, "requests", "MODEL",
     "Requests refused because of a stale version"},
    {"ssmd_poisoned_rows_total", COUNTER, "rows", "MODEL",
     "Rows with NaN, infinity or a positive log_alpha"},
    // The state engine.
    {"ssmd_flushes_total", COUNTER, "folds", "MODEL, reason = fused, background, requested",
     "Checkpoints folded: by committed steps, ahead of time and installed by them, by "
     "FlushSequences"},
    {"ssmd_flushes_deferred_total", COUNTER, "folds", "MODEL",
     "Due folds that waited for a page or for their turn"},
    {"ssmd_state_bytes_total", COUNTER, "bytes",
     "MODEL, kind = checkpoint_hp_read, checkpoint_hp_write, checkpoint_lp_read, "
     "checkpoint_lp_write, ring_read, ring_write, ring_copy",
     "Bytes of state moved by kernels and (ring_copy) by forks, snapshots and exports; lp: the "
     "read "
     "copy of models with two precisions"},
    {"ssmd_write_every_step_bytes_total", COUNTER, "bytes", "MODEL",
     "Bytes that an engine which writes the state every token would have moved"},
    {"ssmd_ring_occupancy_ratio", HISTOGRAM, "1", "MODEL",
     "Committed records over window_records when a step is planned, mean over its rows; above 1 "
     "folds were put off"},
    // Sequences and snapshots.
    {"ssmd_rollbacks_total", COUNTER, "calls", "MODEL", "Rollback calls that moved a sequence"},
    {"ssmd_forks_total", COUNTER, "sequences", "MODEL", "Children made by ForkSequences"},
    {"ssmd_snapshots_created_total", COUNTER, "snapshots", "MODEL", "Snapshots published"},
    {"ssmd_prefix_lookups_total", COUNTER, "calls", "result = hit, absent, too_long",
     "LookupPrefix calls that found a key; none; none but longer ones"},
    {"ssmd_imports_total", COUNTER, "sequences", "MODEL", "Sequences replaced by ImportState"},
    {"ssmd_exports_total", COUNTER, "calls", "MODEL", "ExportState calls that began"},
    {"ssmd_open_imports", GAUGE, "streams", "MODEL", "Imports between their header and their end"},
    {"ssmd_pages", GAUGE, "pages", "MODEL, kind = live, step_target, free",
     "Checkpoint pages: held by sequences, snapshots, imports and exports; by open steps that "
     "fold; "
     "by nobody"},
    {"ssmd_slots", GAUGE, "slots", "MODEL, kind = sequences, snapshots, exports, free",
     "Slots, by what holds them"},
    {"ssmd_sequences_max", GAUGE, "slots", "MODEL", "Most live sequences"},
    {"ssmd_snapshots_max", GAUGE, "slots", "MODEL", "Most snapshots"},
    {"ssmd_model_state_bytes_reserved", GAUGE, "bytes", "MODEL", "Memory of the model's pools"},
#undef COUNTER
#undef GAUGE
#undef HISTOGRAM
};

// A name that is not in the list does not compile.
consteval const MetricInfo& FamilyNamed(std::string_view name) {
  for (const MetricInfo& family : kMetricFamilies)
    if (std::string_view(family.name) == name) return family;
  throw "not in kMetricFamilies";
}

// METRICS.md: the list as a Markdown page.
std::string DescribeMetrics();

}  // namespace ssmd
