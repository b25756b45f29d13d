// A clock that stands still until a test moves it.
#pragma once

#include <atomic>
#include <memory>

#include "service/clock.h"

namespace ssmd::testing {

class FakeClock {
 public:
  Clock AsClock() const {
    return [nanos = nanos_] { return absl::UnixEpoch() + absl::Nanoseconds(nanos->load()); };
  }
  void Advance(absl::Duration by) { *nanos_ += absl::ToInt64Nanoseconds(by); }

 private:
  std::shared_ptr<std::atomic<int64_t>> nanos_ = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace ssmd::testing
