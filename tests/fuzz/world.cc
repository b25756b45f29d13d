#include "tests/fuzz/world.h"

#include <cmath>
#include <random>

#include "service/admin_handlers.h"
#include "service/handlers.h"
#include "tests/fuzz/world_internal.h"
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

}  // namespace

World::World() : core_(SmallServer(), [] { return absl::UnixEpoch(); }) {
  v1::RegisterModelRequest request;
  *request.mutable_spec() = testing::SmallSpec();
  v1::ModelCapacity& capacity = *request.mutable_capacity();
  capacity.set_sequences_max(5);
  capacity.set_snapshots_max(2);
  capacity.set_spare_pages(3);
  capacity.set_rows_max(4);
  capacity.set_steps_max(3);
  v1::RegisterModelResponse registered;
  Must(handlers::RegisterModel(core_, Principal{}, request, registered));
  model_ = registered.model_id();
  owner_ = Must(core_.sessions.Open(0, "fuzz")).id;
  Store& store = this->store();
  ids_ = Must(store.CreateSequences(owner_, 3)).ids;
  StepId committed{};
  for (uint64_t version = 1; version <= 3; ++version) {
    committed = Begin(store, {ids_[0], version, 2});
    for (uint32_t layer = 0; layer < 3; ++layer) Must(Verify(store, committed, layer, 2));
    const std::vector<uint32_t> accepted = {version < 3 ? 2u : 1u};
    Must(store.Commit(owner_, committed, accepted).status());
  }
  steps_ = {Begin(store, {ids_[2], 1, 2}), committed};
  Must(Verify(store, steps_[0], 0, 2));
  Must(store.CreateSnapshot(owner_, {ids_[0], 4}, {"s", 4}).status());
}

absl::Status World::Answered(const Message& request, const absl::Status& status) {
  SSMD_CHECK(!absl::IsInternal(status) && !absl::IsUnknown(status), "%s: %s",
             request.ShortDebugString().c_str(), status.ToString().c_str());
  return status;
}

bool Same(const Held& a, const Held& b) {
  return a.state.id == b.state.id && a.state.version == b.state.version &&
         a.state.position == b.state.position && a.state.floor == b.state.floor &&
         a.state.open_step == b.state.open_step && a.values == b.values;
}

std::vector<Held> World::Look(Store& store) const {
  std::vector<Held> all;
  for (const SequenceState& state : store.GetAll(owner_)) {
    Held held{.state = state};
    for (uint32_t layer = 0; layer < store.geometry().layers.size(); ++layer) {
      const size_t at = held.values.size();
      held.values.resize(at + store.geometry().layers[layer].state_elements());
      Must(store.ReadState(owner_, state.id, layer, state.position,
                           absl::MakeSpan(held.values).subspan(at)));
    }
    all.push_back(std::move(held));
  }
  return all;
}

void World::Check(Values values) {
  for (const ModelRef& model : core_.models.All()) {
    Store& store = *model->store;
    for (const Held& held : Look(store)) {
      for (const float x : held.values)
        SSMD_CHECK(values == Values::kAny || std::isfinite(x), "a state holds %f", double{x});
    }
    if (model->id == model_) Continue(store, values);
    for (const SnapshotKey& key : store.ListSnapshots(std::nullopt, 1000))
      Must(store.DeleteSnapshot(key));
  }
  core_.EndOwner(owner_, kNoTenant, SessionTable::Sequences::kRelease);
  for (const ModelRef& model : core_.models.All()) {
    const StoreUsage usage = model->store->usage();
    SSMD_CHECK(
        usage.sequences + usage.snapshots + usage.open_steps + usage.imports + usage.exports == 0 &&
            usage.pages.free == usage.pages.total,
        "%u sequences, %u snapshots, %u steps left", usage.sequences, usage.snapshots,
        usage.open_steps);
  }
}

StepId World::Begin(Store& store, StepRequest::Row row) {
  return Must(store.BeginStep(owner_, {.rows = {row}})).id;
}

absl::Status World::Verify(Store& store, StepId step, uint32_t layer, uint64_t tokens) {
  std::mt19937_64 random(layer);
  const LayerShape& shape = store.geometry().layers[layer];
  testing::PackedInputs packed;
  for (uint64_t i = 0; i < tokens; ++i)
    packed.Append(testing::RandomToken(shape, Dtype::kFp32, random), Dtype::kFp32);
  std::vector<float> output(tokens * shape.head_count * shape.d_v);
  return store
      .Verify(owner_, {.step = step,
                       .layer = layer,
                       .token_count = tokens,
                       .inputs = packed.view(),
                       .output = output.data()})
      .status();
}

