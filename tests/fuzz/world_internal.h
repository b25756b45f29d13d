// The world itself, and what the one-request types (world.cc) and the others (world_streams.cc)
// share of it.
#pragma once

#include <concepts>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "kernels/check.h"
#include "service/core.h"
#include "tests/fuzz/world.h"

namespace ssmd::fuzz {

inline void Must(const absl::Status& status) {
  SSMD_CHECK(status.ok(), "%s", status.ToString().c_str());
}
template <typename T>
T Must(absl::StatusOr<T> result) {
  Must(result.status());
  return *std::move(result);
}

// A sequence and its state in all layers, one after the other.
struct Held {
  SequenceState state;
  std::vector<float> values;
};
bool Same(const Held& a, const Held& b);  // -0 is 0: a read adds it to 0

class World {
 public:
  World();

  template <typename Request, typename Response, typename Handler>
  absl::Status Serve(Request& request, Handler handler) {
    Name(request);
    Response response;
    absl::Status status;
    if constexpr (std::invocable<Handler, ServiceCore&, const Principal&, const Request&,
                                 Response&>) {
      status = handler(core_, Principal{}, request, response);
    } else {
      SessionCall call = Must(core_.sessions.Enter(owner_));
      status = handler(core_, *call, request, response);
    }
    return Answered(request, status);
  }
  // Returns `status`, which must be one that a caller may see.
  static absl::Status Answered(const google::protobuf::Message& request,
                               const absl::Status& status);

  // kAny: finite numbers of any size were committed or imported. They may leave their format's
  // range when they are added up; then the steps that read them are aborted.
  enum class Values { kTame, kAny };
  // What was accepted must have left a store that works and gives everything back.
  void Check(Values values);

  // Small ids become those of this world; the context, where there is one, is the right one.
  void Name(google::protobuf::Message& message) const;
  uint64_t Named(std::string_view field, uint64_t value) const;
  // The next number in step id fields names this step.
  void AddStep(StepId step) { steps_.push_back(step); }

  std::vector<Held> Look(Store& store) const;
  Store& store() { return *Must(core_.models.Find(model_))->store; }
  const Model& model() { return *Must(core_.models.Find(model_)); }
  ServiceCore& core() { return core_; }
  OwnerId owner() const { return owner_; }

 private:
  StepId Begin(Store& store, StepRequest::Row row);
  absl::Status Verify(Store& store, StepId step, uint32_t layer, uint64_t tokens);
  void Continue(Store& store, Values values);
  void Continue(Store& store, const SequenceState& state, Values values);

  ServiceCore core_;
  uint64_t model_ = 0;
  OwnerId owner_{};
  std::vector<SequenceId> ids_;
  std::vector<StepId> steps_;  // open, committed, then those that were added
};

// A type that is not one request for one handler.
struct OtherType {
  std::string_view name;
  World::Values values;
  bool (*run)(World&, std::string_view bytes);  // whether all of it was accepted
  std::vector<std::pair<std::string, std::string>> (*seeds)();
};
absl::Span<const OtherType> OtherTypes();

// ---- seeds

template <typename Request>
void Fill(Request& request) {
  if constexpr (requires { request.set_model_id(1); }) request.set_model_id(1);
  if constexpr (requires { request.set_step_id(1); }) request.set_step_id(1);
  if constexpr (requires { request.set_sequence_id(1); }) request.set_sequence_id(1);
  if constexpr (requires { request.add_sequence_ids(1); }) request.add_sequence_ids(1);
  if constexpr (requires { request.set_version(4); }) request.set_version(4);
  if constexpr (requires { request.set_count(1); }) request.set_count(1);
  if constexpr (requires { request.set_position(4); }) request.set_position(4);
}
// Two tokens for a layer of SmallSpec.
void FillTensors(v1::VerifyRequest& request, uint32_t layer_id);

}  // namespace ssmd::fuzz
