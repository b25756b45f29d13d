#include "state_store/geometry.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ssmd {
namespace {

absl::Status CheckRange(absl::string_view field, uint64_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return InvalidField(field, absl::StrCat(field, ": expected ", low, "..", high, ", got ", value));
}

absl::Status CheckMultiple(absl::string_view field, uint32_t value, uint32_t multiple) {
  if (value % multiple == 0) return absl::OkStatus();
  return InvalidField(field,
                      absl::StrCat(field, ": expected a multiple of ", multiple, ", got ", value));
}

absl::Status CheckLayer(size_t index, const LayerShape& layer) {
  const std::string at = absl::StrCat("layers[", index, "].");
  SSMD_RETURN_IF_ERROR(CheckRange(at + "head_count", layer.head_count, 1, kHeadsMax));
  SSMD_RETURN_IF_ERROR(
      CheckRange(at + "key_group_count", layer.key_group_count, 1, layer.head_count));
  if (layer.head_count % layer.key_group_count != 0) {
    return InvalidField(at + "key_group_count",
                        absl::StrCat(at, "key_group_count: expected a divisor of head_count ",
                                     layer.head_count, ", got ", layer.key_group_count));
  }
  SSMD_RETURN_IF_ERROR(CheckRange(at + "d_k", layer.d_k, 16, kDimMax));
  SSMD_RETURN_IF_ERROR(CheckMultiple(at + "d_k", layer.d_k, 16));
  SSMD_RETURN_IF_ERROR(CheckRange(at + "d_v", layer.d_v, 8, kDimMax));
  return CheckMultiple(at + "d_v", layer.d_v, 8);
}

absl::Status CheckLength(const std::string& field, size_t length, uint64_t expected,
                         bool may_be_empty) {
  if (length == expected || (may_be_empty && length == 0)) return absl::OkStatus();
  return InvalidField(field, absl::StrCat(field, ": expected ", expected, " values, got ", length));
}

absl::Status CheckFinite(const std::string& field, const std::vector<float>& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i])) continue;
    return InvalidField(field, absl::StrCat(field, "[", i, "] is not finite"));
  }
  return absl::OkStatus();
}

absl::Status CheckRaw(size_t index, const LayerShape& layer, const RawParameters& raw) {
  const std::string at = absl::StrCat("layers[", index, "].parameters.");
  const bool is_kda = layer.family == Family::kKda;
  SSMD_RETURN_IF_ERROR(CheckRange(at + "conv_width", layer.conv_width, 2, 4));
  SSMD_RETURN_IF_ERROR(CheckLength(at + "conv_weight", raw.conv_weight.size(),
                                   uint64_t{layer.conv_channels()} * layer.conv_width, false));
  SSMD_RETURN_IF_ERROR(
      CheckLength(at + "conv_bias", raw.conv_bias.size(), layer.conv_channels(), true));
  SSMD_RETURN_IF_ERROR(CheckLength(at + "a_log", raw.a_log.size(), layer.head_count, false));
  SSMD_RETURN_IF_ERROR(CheckLength(at + "dt_bias", raw.dt_bias.size(),
                                   uint64_t{layer.head_count} * layer.decays_per_head(), true));
  SSMD_RETURN_IF_ERROR(
      CheckLength(at + "d", raw.d.size(), layer.is_delta_rule() ? 0 : layer.head_count, true));
  for (const auto& [name, values] : {std::pair{"conv_weight", &raw.conv_weight},
                                     {"conv_bias", &raw.conv_bias},
                                     {"a_log", &raw.a_log},
                                     {"dt_bias", &raw.dt_bias},
                                     {"d", &raw.d}}) {
    SSMD_RETURN_IF_ERROR(CheckFinite(at + name, *values));
  }
  if (raw.qk_l2_norm && !layer.is_delta_rule()) {
    return InvalidField(at + "qk_l2_norm",
                        absl::StrCat(at, "qk_l2_norm: only GDN and KDA normalise"));
  }
  if (is_kda && raw.kda_gate == KdaGate::kLowerBound && !(raw.gate_lower_bound < 0)) {
    return InvalidField(
        at + "gate_lower_bound",
        absl::StrCat(at, "gate_lower_bound: expected below 0, got ", raw.gate_lower_bound));
  }
  return absl::OkStatus();
}

absl::Status CheckInputForm(const Geometry& geometry) {
  if (geometry.raw.empty()) {
    for (const LayerShape& layer : geometry.layers) {
      if (layer.conv_width != 0)
        return InvalidField("layer_groups.parameters", "post_conv form has no parameters");
    }
    return absl::OkStatus();
  }
  if (geometry.raw.size() != geometry.layers.size()) {
    return InvalidField("layer_groups.parameters",
                        absl::StrCat("raw form: expected parameters of ", geometry.layers.size(),
                                     " layers, got ", geometry.raw.size()));
  }
  for (size_t i = 0; i < geometry.layers.size(); ++i) {
    SSMD_RETURN_IF_ERROR(CheckRaw(i, geometry.layers[i], geometry.raw[i]));
  }
  return absl::OkStatus();
}

