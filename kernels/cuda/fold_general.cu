// Folds outside of a verify, replays into FP32, and states written to pages: the tile of
// verify_general.cu without drafts.
#include "kernels/cuda/launch_general.cuh"
#include "kernels/cuda/verify_general.h"

namespace ssmd::cuda {
namespace general {
namespace {

template <uint32_t kVectors>
__global__ void __launch_bounds__(kThreads) FoldKernel(__grid_constant__ const FoldLaunch launch) {
  extern __shared__ __align__(16) std::byte shared[];
  const LayerShape& shape = launch.shape;
  const uint32_t tiles = (shape.d_v + kTileRows - 1) / kTileRows;
  const uint32_t per_fold = shape.head_count * tiles;
  const uint64_t items = uint64_t{*launch.count} * per_fold;
  const SharedLayout at = SharedLayout::Make(shape, launch.formats, launch.ring.ring_records, 0);
  auto* log_decay = reinterpret_cast<double*>(shared + at.log_decay);
  auto* keys = reinterpret_cast<float*>(shared + at.keys);
  for (uint64_t i = blockIdx.x; i < items; i += gridDim.x) {
    const DeviceFold& fold = launch.folds[i / per_fold];
    const uint32_t head = i % per_fold / tiles, tile = i % tiles;
    const auto count = static_cast<uint32_t>(fold.to - fold.from);
    Records records = MakeRecords(shape, launch.formats, launch.ring, launch.rings, fold.slot, head,
                                  tile, fold.from);
    StateRows<kVectors> state;
    LoadState(shape,
              {launch.pages + uint64_t{fold.source_page} * launch.page.page_bytes,
               launch.formats.checkpoint_hp},
              head, tile, state);
    if (shape.family != Family::kKda) SumLogDecays(records, count, count, nullptr, 0, log_decay);
    __syncthreads();
    CheckpointTarget target;
    if (launch.replay != nullptr) {
      target = {.hp = reinterpret_cast<std::byte*>(launch.replay),
                .lp = nullptr,
                .hp_dtype = Dtype::kFp32,
                .lp_dtype = Dtype::kNone,
                .rounding = {},
                .elements_per_head = shape.d_v * shape.d_k};
    } else {
      target = MakeTarget(shape, launch.formats, launch.page,
                          launch.pages + uint64_t{fold.target_page} * launch.page.page_bytes,
                          {launch.rounding_seed, fold.rounding_key, launch.layer, fold.to});
    }
    if (Rederives(shape, launch.formats)) {
      auto* u = reinterpret_cast<float*>(shared + at.record_u);
      Rederive(records, count, log_decay, keys, state, u,
               reinterpret_cast<float*>(shared + at.record_weight));
      records.rederived = u;
    }
    // What leaves its format's range poisons the steps that read the page.
    FoldAndStore(records, count, log_decay, keys, state, target);
    __syncthreads();
  }
}

__global__ void StoreStateKernel(__grid_constant__ const StoreStateLaunch launch) {
  const CheckpointTarget target =
      MakeTarget(launch.shape, launch.formats, launch.page,
                 launch.pages + uint64_t{launch.target} * launch.page.page_bytes, launch.rounding);
  const uint64_t fours =
      uint64_t{launch.shape.head_count} * launch.shape.d_v * launch.shape.d_k / 4;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < fours;
       i += uint64_t{gridDim.x} * blockDim.x) {
    target.StoreFour(4 * i, reinterpret_cast<const float4*>(launch.state)[i]);
  }
}

}  // namespace
}  // namespace general

using namespace general;  // NOLINT: of this file alone

cudaError_t EnqueueFold(const FoldLaunch& launch, cudaStream_t stream) {
  const uint32_t shared =
      SharedLayout::Make(launch.shape, launch.formats, launch.ring.ring_records, 0).bytes;
  const uint64_t items = launch.folds_max * ItemsPerRow(launch.shape);
  return launch.shape.d_k <= 128 ? Start(FoldKernel<1>, launch, items, shared, stream)
                                 : Start(FoldKernel<2>, launch, items, shared, stream);
}

cudaError_t EnqueueStoreState(const StoreStateLaunch& launch, cudaStream_t stream) {
  const uint64_t fours = launch.shape.state_elements() / 4;
  return Start(StoreStateKernel, launch, (fours + kThreads - 1) / kThreads, 0, stream);
}

}  // namespace ssmd::cuda
