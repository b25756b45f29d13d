#include "kernels/cuda/verify_dispatch.h"

#include "kernels/cuda/verify_general.h"

namespace ssmd::cuda {

namespace {

bool GeneralSupportsLaunch(const VerifyLaunch& launch) {
  return GeneralSupports(launch.shape, launch.formats, launch.draft_tokens_max);
}

}  // namespace

absl::Span<const VerifyKernel> VerifyKernels() {
  static constexpr VerifyKernel kKernels[] = {
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
