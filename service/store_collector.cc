#include "service/store_collector.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ssmd {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

// One reading of a model.
struct ModelSample {
  ModelRef model;
  StoreCounters counters;
  StoreUsage usage;
};

double ToDouble(uint64_t value) { return static_cast<double>(value); }

struct ModelMetric {
  const char* name;
  MetricType type;
  const char* help;
  const char* label;  // of this series beside the model's; null: none
  const char* label_value;
  uint64_t (*value)(const ModelSample&);
};

constexpr MetricType kCounter = MetricType::Counter;
constexpr MetricType kGauge = MetricType::Gauge;
#define SSMD_COUNT(field) [](const ModelSample& sample) { return uint64_t{sample.counters.field}; }
#define SSMD_USAGE(field) [](const ModelSample& sample) { return uint64_t{sample.usage.field}; }

// Rows of one name stand together and make one family.
const ModelMetric kModelMetrics[] = {
    {"ssmd_steps_begun_total", kCounter, "Steps planned", nullptr, nullptr,
     SSMD_COUNT(steps_begun)},
    {"ssmd_steps_total", kCounter, "Steps ended, by result", "result", "committed",
     SSMD_COUNT(steps_committed)},
    {"ssmd_steps_total", kCounter, "", "result", "aborted",
     [](const ModelSample& s) { return s.counters.steps_aborted - s.counters.steps_expired; }},
    {"ssmd_steps_total", kCounter, "", "result", "expired", SSMD_COUNT(steps_expired)},
    {"ssmd_layers_verified_total", kCounter, "Verify calls that computed a layer", nullptr, nullptr,
     SSMD_COUNT(layers_verified)},
    {"ssmd_tokens_drafted_total", kCounter, "Tokens of committed steps, accepted or not", nullptr,
     nullptr, SSMD_COUNT(tokens_drafted)},
    {"ssmd_tokens_accepted_total", kCounter, "Tokens that entered the state", nullptr, nullptr,
     SSMD_COUNT(tokens_accepted)},
    {"ssmd_flushes_total", kCounter, "Checkpoints folded, by reason", "reason", "fused",
     SSMD_COUNT(flushes_fused)},
    {"ssmd_flushes_total", kCounter, "", "reason", "background", SSMD_COUNT(flushes_background)},
    {"ssmd_flushes_total", kCounter, "", "reason", "requested", SSMD_COUNT(flushes_requested)},
    {"ssmd_flushes_deferred_total", kCounter, "Due folds that waited for a page or for their turn",
     nullptr, nullptr, SSMD_COUNT(flushes_deferred)},
    {"ssmd_rollbacks_total", kCounter, "Rollback calls that moved a sequence", nullptr, nullptr,
     SSMD_COUNT(rollbacks)},
    {"ssmd_forks_total", kCounter, "Children made by ForkSequences", nullptr, nullptr,
     SSMD_COUNT(forks)},
    {"ssmd_snapshots_created_total", kCounter, "Snapshots published", nullptr, nullptr,
     SSMD_COUNT(snapshots_created)},
    {"ssmd_imports_total", kCounter, "Sequences replaced by ImportState", nullptr, nullptr,
     SSMD_COUNT(imports)},
    {"ssmd_exports_total", kCounter, "ExportState calls that began", nullptr, nullptr,
     SSMD_COUNT(exports)},
    {"ssmd_stale_versions_total", kCounter, "Requests refused because of a stale version", nullptr,
     nullptr, SSMD_COUNT(stale_versions)},
    {"ssmd_poisoned_rows_total", kCounter, "Rows with NaN, infinity or a positive log_alpha",
     nullptr, nullptr, SSMD_COUNT(poisoned_rows)},
    {"ssmd_state_bytes_total", kCounter, "Bytes of state that kernels moved, by kind", "kind",
     "checkpoint_hp_read", SSMD_COUNT(checkpoint_read_bytes)},
    {"ssmd_state_bytes_total", kCounter, "", "kind", "checkpoint_hp_write",
     SSMD_COUNT(checkpoint_write_bytes)},
    {"ssmd_state_bytes_total", kCounter, "", "kind", "ring_read", SSMD_COUNT(ring_read_bytes)},
    {"ssmd_state_bytes_total", kCounter, "", "kind", "ring_write", SSMD_COUNT(ring_write_bytes)},
    {"ssmd_state_bytes_total", kCounter, "", "kind", "ring_copy", SSMD_COUNT(ring_copy_bytes)},
    {"ssmd_write_every_step_bytes_total", kCounter,
     "Bytes that an engine which writes the state every token would have moved", nullptr, nullptr,
     SSMD_COUNT(write_every_step_bytes)},
    {"ssmd_pages", kGauge, "Checkpoint pages, by what holds them", "kind", "live",
     [](const ModelSample& s) {
       return uint64_t{s.usage.pages.total} - s.usage.pages.free - s.usage.pages.step_targets;
     }},
    {"ssmd_pages", kGauge, "", "kind", "step_target", SSMD_USAGE(pages.step_targets)},
    {"ssmd_pages", kGauge, "", "kind", "free", SSMD_USAGE(pages.free)},
    {"ssmd_slots", kGauge, "Slots, by what holds them", "kind", "sequences", SSMD_USAGE(sequences)},
    {"ssmd_slots", kGauge, "", "kind", "snapshots", SSMD_USAGE(snapshots)},
    {"ssmd_slots", kGauge, "", "kind", "exports", SSMD_USAGE(exports)},
    {"ssmd_slots", kGauge, "", "kind", "free",
     [](const ModelSample& s) {
       const Capacity& capacity = s.model->store->capacity();
       return uint64_t{capacity.sequences_max} + capacity.snapshots_max + kExportSlots -
              s.usage.sequences - s.usage.snapshots - s.usage.exports;
     }},
    {"ssmd_sequences_max", kGauge, "Most live sequences", nullptr, nullptr,
     [](const ModelSample& s) { return uint64_t{s.model->store->capacity().sequences_max}; }},
    {"ssmd_snapshots_max", kGauge, "Most snapshots", nullptr, nullptr,
     [](const ModelSample& s) { return uint64_t{s.model->store->capacity().snapshots_max}; }},
    {"ssmd_open_steps", kGauge, "Steps between BeginStep and their end", nullptr, nullptr,
     SSMD_USAGE(open_steps)},
    {"ssmd_open_imports", kGauge, "Imports between their header and their end", nullptr, nullptr,
     SSMD_USAGE(imports)},
    {"ssmd_model_state_bytes_reserved", kGauge, "Memory of the model's pools", nullptr, nullptr,
     [](const ModelSample& s) { return s.model->reserved_bytes; }},
};
#undef SSMD_COUNT
#undef SSMD_USAGE

