#include "service/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>

#include "service/config.h"
#include "service/metric_families.h"
#include "service/status_map.h"

namespace ssmd {
namespace {

constexpr const char* kMethodNames[] = {
    "RegisterModel",   "GetCapabilities", "OpenSession",      "KeepAlive",      "CloseSession",
    "CreateSequences", "ForkSequences",   "ReleaseSequences", "GetSequences",   "BeginStep",
    "Verify",          "Commit",          "AbortStep",        "Rollback",       "CreateSnapshot",
    "DeleteSnapshot",  "GetStatus",       "UnregisterModel",  "AdoptSequences", "FlushSequences",
    "LookupPrefix",    "ListSnapshots",   "ImportState",      "ExportState",    "Steps",
    "Drain",           "SetLogLevel",     "ListSessions",     "EvictSession",   "EvictSnapshots"};
static_assert(std::size(kMethodNames) == kMethodCount);

// 20 us (a control call on loopback) to 10 s (a large Verify on a loaded CPU), about 1-2-5.
const prometheus::Histogram::BucketBoundaries kSeconds = {
    20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3,
    20e-3, 50e-3, 100e-3, 200e-3, 500e-3, 1.0,  2.0,  5.0,  10.0};

template <typename Builder>
auto& RegisterFamily(Builder builder, const MetricInfo& info, prometheus::Registry& registry) {
  return builder.Name(info.name).Help(info.meaning).Register(registry);
}

}  // namespace

const char* MethodName(Method method) { return kMethodNames[static_cast<size_t>(method)]; }

Metrics::Metrics(const std::string& backend) : registry_(std::make_shared<prometheus::Registry>()) {
  RegisterFamily(prometheus::BuildGauge(), FamilyNamed("ssmd_build_info"), *registry_)
      .Add({{"version", ServerVersion()}, {"backend", backend}})
      .Set(1);
  rpcs_ = &RegisterFamily(prometheus::BuildCounter(), FamilyNamed("ssmd_rpcs_total"), *registry_);
  cancelled_ = &RegisterFamily(prometheus::BuildCounter(), FamilyNamed("ssmd_rpcs_cancelled_total"),
                               *registry_)
                    .Add({});
  auto& lookups = RegisterFamily(prometheus::BuildCounter(),
                                 FamilyNamed("ssmd_prefix_lookups_total"), *registry_);
  prefix_lookups_ = {&lookups.Add({{"result", "hit"}}), &lookups.Add({{"result", "absent"}}),
                     &lookups.Add({{"result", "too_long"}})};
  auto& rpc_seconds = RegisterFamily(prometheus::BuildHistogram(),
                                     FamilyNamed("ssmd_rpc_duration_seconds"), *registry_);
  for (size_t method = 0; method < kMethodCount; ++method)
    rpc_seconds_[method] = &rpc_seconds.Add({{"method", kMethodNames[method]}}, kSeconds);
  // What alerts look at is there from the start: increase() cannot see the first value of a series.
  for (const auto code :
       {absl::StatusCode::kOk, absl::StatusCode::kInternal, absl::StatusCode::kResourceExhausted})
    for (size_t method = 0; method < kMethodCount; ++method)
      RpcCounter(method, static_cast<size_t>(code));
  auto& phases = RegisterFamily(prometheus::BuildHistogram(),
                                FamilyNamed("ssmd_verify_phase_seconds"), *registry_);
  queue_seconds_ = &phases.Add({{"phase", "queue"}}, kSeconds);
  compute_seconds_ = &phases.Add({{"phase", "compute"}}, kSeconds);
}

prometheus::Counter& Metrics::RpcCounter(size_t row, size_t column) {
  std::atomic<prometheus::Counter*>& cached = rpc_counters_[row][column];
  prometheus::Counter* counter = cached.load(std::memory_order_acquire);
  if (counter == nullptr) {  // two threads may race here: Add returns the same counter to both
    counter = &rpcs_->Add(
        {{"method", kMethodNames[row]}, {"code", CodeName(static_cast<absl::StatusCode>(column))}});
    cached.store(counter, std::memory_order_release);
  }
  return *counter;
}

void Metrics::CountRpc(Method method, absl::StatusCode code, absl::Duration duration) {
  const size_t row = static_cast<size_t>(method);
  const size_t column = static_cast<size_t>(code) < kCodeCount
                            ? static_cast<size_t>(code)
                            : static_cast<size_t>(absl::StatusCode::kUnknown);
  RpcCounter(row, column).Increment();
  rpc_seconds_[row]->Observe(absl::ToDoubleSeconds(duration));
}

void Metrics::CountCancelled() { cancelled_->Increment(); }

void Metrics::CountPrefixLookup(PrefixLookup result) {
  prefix_lookups_[static_cast<size_t>(result)]->Increment();
}

void Metrics::CountVerifyPhases(absl::Duration queued, absl::Duration computed) {
  queue_seconds_->Observe(absl::ToDoubleSeconds(queued));
  compute_seconds_->Observe(absl::ToDoubleSeconds(computed));
}

}  // namespace ssmd
