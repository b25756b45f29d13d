// ModelTable: the registered model shards, each with its store.
//
// A model's id is the fingerprint of its spec: XXH3-64 over CanonicalSpec(), the same on every
// server; 0 is mapped to 1. A call holds its model alive through a ModelRef; a model that was
// unregistered refuses new sequences and steps, and its memory comes back with its last ModelRef.
//
// Tenants see the models that they registered, and those that were registered for everybody; equal
// specs share one model. To kNoTenant all are visible.
//
// Thread-safe. Lock order: register_mu_ (one registration at a time, held while pools are
// reserved), then mu_ (the table; a leaf).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"
#include "service/config.h"
#include "service/tenants.h"
#include "state_store/store.h"

namespace ssmd {

enum class InputForm : uint8_t { kPostConv = 1, kRaw = 2 };

// ssmd.v1.ModelSpec as plain data; made by ParseModelSpec, which has checked it.
struct ModelDescription {
  struct LayerGroup {
    LayerShape shape;
    std::vector<uint32_t> layer_ids;
    std::vector<RawParameters> parameters;  // raw form: one per layer id; else empty
  };
  std::string name;
  std::vector<LayerGroup> groups;
  InputForm input_form = InputForm::kPostConv;
  Formats formats;
  uint32_t window_records = 0, draft_tokens_max = 0, rollback_tokens_min = 0;
  uint32_t tp_rank = 0, tp_size = 1, pp_rank = 0, pp_size = 1;
  FlushMode flush_mode = FlushMode::kFused;
  uint64_t rounding_seed = 0;

  Geometry MakeGeometry() const;  // layers in the order of the groups and of their layer_ids
};

// The bytes that the fingerprint is computed over. Little-endian, in this order:
//   u32 format version = 1; u32 name length, name
//   u32 group count; per group: u32 family, u32 id count, u32 ids..., u32 head_count,
//     u32 key_group_count, u32 d_k, u32 d_v, u32 parameter count; per layer's parameters: u32
//     conv_width; conv_weight, conv_bias, a_log, dt_bias, d, each u32 length and the floats' bits;
//     u32 qk_l2_norm, u32 kda_gate (0: not KDA, else as in ssmd.v1), gate_lower_bound's bits
//   u32 input_form, activation, correction, output, checkpoint, checkpoint_lp (0: none)
//   u32 window_records, draft_tokens_max, rollback_tokens_min, tp_rank, tp_size, pp_rank, pp_size
//   u32 flush_mode (as in ssmd.v1, never 0), u64 rounding_seed
// Order and grouping of layers count: the same layers listed otherwise are another model.
std::string CanonicalSpec(const ModelDescription& description);
uint64_t Fingerprint(const ModelDescription& description);

struct Model {
  uint64_t id = 0;
  ModelDescription description;
  absl::flat_hash_map<uint32_t, uint32_t>
      layer_index;  // worker's layer id -> index in the geometry
  std::unique_ptr<Store> store;
  std::vector<uint32_t> layer_ids;  // index in the geometry -> worker's layer id
  uint64_t reserved_bytes = 0;
  uint16_t id_tag = 0;
  // Who registered it, kNoTenant: for everybody. Guarded by ModelTable's mutex.
  absl::flat_hash_set<TenantId> tenants;
};

using ModelRef = std::shared_ptr<Model>;

// Zero fields take the defaults.
Capacity ResolveCapacity(const Capacity& requested, const CapacityDefaults& defaults);

class ModelTable {
 public:
  struct Options {
    uint32_t models_max = 16;
    CapacityDefaults defaults;
    uint64_t server_epoch = 1;
    bool poison_garbage = false;
    bool foreign_is_unknown = false;  // as in Store::Options
  };
  using MakeBackend = std::function<absl::StatusOr<std::unique_ptr<Backend>>(const BackendSpec&)>;

  ModelTable(const Options& options, MakeBackend make_backend)
      : options_(options), make_backend_(std::move(make_backend)) {}
  ModelTable(const ModelTable&) = delete;
  ModelTable& operator=(const ModelTable&) = delete;

  struct Registered {
    ModelRef model;
    bool created = false;  // false: it was there, and visible to the tenant
  };
  // `requested` zeros: defaults for a new model, anything for one that is there.
  // Errors: FAILED_PRECONDITION when it is there with another capacity; RESOURCE_EXHAUSTED +
  // LIMIT_REACHED or NO_MEMORY; those of Store::Create. Nothing is registered then.
  absl::StatusOr<Registered> Register(const ModelDescription& description,
                                      const Capacity& requested, TenantId tenant = kNoTenant);

  struct Unregistered {
    uint16_t id_tag = 0;
    uint32_t snapshots = 0;  // dropped
  };
  // Takes a model out of the table, of all tenants, and gives its memory back.
  // Errors: NOT_FOUND; FAILED_PRECONDITION while sequences live or steps, imports or exports are
  // open; it stays registered then.
  absl::StatusOr<Unregistered> Unregister(uint64_t id);

  // NOT_FOUND, also for a model that the tenant does not see.
  absl::StatusOr<ModelRef> Find(uint64_t id, TenantId tenant = kNoTenant) const;
  std::vector<ModelRef> All(TenantId tenant = kNoTenant) const;  // in the order of registration

 private:
  // Distinct for all models that are registered at one time, and used again as late as can be;
  // another epoch most likely gets others.
  static bool Sees(TenantId tenant, const Model& model) {
    return tenant == kNoTenant || model.tenants.contains(tenant) ||
           model.tenants.contains(kNoTenant);
  }
  uint16_t NextIdTag() ABSL_EXCLUSIVE_LOCKS_REQUIRED(register_mu_);

  const Options options_;
  const MakeBackend make_backend_;

  absl::Mutex register_mu_ ABSL_ACQUIRED_BEFORE(mu_);
  mutable absl::Mutex mu_;
  std::vector<ModelRef> models_ ABSL_GUARDED_BY(mu_);
  uint64_t next_tag_ ABSL_GUARDED_BY(register_mu_) = 0;
};

}  // namespace ssmd
