// Geometry: what a registered model shard looks like, and every size that follows from it.
//
// Pure data and pure functions. ValidateGeometry is the one place where a model's limits are
// checked; whoever holds a validated geometry may rely on them (kernels check the ones they need
// again with SSMD_CHECK).
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/params.h"
#include "kernels/status.h"

namespace ssmd {

inline constexpr uint32_t kLayersMax = 1024;
inline constexpr uint32_t kHeadsMax = 4096;
inline constexpr uint32_t kWindowRecordsMax = 128;
inline constexpr uint32_t kSlotsMax = 1u << 20;
inline constexpr uint32_t kRowsMax = 1u << 16;
inline constexpr uint32_t kExportSlots = 1;  // exports running at a time
inline constexpr uint32_t kStepsMax = 4096;

struct Geometry {
  std::vector<LayerShape> layers;
  std::vector<RawParameters> raw;  // per layer; empty: post_conv form
  Formats formats;
  uint32_t window_records = 16;      // L
  uint32_t draft_tokens_max = 8;     // T_max
  uint32_t rollback_tokens_min = 0;  // K
  FlushMode flush_mode = FlushMode::kFused;
  uint64_t rounding_seed = 0;

  // R: room for deferred folds; see cursor.h.
  uint32_t ring_records() const { return window_records + 2 * draft_tokens_max; }
  FlushRule flush_rule() const {
    return {window_records, draft_tokens_max, rollback_tokens_min, ring_records()};
  }
  uint64_t checkpoint_bytes() const;  // one page, all layers
  uint64_t ring_bytes() const;        // one slot, all layers
  uint64_t conv_bytes() const;        // of ring_bytes: convolution windows
  uint64_t record_bytes() const;      // one token, all layers
};

struct Capacity {
  uint32_t sequences_max = 0;
  uint32_t snapshots_max = 0;
  uint32_t spare_pages = 0;  // F
  uint32_t rows_max = 0;
  uint32_t steps_max = 0;
  friend bool operator==(const Capacity&, const Capacity&) = default;
};

// INVALID_ARGUMENT naming the field (as in ssmd.v1.ModelSpec), or UNIMPLEMENTED for what is valid
// but not built.
absl::Status ValidateGeometry(const Geometry& geometry);

// INVALID_ARGUMENT naming the field (as in ssmd.v1.ModelCapacity).
absl::Status ValidateCapacity(const Capacity& capacity);

// Requires: both are valid. Errors: INVALID_ARGUMENT when the sizes overflow 64 bits.
absl::StatusOr<uint64_t> ReservedBytes(const Geometry& geometry, const Capacity& capacity);

// Requires: both are valid.
BackendSpec MakeBackendSpec(const Geometry& geometry, const Capacity& capacity,
                            bool poison_garbage);

}  // namespace ssmd
