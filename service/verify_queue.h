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
  VerifyQueue(uint32_t worker_count, uint32_t depth_max, uint64_t bytes_max = UINT64_MAX);
  ~VerifyQueue() { Stop(); }
  VerifyQueue(const VerifyQueue&) = delete;
  VerifyQueue& operator=(const VerifyQueue&) = delete;

  // `bytes`: what the task holds while it waits. A task that finds the queue empty is taken
  // whatever its size. Errors: RESOURCE_EXHAUSTED + LIMIT_REACHED when depth_max tasks wait, or
  // with this one more than bytes_max bytes would; `task` is then not run.
  absl::Status Push(std::function<void()> task, uint64_t bytes = 0);
  void Stop();

  uint32_t depth() const;  // waiting, running ones not counted
  uint64_t bytes() const;  // held by waiting tasks
  uint32_t running() const;

 private:
  void Work();

  struct Task {
    std::function<void()> run;
    uint64_t bytes;
  };

  const uint32_t depth_max_;
  const uint64_t bytes_max_;
  mutable absl::Mutex mu_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mu_);
  uint64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint32_t running_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> workers_;
};

}  // namespace ssmd