ClientMetric MakeSeries(MetricType type, double value) {
  ClientMetric series;
  if (type == MetricType::Counter) {
    series.counter.value = value;
  } else {
    series.gauge.value = value;
  }
  return series;
}

std::vector<ClientMetric::Label> LabelsOf(const ModelSample& sample) {
  return {{"model", sample.model->description.name},
          {"model_id", absl::StrFormat("%016x", sample.model->id)}};
}

ClientMetric MakeSeries(const ModelSample& sample, MetricType type, double value) {
  ClientMetric series = MakeSeries(type, value);
  series.label = LabelsOf(sample);
  return series;
}

ClientMetric MakeHistogram(const ModelSample& sample, const RingOccupancy& occupancy) {
  ClientMetric series;
  series.label = LabelsOf(sample);
  ClientMetric::Histogram& histogram = series.histogram;
  for (size_t i = 0; i < occupancy.steps.size(); ++i) {
    histogram.sample_count += occupancy.steps[i];
    if (i < RingOccupancy::kBounds.size())
      histogram.bucket.push_back({histogram.sample_count, RingOccupancy::kBounds[i]});
  }
  histogram.bucket.push_back({histogram.sample_count, std::numeric_limits<double>::infinity()});
  histogram.sample_sum = occupancy.sum;
  return series;
}

