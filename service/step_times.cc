#include "service/step_times.h"

#include <utility>

namespace ssmd {

void StepTimes::Begin(uint64_t step, StepTime time) {
  if (!enabled()) return;
  absl::MutexLock lock(&mu_);
  if (steps_.size() < kTimedStepsMax) steps_.try_emplace(step, std::move(time));
}

void StepTimes::AddVerify(uint64_t step, absl::Duration queued, absl::Duration computed) {
  if (!enabled()) return;
  absl::MutexLock lock(&mu_);
  const auto found = steps_.find(step);
  if (found == steps_.end()) return;
  ++found->second.verifies;
  found->second.queued += queued;
  found->second.computed += computed;
}

std::optional<StepTime> StepTimes::End(uint64_t step, absl::Time now) {
  if (!enabled()) return std::nullopt;
  absl::MutexLock lock(&mu_);
  const auto found = steps_.find(step);
  if (found == steps_.end()) return std::nullopt;
  StepTime time = std::move(found->second);
  steps_.erase(found);
  if (now - time.begun < slow_) return std::nullopt;
  return time;
}

void StepTimes::Forget(uint64_t step) {
  absl::MutexLock lock(&mu_);
  steps_.erase(step);
}

void StepTimes::ForgetBefore(absl::Time begun) {
  absl::MutexLock lock(&mu_);
  absl::erase_if(steps_, [begun](const auto& step) { return step.second.begun < begun; });
}

size_t StepTimes::size() const {
  absl::MutexLock lock(&mu_);
  return steps_.size();
}

}  // namespace ssmd
