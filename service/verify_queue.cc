#include "service/verify_queue.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"

namespace ssmd {
namespace {

constexpr uint32_t kRetryAfterMs = 10;  // about one Verify

}  // namespace

VerifyQueue::VerifyQueue(uint32_t worker_count, uint32_t depth_max, uint64_t bytes_max)
    : depth_max_(depth_max), bytes_max_(bytes_max) {
  for (uint32_t i = 0; i < worker_count; ++i) workers_.emplace_back([this] { Work(); });
}

absl::Status VerifyQueue::Push(std::function<void()> task, uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  if (tasks_.size() >= depth_max_) {
    return Exhausted(reason::kLimit,
                     absl::StrCat("verify_queue_max: ", depth_max_, " Verify calls are waiting"),
                     kRetryAfterMs);
  }
  if (!tasks_.empty() && (bytes > bytes_max_ || bytes_ > bytes_max_ - bytes)) {
    return Exhausted(reason::kLimit,
                     absl::StrCat("verify_queue_bytes_max: waiting Verify calls hold ", bytes_,
                                  " of ", bytes_max_, " bytes, this one has ", bytes),
                     kRetryAfterMs);
  }
  bytes_ += bytes;
  tasks_.push_back({std::move(task), bytes});
  return absl::OkStatus();
}

void VerifyQueue::Work() {
  absl::MutexLock lock(&mu_);
  const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return stopping_ || !tasks_.empty();
  };
  while (true) {
    mu_.Await(absl::Condition(&ready));
    if (tasks_.empty()) return;
    std::function<void()> task = std::move(tasks_.front().run);
    bytes_ -= tasks_.front().bytes;
    tasks_.pop_front();
    ++running_;
    mu_.Unlock();
    task();
    task = nullptr;  // what it owns dies before it counts as done
    mu_.Lock();
    --running_;
  }
}

void VerifyQueue::Stop() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  for (std::thread& worker : workers_)
    if (worker.joinable()) worker.join();
}

uint32_t VerifyQueue::depth() const {
  absl::MutexLock lock(&mu_);
  return static_cast<uint32_t>(tasks_.size());
}

uint64_t VerifyQueue::bytes() const {
  absl::MutexLock lock(&mu_);
  return bytes_;
}

uint32_t VerifyQueue::running() const {
  absl::MutexLock lock(&mu_);
  return running_;
}

}  // namespace ssmd
