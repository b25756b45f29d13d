#include "kernels/cuda/verify_dispatch.h"

#include "kernels/cuda/sm90/verify.h"
#include "kernels/cuda/verify_general.h"

namespace ssmd::cuda {

namespace {

bool GeneralSupportsLaunch(const VerifyLaunch& launch) {
  return GeneralSupports(launch.shape, launch.formats, launch.draft_tokens_max);
}

// Rows of one token run on the sm_90a kernel for them even where that for more is the general one:
// which kernel runs a row is a matter of the row and the registration, not of the step.
bool DecodeSupportsLaunch(const VerifyLaunch& launch) {
  return sm90::Supports(launch, 1) && GeneralSupportsLaunch(launch);
}
cudaError_t EnqueueDecodeAndGeneral(const VerifyLaunch& launch, cudaStream_t stream) {
  if (launch.draft_tokens_max > 1) {
    VerifyLaunch of_more_tokens = launch;
    of_more_tokens.tokens_min = 2;
    const cudaError_t error = EnqueueVerifyGeneral(of_more_tokens, stream);
    if (error != cudaSuccess) return error;
  }
  return sm90::EnqueueOfOneToken(launch, stream);
}

}  // namespace

absl::Span<const VerifyKernel> VerifyKernels() {
  static constexpr VerifyKernel kKernels[] = {
      {"sm90", sm90::Supports, sm90::EnqueueVerify},
      {"sm90 for one token", DecodeSupportsLaunch, EnqueueDecodeAndGeneral},
      {"general", GeneralSupportsLaunch, EnqueueVerifyGeneral},
  };
  return kKernels;
}

const VerifyKernel* FindVerifyKernel(const VerifyLaunch& launch) {
  for (const VerifyKernel& kernel : VerifyKernels()) {
    if (kernel.supports(launch)) return &kernel;
  }
  return nullptr;
}

}  // namespace ssmd::cuda
