// StepLanes: the order of the calls of one Steps stream. Those that name one step are a lane and
// run one after the other, in order of arrival; lanes overlap.
//
// Thread-safe. mu_ is a leaf.
#pragma once

#include <cstdint>
#include <deque>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "kernels/mutex.h"
#include "service/steps_call.h"

namespace ssmd {

class StepLanes {
 public:
  // True: the lane was free and is the caller's, who runs `call` and then what Next returns, until
  // that is null. False: the call waits for whoever has the lane.
  bool Enter(uint64_t step_id, const StepsCallRef& call);

  // The next call of the caller's lane; null: there is none, and the lane is free.
  StepsCallRef Next(uint64_t step_id);

 private:
  Mutex mu_;
  // By step: the calls that wait for the running one. An entry is there while one runs.
  absl::flat_hash_map<uint64_t, std::deque<StepsCallRef>> waiting_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ssmd
