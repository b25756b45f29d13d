// HeldBegins: the BeginSteps of one Steps stream that wait for open steps.
//
// Each held call is let go once: by the one Take that finds it, or by Close.
// Thread-safe. mu_ is a leaf; it may be taken while the stream's lock is held.
#pragma once

#include <atomic>
#include <deque>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "kernels/mutex.h"
#include "service/steps_call.h"

namespace ssmd {

class HeldBegins {
 public:
  // `total`: the number over all streams, which this one keeps up; it outlives this.
  HeldBegins(uint32_t begins_max, std::atomic<uint32_t>* total)
      : begins_max_(begins_max), total_(total) {}

  // From here on any thread may take the call. Errors, the call is then still the caller's:
  // RESOURCE_EXHAUSTED + LIMIT_REACHED; after Close, its reason.
  absl::Status Hold(const StepsCallRef& call);

  std::vector<StepsCallRef> All() const;  // in order of arrival

  // True: the call was held, is not any more, and is the caller's.
  bool Take(const StepsCallRef& call);

  // Holds nothing from here on, and hands over what was held. Repeatable; the last reason counts.
  std::deque<StepsCallRef> Close(const absl::Status& reason);

 private:
  const uint32_t begins_max_;
  std::atomic<uint32_t>* const total_;
  mutable Mutex mu_;
  std::deque<StepsCallRef> calls_ ABSL_GUARDED_BY(mu_);
  absl::Status closed_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ssmd
