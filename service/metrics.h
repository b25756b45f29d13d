// What the process counts about itself: RPCs and Verify phases. Families are looked up once, here.
//
// Numbers that somebody else already keeps (store counters, pools, sessions, queue) are not counted
// a second time: service/store_collector.h reads them when the page is scraped. All families are
// those of service/metric_families.h.
//
// Thread-safe.
#pragma once

#include <prometheus/registry.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace prometheus {
class Counter;
class Histogram;
template <typename T>
class Family;
}  // namespace prometheus

namespace ssmd {

enum class Method : uint8_t {
  kRegisterModel,
  kGetCapabilities,
  kOpenSession,
  kKeepAlive,
  kCloseSession,
  kCreateSequences,
  kForkSequences,
  kReleaseSequences,
  kGetSequences,
  kBeginStep,
  kVerify,
  kCommit,
  kAbortStep,
  kRollback,
  kCreateSnapshot,
  kDeleteSnapshot,
  kGetStatus,
  kUnregisterModel,
  kAdoptSequences,
  kFlushSequences,
  kLookupPrefix,
  kListSnapshots,
  kImportState,
  kExportState,
  kSteps,
  // AdminService
  kDrain,
  kSetLogLevel,
  kListSessions,
  kEvictSession,
  kEvictSnapshots,
};
inline constexpr size_t kMethodCount = 30;
const char* MethodName(Method method);

class Metrics {
 public:
  explicit Metrics(const std::string& backend);

  void CountRpc(Method method, absl::StatusCode code, absl::Duration duration);
  // The client went away, or the deadline passed, before the answer. Its RPC is counted as well.
  void CountCancelled();
  enum class PrefixLookup { kHit, kAbsent, kTooLong };
  void CountPrefixLookup(PrefixLookup result);
  void CountVerifyPhases(absl::Duration queued, absl::Duration computed);

  const std::shared_ptr<prometheus::Registry>& registry() const { return registry_; }

 private:
  static constexpr size_t kCodeCount = 17;
  prometheus::Counter& RpcCounter(size_t row, size_t column);

  std::shared_ptr<prometheus::Registry> registry_;
  prometheus::Family<prometheus::Counter>* rpcs_;
  // Most are filled on first use: a page of 30 x 17 zeros would help nobody.
  std::array<std::array<std::atomic<prometheus::Counter*>, kCodeCount>, kMethodCount>
      rpc_counters_{};
  std::array<prometheus::Histogram*, kMethodCount> rpc_seconds_{};
  prometheus::Counter* cancelled_;
  std::array<prometheus::Counter*, 3> prefix_lookups_{};
  prometheus::Histogram* queue_seconds_;
  prometheus::Histogram* compute_seconds_;
};

}  // namespace ssmd
