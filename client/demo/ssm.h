// SsmLayers: who keeps the recurrent states and evaluates the recurrences of the model's SSM
// layers.
//
// Two implementations: RemoteSsm asks an ssmd server, LocalSsm computes in this process. The model
// does not know which one it talks to.
//
// A step: Begin(rows), then Layer(...) once for each SSM layer, then Commit(accepted) or Abort().
// Tensors are row-major floats, packed by token over all rows (N = sum of tokens):
//   q, k         [N, group, d_k]      v, output  [N, head, d_v]
//   log_alpha    [N, head], KDA [N, head, d_k]
//   beta         [N, head], GDN and KDA; else empty     value_scale  [N, head], Mamba-2; else empty
//
// Errors: those of the implementation. After a failed Begin or Layer the step is over and the
// sequences are as before it. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ssmd::demo {

enum class SsmFamily : uint8_t { kMamba2, kGdn, kKda };

struct SsmShape {
  SsmFamily family;
  uint32_t layer_id;  // the block's number in the model
  uint32_t heads, groups, d_k, d_v;
};

// The SSM layers of the demo's model; layer numbers below index this table.
inline constexpr std::array<SsmShape, 6> kSsmShapes = {{
    {SsmFamily::kMamba2, 0, 4, 1, 128, 64},
    {SsmFamily::kGdn, 1, 4, 2, 128, 64},
    {SsmFamily::kKda, 2, 2, 2, 128, 128},
    {SsmFamily::kMamba2, 4, 4, 1, 128, 64},
    {SsmFamily::kGdn, 5, 4, 2, 128, 64},
    {SsmFamily::kKda, 6, 2, 2, 128, 128},
}};

struct SsmInputs {
  absl::Span<const float> q, k, v, log_alpha, beta, value_scale;
};

class SsmLayers {
 public:
  enum class Handle : uint64_t {};  // a sequence; never reused

  struct Row {
    Handle sequence{};
    uint32_t tokens = 0;
  };

  virtual ~SsmLayers() = default;

  virtual absl::StatusOr<std::vector<Handle>> Create(uint32_t count) = 0;
  virtual absl::StatusOr<std::vector<Handle>> Fork(Handle parent, uint32_t count) = 0;
  virtual absl::Status Release(absl::Span<const Handle> sequences) = 0;

  virtual absl::Status Begin(absl::Span<const Row> rows) = 0;
  virtual absl::Status Layer(size_t layer, const SsmInputs& inputs, absl::Span<float> output) = 0;
  // Keeps the first accepted[i] tokens of each row.
  virtual absl::Status Commit(absl::Span<const uint32_t> accepted) = 0;
  virtual absl::Status Abort() = 0;
};

}  // namespace ssmd::demo
