// SequenceCache: what the worker itself keeps of one sequence: the attention layers' keys and
// values. (The recurrent states and the convolutions' windows are SsmLayers' business.)
//
// `position` tokens are held. A step appends the rows of its drafts; Truncate drops the rejected
// ones. A copy is a fork. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/demo/safetensors.h"

namespace ssmd::demo {

inline constexpr uint32_t kModelDim = 256;
inline constexpr uint32_t kAttentionLayers = 2;

class SequenceCache {
 public:
  uint64_t position() const { return position_; }

  // Drops everything at and after `position`. Errors: OUT_OF_RANGE when it is ahead of position();
  // the cache is then unchanged.
  absl::Status Truncate(uint64_t position);

  // As tensors "cache.*" of a file.
  void Save(SafetensorsWriter& writer) const;
  static absl::StatusOr<SequenceCache> Load(const Safetensors& file);

 private:
  friend class HybridModel;

  uint64_t position_ = 0;
  std::array<std::vector<float>, kAttentionLayers> keys_,
      values_;  // [position, kModelDim]; keys rotated
};

}  // namespace ssmd::demo
