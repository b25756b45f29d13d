// ThreadPool: the CPU's Executor. Fixed threads, started once; several callers may run at a time.
//
// The calling thread works too, so a pool of n threads starts n - 1. Items of one call are claimed
// one by one in index order; a caller returns when its own items are done, whoever ran them.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "kernels/backend.h"
#include "kernels/cpu/background_flushes.h"
#include "kernels/mutex.h"

namespace ssmd::cpu {

class ThreadPool : public Executor {
 public:
  // Requires: thread_count >= 1.
  explicit ThreadPool(uint32_t thread_count);
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  void ParallelFor(size_t count, absl::FunctionRef<void(size_t)> item) override;

 private:
  struct Job;
  void Work();
  static void RunItems(Job& job);

  Mutex mu_;
  std::deque<std::shared_ptr<Job>> jobs_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

// BackgroundThreads: a queue of tasks that nobody waits for and the threads that run them, first
// in, first out. Whoever posts bounds the queue: background flushes post at most one task per layer
// of each pending flush. Thread-safe; the destructor drops what has not begun and waits for the
// rest.
class BackgroundThreads : public TaskQueue {
 public:
  explicit BackgroundThreads(uint32_t thread_count);
  ~BackgroundThreads() override;
  BackgroundThreads(const BackgroundThreads&) = delete;
  BackgroundThreads& operator=(const BackgroundThreads&) = delete;

  void Post(std::function<void()> task) override;

 private:
  void Work();

  Mutex mu_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace ssmd::cpu
