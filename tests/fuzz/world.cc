#include "tests/fuzz/world.h"

#include <cmath>
#include <concepts>
#include <random>

#include "kernels/check.h"
#include "service/core.h"
#include "service/handlers.h"
#include "tests/testing/layer_inputs.h"
#include "tests/testing/model_specs.h"

namespace ssmd::fuzz {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr uint64_t kSmallIds = 15;

ServerConfig SmallServer() {
  ServerConfig config;
  config.compute_threads = 1;
  config.verify_workers = 1;
  config.flush_threads = 0;
  config.state_bytes_max = 8u << 20;
  config.message_bytes_max = 1u << 20;
  config.models_max = 3;
  config.sessions_max = 3;
  config.poison_garbage = true;
  return config;
}

void Must(const absl::Status& status) { SSMD_CHECK(status.ok(), "%s", status.ToString().c_str()); }
template <typename T>
T Must(absl::StatusOr<T> result) {
  Must(result.status());
  return *std::move(result);
}

class World {
 public:
  World() : core_(SmallServer(), [] { return absl::UnixEpoch(); }) {
    v1::RegisterModelRequest request;
    *request.mutable_spec() = testing::SmallSpec();
    v1::ModelCapacity& capacity = *request.mutable_capacity();
    capacity.set_sequences_max(5);
    capacity.set_snapshots_max(2);
    capacity.set_spare_pages(3);
    capacity.set_rows_max(4);
    capacity.set_steps_max(3);
    v1::RegisterModelResponse registered;
    Must(handlers::RegisterModel(core_, request, registered));
    model_ = registered.model_id();
    owner_ = Must(core_.sessions.Open(0, "fuzz")).id;
    ModelRef model = Must(core_.models.Find(model_));
    Store& store = *model->store;
    ids_ = Must(store.CreateSequences(owner_, 3)).ids;
    for (uint64_t version = 1; version <= 3; ++version) {
      const StepId step = Begin(store, {ids_[0], version, 2});
      for (uint32_t layer = 0; layer < 3; ++layer) Verify(store, step, layer, 2);
      const std::vector<uint32_t> accepted = {version < 3 ? 2u : 1u};
      Must(store.Commit(owner_, step, accepted).status());
      steps_[1] = step;
    }
    steps_[0] = Begin(store, {ids_[2], 1, 2});
    Verify(store, steps_[0], 0, 2);
    Must(store.CreateSnapshot(owner_, {ids_[0], 4}, {"s", 4}).status());
  }

  template <typename Request, typename Response, typename Handler>
  absl::Status Serve(Request& request, Handler handler) {
    Name(request);
    Response response;
    absl::Status status;
    if constexpr (std::invocable<Handler, ServiceCore&, const Request&, Response&>) {
      status = handler(core_, request, response);
    } else {
      SessionCall call = Must(core_.sessions.Enter(owner_));
      status = handler(core_, *call, request, response);
    }
    SSMD_CHECK(!absl::IsInternal(status) && !absl::IsUnknown(status), "%s: %s",
               request.ShortDebugString().c_str(), status.ToString().c_str());
    return status;
  }

  // What was accepted must have left a store that works and gives everything back.
  void Check() {
    for (const ModelRef& model : core_.models.All()) {
      Store& store = *model->store;
      for (const SequenceState& state : store.GetAll(owner_)) {
        for (uint32_t layer = 0; layer < store.geometry().layers.size(); ++layer) {
          std::vector<float> values(store.geometry().layers[layer].state_elements());
          Must(store.ReadState(owner_, state.id, layer, state.position, absl::MakeSpan(values)));
          for (const float x : values) SSMD_CHECK(std::isfinite(x), "a state holds %f", double{x});
        }
      }
      if (model->id == model_) Continue(store);
      for (const SnapshotKey& key : store.ListSnapshots(std::nullopt, 1000))
        Must(store.DeleteSnapshot(key));
    }
    core_.EndOwner(owner_, SessionTable::Sequences::kRelease);
    for (const ModelRef& model : core_.models.All()) {
      const StoreUsage usage = model->store->usage();
      SSMD_CHECK(usage.sequences + usage.snapshots + usage.open_steps + usage.imports == 0 &&
                     usage.pages.free == usage.pages.total,
                 "%u sequences, %u snapshots, %u steps left", usage.sequences, usage.snapshots,
                 usage.open_steps);
    }
  }

  ServiceCore& core() { return core_; }
  OwnerId owner() const { return owner_; }

