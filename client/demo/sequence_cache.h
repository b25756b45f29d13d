// SequenceCache: what the worker itself keeps of one sequence: the attention layers' keys and
// values and the convolutions' windows. (The recurrent states are SsmLayers' business.)
//
// `position` tokens are held. A step appends the rows of its drafts; Truncate drops the rejected
// ones, and also rolls back up to kRollbackTokens earlier ones: beyond that the windows are gone.
// A copy is a fork. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/demo/safetensors.h"
#include "client/demo/ssm.h"

namespace ssmd::demo {

inline constexpr uint32_t kModelDim = 256;
inline constexpr uint32_t kConvWidth = 4;
inline constexpr uint32_t kAttentionLayers = 2;

constexpr uint32_t ConvChannels(SsmFamily family) {
  return family == SsmFamily::kMamba2 ? 512 : 768;
}

// The inputs of one causal convolution: at least the last kConvWidth - 1 rows. Tokens before the
// first are zero rows.
class ConvWindow {
 public:
  explicit ConvWindow(uint32_t channels = 0)
      : channels_(channels), first_(1 - int64_t{kConvWidth}), rows_((kConvWidth - 1) * channels) {}

  int64_t end() const { return first_ + static_cast<int64_t>(rows_.size() / channels_); }
  bool Holds(int64_t position) const { return position >= first_ && position < end(); }
  // Requires: Holds(position).
  const float* row(int64_t position) const { return &rows_[(position - first_) * channels_]; }

  void Append(absl::Span<const float> row) { rows_.insert(rows_.end(), row.begin(), row.end()); }
  void Truncate(int64_t end) { rows_.resize((end - first_) * channels_); }
  void ForgetBefore(int64_t position);

 private:
  friend class SequenceCache;
  uint32_t channels_;
  int64_t first_;  // position of the first row held
  std::vector<float> rows_;
};

class SequenceCache {
 public:
  static constexpr uint32_t kRollbackTokens = 16;

  SequenceCache();

  uint64_t position() const { return position_; }

  // Drops everything at and after `position`. Errors: OUT_OF_RANGE when it is ahead of position()
  // or the windows before it are gone; the cache is then unchanged.
  absl::Status Truncate(uint64_t position);

  // As tensors "cache.*" of a file.
  void Save(SafetensorsWriter& writer) const;
  static absl::StatusOr<SequenceCache> Load(const Safetensors& file);

 private:
  friend class HybridModel;

  uint64_t position_ = 0;
  std::array<ConvWindow, kSsmShapes.size()> conv_;
  std::array<std::vector<float>, kAttentionLayers> keys_,
      values_;  // [position, kModelDim]; keys rotated
};

}  // namespace ssmd::demo
