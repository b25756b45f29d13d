// BegunSteps: what one Steps stream remembers of the steps that it began: what a BeginStep must
// wait for, and what is to be aborted when the stream ends badly.
//
// Others may end these steps at any time, so each answer is looked up in the stores, and is old
// when it is given; what ended meanwhile is dropped now and then, so that the memory stays in
// proportion to what is alive.
//
// Thread-safe. mu_ is a leaf: stores are called without it.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "kernels/mutex.h"
#include "service/models.h"
#include "ssmd/v1/state_service.pb.h"

namespace ssmd {

class BegunSteps {
 public:
  // A step of this stream and the version of one of its sequences before it.
  struct Step {
    uint64_t model_id = 0, step_id = 0;
    SequenceId sequence{};
    uint64_t version = 0;
  };
  enum class State { kEnded, kOpen, kAborted };

  explicit BegunSteps(const ModelTable* models) : models_(*models) {}

  // `response` is that of a BeginStep that succeeded.
  void Add(OwnerId owner, const v1::BeginStepRequest& begin, const v1::BeginStepResponse& response);

  // The step has ended; AbortAll need not ask.
  void Forget(uint64_t step_id);

  // The steps, but for `except`, whose next versions the rows of `begin` name.
  std::vector<Step> PredecessorsOf(const v1::BeginStepRequest& begin, uint64_t except = 0) const;

  // kOpen when one of them is open; else kAborted when one was aborted; else kEnded. Steps of one
  // model.
  State Look(OwnerId owner, absl::Span<const Step> steps) const;

  // Aborts what is not known to have ended, and forgets it; false: there was nothing.
  bool AbortAll(OwnerId owner);

  size_t size() const;  // steps and sequences remembered

 private:
  struct Begun {
    uint64_t model_id = 0;
    SequenceId sequence{};  // one of its rows; kPaddingRow: it has no other
  };
  using BegunById = absl::flat_hash_map<uint64_t, Begun>;

  void Prune(OwnerId owner);
  bool MayBeOpen(OwnerId owner, uint64_t step_id, const Begun& begun) const;

  static constexpr size_t kPruneMin = 256;

  const ModelTable& models_;
  mutable Mutex mu_;
  BegunById begun_ ABSL_GUARDED_BY(mu_);  // by step; as far as is known, not ended
  absl::flat_hash_map<SequenceId, Step> last_ ABSL_GUARDED_BY(mu_);
  size_t prune_at_ ABSL_GUARDED_BY(mu_) = kPruneMin;
};

}  // namespace ssmd
