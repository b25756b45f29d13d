#include "kernels/cuda/control.h"

namespace ssmd::cuda {
namespace {

constexpr uint32_t kTeamThreads = 512;
constexpr uint32_t kMoveThreads = 256;
constexpr uint32_t kMoveBlocks = 32;  // of one layer

// One block. Each call leaves the shared words free for the next.
class BlockTeam {
 public:
  __device__ uint32_t rank() const { return threadIdx.x; }
  __device__ uint32_t size() const { return kTeamThreads; }
  __device__ void Sync() { __syncthreads(); }

  __device__ uint64_t Sum(uint64_t value) {
    return Reduce(value, [](uint64_t a, uint64_t b) { return a + b; });
  }
  __device__ uint32_t Min(uint32_t value) {
    return static_cast<uint32_t>(
        Reduce(value, [](uint64_t a, uint64_t b) { return a < b ? a : b; }));
  }

  // values[i] := values[0] + .. + values[i - 1]; returns the sum of all.
  __device__ uint32_t ExclusiveScan(uint32_t* values, uint32_t count) {
    uint32_t carry = 0;
    for (uint32_t first = 0; first < count; first += kTeamThreads) {
      const uint32_t i = first + threadIdx.x;
      const uint32_t value = i < count ? values[i] : 0;
      uint32_t inclusive = value;
      for (uint32_t offset = 1; offset < 32; offset *= 2) {
        const uint32_t below = __shfl_up_sync(0xffffffffu, inclusive, offset);
        if (threadIdx.x % 32 >= offset) inclusive += below;
      }
      __shared__ uint32_t warp_sums[kTeamThreads / 32];
      __syncthreads();
      if (threadIdx.x % 32 == 31) warp_sums[threadIdx.x / 32] = inclusive;
      __syncthreads();
      uint32_t before = carry;
      for (uint32_t warp = 0; warp < kTeamThreads / 32; ++warp) {
        if (warp < threadIdx.x / 32) before += warp_sums[warp];
        carry += warp_sums[warp];
      }
      if (i < count) values[i] = before + inclusive - value;
    }
    __syncthreads();
    return carry;
  }