 private:
  StepId Begin(Store& store, StepRequest::Row row) {
    return Must(store.BeginStep(owner_, {.rows = {row}})).id;
  }
  void Verify(Store& store, StepId step, uint32_t layer, uint64_t tokens) {
    std::mt19937_64 random(layer);
    const LayerShape& shape = store.geometry().layers[layer];
    testing::PackedInputs packed;
    for (uint64_t i = 0; i < tokens; ++i)
      packed.Append(testing::RandomToken(shape, Dtype::kFp32, random), Dtype::kFp32);
    std::vector<float> output(tokens * shape.head_count * shape.d_v);
    Must(store
             .Verify(owner_, {.step = step,
                              .layer = layer,
                              .token_count = tokens,
                              .inputs = packed.view(),
                              .output = output.data()})
             .status());
  }
  // Every sequence that is idle takes another step.
  void Continue(Store& store) {
    for (const SequenceState& state : store.GetAll(owner_)) {
      if (state.open_step != kNoStep) continue;
      auto step = store.BeginStep(owner_, {.rows = {{state.id, state.version, 4}}});
      if (absl::IsResourceExhausted(step.status())) continue;
      Must(step.status());
      for (uint32_t layer = 0; layer < 3; ++layer) Verify(store, step->id, layer, 4);
      const std::vector<uint32_t> accepted = {3};
      Must(store.Commit(owner_, step->id, accepted).status());
    }
  }

  uint64_t Named(const std::string& field, uint64_t value) const {
    if (value == 0 || value > kSmallIds) return value;
    if (field == "model_id") return model_;
    if (field == "step_id") return static_cast<uint64_t>(steps_[(value - 1) % 2]);
    if (field == "session_id") return static_cast<uint64_t>(owner_);
    return static_cast<uint64_t>(ids_[(value - 1) % ids_.size()]);
  }

  // Small ids become those of this world; the context, where there is one, is the right one.
  void Name(Message& message) const {
    const google::protobuf::Reflection& reflection = *message.GetReflection();
    for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
      const FieldDescriptor* field = message.GetDescriptor()->field(i);
      const std::string& name = field->name();
      if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
        if (name == "context") {
          auto* context = static_cast<v1::CallContext*>(reflection.MutableMessage(&message, field));
          context->set_server_epoch(core_.epoch);
          context->set_session_id(static_cast<uint64_t>(owner_));
        } else if (field->is_repeated()) {
          for (int j = 0; j < reflection.FieldSize(message, field); ++j)
            Name(*reflection.MutableRepeatedMessage(&message, field, j));
        } else if (reflection.HasField(message, field)) {
          Name(*reflection.MutableMessage(&message, field));
        }
        continue;
      }
      const bool is_id = name == "model_id" || name == "step_id" || name == "session_id" ||
                         name.find("sequence_id") != std::string::npos || name == "parent_id";
      if (!is_id || field->cpp_type() != FieldDescriptor::CPPTYPE_UINT64) continue;
      if (field->is_repeated()) {
        for (int j = 0; j < reflection.FieldSize(message, field); ++j) {
          reflection.SetRepeatedUInt64(
              &message, field, j, Named(name, reflection.GetRepeatedUInt64(message, field, j)));
        }
      } else {
        reflection.SetUInt64(&message, field, Named(name, reflection.GetUInt64(message, field)));
      }
    }
  }

  ServiceCore core_;
  uint64_t model_ = 0;
  OwnerId owner_{};
  std::vector<SequenceId> ids_;
  StepId steps_[2] = {};  // open, committed
};

absl::Status ServeVerify(ServiceCore& core, Session& session, const v1::VerifyRequest& request,
                         v1::VerifyResponse& response) {
  SSMD_ASSIGN_OR_RETURN(handlers::PreparedVerify prepared,
                        handlers::PrepareVerify(core, session, request));
  return handlers::RunVerify(prepared, session.id(), response);
}

