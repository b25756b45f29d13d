#include "state_store/geometry.h"

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
  if (formats.checkpoint_hp != Dtype::kFp32 || formats.two_precision()) {
    return WithDetail(
        absl::UnimplementedError(absl::StrCat(
            "checkpoint formats ", DtypeName(formats.checkpoint_hp), "/",
            DtypeName(formats.checkpoint_lp), ": only fp32 without a low-precision copy is built")),
        detail::kField, "checkpoint_dtype");
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
          .formats = geometry.formats,
          .rule = geometry.flush_rule(),
          .slot_count = capacity.sequences_max + capacity.snapshots_max,
          // Every live sequence and snapshot may hold one page of its own; F more are between plan
          // and commit.
          .page_count = 1 + capacity.sequences_max + capacity.snapshots_max + capacity.spare_pages,
          .step_count = capacity.steps_max,
          .rows_max = capacity.rows_max,
          .folds_max = capacity.spare_pages,
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