 private:
  template <typename Combine>
  __device__ uint64_t Reduce(uint64_t value, Combine combine) {
    __shared__ uint64_t warp_values[kTeamThreads / 32];
    for (int offset = 16; offset > 0; offset /= 2)
      value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
    __syncthreads();
    if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = value;
    __syncthreads();
    uint64_t all = warp_values[0];
    for (uint32_t warp = 1; warp < kTeamThreads / 32; ++warp) all = combine(all, warp_values[warp]);
    return all;
  }
};

__global__ void __launch_bounds__(kTeamThreads)
    PlanKernel(__grid_constant__ const ControlState control, uint32_t step,
               const DevicePlanRow* rows, const uint32_t* row_count) {
  BlockTeam team;
  PlanStep(team, control, step, rows, *row_count);
}

__global__ void __launch_bounds__(kTeamThreads)
    CommitKernel(__grid_constant__ const ControlState control, uint32_t step,
                 const uint32_t* accepted) {
  BlockTeam team;
  CommitStep(team, control, step, accepted);
}

__global__ void __launch_bounds__(kTeamThreads)
    AbortKernel(__grid_constant__ const ControlState control, uint32_t step) {
  BlockTeam team;
  AbortStep(team, control, step);
}

__global__ void SlotOpKernel(__grid_constant__ const ControlState control,
                             __grid_constant__ const SlotArguments arguments,
                             ControlResult* result) {
  *result = RunSlotOp(control, arguments);
}

// All threads of the blocks of one layer move `bytes`, a multiple of 16.
__device__ void Move(std::byte* to, const std::byte* from, uint32_t bytes, uint32_t thread,
                     uint32_t threads) {
  for (uint32_t i = thread; i < bytes / 16; i += threads)
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
}
__device__ void Fill(std::byte* to, uint64_t bytes, uint64_t thread, uint64_t threads) {
  constexpr uint32_t kNan = 0xffffffffu;
  for (uint64_t i = thread; i < bytes / 16; i += threads)
    reinterpret_cast<uint4*>(to)[i] = {kNan, kNan, kNan, kNan};
}

template <typename Function>
__device__ void ForEachRun(const DeviceLayer& layer, Function&& function) {
  const DeviceRingLayout& ring = layer.ring;
  const uint32_t decay_runs = layer.channelwise ? layer.heads : layer.key_groups;
  auto runs_of = [&](const RingRuns& component, uint32_t runs) {
    for (uint32_t run = blockIdx.x; component.row_bytes != 0 && run < runs; run += gridDim.x)
      function(component, run);
  };
  runs_of(ring.key, layer.key_groups);
  runs_of(ring.value, layer.heads);
  runs_of(ring.log_alpha, decay_runs);
  runs_of(ring.value_scale, layer.key_groups);
  runs_of(ring.target, layer.heads);
  runs_of(ring.beta, layer.key_groups);
}

__device__ uint64_t RowOffset(const DeviceRingLayout& ring, const RingRuns& component, uint32_t run,
                              uint64_t position) {
  return component.offset_bytes +
         (uint64_t{run} * ring.ring_records + position % ring.ring_records) * component.row_bytes;
}
__device__ uint64_t ConvOffset(const DeviceRingLayout& ring, uint64_t position) {
  return ring.conv.offset_bytes + position % ring.conv_rows * ring.conv.row_bytes;
}

__global__ void CopyRecordsKernel(__grid_constant__ const ControlState control,
                                  const DeviceLayer* layers,
                                  __grid_constant__ const SlotArguments arguments,
                                  const ControlResult* result) {
  if (result->code != ControlCode::kOk) return;
  const DeviceLayer layer = layers[blockIdx.y];
  const uint64_t base = control.slots[arguments.slot].base;
  const std::byte* from = layer.rings + uint64_t{arguments.slot} * layer.ring.slot_bytes;
  std::byte* to = layer.rings + uint64_t{arguments.target} * layer.ring.slot_bytes;
  ForEachRun(layer, [&](const RingRuns& component, uint32_t run) {
    for (uint64_t p = base; p < arguments.position; ++p) {
      const uint64_t offset = RowOffset(layer.ring, component, run, p);
      Move(to + offset, from + offset, component.row_bytes, threadIdx.x, blockDim.x);
    }
  });
  if (layer.conv_history == 0) return;
  // The window before `base` too: a child may be rolled back that far.
  const uint64_t history = base < layer.conv_history ? base : layer.conv_history;
  for (uint64_t p = base - history + blockIdx.x; p < arguments.position; p += gridDim.x) {
    const uint64_t offset = ConvOffset(layer.ring, p);
    Move(to + offset, from + offset, layer.ring.conv.row_bytes, threadIdx.x, blockDim.x);
  }
}

__global__ void PoisonSlotKernel(__grid_constant__ const ControlState control,
                                 const DeviceLayer* layers, uint32_t index) {
  const DeviceLayer layer = layers[blockIdx.y];
  const DeviceSlot slot = control.slots[index];
  if (slot.in_step) return;
  std::byte* ring = layer.rings + uint64_t{index} * layer.ring.slot_bytes;
  const uint64_t h = slot.tail - slot.base;
  ForEachRun(layer, [&](const RingRuns& component, uint32_t run) {
    for (uint64_t p = slot.tail; p < slot.tail + (layer.ring.ring_records - h); ++p) {
      Fill(ring + RowOffset(layer.ring, component, run, p), component.row_bytes, threadIdx.x,
           blockDim.x);
    }
  });
  if (layer.conv_history == 0) return;
  const uint64_t history = slot.base < layer.conv_history ? slot.base : layer.conv_history;
  for (uint64_t p = slot.tail + blockIdx.x; p < slot.tail + (layer.ring.conv_rows - h - history);
       p += gridDim.x) {
    Fill(ring + ConvOffset(layer.ring, p), layer.ring.conv.row_bytes, threadIdx.x, blockDim.x);
  }
}

__global__ void PoisonPagesKernel(__grid_constant__ const ControlState control,
                                  const DeviceLayer* layers) {
  if (control.counters->freed == 0) return;
  const DeviceLayer layer = layers[blockIdx.y];
  for (uint32_t page = 1; page < control.page_count; ++page) {
    if (control.page_freed[page] == 0) continue;
    Fill(layer.pages + page * layer.page.page_bytes, layer.page.page_bytes,
         blockIdx.x * blockDim.x + threadIdx.x, uint64_t{gridDim.x} * blockDim.x);
  }
}

__global__ void PoisonedKernel(__grid_constant__ const ControlState control) {
  if (control.counters->freed == 0) return;
  __syncthreads();
  for (uint32_t page = threadIdx.x; page < control.page_count; page += blockDim.x)
    control.page_freed[page] = 0;
  if (threadIdx.x == 0) control.counters->freed = 0;
}

}  // namespace

cudaError_t EnqueuePlan(const ControlState& control, uint32_t step, const DevicePlanRow* rows,
                        const uint32_t* row_count, cudaStream_t stream) {
  PlanKernel<<<1, kTeamThreads, 0, stream>>>(control, step, rows, row_count);
  return cudaGetLastError();
}

cudaError_t EnqueueCommit(const ControlState& control, uint32_t step, const uint32_t* accepted,
                          cudaStream_t stream) {
  CommitKernel<<<1, kTeamThreads, 0, stream>>>(control, step, accepted);
  return cudaGetLastError();
}

cudaError_t EnqueueAbort(const ControlState& control, uint32_t step, cudaStream_t stream) {
  AbortKernel<<<1, kTeamThreads, 0, stream>>>(control, step);
  return cudaGetLastError();
}

cudaError_t EnqueueSlotOp(const ControlState& control, const SlotArguments& arguments,
                          ControlResult* result, cudaStream_t stream) {
  SlotOpKernel<<<1, 1, 0, stream>>>(control, arguments, result);
  return cudaGetLastError();
}

cudaError_t EnqueueCopyRecords(const ControlState& control, const DeviceLayer* layers,
                               uint32_t layer_count, const SlotArguments& arguments,
                               const ControlResult* result, cudaStream_t stream) {
  CopyRecordsKernel<<<dim3(kMoveBlocks, layer_count), kMoveThreads, 0, stream>>>(control, layers,
                                                                                 arguments, result);
  return cudaGetLastError();
}

cudaError_t EnqueuePoison(const ControlState& control, const DeviceLayer* layers,
                          uint32_t layer_count, uint32_t slot, cudaStream_t stream) {
  const dim3 grid(kMoveBlocks, layer_count);
  if (slot != kNone) PoisonSlotKernel<<<grid, kMoveThreads, 0, stream>>>(control, layers, slot);
  PoisonPagesKernel<<<grid, kMoveThreads, 0, stream>>>(control, layers);
  PoisonedKernel<<<1, kMoveThreads, 0, stream>>>(control);
  return cudaGetLastError();
}

}  // namespace ssmd::cuda