#define SSMD_FUZZ_TYPES(X)                        \
  X(RegisterModel, handlers::RegisterModel)       \
  X(UnregisterModel, handlers::UnregisterModel)   \
  X(GetCapabilities, handlers::GetCapabilities)   \
  X(OpenSession, handlers::OpenSession)           \
  X(GetStatus, handlers::GetStatus)               \
  X(KeepAlive, handlers::KeepAlive)               \
  X(CreateSequences, handlers::CreateSequences)   \
  X(ForkSequences, handlers::ForkSequences)       \
  X(ReleaseSequences, handlers::ReleaseSequences) \
  X(AdoptSequences, handlers::AdoptSequences)     \
  X(FlushSequences, handlers::FlushSequences)     \
  X(GetSequences, handlers::GetSequences)         \
  X(BeginStep, handlers::BeginStep)               \
  X(Verify, ServeVerify)                          \
  X(Commit, handlers::Commit)                     \
  X(AbortStep, handlers::AbortStep)               \
  X(Rollback, handlers::Rollback)                 \
  X(CreateSnapshot, handlers::CreateSnapshot)     \
  X(DeleteSnapshot, handlers::DeleteSnapshot)     \
  X(LookupPrefix, handlers::LookupPrefix)         \
  X(ListSnapshots, handlers::ListSnapshots)

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
void Refine(v1::BeginStepRequest& request) {
  request.add_versions(4);
  request.add_draft_tokens(4);
  request.add_sequence_ids(2);
  request.add_versions(1);
  request.add_draft_tokens(3);
}
void Refine(v1::CommitRequest& request) {
  request.set_step_id(2);
  request.add_accepted(1);
}
void Refine(v1::RegisterModelRequest& request) {
  *request.mutable_spec() = testing::SmallSpec();
  request.mutable_spec()->set_name("another");
  request.mutable_capacity()->set_sequences_max(2);
}
void Refine(v1::CreateSnapshotRequest& request) {
  request.mutable_key()->set_digest("t");
  request.mutable_key()->set_position(3);
}
void Refine(v1::DeleteSnapshotRequest& request) {
  request.mutable_key()->set_digest("s");
  request.mutable_key()->set_position(4);
}
void Refine(v1::LookupPrefixRequest& request) {
  request.add_digests("s");
  request.set_position_max(100);
}
void Refine(v1::CreateSequencesRequest& request) {
  request.mutable_from_snapshot()->set_digest("s");
  request.mutable_from_snapshot()->set_position(4);
}
void Refine(v1::VerifyRequest& request) {
  request.set_layer_id(9);
  auto fill = [](v1::Tensor* tensor, std::initializer_list<uint64_t> shape, float value) {
    size_t count = 1;
    tensor->set_dtype(v1::DATA_TYPE_FP32);
    for (const uint64_t size : shape) {
      tensor->add_shape(size);
      count *= size;
    }
    const std::vector<float> values(count, value);
    tensor->set_data(values.data(), count * sizeof(float));
  };
  fill(request.mutable_q(), {2, 1, 16}, 0.1f);
  fill(request.mutable_k(), {2, 1, 16}, 0.2f);
  fill(request.mutable_v(), {2, 2, 8}, 1.0f);
  fill(request.mutable_log_alpha(), {2, 2}, -0.5f);
  fill(request.mutable_beta(), {2, 2}, 0.5f);
}
template <typename Request>
void Refine(Request&) {}

template <typename Request>
std::vector<std::pair<std::string, std::string>> SeedsOf() {
  Request plain, refined;
  Fill(plain);
  Fill(refined);
  Refine(refined);
  return {
      {"empty", ""}, {"plain", plain.SerializeAsString()}, {"full", refined.SerializeAsString()}};
}

}  // namespace

std::vector<std::string_view> Types() {
#define SSMD_NAME(type, handler) #type,
  return {SSMD_FUZZ_TYPES(SSMD_NAME)};
#undef SSMD_NAME
}

bool Run(std::string_view type, const uint8_t* data, size_t size) {
#define SSMD_RUN(name, handler)                                                    \
  if (type == #name) {                                                             \
    v1::name##Request request;                                                     \
    if (!request.ParseFromArray(data, static_cast<int>(size))) return false;       \
    World world;                                                                   \
    const bool accepted =                                                          \
        world.Serve<v1::name##Request, v1::name##Response>(request, handler).ok(); \
    world.Check();                                                                 \
    return accepted;                                                               \
  }
  SSMD_FUZZ_TYPES(SSMD_RUN)
#undef SSMD_RUN
  SSMD_CHECK(false, "no such request type");
  return false;
}

std::vector<std::pair<std::string, std::string>> Seeds(std::string_view type) {
#define SSMD_SEEDS(name, handler) \
  if (type == #name) return SeedsOf<v1::name##Request>();
  SSMD_FUZZ_TYPES(SSMD_SEEDS)
#undef SSMD_SEEDS
  return {};
}

}  // namespace ssmd::fuzz
