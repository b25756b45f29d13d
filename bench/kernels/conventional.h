// The baseline: what an engine without replay does, one read and one write of the state per token.
#pragma once

#include "kernels/cuda/verify_launch.h"

namespace ssmd::bench {

// Advances the source page of every row by its token, in place, and writes the outputs. T = 1; all
// rows are live. Shapes: d_k 128, d_v 64, 80 or 128; bf16 activations; outputs bf16.
cudaError_t LaunchConventional(const cuda::VerifyLaunch& launch, cudaStream_t stream);

// The same with another split of the state, to choose the one above.
struct ConventionalVariant {
  const char* name;
  cudaError_t (*launch)(const cuda::VerifyLaunch&, cudaStream_t);
};
extern const ConventionalVariant kConventionalVariants[4];

}  // namespace ssmd::bench
