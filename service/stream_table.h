// StreamTable: the Steps streams that are open, for those who must tell them something.
//
// Thread-safe. mu_ is a leaf: streams are called without it, and kept alive meanwhile.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "kernels/mutex.h"
#include "state_store/store.h"

namespace ssmd {

class StreamTable {
 public:
  class Stream {
   public:
    virtual ~Stream() = default;
    virtual OwnerId owner() const = 0;  // 0 before the first message
    // Plans or fails held BeginSteps whose predecessors have ended.
    virtual void CheckHeld() = 0;
    // Reads no further, answers what was read, ends with UNAVAILABLE / DRAINING.
    virtual void Drain() = 0;
  };

  // A stream that comes after DrainAll is told to drain at once.
  void Add(const std::shared_ptr<Stream>& stream);
  void Remove(const Stream* stream);

  // After anything that may have ended a step of `owner`. Costs nothing while no BeginStep is held.
  void StepMayHaveEnded(OwnerId owner);
  void CheckAllHeld();
  void DrainAll();

  uint32_t size() const;
  std::atomic<uint32_t> held{0};  // BeginSteps, over all streams; kept by them

 private:
  std::vector<std::shared_ptr<Stream>> All() const;

  mutable Mutex mu_;
  std::vector<std::shared_ptr<Stream>> streams_ ABSL_GUARDED_BY(mu_);
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace ssmd