absl::Status CheckFormats(const Geometry& geometry) {
  const Formats& formats = geometry.formats;
  if (formats.activation == Dtype::kNone)
    return InvalidField("activation_dtype", "activation_dtype is not set");
  if (formats.output == Dtype::kNone)
    return InvalidField("output_dtype", "output_dtype is not set");
  if (formats.checkpoint_hp == Dtype::kNone)
    return InvalidField("checkpoint_dtype", "checkpoint_dtype is not set");
  bool has_delta_rule = false;
  for (const LayerShape& layer : geometry.layers) has_delta_rule |= layer.is_delta_rule();
  const bool correction_ok =
      has_delta_rule ? formats.correction == Dtype::kFp16 || formats.correction == Dtype::kFp32
                     : formats.correction == Dtype::kNone;
  if (!correction_ok) {
    return InvalidField("correction_dtype",
                        absl::StrCat("correction_dtype: expected ",
                                     has_delta_rule ? "fp16 or fp32" : "none (no GDN or KDA layer)",
                                     ", got ", DtypeName(formats.correction)));
  }
  const bool hp_ok = formats.checkpoint_hp == Dtype::kFp32 || formats.checkpoint_hp == Dtype::kFp16;
  const bool lp_ok = !formats.two_precision() || formats.checkpoint_lp == Dtype::kFp16;
  if (!hp_ok || !lp_ok) {
    return WithDetail(absl::UnimplementedError(absl::StrCat(
                          "checkpoint formats ", DtypeName(formats.checkpoint_hp), "/",
                          DtypeName(formats.checkpoint_lp),
                          ": fp32 or fp16, with or without an fp16 low-precision copy, are built")),
                      detail::kField, hp_ok ? "checkpoint_lp_dtype" : "checkpoint_dtype");
  }
  return absl::OkStatus();
}

bool AddProduct(uint64_t a, uint64_t b, uint64_t& sum) {
  uint64_t product = 0;
  return !__builtin_mul_overflow(a, b, &product) && !__builtin_add_overflow(sum, product, &sum);
}

}  // namespace

uint64_t Geometry::checkpoint_bytes() const {
  uint64_t bytes = 0;
  for (const LayerShape& layer : layers) bytes += MakePageLayout(layer, formats).page_bytes;
  return bytes;
}

uint64_t Geometry::ring_bytes() const {
  uint64_t bytes = 0;
  for (const LayerShape& layer : layers)
    bytes += MakeRingLayout(layer, formats, ring_records()).slot_bytes;
  return bytes;
}

uint64_t Geometry::conv_bytes() const {
  uint64_t bytes = 0;
  for (const LayerShape& layer : layers) {
    const RingLayout ring = MakeRingLayout(layer, formats, ring_records());
    bytes += ring.conv.row_bytes * ring.conv_rows;
  }
  return bytes;
}

uint64_t Geometry::record_bytes() const {
  uint64_t bytes = 0;
  for (const LayerShape& layer : layers)
    bytes += MakeRingLayout(layer, formats, ring_records()).record_bytes();
  return bytes;
}

absl::Status ValidateGeometry(const Geometry& geometry) {
  SSMD_RETURN_IF_ERROR(CheckRange("layers", geometry.layers.size(), 1, kLayersMax));
  for (size_t i = 0; i < geometry.layers.size(); ++i)
    SSMD_RETURN_IF_ERROR(CheckLayer(i, geometry.layers[i]));
  SSMD_RETURN_IF_ERROR(CheckRange("window_records", geometry.window_records, 1, kWindowRecordsMax));
  SSMD_RETURN_IF_ERROR(
      CheckRange("draft_tokens_max", geometry.draft_tokens_max, 1, kDraftTokensMax));
  if (uint64_t{geometry.rollback_tokens_min} + geometry.draft_tokens_max >
      geometry.window_records) {
    return InvalidField("draft_tokens_max",
                        absl::StrCat("draft_tokens_max ", geometry.draft_tokens_max,
                                     " + rollback_tokens_min ", geometry.rollback_tokens_min,
                                     " exceeds window_records ", geometry.window_records));
  }
  SSMD_RETURN_IF_ERROR(CheckInputForm(geometry));
  return CheckFormats(geometry);
}

absl::Status ValidateCapacity(const Capacity& capacity) {
  SSMD_RETURN_IF_ERROR(
      CheckRange("capacity.sequences_max", capacity.sequences_max, 1, kSlotsMax / 2));
  SSMD_RETURN_IF_ERROR(
      CheckRange("capacity.snapshots_max", capacity.snapshots_max, 0, kSlotsMax / 2));
  SSMD_RETURN_IF_ERROR(CheckRange("capacity.spare_pages", capacity.spare_pages, 1, kSlotsMax));
  SSMD_RETURN_IF_ERROR(CheckRange("capacity.rows_max", capacity.rows_max, 1, kRowsMax));
  return CheckRange("capacity.steps_max", capacity.steps_max, 1, kStepsMax);
}

BackendSpec MakeBackendSpec(const Geometry& geometry, const Capacity& capacity,
                            bool poison_garbage) {
  return {.layers = geometry.layers,
          .raw = geometry.raw,
          .formats = geometry.formats,
          .rule = geometry.flush_rule(),
          .rounding_seed = geometry.rounding_seed,
          .slot_count = capacity.sequences_max + capacity.snapshots_max + kExportSlots,
          // Every live sequence and snapshot may hold one page of its own; F more are between plan
          // and commit.
          .page_count = 1 + capacity.sequences_max + capacity.snapshots_max + kExportSlots +
                        capacity.spare_pages,
          .step_count = capacity.steps_max,
          .rows_max = capacity.rows_max,
          .folds_max = capacity.spare_pages,
          .flush_mode = geometry.flush_mode,
          .poison_garbage = poison_garbage};
}

absl::StatusOr<uint64_t> ReservedBytes(const Geometry& geometry, const Capacity& capacity) {
  const BackendSpec spec = MakeBackendSpec(geometry, capacity, false);
  uint64_t bytes = 0;
  if (!AddProduct(spec.page_count, geometry.checkpoint_bytes(), bytes) ||
      !AddProduct(spec.slot_count, geometry.ring_bytes(), bytes)) {
    return InvalidField("capacity", "capacity: the pools' bytes overflow 64 bits");
  }
  return bytes;
}

}  // namespace ssmd
