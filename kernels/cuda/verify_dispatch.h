// The table of verify kernels: which one runs a layer.
#pragma once

#include "absl/types/span.h"
#include "kernels/cuda/verify_launch.h"

namespace ssmd::cuda {

// One implementation. Every one computes the same function within the tolerances of
// tests/testing/tolerance.h; tests iterate the table.
struct VerifyKernel {
  const char* name;
  // True for a layer that it can run with any rows of at most `draft_tokens_max` drafts.
  bool (*supports)(const LayerShape& shape, const Formats& formats, uint32_t draft_tokens_max);
  // Enqueues one layer of one step: no allocation, no synchronisation, capturable. Handles rows of
  // any T, padding rows (zeros), rows that fold, and reads how many rows there are on the device.
  cudaError_t (*enqueue)(const VerifyLaunch& launch, cudaStream_t stream);
};

// In order of preference; the general version is last.
absl::Span<const VerifyKernel> VerifyKernels();

// The first that supports the layer, or null.
const VerifyKernel* FindVerifyKernel(const LayerShape& shape, const Formats& formats,
                                     uint32_t draft_tokens_max);

}  // namespace ssmd::cuda
