// Tuning of the sm_90a kernels as data, and their launch for one shape.
#pragma once

#include <cuda_bf16.h>

#include "kernels/cuda/sm90/launch.cuh"
#include "kernels/cuda/sm90/shapes.h"

namespace ssmd::cuda::sm90 {

// A warp takes 16 rows: tiles of 32 KiB, of d_v = 80 40 KiB. kernels/README.md has the times of
// others.
template <Family family, int heads_per_group, int d_v, int tokens_max>
using TunedConfig =
    Config<family, heads_per_group, d_v, d_v == 80 ? 80 : 64, d_v == 80 ? 5 : 4, tokens_max>;

template <Family family, int heads_per_group, int d_v, int tokens_max>
cudaError_t EnqueueShape(const VerifyLaunch& launch, cudaStream_t stream) {
  using C = TunedConfig<family, heads_per_group, d_v, tokens_max>;
  static_assert(C::kRecordsMax == (family == Family::kKda ? 20 : 24), "verify.cc says so too");
  Schedule schedule;
  constexpr int kChunkItems = tokens_max == 1 ? 4 : 8;
  schedule.chunk_items = C::kItemsPerGroup < kChunkItems ? C::kItemsPerGroup : kChunkItems;
  schedule.prefetch = launch.rows_settled;
  return launch.formats.output == Dtype::kFp32
             ? LaunchStep<C, float>(launch, schedule, stream)
             : LaunchStep<C, __nv_bfloat16>(launch, schedule, stream);
}

}  // namespace ssmd::cuda::sm90
