// Streams, message by message as service/transfers.cc and service/steps_stream.cc take them but
// without their reactors; and CloseSession, whose end is that of the owner.
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/util/delimited_message_util.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <sstream>

#include "service/admin_handlers.h"
#include "service/fence.h"
#include "service/handlers.h"
#include "service/state_transfer.h"
#include "tests/fuzz/world_internal.h"

namespace ssmd::fuzz {
namespace {

using SeedList = std::vector<std::pair<std::string, std::string>>;

constexpr int kMessagesMax = 256;  // of one stream
constexpr uint64_t kRightChecksum = 1;

template <typename Message>
bool Parse(std::string_view bytes, Message& message) {
  return message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
}

// The messages of one stream; `take` returns whether to go on. True when all of them were taken.
template <typename Message, typename Take>
bool ForEach(std::string_view bytes, Take take) {
  google::protobuf::io::CodedInputStream in(reinterpret_cast<const uint8_t*>(bytes.data()),
                                            static_cast<int>(bytes.size()));
  bool at_end = false;
  for (int i = 0; i < kMessagesMax; ++i) {
    Message message;
    if (!google::protobuf::util::ParseDelimitedFromCodedStream(&message, &in, &at_end))
      return at_end && i > 0;
    if (!take(message)) return false;
  }
  return false;
}

template <typename Message>
std::string Delimited(const std::vector<Message>& messages) {
  std::ostringstream out;
  for (const Message& message : messages)
    google::protobuf::util::SerializeDelimitedToOstream(message, &out);
  return out.str();
}

// ---- ImportState

class Import {
 public:
  explicit Import(World& world) : world_(world) {}

  absl::Status Take(const v1::ImportStateRequest& message) {
    if (message.has_header() == opened_)
      return InvalidField("header", "header: expected once, as the first message");
    opened_ = true;
    if (message.has_header()) return Open(message.header());
    SSMD_ASSIGN_OR_RETURN(const SessionCall call, world_.core().sessions.Enter(world_.owner()));
    if (message.has_chunk()) {
      const v1::StateChunk& chunk = message.chunk();
      SSMD_RETURN_IF_ERROR(assembler_->Add(chunk));
      std::string& layer = received_[chunk.layer_id()];
      layer.resize(std::max(layer.size(), chunk.offset_bytes() + chunk.data().size()));
      layer.replace(chunk.offset_bytes(), chunk.data().size(), chunk.data());
      return absl::OkStatus();
    }
    if (!message.has_finish()) return InvalidField("message", "message: got none");
    const uint64_t checksum = message.finish().checksum();
    SSMD_ASSIGN_OR_RETURN(result_,
                          assembler_->Finish(checksum == kRightChecksum ? Checksum() : checksum));
    return absl::OkStatus();
  }

  const std::optional<SequenceState>& result() const { return result_; }

  // What was sent, as the sequence now must hold it.
  Held Expected() const {
    std::string bytes;
    for (const auto& [id, layer] : received_) bytes += layer;
    Held held{.state = {.id = SequenceId{header_.sequence_id()},
                        .version = header_.version() + 1,
                        .position = header_.state().position(),
                        .floor = header_.state().position()}};
    held.values.resize(bytes.size() / sizeof(float));
    std::memcpy(held.values.data(), bytes.data(), bytes.size());
    for (float& value : held.values)
      if (std::fpclassify(value) == FP_SUBNORMAL) value = 0;  // as kernels read it
    return held;
  }

 private:
  absl::Status Open(const v1::ImportStateRequest::Header& header) {
    header_ = header;
    ServiceCore& core = world_.core();
    SSMD_ASSIGN_OR_RETURN(const SessionCall call,
                          Fence(core, Principal{}, header.has_context(), header.context()));
    SSMD_ASSIGN_OR_RETURN(model_, core.models.Find(header.model_id()));
    SSMD_RETURN_IF_ERROR(CheckDescriptor(*model_, header.state()));
    SSMD_ASSIGN_OR_RETURN(
        import_, model_->store->BeginImport(call->id(), {.id = SequenceId{header.sequence_id()},
                                                         .version = header.version()}));
    assembler_ = std::make_unique<StateAssembler>(model_.get(), header.state(),
                                                  ChunkBytesMax(core.config), import_.get());
    return absl::OkStatus();
  }

