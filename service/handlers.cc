#include "service/handlers.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "service/state_transfer.h"
#include "service/status_map.h"

namespace ssmd::handlers {
namespace {

SequenceVersion Named(uint64_t sequence_id, uint64_t version) {
  return {.id = SequenceId{sequence_id}, .version = version};
}

// Whose models a caller sees: an admin sees all.
TenantId ViewOf(const Principal& caller) {
  return caller.role == Role::kAdmin ? kNoTenant : caller.tenant;
}

uint64_t SnapshotBytes(const Store& store, const std::string& worker_window) {
  return store.geometry().checkpoint_bytes() + store.geometry().ring_bytes() + worker_window.size();
}

template <typename Response>
void FillNewSequences(const NewSequences& created, Response& response) {
  for (const SequenceId id : created.ids) response.add_sequence_ids(static_cast<uint64_t>(id));
  response.set_version(created.version);
  response.set_position(created.position);
}

}  // namespace

absl::Status RegisterModel(ServiceCore& core, const Principal& caller,
                           const v1::RegisterModelRequest& request,
                           v1::RegisterModelResponse& response) {
  SSMD_RETURN_IF_ERROR(core.CheckServing());
  SSMD_ASSIGN_OR_RETURN(const ModelDescription description, ParseModelSpec(request.spec()));
  SSMD_ASSIGN_OR_RETURN(
      const ModelTable::Registered registered,
      core.models.Register(description, ParseCapacity(request.capacity()), caller.tenant));
  const Model& model = *registered.model;
  if (registered.created) {
    spdlog::info("model {} registered: id {:#018x}, {} layers, {} bytes reserved",
                 model.description.name, model.id, model.layer_index.size(), model.reserved_bytes);
  }
  response.set_model_id(model.id);
  response.set_created(registered.created);
  ToProto(model.store->capacity(), *response.mutable_capacity());
  ToProto(model, *response.mutable_footprint());
  return absl::OkStatus();
}

absl::Status GetCapabilities(ServiceCore& core, const Principal& caller,
                             const v1::GetCapabilitiesRequest& request,
                             v1::GetCapabilitiesResponse& response) {
  const ServerConfig& config = core.config;
  response.set_server_version(ServerVersion());
  response.set_backend(core.device->name());
  response.set_message_bytes_max(config.message_bytes_max);
  response.set_state_bytes_max(core.device->bytes_max());
  response.set_state_bytes_used(core.device->bytes_used());
  response.set_models_max(config.models_max);
  response.set_sessions_max(config.sessions_max);
  response.set_lease_ms_min(config.lease_ms_min);
  response.set_lease_ms_max(config.lease_ms_max);
  response.set_step_timeout_ms_max(config.step_timeout_ms_max);
  response.set_verify_queue_max(config.verify_queue_max);
  response.set_adoption_ms_max(config.adoption_ms_max);
  response.set_stream_calls_max(config.stream_calls_max);
  response.set_stream_begins_max(config.stream_begins_max);
  response.set_chunk_bytes_max(static_cast<uint32_t>(ChunkBytesMax(config)));
  if (request.model_id() == 0) return absl::OkStatus();
  SSMD_ASSIGN_OR_RETURN(const ModelRef model, core.models.Find(request.model_id(), ViewOf(caller)));
  ToProto(model->description, *response.mutable_spec());
  ToProto(model->store->capacity(), *response.mutable_capacity());
  ToProto(*model, *response.mutable_footprint());
  return absl::OkStatus();
}

absl::Status OpenSession(ServiceCore& core, const Principal& caller,
                         const v1::OpenSessionRequest& request, v1::OpenSessionResponse& response) {
  SSMD_RETURN_IF_ERROR(core.CheckServing());
  SSMD_RETURN_IF_ERROR(CheckClientName(request.client_name()));
  SSMD_ASSIGN_OR_RETURN(const SessionTable::Opened opened,
                        core.sessions.Open(request.lease_ms(), request.client_name(),
                                           request.adoption_ms(), caller.tenant));
  if (core.log.Admits(LogKind::kSession, spdlog::level::info))
    EventLog::Write(
        LogKind::kSession, spdlog::level::info,
        {{"session", LogId(static_cast<uint64_t>(opened.id))}},
        absl::StrCat("session opened by '", request.client_name(), "' of tenant ",
                     core.tenants.NameOf(caller.tenant), ", lease ", opened.lease_ms, " ms"));
  response.set_session_id(static_cast<uint64_t>(opened.id));
  response.set_lease_ms(opened.lease_ms);
  return absl::OkStatus();
}

absl::Status GetStatus(ServiceCore& core, const Principal& caller, const v1::GetStatusRequest&,
                       v1::GetStatusResponse& response) {
  response.set_server_version(ServerVersion());
  response.set_backend(core.device->name());
  response.set_uptime_ms(
      static_cast<uint64_t>(absl::ToInt64Milliseconds(core.clock() - core.started)));
  const TenantId view = ViewOf(caller);
  response.set_sessions(view == kNoTenant ? core.sessions.size() : core.sessions.CountOf(view));
  response.set_draining(core.draining.load());
  response.set_state_bytes_used(core.device->bytes_used());
  response.set_state_bytes_max(core.device->bytes_max());
  response.set_sessions_kept(core.sessions.kept_count());
  response.set_sessions_max(core.config.sessions_max);
  response.set_verify_queue_depth(core.verify_queue.depth());
  response.set_verify_queue_max(core.config.verify_queue_max);
  response.set_verify_running(core.verify_queue.running());
  for (const ModelRef& model : core.models.All(view)) {
    StoreUsage usage = model->store->usage();
    if (view != kNoTenant) {  // of a model that several share, its own
      const TenantTable::Usage own = core.tenants.Of(view, model->id_tag);
      usage.sequences = static_cast<uint32_t>(own.sequences);
      usage.snapshots = static_cast<uint32_t>(own.snapshots);
    }
    const StoreCounters counters = model->store->counters();
    v1::ModelStatus& status = *response.add_models();
    status.set_model_id(model->id);
    status.set_name(model->description.name);
    ToProto(model->store->capacity(), *status.mutable_capacity());
    ToProto(*model, *status.mutable_footprint());
    status.set_sequences(usage.sequences);
    status.set_snapshots(usage.snapshots);
    status.set_open_steps(usage.open_steps);
    status.set_pages_total(usage.pages.total);
    status.set_pages_free(usage.pages.free);
    status.set_steps_committed(counters.steps_committed);
    status.set_steps_aborted(counters.steps_aborted);
    status.set_tokens_accepted(counters.tokens_accepted);
    status.set_flushes(counters.flushes_fused + counters.flushes_background +
                       counters.flushes_requested);
    status.set_tokens_drafted(counters.tokens_drafted);
    status.set_flushes_fused(counters.flushes_fused);
    status.set_flushes_background(counters.flushes_background);
    status.set_flushes_requested(counters.flushes_requested);
    status.set_flushes_deferred(counters.flushes_deferred);
    // A copy reads and writes what it copies.
    status.set_state_bytes_read(counters.checkpoint_hp_read_bytes +
                                counters.checkpoint_lp_read_bytes + counters.ring_read_bytes +
                                counters.ring_copy_bytes);
    status.set_state_bytes_written(counters.checkpoint_hp_write_bytes +
                                   counters.checkpoint_lp_write_bytes + counters.ring_write_bytes +
                                   counters.ring_copy_bytes);
    status.set_write_every_step_bytes(counters.write_every_step_bytes);
  }
  return absl::OkStatus();
}

absl::Status KeepAlive(ServiceCore&, Session& session, const v1::KeepAliveRequest&,
                       v1::KeepAliveResponse& response) {
  response.set_lease_ms(session.lease_ms());
  return absl::OkStatus();
}

absl::Status CreateSequences(ServiceCore& core, Session& session,
                             const v1::CreateSequencesRequest& request,
                             v1::CreateSequencesResponse& response) {
  SSMD_RETURN_IF_ERROR(core.CheckServing());
  SSMD_ASSIGN_OR_RETURN(const ModelRef model,
                        core.models.Find(request.model_id(), session.tenant()));
  std::optional<SnapshotKey> snapshot;
  if (request.has_from_snapshot()) {
    SSMD_ASSIGN_OR_RETURN(snapshot, ParseSnapshotKey("from_snapshot", request.from_snapshot()));
  }
  const std::string arguments =
      absl::StrCat("create ", request.model_id(), " ", request.count(), " ",
                   snapshot ? absl::StrCat(snapshot->position, " ", snapshot->digest) : "empty");
  const auto create = [&] {
    return snapshot ? model->store->CreateFromSnapshot(
                          session.id(), ScopedKey(session.tenant(), *snapshot), request.count())
                    : model->store->CreateSequences(session.id(), request.count());
  };
  const auto counted = [&] {
    return core.tenants.CreateSequences(session.tenant(), model->id_tag, request.count(), create);
  };
  SSMD_ASSIGN_OR_RETURN(const NewSequences created,
                        session.Once(request.request_id(), arguments, counted));
  FillNewSequences(created, response);
  response.set_worker_window(created.worker_window);
  return absl::OkStatus();
}

absl::Status ForkSequences(ServiceCore& core, Session& session,
                           const v1::ForkSequencesRequest& request,
                           v1::ForkSequencesResponse& response) {
  SSMD_RETURN_IF_ERROR(core.CheckServing());
  SSMD_ASSIGN_OR_RETURN(const ModelRef model,
                        core.models.Find(request.model_id(), session.tenant()));
  std::optional<uint64_t> position;
  if (request.has_position()) position = request.position();
  const std::string arguments =
      absl::StrCat("fork ", request.model_id(), " ", request.sequence_id(), " ", request.version(),
                   " ", request.count(), " ", position ? absl::StrCat(*position) : "tail");
  const auto fork = [&] {
    return model->store->Fork(session.id(), Named(request.sequence_id(), request.version()),
                              request.count(), position);
  };
  const auto counted = [&] {
    return core.tenants.CreateSequences(session.tenant(), model->id_tag, request.count(), fork);
  };
  SSMD_ASSIGN_OR_RETURN(const NewSequences created,
                        session.Once(request.request_id(), arguments, counted));
  FillNewSequences(created, response);
  return absl::OkStatus();
}

absl::Status ReleaseSequences(ServiceCore& core, Session& session,
                              const v1::ReleaseSequencesRequest& request,
                              v1::ReleaseSequencesResponse&) {
  SSMD_ASSIGN_OR_RETURN(const ModelRef model,
                        core.models.Find(request.model_id(), session.tenant()));
  SSMD_ASSIGN_OR_RETURN(
      const std::vector<SequenceId> ids,
      ParseSequenceIds(request.sequence_ids(), model->store->capacity().sequences_max));
  SSMD_RETURN_IF_ERROR(model->store->Release(session.id(), ids));
  core.tenants.SequencesReleased(session.tenant(), model->id_tag, ids.size());
  return absl::OkStatus();
}

absl::Status GetSequences(ServiceCore& core, Session& session,
                          const v1::GetSequencesRequest& request,
                          v1::GetSequencesResponse& response) {
  SSMD_ASSIGN_OR_RETURN(const ModelRef model,
                        core.models.Find(request.model_id(), session.tenant()));
  std::vector<SequenceState> states;
  if (request.sequence_ids().empty()) {
    states = model->store->GetAll(session.id());
  } else {
    SSMD_ASSIGN_OR_RETURN(
        const std::vector<SequenceId> ids,
        ParseSequenceIds(request.sequence_ids(), model->store->capacity().sequences_max));
    for (const SequenceId id : ids) {
      SSMD_ASSIGN_OR_RETURN(const SequenceState state, model->store->Get(session.id(), id));
      states.push_back(state);
    }
  }
  for (const SequenceState& state : states) ToProto(state, *response.add_sequences());
  return absl::OkStatus();
}

namespace {

absl::Status Annotated(const absl::Status& status, absl::string_view prefix) {
  absl::Status named(status.code(), absl::StrCat(prefix, ": ", status.message()));
  status.ForEachPayload(
      [&](absl::string_view key, const absl::Cord& value) { named.SetPayload(key, value); });
  return named;
}

// The commit that rides on a BeginStep; its context and model are the BeginStep's.
absl::Status CommitFirst(ServiceCore& core, Session& session, const v1::BeginStepRequest& request,
                         v1::CommitResponse& response) {
  v1::CommitRequest commit = request.commit_first();
  if (commit.model_id() != 0 && commit.model_id() != request.model_id()) {
    return InvalidField("commit_first.model_id",
                        absl::StrFormat("commit_first.model_id: expected none or the step's "
                                        "0x%016x, got 0x%016x",
                                        request.model_id(), commit.model_id()));
  }
  commit.set_model_id(request.model_id());
  SSMD_RETURN_IF_ERROR(Commit(core, session, commit, response));
  response.set_server_epoch(core.epoch);
  return absl::OkStatus();
}

// What the log would say of the step that this request begins.
StepTime TimeOf(const ServiceCore& core, const Session& session,
                const v1::BeginStepRequest& request) {
  constexpr int kSequencesNamed = 4;
  StepTime time{.begun = core.clock(),
                .session = static_cast<uint64_t>(session.id()),
                .model = request.model_id(),
                .rows = static_cast<uint32_t>(request.sequence_ids_size())};
  for (const uint32_t tokens : request.draft_tokens()) time.tokens += tokens;
  const auto& ids = request.sequence_ids();
  time.sequences.assign(ids.begin(), ids.begin() + std::min(ids.size(), kSequencesNamed));
  return time;
}

}  // namespace

absl::Status BeginStep(ServiceCore& core, Session& session, const v1::BeginStepRequest& request,
                       v1::BeginStepResponse& response) {
  SSMD_ASSIGN_OR_RETURN(const ModelRef model,
                        core.models.Find(request.model_id(), session.tenant()));
  SSMD_ASSIGN_OR_RETURN(
      ParsedStep parsed,
      ParseBeginStep(request, {.rows_max = model->store->capacity().rows_max,
                               .draft_tokens_max = model->store->geometry().draft_tokens_max,
                               .step_timeout_ms_max = core.config.step_timeout_ms_max}));
  if (request.has_commit_first()) {
    const absl::Status status = CommitFirst(core, session, request, *response.mutable_committed());
    if (!status.ok()) return Annotated(status, "commit_first");
  }
  parsed.request.deadline = core.clock() + absl::Milliseconds(parsed.step_timeout_ms);
  SSMD_ASSIGN_OR_RETURN(const OpenStep step, model->store->BeginStep(session.id(), parsed.request));
  response.set_step_id(static_cast<uint64_t>(step.id));
  for (const uint64_t position : step.positions) response.add_positions(position);
  response.set_flushing_rows(step.folds);
  if (core.step_times.enabled())
    core.step_times.Begin(response.step_id(), TimeOf(core, session, request));
  for (const absl::Status& status : step.row_status)
    *response.add_row_status() = ToRpcStatus(status);
  return absl::OkStatus();
}

absl::Status Commit(ServiceCore& core, Session& session, const v1::CommitRequest& request,
                    v1::CommitResponse& response) {
  SSMD_ASSIGN_OR_RETURN(const ModelRef model,
                        core.models.Find(request.model_id(), session.tenant()));
  const absl::Span<const uint32_t> accepted(request.accepted().data(), request.accepted_size());
  SSMD_ASSIGN_OR_RETURN(const CommitResult result,
                        model->store->Commit(session.id(), StepId{request.step_id()}, accepted));
  for (const uint64_t version : result.versions) response.add_versions(version);
  for (const uint64_t position : result.positions) response.add_positions(position);
  core.CountCommit(request.step_id());
  return absl::OkStatus();
}

absl::Status AbortStep(ServiceCore& core, Session& session, const v1::AbortStepRequest& request,
                       v1::AbortStepResponse&) {
  SSMD_ASSIGN_OR_RETURN(const ModelRef model,
                        core.models.Find(request.model_id(), session.tenant()));
  SSMD_RETURN_IF_ERROR(model->store->Abort(session.id(), StepId{request.step_id()}));
  core.step_times.Forget(request.step_id());
  return absl::OkStatus();
}

absl::Status Rollback(ServiceCore& core, Session& session, const v1::RollbackRequest& request,
                      v1::RollbackResponse& response) {
  SSMD_ASSIGN_OR_RETURN(const ModelRef model,
                        core.models.Find(request.model_id(), session.tenant()));
  SSMD_ASSIGN_OR_RETURN(
      const SequenceState state,
      model->store->Rollback(session.id(), Named(request.sequence_id(), request.version()),
                             request.position()));
  response.set_version(state.version);
  response.set_position(state.position);
  return absl::OkStatus();
}

absl::Status CreateSnapshot(ServiceCore& core, Session& session,
                            const v1::CreateSnapshotRequest& request,
                            v1::CreateSnapshotResponse& response) {
  SSMD_ASSIGN_OR_RETURN(const ModelRef model,
                        core.models.Find(request.model_id(), session.tenant()));
  SSMD_ASSIGN_OR_RETURN(const SnapshotKey key, ParseSnapshotKey("key", request.key()));
  SSMD_RETURN_IF_ERROR(CheckWorkerWindow("worker_window", request.worker_window()));
  const SnapshotKey scoped = ScopedKey(session.tenant(), key);
  const auto publish = [&] {
    return model->store->CreateSnapshot(
        session.id(), Named(request.sequence_id(), request.version()), scoped,
        {.overwrite = request.overwrite(), .worker_window = request.worker_window()});
  };
  SSMD_ASSIGN_OR_RETURN(
      const bool created,
      core.tenants.CreateSnapshot(session.tenant(), model->id_tag, scoped,
                                  SnapshotBytes(*model->store, request.worker_window()), publish));
  response.set_created(created);
  return absl::OkStatus();
}

absl::Status DeleteSnapshot(ServiceCore& core, Session& session,
                            const v1::DeleteSnapshotRequest& request, v1::DeleteSnapshotResponse&) {
  SSMD_ASSIGN_OR_RETURN(const ModelRef model,
                        core.models.Find(request.model_id(), session.tenant()));
  SSMD_ASSIGN_OR_RETURN(const SnapshotKey key, ParseSnapshotKey("key", request.key()));
  const SnapshotKey scoped = ScopedKey(session.tenant(), key);
  return core.tenants.DeleteSnapshot(session.tenant(), model->id_tag, scoped,
                                     [&] { return model->store->DeleteSnapshot(scoped); });
}

absl::Status UnregisterModel(ServiceCore& core, Session&, const v1::UnregisterModelRequest& request,
                             v1::UnregisterModelResponse& response) {
  SSMD_ASSIGN_OR_RETURN(const ModelTable::Unregistered gone,
                        core.models.Unregister(request.model_id()));
  core.tenants.ModelDropped(gone.id_tag);
  const uint32_t snapshots = gone.snapshots;
  spdlog::info("model {:#018x} unregistered, {} snapshots dropped", request.model_id(), snapshots);
  response.set_snapshots_dropped(snapshots);
  return absl::OkStatus();
}

absl::Status AdoptSequences(ServiceCore& core, Session& session,
                            const v1::AdoptSequencesRequest& request,
                            v1::AdoptSequencesResponse& response) {
  SSMD_ASSIGN_OR_RETURN(const ModelRef model,
                        core.models.Find(request.model_id(), session.tenant()));
  std::vector<SequenceId> ids;
  if (!request.sequence_ids().empty()) {
    SSMD_ASSIGN_OR_RETURN(
        ids, ParseSequenceIds(request.sequence_ids(), model->store->capacity().sequences_max));
  }
  SSMD_ASSIGN_OR_RETURN(
      const std::vector<SequenceState> adopted,
      core.sessions.Adopt(session, OwnerId{request.old_session_id()}, *model->store, ids));
  for (const SequenceState& state : adopted) ToProto(state, *response.add_sequences());
  return absl::OkStatus();
}

absl::Status FlushSequences(ServiceCore& core, Session& session,
                            const v1::FlushSequencesRequest& request,
                            v1::FlushSequencesResponse& response) {
  SSMD_ASSIGN_OR_RETURN(const ModelRef model,
                        core.models.Find(request.model_id(), session.tenant()));
  SSMD_ASSIGN_OR_RETURN(
      const std::vector<SequenceId> ids,
      ParseSequenceIds(request.sequence_ids(), model->store->capacity().sequences_max));
  SSMD_ASSIGN_OR_RETURN(const uint32_t flushed, model->store->Flush(session.id(), ids));
  response.set_flushed(flushed);
  return absl::OkStatus();
}

absl::Status LookupPrefix(ServiceCore& core, Session& session,
                          const v1::LookupPrefixRequest& request,
                          v1::LookupPrefixResponse& response) {
  SSMD_ASSIGN_OR_RETURN(const ModelRef model,
                        core.models.Find(request.model_id(), session.tenant()));
  SSMD_ASSIGN_OR_RETURN(std::vector<std::string> digests, ParseDigests(request.digests()));
  for (std::string& digest : digests) digest = ScopedDigest(session.tenant(), digest);
  const Store::Prefixes found = model->store->LookupPrefix(digests, request.position_max());
  for (const SnapshotKey& key : found.keys)
    ToProto(UnscopedKey(session.tenant(), key), *response.add_keys());
  response.set_too_long(found.too_long);
  core.metrics.CountPrefixLookup(!found.keys.empty()   ? Metrics::PrefixLookup::kHit
                                 : found.too_long == 0 ? Metrics::PrefixLookup::kAbsent
                                                       : Metrics::PrefixLookup::kTooLong);
  return absl::OkStatus();
}

absl::Status ListSnapshots(ServiceCore& core, Session& session,
                           const v1::ListSnapshotsRequest& request,
                           v1::ListSnapshotsResponse& response) {
  SSMD_ASSIGN_OR_RETURN(const ModelRef model,
                        core.models.Find(request.model_id(), session.tenant()));
  SSMD_ASSIGN_OR_RETURN(const uint32_t page_size, ParsePageSize(request.page_size()));
  const TenantId tenant = session.tenant();
  SnapshotKey after;  // a tenant's keys stand together; before the first of them
  if (!request.page_token().empty()) {
    SSMD_ASSIGN_OR_RETURN(after, ParsePageToken(model->id, request.page_token()));
  }
  std::vector<SnapshotKey> keys =
      model->store->ListSnapshots(ScopedKey(tenant, after), page_size + 1);
  while (!keys.empty() && !IsInScope(tenant, keys.back())) keys.pop_back();
  for (SnapshotKey& key : keys) key = UnscopedKey(tenant, std::move(key));
  if (keys.size() > page_size) {  // one more than asked: there is a next page
    keys.pop_back();
    response.set_next_page_token(MakePageToken(model->id, keys.back()));
  }
  for (const SnapshotKey& key : keys) ToProto(key, *response.add_keys());
  return absl::OkStatus();
}

absl::StatusOr<PreparedVerify> PrepareVerify(ServiceCore& core, Session& session,
                                             const v1::VerifyRequest& request) {
  PreparedVerify prepared;
  SSMD_ASSIGN_OR_RETURN(prepared.model, core.models.Find(request.model_id(), session.tenant()));
  const Store& store = *prepared.model->store;
  const auto layer = prepared.model->layer_index.find(request.layer_id());
  if (layer == prepared.model->layer_index.end()) {
    return InvalidField(
        "layer_id", absl::StrCat("layer_id: expected a layer of model ",
                                 prepared.model->description.name, ", got ", request.layer_id()));
  }
  const StepId step{request.step_id()};
  SSMD_ASSIGN_OR_RETURN(const uint64_t token_count, store.StepTokenCount(session.id(), step));
  prepared.layer_id = request.layer_id();
  prepared.expected = {.shape = store.geometry().layers[layer->second],
                       .formats = store.geometry().formats,
                       .raw = prepared.model->description.input_form == InputForm::kRaw,
                       .token_count = token_count,
                       .message_bytes_max = core.config.message_bytes_max};
  SSMD_ASSIGN_OR_RETURN(prepared.tensors, ParseVerifyTensors(request, prepared.expected));
  prepared.request = {.step = step,
                      .layer = layer->second,
                      .token_count = token_count,
                      .inputs = prepared.tensors.inputs,
                      .raw = prepared.tensors.raw};
  return prepared;
}

absl::Status RunVerify(PreparedVerify& prepared, OwnerId owner, v1::VerifyResponse& response) {
  SetOutput(prepared.expected, *response.mutable_output());
  prepared.request.output = response.mutable_output()->mutable_data()->data();
  const auto verified = prepared.model->store->Verify(owner, prepared.request);
  if (verified.ok()) {
    response.set_committed(verified->has_value());
    return absl::OkStatus();
  }
  // The store counts layers; the caller knows them by the ids it registered.
  return Annotated(verified.status(), absl::StrCat("layer_id ", prepared.layer_id));
}

}  // namespace ssmd::handlers
