// SsmLayers: who keeps the recurrent states and evaluates the recurrences of the model's SSM
// layers.
//
// Two implementations: RemoteSsm asks an ssmd server, LocalSsm computes in this process. The model
// does not know which one it talks to.
//
// A step: Begin(rows), then Layer(...) once for each SSM layer, then Commit(accepted) or Abort().
// A layer takes the projections before the short convolution and returns what the gated norm takes:
// convolution, gates, norms, recurrence and D x lie between. Tensors are row-major floats, packed
// by token over all rows (N = sum of tokens):
//   projection  [N, channels]   Mamba-2 x|B|C, GDN and KDA q|k|v
//   gate        [N, head]       Mamba-2 dt, GDN a, before bias and softplus; KDA [N, head, d_k]
//   b           [N, head]       GDN and KDA, before the sigmoid; else empty
//   output      [N, head, d_v]
//
// A commit may take effect with the next call only (it then travels with it), and its error come
// from there; Settle() waits for it.
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

inline constexpr uint32_t kConvWidth = 4;

constexpr uint32_t ConvChannels(SsmFamily family) {
  return family == SsmFamily::kMamba2 ? 512 : 768;
}

// The small parameters of one SSM layer.
struct SsmParameters {
  std::vector<float> conv_weight;  // [channels, kConvWidth]; the last tap is the current token
  std::vector<float> conv_bias;    // [channels]; Mamba-2, else empty
  std::vector<float> a_log;        // [head]
  std::vector<float> dt_bias;      // [head], KDA [head, d_k]
  std::vector<float> d;            // [head]; Mamba-2, else empty
};
using AllSsmParameters = std::array<SsmParameters, kSsmShapes.size()>;

struct SsmInputs {
  absl::Span<const float> projection, gate, b;
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
  virtual absl::Status Settle() { return absl::OkStatus(); }
};

}  // namespace ssmd::demo
