#include "service/admin_handlers.h"

#include <spdlog/spdlog.h>

#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "service/log.h"
#include "service/validate.h"

namespace ssmd::handlers {
namespace {

constexpr uint32_t kSnapshotsBatch = 1000;

// One by its key in the store; false: it is not there.
bool EvictOne(ServiceCore& core, const Model& model, TenantId tenant, const SnapshotKey& scoped) {
  return core.tenants
      .DeleteSnapshot(tenant, model.id_tag, scoped,
                      [&] { return model.store->DeleteSnapshot(scoped); })
      .ok();
}

// Ascending by key, each page after the last: what is published meanwhile cannot keep this going.
uint32_t EvictAll(ServiceCore& core, const Model& model) {
  uint32_t evicted = 0;
  std::optional<SnapshotKey> after;
  while (true) {
    const std::vector<SnapshotKey> keys = model.store->ListSnapshots(after, kSnapshotsBatch);
    if (keys.empty()) return evicted;
    for (const SnapshotKey& key : keys) {
      const TenantId tenant = core.auth.enabled() ? TenantOf(key) : kNoTenant;
      evicted += EvictOne(core, model, tenant, key);
    }
    after = keys.back();
  }
}

}  // namespace

absl::Status Drain(ServiceCore& core, const Principal&, const v1::DrainRequest& request,
                   v1::DrainResponse& response) {
  if (request.resume()) {
    SSMD_RETURN_IF_ERROR(core.Resume());
  } else {
    core.Drain();
  }
  response.set_draining(core.draining.load());
  response.set_sequences(core.LiveSequences());
  response.set_sessions(core.sessions.size());
  return absl::OkStatus();
}

absl::Status SetLogLevel(ServiceCore&, const Principal&, const v1::SetLogLevelRequest& request,
                         v1::SetLogLevelResponse& response) {
  const absl::StatusOr<std::string> previous = ChangeLogLevel(request.level());
  if (!previous.ok())
    return InvalidField("level", absl::StrCat("level: ", previous.status().message()));
  response.set_previous(*previous);
  return absl::OkStatus();
}

absl::Status ListSessions(ServiceCore& core, const Principal&,
                          const v1::ListSessionsRequest& request,
                          v1::ListSessionsResponse& response) {
  SSMD_ASSIGN_OR_RETURN(const uint32_t page_size, ParsePageSize(request.page_size()));
  std::vector<SessionTable::View> views =
      core.sessions.List(OwnerId{request.after()}, page_size + 1);
  if (views.size() > page_size) {  // one more than asked: there is a next page
    views.pop_back();
    response.set_next_after(static_cast<uint64_t>(views.back().id));
  }
  for (const SessionTable::View& view : views) {
    v1::SessionInfo& info = *response.add_sessions();
    info.set_session_id(static_cast<uint64_t>(view.id));
    info.set_client_name(view.client_name);
    info.set_kept(view.kept);
    info.set_age_ms(static_cast<uint64_t>(absl::ToInt64Milliseconds(view.age)));
    info.set_remaining_ms(static_cast<uint64_t>(absl::ToInt64Milliseconds(view.remaining)));
    info.set_lease_ms(view.lease_ms);
    info.set_adoption_ms(view.adoption_ms);
    info.set_calls_in_flight(view.calls_in_flight);
    info.set_sequences(core.CountSequences(view.id));
  }
  return absl::OkStatus();
}

absl::Status EvictSession(ServiceCore& core, const v1::EvictSessionRequest& request,
                          std::function<void(Store::Released)> done) {
  SSMD_RETURN_IF_ERROR(core.sessions.Evict(OwnerId{request.session_id()}, std::move(done)));
  spdlog::info("session {:#018x} evicted", request.session_id());
  return absl::OkStatus();
}

absl::Status EvictSnapshots(ServiceCore& core, const Principal& caller,
                            const v1::EvictSnapshotsRequest& request,
                            v1::EvictSnapshotsResponse& response) {
  SSMD_ASSIGN_OR_RETURN(const ModelRef model, core.models.Find(request.model_id()));
  if (request.all() != request.keys().empty() || request.keys_size() > kEvictKeysMax)
    return InvalidField(
        "keys", absl::StrCat("keys: expected 1..", kEvictKeysMax, " keys, or none and `all`, got ",
                             request.keys_size(), " keys", request.all() ? " and `all`" : ""));
  std::vector<SnapshotKey> keys;  // all are checked before the first is dropped
  for (int i = 0; i < request.keys_size(); ++i) {
    SSMD_ASSIGN_OR_RETURN(SnapshotKey key,
                          ParseSnapshotKey(absl::StrCat("keys[", i, "]"), request.keys(i)));
    keys.push_back(std::move(key));
  }
  uint32_t evicted = request.all() ? EvictAll(core, *model) : 0;
  for (const SnapshotKey& key : keys)
    evicted += EvictOne(core, *model, caller.tenant, ScopedKey(caller.tenant, key));
  response.set_evicted(evicted);
  response.set_absent(request.all() ? 0 : static_cast<uint32_t>(keys.size()) - evicted);
  spdlog::info("model {}: {} snapshots evicted", model->description.name, evicted);
  return absl::OkStatus();
}

}  // namespace ssmd::handlers
