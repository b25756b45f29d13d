// The entry of every shape that the sm_90a kernels are built for; one translation unit each, in
// instantiations/. The list of them is in verify.cc: here it would instantiate all of them
// everywhere.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/verify_launch.h"

namespace ssmd::cuda::sm90 {

// Runs the rows of a launch that have one token (tokens_max = 1), or 2 to tokens_max. Requires: the
// launch has this family, heads per group and d_v. Capturable.
template <Family family, int heads_per_group, int d_v, int tokens_max>
cudaError_t EnqueueShape(const VerifyLaunch& launch, cudaStream_t stream);

}  // namespace ssmd::cuda::sm90
