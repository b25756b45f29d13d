// Launches one configuration of the T = 1 kernel.
#pragma once

#include <algorithm>

#include "kernels/cuda/sm90/kernel.cuh"

namespace ssmd::cuda::sm90 {

inline constexpr int kBlocksPerSm = 2;

// Requires: the launch is one that Supports() accepts for this configuration. Capturable.
template <class C, class Output>
cudaError_t LaunchStep(const VerifyLaunch& launch, const Schedule& schedule, cudaStream_t stream) {
  constexpr size_t kSharedBytes = sizeof(SharedStorage<C>);
  static_assert(kSharedBytes <= kSharedBytesMax);
  auto* kernel = StepKernel<C, Output>;
  static const cudaError_t prepared = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes));
  if (prepared != cudaSuccess) return prepared;
  static const uint32_t blocks_max = [] {
    int device = 0, sms = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    return static_cast<uint32_t>(sms) * kBlocksPerSm;
  }();
  const uint64_t items =
      uint64_t{launch.rows_max} * launch.shape.key_group_count * C::kItemsPerGroup;
  cudaLaunchAttribute dependent{};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(std::clamp<uint64_t>(items, 1, blocks_max));
  config.blockDim = C::kThreads;
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, launch, schedule);
}

}  // namespace ssmd::cuda::sm90
