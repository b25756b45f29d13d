// StepTimes: how long open steps take, for the log of slow ones (--slow-step-ms).
//
// A step's time is from its plan to its commit: queue, kernels and the worker's own work between
// its calls. At most kTimedStepsMax steps are timed at once, others not at all. Steps that end
// without a commit are forgotten: by Forget, or by the sweeper when no step can be so old.
//
// Thread-safe; a leaf lock.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ssmd {

inline constexpr size_t kTimedStepsMax = 4096;

struct StepTime {
  absl::Time begun;
  uint64_t session = 0, model = 0;
  uint32_t rows = 0, tokens = 0;
  std::vector<uint64_t> sequences;  // the first ones
  uint32_t verifies = 0;
  absl::Duration queued, computed;  // of its Verifies
};

class StepTimes {
 public:
  // zero: nothing is timed.
  explicit StepTimes(absl::Duration slow) : slow_(slow) {}

  bool enabled() const { return slow_ > absl::ZeroDuration(); }
  // Of a step that is timed already: nothing.
  void Begin(uint64_t step, StepTime time);
  void AddVerify(uint64_t step, absl::Duration queued, absl::Duration computed);
  // A step was committed; its time if it was slow.
  std::optional<StepTime> End(uint64_t step, absl::Time now);
  void Forget(uint64_t step);
  void ForgetBefore(absl::Time begun);
  size_t size() const;

 private:
  const absl::Duration slow_;
  mutable absl::Mutex mu_;
  absl::flat_hash_map<uint64_t, StepTime> steps_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ssmd
