// The verify kernels specialised for sm_90a: which launches they take.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/verify_launch.h"

namespace ssmd::cuda::sm90 {

// Whether rows of `tokens` tokens can be run: FP32 checkpoints in one precision, bf16 activations,
// fp16 corrections, outputs bf16 or FP32, d_k 128, a shape of the list in verify.cc, head_count a
// multiple of 4, and rows that cannot hold more committed records than the list says; KDA without a
// rollback window (K = 0). The device is of compute capability 9.0.
bool Supports(const VerifyLaunch& launch, uint32_t tokens);

// Runs the rows of the launch that have one token, and its rows of more. Two kernels, whatever the
// step, so that a row's bytes do not depend on the tokens of others. Capturable. Requires:
// Supports; tensors and pools are 16-byte aligned.
cudaError_t EnqueueOfOneToken(const VerifyLaunch& launch, cudaStream_t stream);
cudaError_t EnqueueOfMoreTokens(const VerifyLaunch& launch, cudaStream_t stream);

// All rows.
bool Supports(const VerifyLaunch& launch);
cudaError_t EnqueueVerify(const VerifyLaunch& launch, cudaStream_t stream);

}  // namespace ssmd::cuda::sm90
