#include "service/store_collector.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "service/metric_families.h"
#include "service/process_usage.h"

namespace ssmd {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

MetricFamily EmptyFamily(const MetricInfo& info) {
  return {info.name, info.meaning, info.type, {}};
}

// One reading of a model.
struct ModelSample {
  ModelRef model;
  StoreCounters counters;
  StoreUsage usage;
};

double ToDouble(uint64_t value) { return static_cast<double>(value); }

struct ModelMetric {
  const MetricInfo& family;
  const char* label;  // of this series beside the model's; null: none
  const char* label_value;
  uint64_t (*value)(const ModelSample&);
};

#define SSMD_COUNT(field) [](const ModelSample& sample) { return uint64_t{sample.counters.field}; }
#define SSMD_USAGE(field) [](const ModelSample& sample) { return uint64_t{sample.usage.field}; }

// Rows of one name stand together and make one family.
const ModelMetric kModelMetrics[] = {
    {FamilyNamed("ssmd_steps_begun_total"), nullptr, nullptr, SSMD_COUNT(steps_begun)},
    {FamilyNamed("ssmd_steps_total"), "result", "committed", SSMD_COUNT(steps_committed)},
    {FamilyNamed("ssmd_steps_total"), "result", "aborted",
     [](const ModelSample& s) { return s.counters.steps_aborted - s.counters.steps_expired; }},
    {FamilyNamed("ssmd_steps_total"), "result", "expired", SSMD_COUNT(steps_expired)},
    {FamilyNamed("ssmd_layers_verified_total"), nullptr, nullptr, SSMD_COUNT(layers_verified)},
    {FamilyNamed("ssmd_rows_committed_total"), nullptr, nullptr, SSMD_COUNT(rows_committed)},
    {FamilyNamed("ssmd_tokens_drafted_total"), nullptr, nullptr, SSMD_COUNT(tokens_drafted)},
    {FamilyNamed("ssmd_tokens_accepted_total"), nullptr, nullptr, SSMD_COUNT(tokens_accepted)},
    {FamilyNamed("ssmd_flushes_total"), "reason", "fused", SSMD_COUNT(flushes_fused)},
    {FamilyNamed("ssmd_flushes_total"), "reason", "background", SSMD_COUNT(flushes_background)},
    {FamilyNamed("ssmd_flushes_total"), "reason", "requested", SSMD_COUNT(flushes_requested)},
    {FamilyNamed("ssmd_flushes_deferred_total"), nullptr, nullptr, SSMD_COUNT(flushes_deferred)},
    {FamilyNamed("ssmd_rollbacks_total"), nullptr, nullptr, SSMD_COUNT(rollbacks)},
    {FamilyNamed("ssmd_forks_total"), nullptr, nullptr, SSMD_COUNT(forks)},
    {FamilyNamed("ssmd_snapshots_created_total"), nullptr, nullptr, SSMD_COUNT(snapshots_created)},
    {FamilyNamed("ssmd_imports_total"), nullptr, nullptr, SSMD_COUNT(imports)},
    {FamilyNamed("ssmd_exports_total"), nullptr, nullptr, SSMD_COUNT(exports)},
    {FamilyNamed("ssmd_stale_versions_total"), nullptr, nullptr, SSMD_COUNT(stale_versions)},
    {FamilyNamed("ssmd_poisoned_rows_total"), nullptr, nullptr, SSMD_COUNT(poisoned_rows)},
    {FamilyNamed("ssmd_state_bytes_total"), "kind", "checkpoint_hp_read",
     SSMD_COUNT(checkpoint_hp_read_bytes)},
    {FamilyNamed("ssmd_state_bytes_total"), "kind", "checkpoint_hp_write",
     SSMD_COUNT(checkpoint_hp_write_bytes)},
    {FamilyNamed("ssmd_state_bytes_total"), "kind", "checkpoint_lp_read",
     SSMD_COUNT(checkpoint_lp_read_bytes)},
    {FamilyNamed("ssmd_state_bytes_total"), "kind", "checkpoint_lp_write",
     SSMD_COUNT(checkpoint_lp_write_bytes)},
    {FamilyNamed("ssmd_state_bytes_total"), "kind", "ring_read", SSMD_COUNT(ring_read_bytes)},
    {FamilyNamed("ssmd_state_bytes_total"), "kind", "ring_write", SSMD_COUNT(ring_write_bytes)},
    {FamilyNamed("ssmd_state_bytes_total"), "kind", "ring_copy", SSMD_COUNT(ring_copy_bytes)},
    {FamilyNamed("ssmd_write_every_step_bytes_total"), nullptr, nullptr,
     SSMD_COUNT(write_every_step_bytes)},
    {FamilyNamed("ssmd_pages"), "kind", "live",
     [](const ModelSample& s) {
       return uint64_t{s.usage.pages.total} - s.usage.pages.free - s.usage.pages.step_targets;
     }},
    {FamilyNamed("ssmd_pages"), "kind", "step_target", SSMD_USAGE(pages.step_targets)},
    {FamilyNamed("ssmd_pages"), "kind", "free", SSMD_USAGE(pages.free)},
    {FamilyNamed("ssmd_slots"), "kind", "sequences", SSMD_USAGE(sequences)},
    {FamilyNamed("ssmd_slots"), "kind", "snapshots", SSMD_USAGE(snapshots)},
    {FamilyNamed("ssmd_slots"), "kind", "exports", SSMD_USAGE(exports)},
    {FamilyNamed("ssmd_slots"), "kind", "free",
     [](const ModelSample& s) {
       const Capacity& capacity = s.model->store->capacity();
       return uint64_t{capacity.sequences_max} + capacity.snapshots_max + kExportSlots -
              s.usage.sequences - s.usage.snapshots - s.usage.exports;
     }},
    {FamilyNamed("ssmd_sequences_max"), nullptr, nullptr,
     [](const ModelSample& s) { return uint64_t{s.model->store->capacity().sequences_max}; }},
    {FamilyNamed("ssmd_snapshots_max"), nullptr, nullptr,
     [](const ModelSample& s) { return uint64_t{s.model->store->capacity().snapshots_max}; }},
    {FamilyNamed("ssmd_open_steps"), nullptr, nullptr, SSMD_USAGE(open_steps)},
    {FamilyNamed("ssmd_open_imports"), nullptr, nullptr, SSMD_USAGE(imports)},
    {FamilyNamed("ssmd_model_state_bytes_reserved"), nullptr, nullptr,
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
    if (families.empty() || families.back().name != metric.family.name)
      families.push_back(EmptyFamily(metric.family));
    for (const ModelSample& sample : samples) {
      ClientMetric series = MakeSeries(sample, metric.family.type, ToDouble(metric.value(sample)));
      if (metric.label != nullptr) series.label.push_back({metric.label, metric.label_value});
      families.back().metric.push_back(std::move(series));
    }
  }
  MetricFamily by_position = EmptyFamily(FamilyNamed("ssmd_tokens_accepted_by_position_total"));
  for (const ModelSample& sample : samples) {
    for (uint32_t i = 0; i < sample.model->description.draft_tokens_max; ++i) {
      ClientMetric series =
          MakeSeries(sample, by_position.type, ToDouble(sample.counters.tokens_accepted_at[i]));
      series.label.push_back({"position", absl::StrCat(i)});
      by_position.metric.push_back(std::move(series));
    }
  }
  families.push_back(std::move(by_position));
  MetricFamily occupancy = EmptyFamily(FamilyNamed("ssmd_ring_occupancy_ratio"));
  for (const ModelSample& sample : samples)
    occupancy.metric.push_back(MakeHistogram(sample, sample.counters.ring_occupancy));
  families.push_back(std::move(occupancy));
}

}  // namespace

