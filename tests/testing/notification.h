// Notification: as absl::Notification, on our Mutex, so that ThreadSanitizer sees it.
#pragma once

#include "kernels/mutex.h"

namespace ssmd::testing {

class Notification {
 public:
  void Notify() {
    MutexLock lock(&mu_);
    notified_ = true;
  }
  bool HasBeenNotified() const {
    MutexLock lock(&mu_);
    return notified_;
  }
  void WaitForNotification() const {
    MutexLock lock(&mu_);
    auto notified = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return notified_; };
    mu_.Await(absl::Condition(&notified));
  }

 private:
  mutable Mutex mu_;
  bool notified_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace ssmd::testing
