// Verify for sm_90a, FP32 checkpoints: outputs of all tokens of a row, their records appended, and
// due folds, in one pass over the checkpoint. Equations: kernels/cpu/verify_kernel.h.
//
// A persistent grid, two blocks per SM. One producer warp fills two stages with bulk copies (a tile
// of up to 40 KiB of state and the values of its records); what the items of one key group share
// (q, k, keys and decays of the records) travels once per chunk of items in stages of its own.
// Consumer warps pull their part of the tile into registers, release the stage at once, and only
// then compute: the copies never wait for arithmetic. Chunks are claimed dynamically, fewer items
// at a time towards the end.
//
// A folding row is the same item with more arithmetic: its output is computed exactly as if it did
// not fold, then the tile in registers becomes S' and goes to the target page with plain stores.
//
// decode_consumer.cuh is the arithmetic of T = 1, in FP32 FMAs; draft_consumer.cuh that of T <= 8,
// on tensor cores.
//
// Deterministic: fixed order of every sum, and a row's bytes depend on nothing but its own inputs.
// FP32 throughout; logs of decays are summed before they are exponentiated, never subtracted.
//
// Dependent launch: the next kernel may start only after this one's own wait, so it may take
// everything up to the kernel before this one as complete. Rings, inputs and the work counter are
// touched after the wait; rows and pages before it only if the schedule says so.
#pragma once

#include <type_traits>

#include "kernels/cuda/sm90/decode_consumer.cuh"
#include "kernels/cuda/sm90/draft_consumer.cuh"
#include "kernels/cuda/sm90/producer.cuh"

namespace ssmd::cuda::sm90 {

template <class C, class Output>
__global__ void __launch_bounds__(C::kThreads, 2)
    StepKernel(const __grid_constant__ VerifyLaunch launch,
               const __grid_constant__ Schedule schedule) {
  extern __shared__ __align__(128) std::byte shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<C>*>(shared_bytes);
  if (threadIdx.x < 4) shared.zeros[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::InitBarrier(&shared.item_full[i], 1);
      ptx::InitBarrier(&shared.item_empty[i], C::kConsumerWarps);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::InitBarrier(&shared.chunk_full[i], kRowWords);
      ptx::InitBarrier(&shared.chunk_empty[i], C::kConsumerWarps);
    }
    ptx::FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x >= C::kConsumerThreads) {
    Producer<C>(launch, schedule, shared).Run();
  } else {
    using Consumer =
        std::conditional_t<C::kTokensMax == 1, DecodeConsumer<C, Output>, DraftConsumer<C, Output>>;
    Consumer(launch, shared).Run();
  }
}

}  // namespace ssmd::cuda::sm90
