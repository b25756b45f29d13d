// HybridModel: the demo's byte-level hybrid language model, everything but what lies between an SSM
// layer's projections and its gated norm (ssm.h).
//
//   embedding; 8 blocks  x += mixer(norm1(x)); x += mlp(norm2(x));  norm; logits = embedding x
//   mixers: mamba2, gdn, kda, attention, twice; d_model 256, no biases (train/model.py is the spec)
//
// All arithmetic is FP32, and the result for a token depends on its own row alone, bit for bit:
// every sum runs in an order that neither the batch nor the chunking of tokens changes.
//
// Immutable after Load, so Forward may run on several threads with different rows.
#pragma once

#include <Eigen/Core>
#include <array>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/demo/safetensors.h"
#include "client/demo/sequence_cache.h"
#include "client/demo/ssm.h"

namespace ssmd::demo {

inline constexpr uint32_t kVocabulary = 256;

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// A piece of a sequence: its next tokens. `cache` and `ssm` are at the same position.
struct ModelRow {
  SequenceCache* cache = nullptr;
  SsmLayers::Handle ssm{};
  absl::Span<const uint8_t> tokens;
};

class HybridModel {
 public:
  // Errors: NOT_FOUND or INVALID_ARGUMENT naming the tensor.
  static absl::StatusOr<std::unique_ptr<HybridModel>> Load(const Safetensors& weights);

  // Runs the tokens of all rows through the model: opens a step of `ssm`, appends to the caches.
  // Returns logits [N, 256], packed by token. `hidden`, when given, receives the residual stream
  // after each block. Commit must follow. After an error the rows are as before.
  absl::StatusOr<Matrix> Forward(absl::Span<const ModelRow> rows, SsmLayers& ssm,
                                 std::vector<Matrix>* hidden = nullptr) const;

  // Keeps the first accepted[i] tokens of each row of the last Forward.
  absl::Status Commit(absl::Span<const ModelRow> rows, absl::Span<const uint32_t> accepted,
                      SsmLayers& ssm) const;

  uint64_t parameter_count() const { return parameter_count_; }
  // Of convolutions and gates, for who evaluates them. Lives as long as the model.
  const AllSsmParameters& ssm_parameters() const { return ssm_parameters_; }

 private:
  struct Block {
    bool attention = false;
    size_t index = 0;  // among the SSM layers, or among the attention layers
    Matrix norm1, norm2, in_proj, out_proj, gate, up, down;
    // SSM blocks only:
    Matrix mixer_norm, f_proj;
  };
  class Loader;

  HybridModel() = default;

  absl::StatusOr<Matrix> SsmMixer(const Block& block, const Matrix& x, SsmLayers& ssm) const;
  Matrix Attention(const Block& block, const Matrix& x, absl::Span<const ModelRow> rows) const;

  uint64_t parameter_count_ = 0;
  Matrix embedding_, norm_;
  std::array<Block, 8> blocks_;
  AllSsmParameters ssm_parameters_;
};

}  // namespace ssmd::demo
