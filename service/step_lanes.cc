#include "service/step_lanes.h"

#include <utility>

#include "kernels/check.h"

namespace ssmd {

bool StepLanes::Enter(uint64_t step_id, const StepsCallRef& call) {
  MutexLock lock(&mu_);
  const auto [lane, is_free] = waiting_.try_emplace(step_id);
  if (!is_free) lane->second.push_back(call);
  return is_free;
}

StepsCallRef StepLanes::Next(uint64_t step_id) {
  MutexLock lock(&mu_);
  const auto lane = waiting_.find(step_id);
  SSMD_CHECK(lane != waiting_.end(), "nobody has the lane of step %llx",
             static_cast<unsigned long long>(step_id));
  if (lane->second.empty()) {
    waiting_.erase(lane);
    return nullptr;
  }
  StepsCallRef call = std::move(lane->second.front());
  lane->second.pop_front();
  return call;
}

}  // namespace ssmd
