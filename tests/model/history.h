// One random history of a store against StoreModel and the float64 oracle. The seed decides
// everything.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace ssmd::testing {

// A deliberate mistake of the model: a history that still passes would prove nothing.
enum class ModelFault { kNone, kForgetsLastAccepted, kSkipsRollback, kForkSeesDrafts };

struct HistoryOptions {
  ModelFault fault = ModelFault::kNone;
  bool background = false;   // FlushMode::kBackground
  uint64_t timing_seed = 0;  // decides when background work runs, and nothing else
};

struct HistoryResult {
  std::string error;               // empty: the store agreed throughout
  std::map<std::string, int> did;  // operations that happened, by name
  uint64_t digest = 0;             // of every output and every fingerprint, in order
};

HistoryResult RunHistory(uint64_t seed, const HistoryOptions& options = {});

}  // namespace ssmd::testing
