// The table of verify kernels: which one runs a layer.
#pragma once

#include "absl/types/span.h"
#include "kernels/cuda/verify_launch.h"

namespace ssmd::cuda {

// One implementation. Every one computes the same function within the tolerances of
// tests/testing/tolerance.h; tests iterate the table.
struct VerifyKernel {
  const char* name;
  // True when it can run the launch, whatever its rows; decided by what the host knows of it:
  // shape, formats, rule, draft_tokens_max.
  bool (*supports)(const VerifyLaunch& launch);
  // Enqueues one layer of one step: no allocation, no synchronisation, capturable. Handles rows of
  // any T, padding rows (zeros), rows that fold, and reads how many rows there are on the device.
  cudaError_t (*enqueue)(const VerifyLaunch& launch, cudaStream_t stream);
};

// In order of preference; the general version is last.
absl::Span<const VerifyKernel> VerifyKernels();

// The first that supports the launch, or null.
const VerifyKernel* FindVerifyKernel(const VerifyLaunch& launch);

}  // namespace ssmd::cuda
