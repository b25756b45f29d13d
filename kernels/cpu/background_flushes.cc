#include "kernels/cpu/background_flushes.h"

#include <map>
#include <utility>

#include "kernels/check.h"
#include "kernels/mutex.h"

namespace ssmd::cpu {

struct BackgroundFlushes::State {
  struct Work {
    BackgroundFlush flush;
    uint32_t begun = 0;  // layers handed out, in order
    uint32_t running = 0;
    bool dropped = false;
  };

  State(uint32_t count, RunLayer run) : layer_count(count), run_layer(std::move(run)) {}

  // Runs the next layer of a flush that has one left; false when there is none.
  bool RunOne(FlushId id) {
    BackgroundFlush flush;
    uint32_t layer = 0;
    {
      MutexLock lock(&mu);
      auto found = works.find(id);
      if (found == works.end() || found->second.dropped || found->second.begun == layer_count)
        return false;
      flush = found->second.flush;
      layer = found->second.begun++;
      ++found->second.running;
    }
    run_layer(flush, layer);
    MutexLock lock(&mu);
    --works.at(id).running;
    return true;
  }

  void AwaitQuiet(const Work& work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    auto quiet = [&]() { return work.running == 0; };
    mu.Await(absl::Condition(&quiet));
  }

  const uint32_t layer_count;
  const RunLayer run_layer;
  Mutex mu;
  std::map<FlushId, Work> works ABSL_GUARDED_BY(mu);
};

BackgroundFlushes::BackgroundFlushes(uint32_t layer_count, RunLayer run_layer, TaskQueue* queue)
    : queue_(queue), state_(std::make_shared<State>(layer_count, std::move(run_layer))) {}

BackgroundFlushes::~BackgroundFlushes() {
  MutexLock lock(&state_->mu);
  for (auto& [id, work] : state_->works) work.dropped = true;
  for (auto& [id, work] : state_->works) state_->AwaitQuiet(work);
  state_->works.clear();
}

void BackgroundFlushes::Start(const BackgroundFlush& flush) {
  {
    MutexLock lock(&state_->mu);
    state_->works[flush.id] = {.flush = flush};
  }
  if (queue_ == nullptr) return;
  for (uint32_t layer = 0; layer < state_->layer_count; ++layer) {
    queue_->Post([state = state_, id = flush.id] { state->RunOne(id); });
  }
}

void BackgroundFlushes::Finish(FlushId id) {
  while (state_->RunOne(id)) {
  }
  MutexLock lock(&state_->mu);
  const State::Work& work = state_->works.at(id);
  state_->AwaitQuiet(work);
  SSMD_CHECK(work.begun == state_->layer_count, "flush finished with %u of %u layers", work.begun,
             state_->layer_count);
}

void BackgroundFlushes::Drop(FlushId id) {
  MutexLock lock(&state_->mu);
  State::Work& work = state_->works.at(id);
  work.dropped = true;
  state_->AwaitQuiet(work);
  state_->works.erase(id);
}

}  // namespace ssmd::cpu
