#include "kernels/cpu/thread_pool.h"

#include "kernels/check.h"

namespace ssmd::cpu {

struct ThreadPool::Job {
  Job(size_t item_count, absl::FunctionRef<void(size_t)> function)
      : count(item_count), item(function) {}
  const size_t count;
  const absl::FunctionRef<void(size_t)>
      item;  // valid while the caller waits, which is until done == count
  std::atomic<size_t> next{0};
  Mutex mu;
  size_t done ABSL_GUARDED_BY(mu) = 0;
};

ThreadPool::ThreadPool(uint32_t thread_count) {
  SSMD_CHECK(thread_count >= 1, "a pool needs a thread");
  for (uint32_t i = 1; i < thread_count; ++i) threads_.emplace_back([this] { Work(); });
}

ThreadPool::~ThreadPool() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::RunItems(Job& job) {
  size_t ran = 0;
  for (size_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.count; ++ran)
    job.item(i);
  if (ran == 0) return;
  MutexLock lock(&job.mu);
  job.done += ran;
}

void ThreadPool::Work() {
  while (true) {
    std::shared_ptr<Job> job;
    {
      MutexLock lock(&mu_);
      auto ready = [this]()
                       ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || !jobs_.empty(); };
      mu_.Await(absl::Condition(&ready));
      if (stopping_) return;
      job = jobs_.front();
      if (job->next.load(std::memory_order_relaxed) >= job->count) {  // every item is claimed
        jobs_.pop_front();
        continue;
      }
    }
    RunItems(*job);
  }
}

void ThreadPool::ParallelFor(size_t count, absl::FunctionRef<void(size_t)> item) {
  if (threads_.empty() || count <= 1) {
    for (size_t i = 0; i < count; ++i) item(i);
    return;
  }
  auto job = std::make_shared<Job>(count, item);
  {
    MutexLock lock(&mu_);
    jobs_.push_back(job);
  }
  RunItems(*job);
  MutexLock lock(&job->mu);
  auto finished = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job->mu) { return job->done == job->count; };
  job->mu.Await(absl::Condition(&finished));
}

BackgroundThreads::BackgroundThreads(uint32_t thread_count) {
  for (uint32_t i = 0; i < thread_count; ++i) threads_.emplace_back([this] { Work(); });
}

BackgroundThreads::~BackgroundThreads() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    tasks_.clear();
  }
  for (std::thread& thread : threads_) thread.join();
}

void BackgroundThreads::Post(std::function<void()> task) {
  MutexLock lock(&mu_);
  if (!stopping_) tasks_.push_back(std::move(task));
}

void BackgroundThreads::Work() {
  while (true) {
    std::function<void()> task;
    {
      MutexLock lock(&mu_);
      auto ready = [this]()
                       ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || !tasks_.empty(); };
      mu_.Await(absl::Condition(&ready));
      if (stopping_) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace ssmd::cpu
