// The raw input form: what comes before a verify (short convolution, norms, gates) and after it
// (Mamba-2's D x). The equations, the order of roundings and what is poisoned are those of
// cpu/raw_kernel.h.
#pragma once

#include "kernels/cuda/verify_launch.h"

namespace ssmd::cuda {

// RawParameters of one layer in device memory. Absent biases are zeros.
struct DeviceRawLayer {
  const float* taps = nullptr;     // [w, channels]
  const float* bias = nullptr;     // [channels]
  const float* rate = nullptr;     // exp(A_log) [head]
  const float* dt_bias = nullptr;  // [head], KDA [head, d_k]
  const float* d = nullptr;        // [head]; null: no skip
  bool qk_l2_norm = false;
  KdaGate kda_gate = KdaGate::kSoftplus;
  float gate_lower_bound = 0;
};

// VerifyInputs, to be written.
struct DeviceRawOutputs {
  void *q = nullptr, *k = nullptr, *v = nullptr;
  float *log_alpha = nullptr, *beta = nullptr, *value_scale = nullptr;
};

struct RawLaunch {
  LayerShape shape;
  Formats formats;
  DeviceRingLayout ring;
  std::byte* rings = nullptr;  // [slot]; the drafts' projections are appended
  const DeviceStep* step = nullptr;
  const DeviceRow* rows = nullptr;
  uint32_t rows_max = 0;  // bounds the grid
  DeviceRawLayer layer;
  RawInputs inputs;
  DeviceRawOutputs outputs;
  uint32_t* poison = nullptr;  // [rows_max] or-ed
};
// Makes outputs of inputs, for live rows.
cudaError_t EnqueuePrepare(const RawLaunch& launch, cudaStream_t stream);

// output := sum + D v, rounded once; zeros in padding rows. `sum`: FP32 [tokens, head, d_v].
cudaError_t EnqueueSkip(const RawLaunch& launch, const float* sum, void* output,
                        cudaStream_t stream);

}  // namespace ssmd::cuda
