// VerifyQueue: a bounded queue and the worker threads that take from it, first in, first out.
//
// Keeps kernels off gRPC's threads: a handler pushes and returns. The workers only wait for and
// launch work; the kernels run on the backend's executor, which all workers share.
//
// Thread-safe. Stop() runs what is queued (each task answers its own call) and joins the workers;
// it must come after the last Push.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace ssmd {

class VerifyQueue {
 public:
  VerifyQueue(uint32_t worker_count, uint32_t depth_max);
  ~VerifyQueue() { Stop(); }
  VerifyQueue(const VerifyQueue&) = delete;
  VerifyQueue& operator=(const VerifyQueue&) = delete;

  // Errors: RESOURCE_EXHAUSTED + LIMIT_REACHED when depth_max tasks wait; `task` is then not run.
  absl::Status Push(std::function<void()> task);
  void Stop();

  uint32_t depth() const;  // waiting, running ones not counted
  uint32_t running() const;

 private:
  void Work();

  const uint32_t depth_max_;
  mutable absl::Mutex mu_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  uint32_t running_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> workers_;
};

}  // namespace ssmd
