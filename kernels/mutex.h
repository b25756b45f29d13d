// Mutex and MutexLock: absl::Mutex, except under ThreadSanitizer.
//
// Distributions ship Abseil without TSan's instrumentation, so TSan would see none of its
// locks and report every guarded access. There, and only there, the same small interface stands on
// std::mutex, which TSan knows. Everything below the RPC layer locks with these two.
#pragma once

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#if defined(__SANITIZE_THREAD__)
#define SSMD_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SSMD_THREAD_SANITIZER 1
#endif
#endif

#ifdef SSMD_THREAD_SANITIZER

#include <condition_variable>
#include <mutex>

namespace ssmd {

class ABSL_LOCKABLE Mutex {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mu_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() {
    mu_.unlock();
    changed_.notify_all();  // any condition may have become true
  }
  // Requires: held by the caller. Releases it while the condition is false.
  void Await(const absl::Condition& condition) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (condition.Eval()) return;
    changed_.notify_all();  // what this thread changed before it waits
    std::unique_lock<std::mutex> lock(mu_, std::adopt_lock);
    changed_.wait(lock, [&] { return condition.Eval(); });
    lock.release();
  }

 private:
  std::mutex mu_;
  std::condition_variable changed_;
};

class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex* mu) ABSL_EXCLUSIVE_LOCK_FUNCTION(mu) : mu_(mu) { mu->Lock(); }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mu_->Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex* const mu_;
};

}  // namespace ssmd

#else

namespace ssmd {
using Mutex = absl::Mutex;
using MutexLock = absl::MutexLock;
}  // namespace ssmd

#endif
