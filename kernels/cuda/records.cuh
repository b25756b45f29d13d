// The records of one row, as a block of the general kernels sees them: where each lies, and the
// sums of their decays.
#pragma once

#include "kernels/cuda/codec.cuh"
#include "kernels/cuda/ring_layout.h"

namespace ssmd::cuda::general {

inline constexpr uint32_t kWarps = 8;
inline constexpr uint32_t kThreads = 32 * kWarps;
inline constexpr uint32_t kRowsPerWarp = 4;
inline constexpr uint32_t kTileRows = kWarps * kRowsPerWarp;
static_assert(kTileRows == 32, "a lane per state row of a tile");
static_assert(kThreads >= kDimMax, "a thread per key channel");
inline constexpr uint32_t kKeyChunk = 16;  // KDA: decayed keys in shared memory at a time

// The records of one slot and layer, as a block of one head sees them.
struct Records {
  const LayerShape& shape;
  const DeviceRingLayout& ring;
  std::byte* slot;
  Dtype activation, value_dtype;
  uint32_t head, group, lane_head;  // lane_head: of the group
  uint64_t base;
  uint32_t tile;
  const float* rederived = nullptr;  // [record][row of the tile]: u in place of the recorded ones

  __device__ uint32_t Row(uint64_t j) const {
    return static_cast<uint32_t>((base + j) % ring.ring_records);
  }
  __device__ std::byte* At(const RingRuns& runs, uint32_t run, uint64_t j) const {
    return slot + runs.offset_bytes + (uint64_t{run} * ring.ring_records + Row(j)) * runs.row_bytes;
  }
  __device__ std::byte* Key(uint64_t j) const { return At(ring.key, group, j); }
  __device__ std::byte* Value(uint64_t j) const { return At(ring.value, head, j); }
  __device__ std::byte* Target(uint64_t j) const { return At(ring.target, head, j); }
  __device__ float* Beta(uint64_t j) const {
    return reinterpret_cast<float*>(At(ring.beta, group, j)) + lane_head;
  }
  __device__ float* LogAlpha(uint64_t j) const {
    if (shape.family == Family::kKda) return reinterpret_cast<float*>(At(ring.log_alpha, head, j));
    return reinterpret_cast<float*>(At(ring.log_alpha, group, j)) + lane_head;
  }
  __device__ float* ValueScale(uint64_t j) const {
    return reinterpret_cast<float*>(At(ring.value_scale, group, j)) + lane_head;
  }
  // u of a committed record; Mamba-2: dt * x. v is in the tile.
  __device__ float U(uint64_t j, uint32_t v) const {
    if (rederived != nullptr) return rederived[j * kTileRows + v % kTileRows];
    const float value = LoadAs(value_dtype, Value(j), v);
    return shape.family == Family::kMamba2 ? *ValueScale(j) * value : value;
  }
};

__device__ inline Records MakeRecords(const LayerShape& shape, const Formats& formats,
                                      const DeviceRingLayout& ring, const std::byte* rings,
                                      uint32_t slot, uint32_t head, uint32_t tile, uint64_t base) {
  const uint32_t heads_per_group = shape.head_count / shape.key_group_count;
  return {.shape = shape,
          .ring = ring,
          .slot = const_cast<std::byte*>(rings) + uint64_t{slot} * ring.slot_bytes,
          .activation = formats.activation,
          .value_dtype = shape.family == Family::kMamba2 ? formats.activation : formats.correction,
          .head = head,
          .group = head / heads_per_group,
          .lane_head = head % heads_per_group,
          .base = base,
          .tile = tile};
}

__device__ inline float WarpSum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

__device__ inline float Dot(const float4& a, const float4& b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

__device__ inline float DecayOf(double log_sum) {
  return expf(fminf(static_cast<float>(log_sum), 0.0f));
}

// Sums of logs up to and including each record, scalar decays; `values` are they themselves.
__device__ inline void SumLogDecays(const Records& records, uint32_t committed, uint32_t total,
                                    const float* draft_log_alpha, uint32_t draft_stride,
                                    double* log_decay) {
  for (uint32_t j = threadIdx.x; j < total; j += kThreads) {
    double sum = 0;
    for (uint32_t i = 0; i <= j; ++i) {
      sum += i < committed ? *records.LogAlpha(i)
                           : draft_log_alpha[uint64_t{i - committed} * draft_stride];
    }
    log_decay[j] = sum;
  }
}

// keys[j - first] := gamma_{j+1:end} * k_j for j in [first, first + kKeyChunk), channelwise, by the
// thread of each channel, whose `suffix` is the sum of logs behind the chunk, and then behind what
// is before it. Chunks come last first.
__device__ inline void DecayKeys(const Records& records, uint32_t first, uint32_t end,
                                 double& suffix, float* keys) {
  const uint32_t d_k = records.shape.d_k, c = threadIdx.x;
  if (c >= d_k) return;
  for (uint32_t j = min(first + kKeyChunk, end); j-- > first;) {
    keys[(j - first) * d_k + c] = LoadAs(records.activation, records.Key(j), c) * DecayOf(suffix);
    suffix += records.LogAlpha(j)[c];
  }
}

// The sum of all logs of one channel: what DecayKeys ends with.
__device__ inline double SumOfChannel(const Records& records, uint32_t count, uint32_t c) {
  double sum = 0;
  for (uint32_t j = count; j-- > 0;) sum += records.LogAlpha(j)[c];
  return sum;
}

}  // namespace ssmd::cuda::general