std::vector<MetricFamily> StoreCollector::Collect() const {
  std::vector<MetricFamily> families;
  const ServerGauges gauges = read_gauges_();
  const std::vector<ModelRef> models = models_->All();
  const ProcessUsage process = ReadProcessUsage();
  const auto add = [&families](const MetricInfo& info, double value) {
    families.push_back(EmptyFamily(info));
    families.back().metric.push_back(MakeSeries(info.type, value));
  };
  add(FamilyNamed("ssmd_process_start_time_seconds"), process.start_time_seconds);
  add(FamilyNamed("ssmd_process_cpu_seconds_total"), process.cpu_seconds);
  add(FamilyNamed("ssmd_process_resident_bytes"), ToDouble(process.resident_bytes));
  add(FamilyNamed("ssmd_draining"), gauges.draining ? 1 : 0);
  add(FamilyNamed("ssmd_models"), ToDouble(models.size()));
  add(FamilyNamed("ssmd_sessions"), gauges.sessions);
  add(FamilyNamed("ssmd_sessions_max"), gauges.sessions_max);
  add(FamilyNamed("ssmd_sessions_kept"), gauges.sessions_kept);
  add(FamilyNamed("ssmd_sessions_opened_total"), ToDouble(gauges.sessions_opened));
  add(FamilyNamed("ssmd_lease_expirations_total"), ToDouble(gauges.lease_expirations));
  add(FamilyNamed("ssmd_sessions_evicted_total"), ToDouble(gauges.sessions_evicted));
  add(FamilyNamed("ssmd_verify_queue_depth"), gauges.verify_queue_depth);
  add(FamilyNamed("ssmd_verify_queue_depth_max"), gauges.verify_queue_depth_max);
  add(FamilyNamed("ssmd_verify_queue_bytes"), ToDouble(gauges.verify_queue_bytes));
  add(FamilyNamed("ssmd_verify_running"), gauges.verify_running);
  add(FamilyNamed("ssmd_steps_streams"), gauges.steps_streams);
  add(FamilyNamed("ssmd_held_begins"), gauges.held_begins);
  add(FamilyNamed("ssmd_state_bytes_reserved"), ToDouble(gauges.state_bytes_reserved));
  add(FamilyNamed("ssmd_state_bytes_max"), ToDouble(gauges.state_bytes_max));
  MetricFamily suppressed = EmptyFamily(FamilyNamed("ssmd_log_messages_suppressed_total"));
  for (size_t i = 0; i < kLogKindCount; ++i) {
    suppressed.metric.push_back(
        MakeSeries(MetricType::Counter, ToDouble(gauges.log_suppressed[i])));
    suppressed.metric.back().label.push_back({"kind", LogKindName(static_cast<LogKind>(i))});
  }
  families.push_back(std::move(suppressed));

  std::vector<ModelSample> samples;
  for (const ModelRef& model : models)
    samples.push_back({model, model->store->counters(), model->store->usage()});
  AddModelFamilies(samples, families);
  return families;
}

}  // namespace ssmd
