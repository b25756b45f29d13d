#include "service/metric_families.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace ssmd {
namespace {

const char* TypeName(prometheus::MetricType type) {
  switch (type) {
    case prometheus::MetricType::Counter:
      return "counter";
    case prometheus::MetricType::Gauge:
      return "gauge";
    default:
      return "histogram";
  }
}

}  // namespace

std::string DescribeMetrics() {
  std::string page =
      "# Metrics\n\n"
      "Written by `ssmd-server --print-metrics`; a test compares. Served at "
      "`http://<--metrics-listen>/metrics`.\n\n"
      "`model` is the name and `model_id` the fingerprint of a registered model (shards may share "
      "a "
      "name), at most\n`--models-max` pairs. There are no series per sequence or session. Counters "
      "count since the process started, those of a\nmodel since it was registered.\n\n"
      "| name | type | unit | labels | meaning |\n| --- | --- | --- | --- | --- |\n";
  for (const MetricInfo& family : kMetricFamilies) {
    absl::StrAppend(&page, "| `", family.name, "` | ", TypeName(family.type), " | ", family.unit,
                    " | ", absl::StrReplaceAll(family.labels, {{"MODEL", "model, model_id"}}),
                    " | ", family.meaning, " |\n");
  }
  absl::StrAppend(&page, "\nThe page also carries prometheus-cpp's own `exposer_*` series.\n");
  return page;
}

}  // namespace ssmd
