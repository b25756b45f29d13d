// One random history of a store against StoreModel and the float64 oracle. The seed decides
// everything.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace ssmd::testing {

// A deliberate mistake of the model: a history that still passes would prove nothing.
enum class ModelFault { kNone, kForgetsLastAccepted, kSkipsRollback, kForkSeesDrafts };

struct HistoryResult {
  std::string error;               // empty: the store agreed throughout
  std::map<std::string, int> did;  // operations that happened, by name
};

HistoryResult RunHistory(uint64_t seed, ModelFault fault = ModelFault::kNone);

}  // namespace ssmd::testing