void AddModelFamilies(const std::vector<ModelSample>& samples,
                      std::vector<MetricFamily>& families) {
  for (const ModelMetric& metric : kModelMetrics) {
    if (families.empty() || families.back().name != metric.name)
      families.push_back({metric.name, metric.help, metric.type, {}});
    for (const ModelSample& sample : samples) {
      ClientMetric series = MakeSeries(sample, metric.type, ToDouble(metric.value(sample)));
      if (metric.label != nullptr) series.label.push_back({metric.label, metric.label_value});
      families.back().metric.push_back(std::move(series));
    }
  }
  MetricFamily by_position = {"ssmd_tokens_accepted_by_position_total",
                              "Rows of committed steps that accepted the token at this position",
                              kCounter,
                              {}};
  for (const ModelSample& sample : samples) {
    for (uint32_t i = 0; i < sample.model->description.draft_tokens_max; ++i) {
      ClientMetric series =
          MakeSeries(sample, kCounter, ToDouble(sample.counters.tokens_accepted_at[i]));
      series.label.push_back({"position", absl::StrCat(i)});
      by_position.metric.push_back(std::move(series));
    }
  }
  families.push_back(std::move(by_position));
  MetricFamily occupancy = {"ssmd_ring_occupancy_ratio",
                            "Committed records over window_records when a step is planned, mean "
                            "over its rows; above 1 folds were put off",
                            MetricType::Histogram,
                            {}};
  for (const ModelSample& sample : samples)
    occupancy.metric.push_back(MakeHistogram(sample, sample.counters.ring_occupancy));
  families.push_back(std::move(occupancy));
}

}  // namespace

std::vector<MetricFamily> StoreCollector::Collect() const {
  std::vector<MetricFamily> families;
  const ServerGauges gauges = read_gauges_();
  const std::vector<ModelRef> models = models_->All();
  const auto add = [&families](const char* name, MetricType type, const char* help, double value) {
    families.push_back({name, help, type, {MakeSeries(type, value)}});
  };
  add("ssmd_models", kGauge, "Registered models", ToDouble(models.size()));
  add("ssmd_sessions", kGauge, "Open sessions", gauges.sessions);
  add("ssmd_sessions_kept", kGauge, "Ended sessions whose sequences wait for adoption",
      gauges.sessions_kept);
  add("ssmd_sessions_opened_total", kCounter, "Sessions opened", ToDouble(gauges.sessions_opened));
  add("ssmd_lease_expirations_total", kCounter, "Sessions ended because their lease ran out",
      ToDouble(gauges.lease_expirations));
  add("ssmd_verify_queue_depth", kGauge, "Verify calls waiting for a worker",
      gauges.verify_queue_depth);
  add("ssmd_verify_queue_bytes", kGauge, "Memory of the requests of waiting Verify calls",
      ToDouble(gauges.verify_queue_bytes));
  add("ssmd_verify_running", kGauge, "Verify calls being computed", gauges.verify_running);
  add("ssmd_steps_streams", kGauge, "Open Steps streams", gauges.steps_streams);
  add("ssmd_held_begins", kGauge, "BeginStep calls that wait for an open step of their stream",
      gauges.held_begins);
  add("ssmd_state_bytes_reserved", kGauge, "Memory of all pools",
      ToDouble(gauges.state_bytes_reserved));
  add("ssmd_state_bytes_max", kGauge, "Memory that pools may take (--state-memory)",
      ToDouble(gauges.state_bytes_max));
  add("ssmd_draining", kGauge, "1 while the server is stopping", gauges.draining ? 1 : 0);

  std::vector<ModelSample> samples;
  for (const ModelRef& model : models)
    samples.push_back({model, model->store->counters(), model->store->usage()});
  AddModelFamilies(samples, families);
  return families;
}

}  // namespace ssmd
