#include "kernels/cuda/verify_dispatch.h"

#include "kernels/cuda/verify_general.h"

namespace ssmd::cuda {

absl::Span<const VerifyKernel> VerifyKernels() {
  static constexpr VerifyKernel kKernels[] = {
      {"general", GeneralSupports, EnqueueVerifyGeneral},
  };
  return kKernels;
}

const VerifyKernel* FindVerifyKernel(const LayerShape& shape, const Formats& formats,
                                     uint32_t draft_tokens_max) {
  for (const VerifyKernel& kernel : VerifyKernels()) {
    if (kernel.supports(shape, formats, draft_tokens_max)) return &kernel;
  }
  return nullptr;
}

}  // namespace ssmd::cuda
