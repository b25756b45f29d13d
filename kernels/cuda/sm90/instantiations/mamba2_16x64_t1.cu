#include "kernels/cuda/sm90/tuning.cuh"

template cudaError_t ssmd::cuda::sm90::EnqueueShape<ssmd::Family::kMamba2, 16, 64, 1>(
    const ssmd::cuda::VerifyLaunch&, cudaStream_t);
