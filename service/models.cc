#include "service/models.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ssmd {
namespace {

constexpr absl::Duration kRetireWait = absl::Seconds(1);

void Put(std::string& out, uint32_t value) {
  for (int shift = 0; shift < 32; shift += 8)
    out.push_back(static_cast<char>(value >> shift & 0xff));
}

void Put(std::string& out, float value) { Put(out, std::bit_cast<uint32_t>(value)); }

void Put(std::string& out, const std::vector<float>& values) {
  Put(out, static_cast<uint32_t>(values.size()));
  for (const float value : values) Put(out, value);
}

void Put(std::string& out, const LayerShape& shape, const RawParameters& raw) {
  Put(out, shape.conv_width);
  for (const std::vector<float>* values :
       {&raw.conv_weight, &raw.conv_bias, &raw.a_log, &raw.dt_bias, &raw.d})
    Put(out, *values);
  Put(out, uint32_t{raw.qk_l2_norm});
  Put(out, shape.family == Family::kKda ? static_cast<uint32_t>(raw.kda_gate) + 1 : 0u);
  Put(out, raw.gate_lower_bound);
}

// Every nonzero field of `requested` that differs from `actual`; "" when none does.
std::string CapacityDifference(const Capacity& requested, const Capacity& actual) {
  std::string text;
  const auto compare = [&text](absl::string_view name, uint32_t wanted, uint32_t have) {
    if (wanted != 0 && wanted != have)
      absl::StrAppend(&text, text.empty() ? "" : ", ", name, " is ", have, ", request expected ",
                      wanted);
  };
  compare("sequences_max", requested.sequences_max, actual.sequences_max);
  compare("snapshots_max", requested.snapshots_max, actual.snapshots_max);
  compare("spare_pages", requested.spare_pages, actual.spare_pages);
  compare("rows_max", requested.rows_max, actual.rows_max);
  compare("steps_max", requested.steps_max, actual.steps_max);
  return text;
}

}  // namespace

Geometry ModelDescription::MakeGeometry() const {
  Geometry geometry;
  for (const LayerGroup& group : groups) {
    geometry.layers.insert(geometry.layers.end(), group.layer_ids.size(), group.shape);
    geometry.raw.insert(geometry.raw.end(), group.parameters.begin(), group.parameters.end());
  }
  geometry.formats = formats;
  geometry.window_records = window_records;
  geometry.draft_tokens_max = draft_tokens_max;
  geometry.rollback_tokens_min = rollback_tokens_min;
  geometry.flush_mode = flush_mode;
  geometry.rounding_seed = rounding_seed;
  return geometry;
}

std::string CanonicalSpec(const ModelDescription& description) {
  std::string out;
  Put(out, 1u);
  Put(out, static_cast<uint32_t>(description.name.size()));
  out += description.name;
  Put(out, static_cast<uint32_t>(description.groups.size()));
  for (const ModelDescription::LayerGroup& group : description.groups) {
    Put(out, static_cast<uint32_t>(group.shape.family));
    Put(out, static_cast<uint32_t>(group.layer_ids.size()));
    for (const uint32_t id : group.layer_ids) Put(out, id);
    for (const uint32_t field :
         {group.shape.head_count, group.shape.key_group_count, group.shape.d_k, group.shape.d_v})
      Put(out, field);
    Put(out, static_cast<uint32_t>(group.parameters.size()));
    for (const RawParameters& raw : group.parameters) Put(out, group.shape, raw);
  }
  Put(out, static_cast<uint32_t>(description.input_form));
  const Formats& formats = description.formats;
  for (const Dtype dtype : {formats.activation, formats.correction, formats.output,
                            formats.checkpoint_hp, formats.checkpoint_lp})
    Put(out, static_cast<uint32_t>(dtype));
  for (const uint32_t field :
       {description.window_records, description.draft_tokens_max, description.rollback_tokens_min,
        description.tp_rank, description.tp_size, description.pp_rank, description.pp_size})
    Put(out, field);
  Put(out, static_cast<uint32_t>(description.flush_mode) + 1);
  Put(out, static_cast<uint32_t>(description.rounding_seed));
  Put(out, static_cast<uint32_t>(description.rounding_seed >> 32));
  return out;
}

uint64_t Fingerprint(const ModelDescription& description) {
  const std::string bytes = CanonicalSpec(description);
  const uint64_t hash = XXH3_64bits(bytes.data(), bytes.size());
  return hash == 0 ? 1 : hash;
}

