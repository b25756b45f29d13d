// TenantTable: tenants by number, and what each of them holds, against its quota.
//
// A tenant keeps its number for the life of the server, also when the tokens file forgets it for a
// while; at most kTenantsMax of them are known. kNoTenant is everybody, on a server without tokens:
// nothing of it is counted.
//
// Invariant, between calls: a tenant's count of sequences in a model is that of the store's
// sequences of its sessions, living or kept; its snapshots are the store's under its scope. So
// every creation and every end of them on behalf of a tenant passes here.
//
// Thread-safe. mu_ is held over `make` and `drop` of snapshots: it comes before a store's lock.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "service/tokens.h"
#include "state_store/store.h"

namespace ssmd {

enum class TenantId : uint32_t {};
inline constexpr TenantId kNoTenant{0};

namespace reason {
inline constexpr absl::string_view kQuota = "QUOTA_EXCEEDED";
}  // namespace reason

// What the store knows a tenant's snapshot under: other tenants' keys are other keys.
SnapshotKey ScopedKey(TenantId tenant, SnapshotKey key);
std::string ScopedDigest(TenantId tenant, absl::string_view digest);
SnapshotKey UnscopedKey(TenantId tenant, SnapshotKey key);
// Whose a scoped key is. Requires: it was scoped for a tenant, not kNoTenant.
TenantId TenantOf(const SnapshotKey& key);
bool IsInScope(TenantId tenant, const SnapshotKey& key);

class TenantTable {
 public:
  struct Usage {
    uint64_t sequences = 0, snapshots = 0, snapshot_bytes = 0;
    uint64_t pages() const { return sequences + snapshots; }
  };
  // What is counted, of which model: Model::id_tag.
  using ModelTag = uint16_t;

  // The tenant's number, and its quota from here on. RESOURCE_EXHAUSTED: too many tenants.
  absl::StatusOr<TenantId> Introduce(const std::string& name, const Quota& quota);

  // Runs `make`, which creates `count` sequences or none. Errors: RESOURCE_EXHAUSTED +
  // QUOTA_EXCEEDED, and then it is not run; its own.
  absl::StatusOr<NewSequences> CreateSequences(
      TenantId tenant, ModelTag model, uint64_t count,
      absl::FunctionRef<absl::StatusOr<NewSequences>()> make);
  void SequencesReleased(TenantId tenant, ModelTag model, uint64_t count);

  // Runs `make`, which publishes a snapshot of `bytes` under a scoped key, or finds one there
  // (false). Errors: as CreateSequences.
  absl::StatusOr<bool> CreateSnapshot(TenantId tenant, ModelTag model, const SnapshotKey& key,
                                      uint64_t bytes,
                                      absl::FunctionRef<absl::StatusOr<bool>()> make);
  absl::Status DeleteSnapshot(TenantId tenant, ModelTag model, const SnapshotKey& key,
                              absl::FunctionRef<absl::Status()> drop);
  // The model is gone, and all its snapshots.
  void ModelDropped(ModelTag model);

  Usage Of(TenantId tenant) const;
  Usage Of(TenantId tenant, ModelTag model) const;
  std::string NameOf(TenantId tenant) const;  // "-": none

 private:
  struct Holding {
    uint64_t sequences = 0;
    absl::flat_hash_map<SnapshotKey, uint64_t> snapshots;  // their bytes
    uint64_t snapshot_bytes = 0;
  };
  struct Tenant {
    std::string name;
    Quota quota;
    absl::flat_hash_map<ModelTag, Holding> by_model;
    Usage total;
  };
  static absl::Status Check(const Tenant& tenant, const Usage& more);
  Tenant& Get(TenantId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return tenants_[static_cast<uint32_t>(id) - 1];
  }
  const Tenant& Get(TenantId id) const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return tenants_[static_cast<uint32_t>(id) - 1];
  }
  static void Forget(Tenant& tenant, Holding& holding, const SnapshotKey& key);

  mutable absl::Mutex mu_;
  std::vector<Tenant> tenants_ ABSL_GUARDED_BY(mu_);  // [id - 1]
};

}  // namespace ssmd
