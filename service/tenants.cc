#include "service/tenants.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/check.h"

namespace ssmd {
namespace {

// Of one length, so that no tenant's is the beginning of another's.
std::string Scope(TenantId tenant) {
  if (tenant == kNoTenant) return "";
  std::string scope;
  for (int shift = 24; shift >= 0; shift -= 8)
    scope.push_back(static_cast<char>(static_cast<uint32_t>(tenant) >> shift & 0xff));
  return scope;
}

absl::Status OverQuota(absl::string_view tenant, absl::string_view what, uint64_t limit,
                       uint64_t used, uint64_t more) {
  // No delay is named: only the tenant itself can make room.
  return ErrorWithReason(absl::StatusCode::kResourceExhausted, reason::kQuota,
                         absl::StrCat("quota of tenant ", tenant, ": ", what, "=", limit, ", ",
                                      used, " in use, ", more, " more asked"));
}

bool Exceeds(uint64_t limit, uint64_t used, uint64_t more) {
  return more > 0 && (used > limit || more > limit - used);
}

}  // namespace

std::string ScopedDigest(TenantId tenant, absl::string_view digest) {
  return absl::StrCat(Scope(tenant), digest);
}

SnapshotKey ScopedKey(TenantId tenant, SnapshotKey key) {
  key.digest = ScopedDigest(tenant, key.digest);
  return key;
}

SnapshotKey UnscopedKey(TenantId tenant, SnapshotKey key) {
  key.digest.erase(0, Scope(tenant).size());
  return key;
}

bool IsInScope(TenantId tenant, const SnapshotKey& key) {
  return absl::StartsWith(key.digest, Scope(tenant));
}

TenantId TenantOf(const SnapshotKey& key) {
  SSMD_CHECK(key.digest.size() >= 4, "a digest of %zu bytes has no tenant", key.digest.size());
  uint32_t tenant = 0;
  for (size_t i = 0; i < 4; ++i) tenant = tenant << 8 | static_cast<uint8_t>(key.digest[i]);
  return TenantId{tenant};
}

absl::StatusOr<TenantId> TenantTable::Introduce(const std::string& name, const Quota& quota) {
  absl::MutexLock lock(&mu_);
  for (size_t i = 0; i < tenants_.size(); ++i) {
    if (tenants_[i].name != name) continue;
    tenants_[i].quota = quota;
    return TenantId{static_cast<uint32_t>(i + 1)};
  }
  if (tenants_.size() == kTenantsMax)
    return absl::ResourceExhaustedError(absl::StrCat(
        "tenant ", name, ": ", kTenantsMax, " others were in the file since the server started"));
  tenants_.push_back({.name = name, .quota = quota});
  return TenantId{static_cast<uint32_t>(tenants_.size())};
}

absl::Status TenantTable::Check(const Tenant& tenant, const Usage& more) {
  const Usage& used = tenant.total;
  const Quota& quota = tenant.quota;
  if (Exceeds(quota.sequences, used.sequences, more.sequences))
    return OverQuota(tenant.name, "sequences", quota.sequences, used.sequences, more.sequences);
  if (Exceeds(quota.pages, used.pages(), more.pages()))
    return OverQuota(tenant.name, "pages", quota.pages, used.pages(), more.pages());
  if (Exceeds(quota.snapshot_bytes, used.snapshot_bytes, more.snapshot_bytes))
    return OverQuota(tenant.name, "snapshot-bytes", quota.snapshot_bytes, used.snapshot_bytes,
                     more.snapshot_bytes);
  return absl::OkStatus();
}

absl::StatusOr<NewSequences> TenantTable::CreateSequences(
    TenantId id, ModelTag model, uint64_t count,
    absl::FunctionRef<absl::StatusOr<NewSequences>()> make) {
  if (id == kNoTenant) return make();
  {
    absl::MutexLock lock(&mu_);
    Tenant& tenant = Get(id);
    SSMD_RETURN_IF_ERROR(Check(tenant, {.sequences = count}));
    tenant.by_model[model].sequences += count;  // before there are any: never too few are counted
    tenant.total.sequences += count;
  }
  absl::StatusOr<NewSequences> made = make();
  if (!made.ok()) SequencesReleased(id, model, count);
  return made;
}

void TenantTable::SequencesReleased(TenantId id, ModelTag model, uint64_t count) {
  if (id == kNoTenant || count == 0) return;
  absl::MutexLock lock(&mu_);
  Tenant& tenant = Get(id);
  Holding& holding = tenant.by_model[model];
  SSMD_CHECK(holding.sequences >= count, "tenant %s: more sequences released than created",
             tenant.name.c_str());
  holding.sequences -= count;
  tenant.total.sequences -= count;
  if (holding.sequences == 0 && holding.snapshots.empty()) tenant.by_model.erase(model);
}

void TenantTable::Forget(Tenant& tenant, Holding& holding, const SnapshotKey& key) {
  const auto found = holding.snapshots.find(key);
  if (found == holding.snapshots.end()) return;
  holding.snapshot_bytes -= found->second;
  tenant.total.snapshot_bytes -= found->second;
  --tenant.total.snapshots;
  holding.snapshots.erase(found);
}

absl::StatusOr<bool> TenantTable::CreateSnapshot(TenantId id, ModelTag model,
                                                 const SnapshotKey& key, uint64_t bytes,
                                                 absl::FunctionRef<absl::StatusOr<bool>()> make) {
  if (id == kNoTenant) return make();
  absl::MutexLock lock(&mu_);
  Tenant& tenant = Get(id);
  Holding& holding = tenant.by_model[model];
  const auto existing = holding.snapshots.find(key);
  Usage more{.snapshots = 1, .snapshot_bytes = bytes};
  if (existing != holding.snapshots.end()) {
    more = {.snapshot_bytes = bytes - std::min(bytes, existing->second)};
  }
  SSMD_RETURN_IF_ERROR(Check(tenant, more));
  SSMD_ASSIGN_OR_RETURN(const bool created, make());
  if (!created) return false;
  Forget(tenant, holding, key);
  holding.snapshots.emplace(key, bytes);
  holding.snapshot_bytes += bytes;
  tenant.total.snapshot_bytes += bytes;
  ++tenant.total.snapshots;
  return true;
}

absl::Status TenantTable::DeleteSnapshot(TenantId id, ModelTag model, const SnapshotKey& key,
                                         absl::FunctionRef<absl::Status()> drop) {
  if (id == kNoTenant) return drop();
  absl::MutexLock lock(&mu_);
  SSMD_RETURN_IF_ERROR(drop());
  Tenant& tenant = Get(id);
  Forget(tenant, tenant.by_model[model], key);
  return absl::OkStatus();
}

void TenantTable::ModelDropped(ModelTag model) {
  absl::MutexLock lock(&mu_);
  for (Tenant& tenant : tenants_) {
    const auto found = tenant.by_model.find(model);
    if (found == tenant.by_model.end()) continue;
    Holding& holding = found->second;
    tenant.total.snapshots -= holding.snapshots.size();
    tenant.total.snapshot_bytes -= holding.snapshot_bytes;
    holding.snapshots.clear();
    holding.snapshot_bytes = 0;
    // Sequences that are counted still are of calls under way, which take them back themselves.
    if (holding.sequences == 0) tenant.by_model.erase(found);
  }
}

TenantTable::Usage TenantTable::Of(TenantId id) const {
  if (id == kNoTenant) return {};
  absl::ReaderMutexLock lock(&mu_);
  return Get(id).total;
}

TenantTable::Usage TenantTable::Of(TenantId id, ModelTag model) const {
  if (id == kNoTenant) return {};
  absl::ReaderMutexLock lock(&mu_);
  const Tenant& tenant = Get(id);
  const auto found = tenant.by_model.find(model);
  if (found == tenant.by_model.end()) return {};
  return {.sequences = found->second.sequences,
          .snapshots = found->second.snapshots.size(),
          .snapshot_bytes = found->second.snapshot_bytes};
}

std::string TenantTable::NameOf(TenantId id) const {
  if (id == kNoTenant) return "-";
  absl::ReaderMutexLock lock(&mu_);
  return Get(id).name;
}

}  // namespace ssmd
