// The kernels for any allowed shape (d_k <= 256 and a multiple of 16, d_v <= 256 and a multiple of
// 8, any heads and key groups, T <= 16, all families) on any GPU from sm_80 on: verify with its
// fused fold, and folds outside of a verify.
//
// Every function enqueues on `stream` and returns; none allocates, synchronises or reads back.
#pragma once

#include "kernels/cuda/control_state.h"

namespace ssmd::cuda {

// Tensors are aligned to 16 bytes.
cudaError_t EnqueueVerifyGeneral(const VerifyLaunch& launch, cudaStream_t stream);

// Folds of one layer. Each writes what a fold within a verify writes.
struct FoldLaunch {
  LayerShape shape;
  Formats formats;
  PageLayout page;
  DeviceRingLayout ring;
  std::byte* pages = nullptr;
  const std::byte* rings = nullptr;
  const DeviceFold* folds = nullptr;  // device
  const uint32_t* count = nullptr;    // device
  uint32_t folds_max = 0;             // bounds the grid
  float* replay = nullptr;            // not null: FP32 [head, d_v, d_k], in place of target pages
  uint64_t rounding_seed = 0;
  uint32_t layer = 0;
};
cudaError_t EnqueueFold(const FoldLaunch& launch, cudaStream_t stream);

// Writes `state`, FP32 [head, d_v, d_k] in device memory, to one layer of page `target`.
struct StoreStateLaunch {
  LayerShape shape;
  Formats formats;
  PageLayout page;
  std::byte* pages = nullptr;
  const float* state = nullptr;
  uint32_t target = 0;
  RoundingKey rounding;
};
cudaError_t EnqueueStoreState(const StoreStateLaunch& launch, cudaStream_t stream);

// True when `formats` are ones that the general kernels read and write.
bool GeneralSupports(const LayerShape& shape, const Formats& formats, uint32_t draft_tokens_max);

// Fails when this build has no code for the current device.
cudaError_t ProbeKernels();

}  // namespace ssmd::cuda
