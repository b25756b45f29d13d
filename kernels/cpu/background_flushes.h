// BackgroundFlushes: runs the folds that a control block planned ahead, layer by layer, on somebody
// else's threads.
//
// Each flush posts one task per layer to the queue. Finish runs whatever has not begun on the
// calling thread, so it never waits for the queue, only for layers that are running. Drop waits for
// those too: after it, nobody writes the target page. When layers run decides nothing but time.
//
// Thread-safe. Lock order: the backend's control mutex, then this one. Running a layer takes
// neither.
#pragma once

#include <functional>
#include <memory>

#include "kernels/cpu/control_block.h"

namespace ssmd::cpu {

// Where background work is posted; the owner runs it when it likes, or never.
class TaskQueue {
 public:
  virtual ~TaskQueue() = default;
  virtual void Post(std::function<void()> task) = 0;
};

class BackgroundFlushes : public FlushRunner {
 public:
  using RunLayer = std::function<void(const BackgroundFlush& flush, uint32_t layer)>;

  // `queue` may be null: then every flush runs when it is needed.
  BackgroundFlushes(uint32_t layer_count, RunLayer run_layer, TaskQueue* queue);
  ~BackgroundFlushes() override;  // drops what is left; tasks still in the queue do nothing

  void Start(const BackgroundFlush& flush) override;
  void Finish(FlushId id) override;
  void Drop(FlushId id) override;

 private:
  struct State;
  TaskQueue* const queue_;
  const std::shared_ptr<State> state_;  // shared with posted tasks
};

}  // namespace ssmd::cpu