Capacity ResolveCapacity(const Capacity& requested, const CapacityDefaults& defaults) {
  const auto or_default = [](uint32_t value, uint32_t fallback) {
    return value != 0 ? value : fallback;
  };
  Capacity capacity;
  capacity.sequences_max = or_default(requested.sequences_max, defaults.sequences_max);
  capacity.snapshots_max = or_default(requested.snapshots_max, defaults.snapshots_max);
  capacity.spare_pages =
      or_default(requested.spare_pages,
                 or_default(defaults.spare_pages, std::max(2u, (capacity.sequences_max + 3) / 4)));
  capacity.rows_max =
      or_default(requested.rows_max,
                 or_default(defaults.rows_max, std::min(capacity.sequences_max, kRowsMax)));
  capacity.steps_max = or_default(requested.steps_max, defaults.steps_max);
  return capacity;
}

uint16_t ModelTable::NextIdTag() {
  const std::vector<ModelRef> models = All();
  while (true) {
    const auto tag = static_cast<uint16_t>(1 + (options_.server_epoch + next_tag_++) % 0xffffu);
    if (std::none_of(models.begin(), models.end(),
                     [tag](const ModelRef& model) { return model->id_tag == tag; }))
      return tag;
  }
}

absl::StatusOr<ModelTable::Registered> ModelTable::Register(const ModelDescription& description,
                                                            const Capacity& requested,
                                                            TenantId tenant) {
  const uint64_t id = Fingerprint(description);
  absl::MutexLock register_lock(&register_mu_);
  if (const absl::StatusOr<ModelRef> found = Find(id); found.ok()) {
    if (CanonicalSpec((*found)->description) != CanonicalSpec(description)) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "spec: another spec has the same fingerprint 0x%016x; change the name", id));
    }
    const std::string difference = CapacityDifference(requested, (*found)->store->capacity());
    if (difference.empty()) {
      absl::MutexLock lock(&mu_);
      const bool seen = Sees(tenant, **found);
      (*found)->tenants.insert(tenant);
      return Registered{*found, !seen};
    }
    return WithDetail(absl::FailedPreconditionError(absl::StrCat(
                          "capacity: the model is registered with another one: ", difference)),
                      detail::kField, "capacity");
  }
  if (All().size() >= options_.models_max) {
    return ErrorWithReason(
        absl::StatusCode::kResourceExhausted, reason::kLimit,
        absl::StrCat("models_max: ", options_.models_max, " models are registered"));
  }
  auto model = std::make_shared<Model>();
  model->id = id;
  model->description = description;
  for (const ModelDescription::LayerGroup& group : description.groups)
    for (const uint32_t layer_id : group.layer_ids) {
      model->layer_index.emplace(layer_id, static_cast<uint32_t>(model->layer_ids.size()));
      model->layer_ids.push_back(layer_id);
    }
  model->id_tag = NextIdTag();
  model->tenants.insert(tenant);
  const Store::Options store_options = {.geometry = description.MakeGeometry(),
                                        .capacity = ResolveCapacity(requested, options_.defaults),
                                        .id_tag = model->id_tag,
                                        .poison_garbage = options_.poison_garbage,
                                        .foreign_is_unknown = options_.foreign_is_unknown};
  SSMD_ASSIGN_OR_RETURN(model->store, Store::Create(store_options, make_backend_));
  SSMD_ASSIGN_OR_RETURN(model->reserved_bytes,
                        ReservedBytes(store_options.geometry, store_options.capacity));
  absl::MutexLock lock(&mu_);
  models_.push_back(model);
  return Registered{std::move(model), true};
}

absl::StatusOr<ModelTable::Unregistered> ModelTable::Unregister(uint64_t id) {
  absl::MutexLock register_lock(&register_mu_);  // nobody registers it meanwhile
  SSMD_ASSIGN_OR_RETURN(ModelRef model, Find(id));
  SSMD_ASSIGN_OR_RETURN(const uint32_t snapshots, model->store->Retire());
  {
    absl::MutexLock lock(&mu_);
    models_.erase(std::find(models_.begin(), models_.end(), model));
  }
  // Calls and scrapes that still look at it end soon: nothing of it computes. Whoever registers
  // next finds the memory free.
  const absl::Time end = absl::Now() + kRetireWait;
  while (model.use_count() > 1 && absl::Now() < end) absl::SleepFor(absl::Microseconds(100));
  return Unregistered{model->id_tag, snapshots};
}

absl::StatusOr<ModelRef> ModelTable::Find(uint64_t id, TenantId tenant) const {
  absl::MutexLock lock(&mu_);
  for (const ModelRef& model : models_)
    if (model->id == id && Sees(tenant, *model)) return model;
  return absl::NotFoundError(
      absl::StrFormat("model_id: no model 0x%016x is registered on this server", id));
}

std::vector<ModelRef> ModelTable::All(TenantId tenant) const {
  absl::MutexLock lock(&mu_);
  std::vector<ModelRef> seen;
  for (const ModelRef& model : models_)
    if (Sees(tenant, *model)) seen.push_back(model);
  return seen;
}

}  // namespace ssmd
