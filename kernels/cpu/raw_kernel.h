// The raw input form on the CPU: short convolution, gates and norms of one row of a step and one
// key group, made into the inputs that VerifyGroup takes.
//
//   conv   y_p = SiLU(bias + sum_{i < w} weight_i * z_{p - (w-1) + i}) per channel, z the
//          projection, 0 at positions below 0. Mamba-2 y = x|B|C = v|k|q, GDN and KDA y = q|k|v.
//   norm   q, k := q, k / sqrt(|.|^2 + 1e-6) per key group, then q := q d_k^-0.5   (qk_l2_norm)
//   gates  Mamba-2  dt = softplus(dt + dt_bias), log_alpha = -exp(A_log) dt, value_scale = dt
//          GDN      log_alpha = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)
//          KDA      log_alpha = -exp(A_log) softplus(g + dt_bias) per channel, or
//                   lower_bound * sigmoid(exp(A_log) (g + dt_bias)); beta = sigmoid(b)
//
// FP32 throughout, taps from oldest to newest. q, k and v are rounded once, to the activation
// dtype: the rounded value is what records keep and every later computation uses. Gates stay FP32.
//
// The drafts' projections are appended to the conv ring, byte for byte. Read are the inputs and the
// ring rows [tail - (w-1), tail) of positions from 0 up. The bytes of a token do not depend on how
// many came with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/params.h"

namespace ssmd::cpu {

// RawParameters of one layer in the order the kernel reads them. Absent biases are zeros.
struct RawLayer {
  RawLayer(const LayerShape& shape, const RawParameters& parameters);

  std::vector<float> taps;     // [w, channels]
  std::vector<float> bias;     // [channels]
  std::vector<float> rate;     // exp(A_log) [head]
  std::vector<float> dt_bias;  // [head], KDA [head, d_k]
  std::vector<float> d;        // [head] or empty
  bool qk_l2_norm;
  KdaGate kda_gate;
  float gate_lower_bound;
};

// VerifyInputs, to be written.
struct RawOutputs {
  std::byte* q = nullptr;
  std::byte* k = nullptr;
  std::byte* v = nullptr;
  float* log_alpha = nullptr;
  float* beta = nullptr;         // GDN, KDA
  float* value_scale = nullptr;  // Mamba-2
  VerifyInputs view() const { return {q, k, v, log_alpha, beta, value_scale}; }
};

// Room for the RawOutputs of `tokens` tokens: what one Verify call needs.
class RawBuffer {
 public:
  RawBuffer(const LayerShape& shape, const Formats& formats, uint64_t tokens);
  const RawOutputs& outputs() const { return outputs_; }

 private:
  std::unique_ptr<std::byte[]> bytes_;
  RawOutputs outputs_;
};

// Everything one item needs; pointers are already resolved to the row's slot and first token.
struct RawItem {
  const LayerShape* shape = nullptr;
  const Formats* formats = nullptr;
  const RawLayer* layer = nullptr;
  const RingLayout* ring_layout = nullptr;
  std::byte* ring = nullptr;  // the slot's ring of this layer
  uint64_t tail = 0;
  uint32_t draft_tokens = 0;  // 1..kDraftTokensMax
  uint32_t group = 0;         // key group
  RawInputs inputs;
  RawOutputs outputs;
};

// Returns PoisonFlags: kPoisonInput when a raw input is not finite. (VerifyGroup flags what became
// not finite on the way.) Written are this group's channels of the drafts' conv rows, and outputs.
uint32_t PrepareGroup(const RawItem& item);

}  // namespace ssmd::cpu
