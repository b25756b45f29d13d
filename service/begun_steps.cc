#include "service/begun_steps.h"

#include <algorithm>
#include <utility>

namespace ssmd {

void BegunSteps::Add(OwnerId owner, const v1::BeginStepRequest& begin,
                     const v1::BeginStepResponse& response) {
  {
    MutexLock lock(&mu_);
    SequenceId some_sequence = kPaddingRow;
    for (int i = 0; i < begin.sequence_ids_size(); ++i) {
      const SequenceId sequence{begin.sequence_ids(i)};
      if (sequence == kPaddingRow) continue;
      if (response.row_status_size() > i && response.row_status(i).code() != 0) continue;
      some_sequence = sequence;
      last_[sequence] = {begin.model_id(), response.step_id(), sequence, begin.versions(i)};
    }
    begun_[response.step_id()] = {begin.model_id(), some_sequence};
  }
  Prune(owner);
}

void BegunSteps::Forget(uint64_t step_id) {
  MutexLock lock(&mu_);
  begun_.erase(step_id);
}

std::vector<BegunSteps::Step> BegunSteps::PredecessorsOf(const v1::BeginStepRequest& begin,
                                                         uint64_t except) const {
  std::vector<Step> steps;
  MutexLock lock(&mu_);
  const int rows = std::min(begin.sequence_ids_size(), begin.versions_size());
  for (int i = 0; i < rows; ++i) {
    const auto found = last_.find(SequenceId{begin.sequence_ids(i)});
    if (found == last_.end()) continue;
    const Step& step = found->second;
    if (step.model_id == begin.model_id() && step.version + 1 == begin.versions(i) &&
        step.step_id != except)
      steps.push_back(step);
  }
  return steps;
}

BegunSteps::State BegunSteps::Look(OwnerId owner, absl::Span<const Step> steps) const {
  if (steps.empty()) return State::kEnded;
  const auto model = models_.Find(steps.front().model_id);
  if (!model.ok()) return State::kEnded;
  State result = State::kEnded;
  for (const Step& step : steps) {
    const auto now = (*model)->store->Get(owner, step.sequence);
    if (!now.ok()) continue;
    if (now->open_step == StepId{step.step_id}) return State::kOpen;
    // Not open and not committed: it was aborted.
    if (now->version == step.version) result = State::kAborted;
  }
  return result;
}

bool BegunSteps::AbortAll(OwnerId owner) {
  BegunById steps;
  {
    MutexLock lock(&mu_);
    steps = std::exchange(begun_, {});
  }
  for (const auto& [step_id, begun] : steps) {
    const auto model = models_.Find(begun.model_id);
    if (!model.ok()) continue;
    // Committed or aborted by others meanwhile, or its owner gone: nothing is left to do.
    (void)(*model)->store->Abort(owner, StepId{step_id});
  }
  return !steps.empty();
}

size_t BegunSteps::size() const {
  MutexLock lock(&mu_);
  return begun_.size() + last_.size();
}

void BegunSteps::Prune(OwnerId owner) {
  BegunById steps;
  std::vector<Step> last;
  {
    MutexLock lock(&mu_);
    if (begun_.size() + last_.size() < prune_at_) return;
    steps = begun_;
    for (const auto& [sequence, step] : last_) last.push_back(step);
  }
  std::vector<uint64_t> gone_steps;
  std::vector<SequenceId> gone_sequences;
  for (const auto& [step_id, begun] : steps)
    if (!MayBeOpen(owner, step_id, begun)) gone_steps.push_back(step_id);
  for (const Step& step : last) {
    const auto model = models_.Find(step.model_id);
    if (!model.ok() || !(*model)->store->Get(owner, step.sequence).ok())
      gone_sequences.push_back(step.sequence);
  }
  MutexLock lock(&mu_);
  for (const uint64_t id : gone_steps) begun_.erase(id);
  for (const SequenceId id : gone_sequences) last_.erase(id);
  prune_at_ = std::max(kPruneMin, 2 * (begun_.size() + last_.size()));
}

bool BegunSteps::MayBeOpen(OwnerId owner, uint64_t step_id, const Begun& begun) const {
  const auto model = models_.Find(begun.model_id);
  if (!model.ok()) return false;
  const Store& store = *(*model)->store;
  if (begun.sequence == kPaddingRow) return store.StepTokenCount(owner, StepId{step_id}).ok();
  const auto state = store.Get(owner, begun.sequence);
  return state.ok() && state->open_step == StepId{step_id};
}

}  // namespace ssmd
