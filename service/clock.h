// The one source of time in the service. Injected, so that tests advance it instead of sleeping.
#pragma once

#include <chrono>
#include <functional>

#include "absl/time/time.h"

namespace ssmd {

// Thread-safe. Only differences and comparisons mean anything.
using Clock = std::function<absl::Time()>;

// Never steps back and never jumps: leases and step deadlines outlive a change of the wall clock.
inline Clock MonotonicClock() {
  return [] {
    return absl::UnixEpoch() +
           absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
  };
}

}  // namespace ssmd