// Every sequence that is idle takes another step.
void World::Continue(Store& store, Values values) {
  for (const SequenceState& state : store.GetAll(owner_))
    if (state.open_step == kNoStep) Continue(store, state, values);
}

void World::Continue(Store& store, const SequenceState& state, Values values) {
  auto step = store.BeginStep(owner_, {.rows = {{state.id, state.version, 4}}});
  if (absl::IsResourceExhausted(step.status())) return;
  Must(step.status());
  for (uint32_t layer = 0; layer < 3; ++layer) {
    const absl::Status verified = Verify(store, step->id, layer, 4);
    if (values == Values::kAny && absl::IsAborted(verified)) return;
    Must(verified);
  }
  const std::vector<uint32_t> accepted = {3};
  Must(store.Commit(owner_, step->id, accepted).status());
}

uint64_t World::Named(std::string_view field, uint64_t value) const {
  if (value == 0 || value > kSmallIds) return value;
  if (field == "model_id") return model_;
  if (field == "step_id") return static_cast<uint64_t>(steps_[(value - 1) % steps_.size()]);
  if (field == "session_id") return static_cast<uint64_t>(owner_);
  if (field == "server_epoch") return core_.epoch;
  return static_cast<uint64_t>(ids_[(value - 1) % ids_.size()]);
}

void World::Name(Message& message) const {
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
        reflection.SetRepeatedUInt64(&message, field, j,
                                     Named(name, reflection.GetRepeatedUInt64(message, field, j)));
      }
    } else if (reflection.HasField(message, field)) {
      reflection.SetUInt64(&message, field, Named(name, reflection.GetUInt64(message, field)));
    }
  }
}

void FillTensors(v1::VerifyRequest& request, uint32_t layer_id) {
  const bool gdn = layer_id == 9;
  const uint64_t heads = gdn ? 2 : 4;
  request.set_layer_id(layer_id);
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
  fill(request.mutable_q(), {2, heads / 2, 16}, 0.1f);
  fill(request.mutable_k(), {2, heads / 2, 16}, 0.2f);
  fill(request.mutable_v(), {2, heads, 8}, 1.0f);
  fill(request.mutable_log_alpha(), {2, heads}, -0.5f);
  if (gdn) fill(request.mutable_beta(), {2, heads}, 0.5f);
}

namespace {

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
  X(ListSnapshots, handlers::ListSnapshots)       \
  X(Drain, handlers::Drain)                       \
  X(SetLogLevel, handlers::SetLogLevel)           \
  X(ListSessions, handlers::ListSessions)         \
  X(EvictSnapshots, handlers::EvictSnapshots)

// ---- seeds

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
void Refine(v1::SetLogLevelRequest& request) { request.set_level("off"); }
void Refine(v1::EvictSnapshotsRequest& request) {
  for (const char* digest : {"s", "none"}) {
    request.add_keys()->set_digest(digest);
    request.mutable_keys()->rbegin()->set_position(4);
  }
}
void Refine(v1::VerifyRequest& request) { FillTensors(request, 9); }
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
  std::vector<std::string_view> types = {SSMD_FUZZ_TYPES(SSMD_NAME)};
#undef SSMD_NAME
  for (const OtherType& other : OtherTypes()) types.push_back(other.name);
  return types;
}

bool Run(std::string_view type, const uint8_t* data, size_t size) {
#define SSMD_RUN(name, handler)                                                    \
  if (type == #name) {                                                             \
    v1::name##Request request;                                                     \
    if (!request.ParseFromArray(data, static_cast<int>(size))) return false;       \
    World world;                                                                   \
    const bool accepted =                                                          \
        world.Serve<v1::name##Request, v1::name##Response>(request, handler).ok(); \
    world.Check(World::Values::kTame);                                             \
    return accepted;                                                               \
  }
  SSMD_FUZZ_TYPES(SSMD_RUN)
#undef SSMD_RUN
  for (const OtherType& other : OtherTypes()) {
    if (type != other.name) continue;
    World world;
    const bool accepted = other.run(world, {reinterpret_cast<const char*>(data), size});
    world.Check(other.values);
    return accepted;
  }
  SSMD_CHECK(false, "no such request type");
  return false;
}

std::vector<std::pair<std::string, std::string>> Seeds(std::string_view type) {
#define SSMD_SEEDS(name, handler) \
  if (type == #name) return SeedsOf<v1::name##Request>();
  SSMD_FUZZ_TYPES(SSMD_SEEDS)
#undef SSMD_SEEDS
  for (const OtherType& other : OtherTypes())
    if (type == other.name) return other.seeds();
  return {};
}

}  // namespace ssmd::fuzz
