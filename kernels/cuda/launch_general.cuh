// How the general kernels are launched: shared memory, and a grid that walks over its items.
#pragma once

#include "kernels/cuda/state_tile.cuh"

namespace ssmd::cuda::general {

inline constexpr uint32_t kBlocksPerSm = 8;  // at most

// Offsets into dynamic shared memory, in bytes. h + T never exceeds R.
struct SharedLayout {
  uint32_t log_decay, x, decayed_x, weight, sum, draft_u, keys, record_u, record_weight, bytes;

  __host__ __device__ static SharedLayout Make(const LayerShape& shape, const Formats& formats,
                                               uint32_t ring_records, uint32_t draft_tokens) {
    const bool rederives = Rederives(shape, formats);
    const bool channelwise = shape.family == Family::kKda;
    const uint32_t vectors = shape.family == Family::kMamba2 ? draft_tokens : 2 * draft_tokens;
    SharedLayout at{};
    auto place = [&](uint32_t bytes) {
      const uint32_t offset = at.bytes;
      at.bytes += (bytes + 15) / 16 * 16;
      return offset;
    };
    at.log_decay = place(channelwise ? 0 : ring_records * 8);
    at.x = place(vectors * shape.d_k * 4);
    at.decayed_x = place(channelwise ? vectors * shape.d_k * 4 : 0);
    at.weight = place(vectors * ring_records * 4);
    at.sum = place(vectors * kTileRows * 4);
    at.draft_u = place(draft_tokens * kTileRows * 4);
    at.keys = place(channelwise ? kKeyChunk * shape.d_k * 4 : 0);
    at.record_u = place(rederives ? ring_records * kTileRows * 4 : 0);
    at.record_weight = place(rederives ? kWarps * ring_records * 4 : 0);
    return at;
  }
};

// Of the current device.
struct DeviceLimits {
  cudaError_t error = cudaSuccess;
  int multiprocessors = 0, shared_bytes = 0;
};
inline DeviceLimits ReadLimits() {
  DeviceLimits limits;
  int device = 0;
  auto read = [&](int& to, cudaDeviceAttr attribute) {
    if (limits.error == cudaSuccess) limits.error = cudaDeviceGetAttribute(&to, attribute, device);
  };
  limits.error = cudaGetDevice(&device);
  read(limits.multiprocessors, cudaDevAttrMultiProcessorCount);
  read(limits.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return limits;
}

template <typename Kernel, typename Launch>
cudaError_t Start(Kernel* kernel, const Launch& launch, uint64_t items, uint32_t shared_bytes,
                  cudaStream_t stream) {
  static const DeviceLimits limits = ReadLimits();
  if (limits.error != cudaSuccess) return limits.error;
  if (shared_bytes > static_cast<uint32_t>(limits.shared_bytes)) return cudaErrorInvalidValue;
  if (const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_bytes);
      error != cudaSuccess) {
    return error;
  }
  const uint64_t most = uint64_t{kBlocksPerSm} * static_cast<uint32_t>(limits.multiprocessors);
  const auto blocks = static_cast<uint32_t>(items < most ? items : most);
  if (blocks == 0) return cudaSuccess;
  kernel<<<blocks, kThreads, shared_bytes, stream>>>(launch);
  return cudaGetLastError();
}

inline uint64_t ItemsPerRow(const LayerShape& shape) {
  return uint64_t{shape.head_count} * ((shape.d_v + kTileRows - 1) / kTileRows);
}

}  // namespace ssmd::cuda::general