  uint64_t Checksum() const {
    StateChecksum checksum;
    for (const auto& [id, layer] : received_) checksum.Update(layer.data(), layer.size());
    return checksum.value();
  }

  World& world_;
  bool opened_ = false;
  v1::ImportStateRequest::Header header_;
  std::map<uint32_t, std::string> received_;  // by layer id: the order of the descriptor
  std::optional<SequenceState> result_;
  ModelRef model_;
  std::unique_ptr<StateImport> import_;
  std::unique_ptr<StateAssembler> assembler_;
};

// Unless the import is finished, nothing has changed: neither while it is open nor afterwards.
bool RunImport(World& world, std::string_view bytes) {
  std::vector<Held> expected = world.Look(world.store());
  const auto check = [&] {
    const std::vector<Held> held = world.Look(world.store());
    SSMD_CHECK(std::equal(held.begin(), held.end(), expected.begin(), expected.end(), Same),
               "a sequence is not what it was, or not what was imported");
  };
  auto import = std::make_unique<Import>(world);
  ForEach<v1::ImportStateRequest>(bytes, [&](v1::ImportStateRequest& message) {
    world.Name(message);
    return World::Answered(message, import->Take(message)).ok() && !import->result();
  });
  const bool finished = import->result().has_value();
  if (finished) {
    for (Held& held : expected)
      if (held.state.id == import->result()->id) held = import->Expected();
  }
  check();
  import.reset();
  check();
  return finished;
}

SeedList ImportSeeds() {
  World world;
  v1::ImportStateRequest header, finish;
  Fill(*header.mutable_header());
  finish.mutable_finish()->set_checksum(kRightChecksum);
  const std::string plain = Delimited<v1::ImportStateRequest>({header, finish});
  // Sequence 2 becomes what sequence 1 is.
  header.mutable_header()->set_sequence_id(2);
  header.mutable_header()->set_version(1);
  const std::vector<Held> held = world.Look(world.store());
  StateReader reader(
      &world.model(),
      Must(world.store().BeginExport(world.owner(), {held[0].state.id, held[0].state.version})),
      1024);
  std::vector<v1::ImportStateRequest> messages = {header};
  v1::ExportStateResponse part;
  for (; Must(reader.Next(part)); part.Clear()) {
    if (part.has_state()) {
      *messages[0].mutable_header()->mutable_state() = part.state();
      messages[0].mutable_header()->mutable_state()->set_model_id(1);
    } else if (part.has_chunk()) {
      *messages.emplace_back().mutable_chunk() = part.chunk();
    }
  }
  messages.push_back(finish);
  return {{"empty", ""}, {"plain", plain}, {"full", Delimited(messages)}};
}

// ---- ExportState

absl::StatusOr<std::unique_ptr<StateExport>> BeginExport(World& world, Store& store,
                                                         const v1::ExportStateRequest& request) {
  if (request.has_snapshot()) {
    SSMD_ASSIGN_OR_RETURN(const SnapshotKey key, ParseSnapshotKey("snapshot", request.snapshot()));
    return store.BeginExport(key);
  }
  return store.BeginExport(world.owner(),
                           {.id = SequenceId{request.sequence_id()}, .version = request.version()});
}

// To its end, which must come in time; what comes is what the sequence holds.
absl::Status Export(World& world, const v1::ExportStateRequest& request) {
  ServiceCore& core = world.core();
  SSMD_ASSIGN_OR_RETURN(const SessionCall call,
                        Fence(core, Principal{}, request.has_context(), request.context()));
  const uint64_t chunk_bytes_max = ChunkBytesMax(core.config);
  if (request.chunk_bytes() % 4 != 0 || request.chunk_bytes() > chunk_bytes_max)
    return InvalidField("chunk_bytes", "chunk_bytes: expected a multiple of 4 up to the maximum");
  SSMD_ASSIGN_OR_RETURN(const ModelRef model, core.models.Find(request.model_id()));
  SSMD_ASSIGN_OR_RETURN(std::unique_ptr<StateExport> source,
                        BeginExport(world, *model->store, request));
  StateReader reader(model.get(), std::move(source),
                     request.chunk_bytes() == 0 ? chunk_bytes_max : request.chunk_bytes());
  uint64_t size = 0;
  for (const LayerShape& shape : model->store->geometry().layers)
    size += shape.state_elements() * sizeof(float);
  const uint64_t messages_max = 2 + size / 4;
  std::string bytes;
  StateChecksum checksum;
  bool finished = false;
  v1::ExportStateResponse message;
  for (uint64_t count = 0; Must(reader.Next(message)); message.Clear()) {
    SSMD_CHECK(++count <= messages_max && !finished &&
                   message.ByteSizeLong() <= core.config.message_bytes_max,
               "message %llu of an export of %llu bytes", static_cast<unsigned long long>(count),
               static_cast<unsigned long long>(size));
    bytes += message.chunk().data();
    checksum.Update(message.chunk().data().data(), message.chunk().data().size());
    finished = message.has_finish();
    SSMD_CHECK(!finished || message.finish().checksum() == checksum.value(), "wrong checksum");
  }
  SSMD_CHECK(finished && bytes.size() == size, "%zu bytes were exported", bytes.size());
  for (const Held& held : world.Look(*model->store)) {
    if (held.state.id != SequenceId{request.sequence_id()}) continue;
    SSMD_CHECK(std::memcmp(held.values.data(), bytes.data(), size) == 0, "another state came out");
  }
  return absl::OkStatus();
}

bool RunExport(World& world, std::string_view bytes) {
  v1::ExportStateRequest request;
  if (!Parse(bytes, request)) return false;
  world.Name(request);
  return World::Answered(request, Export(world, request)).ok();
}

SeedList ExportSeeds() {
  v1::ExportStateRequest plain, full;
  Fill(plain);
  full.set_model_id(1);
  full.set_chunk_bytes(512);
  full.mutable_snapshot()->set_digest("s");
  full.mutable_snapshot()->set_position(4);
  return {{"empty", ""}, {"plain", plain.SerializeAsString()}, {"full", full.SerializeAsString()}};
}

// ---- Steps

absl::Status Dispatch(World& world, const v1::StepsRequest& request) {
  ServiceCore& core = world.core();
  SSMD_ASSIGN_OR_RETURN(const SessionCall call,
                        Fence(core, Principal{}, request.has_context(), request.context()));
  switch (request.call_case()) {
    case v1::StepsRequest::kBegin: {
      v1::BeginStepResponse response;
      SSMD_RETURN_IF_ERROR(handlers::BeginStep(core, *call, request.begin(), response));
      world.AddStep(StepId{response.step_id()});
      return absl::OkStatus();
    }
    case v1::StepsRequest::kVerify: {
      v1::VerifyResponse response;
      SSMD_ASSIGN_OR_RETURN(handlers::PreparedVerify prepared,
                            handlers::PrepareVerify(core, *call, request.verify()));
      return handlers::RunVerify(prepared, call->id(), response);
    }
    case v1::StepsRequest::kCommit: {
      v1::CommitResponse response;
      return handlers::Commit(core, *call, request.commit(), response);
    }
    case v1::StepsRequest::kAbort: {
      v1::AbortStepResponse response;
      return handlers::AbortStep(core, *call, request.abort(), response);
    }
    case v1::StepsRequest::CALL_NOT_SET:
      break;
  }
  return InvalidField("call", "call: expected begin, verify, commit or abort, got none");
}

// A call that is refused does not end the stream.
bool RunSteps(World& world, std::string_view bytes) {
  bool accepted = true;
  const bool complete = ForEach<v1::StepsRequest>(bytes, [&](v1::StepsRequest& request) {
    world.Name(request);
    accepted &= World::Answered(request, Dispatch(world, request)).ok();
    return true;
  });
  return accepted && complete;
}

SeedList StepsSeeds() {
  v1::StepsRequest plain;
  Fill(*plain.mutable_begin());
  // Sequence 2 takes step 3; step 4 rides on its commit and is aborted; step 2's commit comes
  // again.
  std::vector<v1::StepsRequest> calls;
  const auto begin = [&](uint64_t version) -> v1::BeginStepRequest& {
    v1::BeginStepRequest& call = *calls.emplace_back().mutable_begin();
    call.set_model_id(1);
    call.add_sequence_ids(2);
    call.add_versions(version);
    call.add_draft_tokens(2);
    return call;
  };
  begin(1);
  for (const uint32_t layer_id : {3, 5, 9}) {
    v1::VerifyRequest& verify = *calls.emplace_back().mutable_verify();
    verify.set_model_id(1);
    verify.set_step_id(3);
    FillTensors(verify, layer_id);
  }
  v1::CommitRequest& first = *begin(2).mutable_commit_first();
  first.set_step_id(3);
  first.add_accepted(1);
  v1::AbortStepRequest& abort = *calls.emplace_back().mutable_abort();
  abort.set_model_id(1);
  abort.set_step_id(4);
  v1::CommitRequest& again = *calls.emplace_back().mutable_commit();
  again.set_model_id(1);
  again.set_step_id(2);
  again.add_accepted(1);
  return {
      {"empty", ""}, {"plain", Delimited<v1::StepsRequest>({plain})}, {"full", Delimited(calls)}};
}

// ---- CloseSession

// The context is all there is in the request: its small numbers are named, it is not replaced.
bool RunClose(World& world, std::string_view bytes) {
  v1::CloseSessionRequest request;
  if (!Parse(bytes, request)) return false;
  if (request.has_context()) {
    v1::CallContext& context = *request.mutable_context();
    context.set_server_epoch(world.Named("server_epoch", context.server_epoch()));
    context.set_session_id(world.Named("session_id", context.session_id()));
  }
  SessionTable& sessions = world.core().sessions;
  std::optional<Store::Released> released;
  const absl::Status status = [&]() -> absl::Status {
    SSMD_ASSIGN_OR_RETURN(const SessionCall call, Fence(world.core(), Principal{},
                                                        request.has_context(), request.context()));
    return sessions.Close(call, [&](Store::Released all) { released = all; });
  }();
  const bool closed = World::Answered(request, status).ok();
  SSMD_CHECK(closed == released.has_value() && closed == !sessions.Enter(world.owner()).ok(),
             "closing: %s", status.ToString().c_str());
  if (closed) {
    SSMD_CHECK(released->sequences == 3 && released->steps == 1 &&
                   world.store().CountOwned(world.owner()) == 0,
               "%u sequences, %u steps released", released->sequences, released->steps);
  }
  return closed;
}

SeedList CloseSeeds() {
  v1::CloseSessionRequest plain, full;
  plain.mutable_context()->set_server_epoch(1);
  plain.mutable_context()->set_session_id(100);
  full.mutable_context()->set_server_epoch(1);
  full.mutable_context()->set_session_id(1);
  return {{"empty", ""}, {"plain", plain.SerializeAsString()}, {"full", full.SerializeAsString()}};
}

// ---- EvictSession

bool RunEvict(World& world, std::string_view bytes) {
  v1::EvictSessionRequest request;
  if (!Parse(bytes, request)) return false;
  world.Name(request);
  std::optional<Store::Released> released;
  const absl::Status status =
      handlers::EvictSession(world.core(), request, [&](Store::Released all) { released = all; });
  const bool evicted = World::Answered(request, status).ok();
  SSMD_CHECK(evicted == released.has_value() &&
                 evicted == !world.core().sessions.Enter(world.owner()).ok(),
             "evicting: %s", status.ToString().c_str());
  if (evicted) {
    SSMD_CHECK(released->sequences == 3 && released->steps == 1 &&
                   world.store().CountOwned(world.owner()) == 0,
               "%u sequences, %u steps released", released->sequences, released->steps);
  }
  return evicted;
}

SeedList EvictSeeds() {
  v1::EvictSessionRequest plain, full;
  plain.set_session_id(100);
  full.set_session_id(1);
  return {{"empty", ""}, {"plain", plain.SerializeAsString()}, {"full", full.SerializeAsString()}};
}

constexpr OtherType kOtherTypes[] = {
    {"ImportState", World::Values::kAny, RunImport, ImportSeeds},
    {"ExportState", World::Values::kTame, RunExport, ExportSeeds},
    {"Steps", World::Values::kAny, RunSteps, StepsSeeds},
    {"CloseSession", World::Values::kTame, RunClose, CloseSeeds},
    {"EvictSession", World::Values::kTame, RunEvict, EvictSeeds},
};

}  // namespace

absl::Span<const OtherType> OtherTypes() { return kOtherTypes; }

}  // namespace ssmd::fuzz
