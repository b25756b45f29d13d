// One block works on one segment of the channels of one row: the q or k of a key group, or the v of
// a head with that head's gates. A thread owns a channel and walks over the drafts.
#include <cfloat>

#include "kernels/cuda/codec.cuh"
#include "kernels/cuda/raw.h"

namespace ssmd::cuda {
namespace {

constexpr uint32_t kThreads = 256;
static_assert(kThreads >= kDimMax, "a thread per channel of a segment");
constexpr uint32_t kBlocksMax = 4096;
constexpr uint32_t kConvWidthMax = 4;
constexpr float kNormEpsilon = 1e-6f;

// Without cancellation or overflow for any finite x.
__device__ float Softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }
__device__ float Sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return (x < 0 ? e : 1.0f) / (1.0f + e);
}
// log_alpha stays finite: full forgetting is finite too.
__device__ float LogDecay(float rate, float step) { return fmaxf(-rate * step, -FLT_MAX); }

// Of one value a thread, in one order; for all threads.
__device__ float BlockSum(float value) {
  __shared__ float warp_sums[kThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0;
  for (const float part : warp_sums) sum += part;
  return sum;
}

struct Segment {
  uint32_t first, count;  // channels
  void* to;               // rows of `columns` elements
  uint32_t column, columns;
  float norm_factor;  // 0: no norm
};

__device__ Segment SegmentOf(const RawLaunch& launch, uint32_t index) {
  const LayerShape& shape = launch.shape;
  const uint32_t keys = shape.key_group_count * shape.d_k, values = shape.head_count * shape.d_v;
  const bool mamba2 = shape.family == Family::kMamba2, norm = launch.layer.qk_l2_norm;
  const uint32_t groups = shape.key_group_count;
  if (index < groups) {
    const uint32_t column = index * shape.d_k, q = mamba2 ? values + keys : 0;
    const float factor = norm ? 1 / sqrtf(static_cast<float>(shape.d_k)) : 0.0f;
    return {q + column, shape.d_k, launch.outputs.q, column, keys, factor};
  }
  if (index < 2 * groups) {
    const uint32_t column = (index - groups) * shape.d_k, k = mamba2 ? values : keys;
    return {k + column, shape.d_k, launch.outputs.k, column, keys, norm ? 1.0f : 0.0f};
  }
  const uint32_t column = (index - 2 * groups) * shape.d_v, v = mamba2 ? 0 : 2 * keys;
  return {v + column, shape.d_v, launch.outputs.v, column, values, 0.0f};
}

__device__ bool Convolve(const RawLaunch& launch, const DeviceRow& row, const Segment& segment) {
  const LayerShape& shape = launch.shape;
  const Dtype dtype = launch.formats.activation;
  const uint32_t w = shape.conv_width,
                 channels = shape.head_count * shape.d_v + 2 * shape.key_group_count * shape.d_k;
  const uint32_t c = segment.first + threadIdx.x;
  const bool active = threadIdx.x < segment.count;
  std::byte* ring = launch.rings + uint64_t{row.slot} * launch.ring.slot_bytes;
  auto conv_row = [&](uint64_t position) {
    return ring + launch.ring.conv.offset_bytes +
           position % launch.ring.conv_rows * launch.ring.conv.row_bytes;
  };
  float tap[kConvWidthMax] = {}, window[kConvWidthMax] = {}, bias = 0;  // the newest is last
  bool good = true;
  if (active) {
    bias = launch.layer.bias[c];
#pragma unroll
    for (uint32_t i = 0; i < kConvWidthMax; ++i) {  // right-aligned: missing taps are zeros
      const uint32_t missing = kConvWidthMax - w;
      if (i >= missing) tap[i] = launch.layer.taps[(i - missing) * channels + c];
      // Before draft 0 shifts it, window[i] is the input of position tail - (kConvWidthMax - i).
      const uint64_t back = kConvWidthMax - i;
      if (i > missing && row.tail >= back) window[i] = LoadAs(dtype, conv_row(row.tail - back), c);
    }
  }
  for (uint32_t s = 0; s < row.draft_tokens; ++s) {
    const uint64_t token = uint64_t{row.first_token} + s;
    float y = bias;
    if (active) {
      const float z = LoadAs(dtype, launch.inputs.projection, token * channels + c);
      good = good && IsFinite(z);
      StoreAs(dtype, conv_row(row.tail + s), c, z);
#pragma unroll
      for (uint32_t i = 0; i + 1 < kConvWidthMax; ++i) window[i] = window[i + 1];
      window[kConvWidthMax - 1] = z;
#pragma unroll
      for (uint32_t i = 0; i < kConvWidthMax; ++i) y = fmaf(tap[i], window[i], y);
      y *= Sigmoid(y);
    }
    if (segment.norm_factor != 0) {
      const float squares = BlockSum(active ? y * y : 0.0f);
      y = y / sqrtf(squares + kNormEpsilon) * segment.norm_factor;
    }
    if (active)
      StoreAs(dtype, segment.to, token * segment.columns + segment.column + threadIdx.x, y);
  }
  return good;
}

__device__ bool PrepareGates(const RawLaunch& launch, const DeviceRow& row, uint32_t head) {
  const LayerShape& shape = launch.shape;
  const DeviceRawLayer& layer = launch.layer;
  const Dtype dtype = launch.formats.activation;
  const float rate = layer.rate[head];
  bool good = true;
  for (uint32_t s = threadIdx.x; s < row.draft_tokens; s += kThreads) {
    const uint64_t i = (uint64_t{row.first_token} + s) * shape.head_count + head;
    if (shape.family != Family::kMamba2) {
      const float b = LoadAs(dtype, launch.inputs.b, i);
      good = good && IsFinite(b);
      launch.outputs.beta[i] = Sigmoid(b);
    }
    if (shape.family == Family::kKda) continue;
    const void* raw_step = shape.family == Family::kGdn ? launch.inputs.a : launch.inputs.dt;
    const float raw = LoadAs(dtype, raw_step, i);
    good = good && IsFinite(raw);
    const float step = Softplus(raw + layer.dt_bias[head]);
    launch.outputs.log_alpha[i] = LogDecay(rate, step);
    if (shape.family == Family::kMamba2) launch.outputs.value_scale[i] = step;
  }
  if (shape.family != Family::kKda) return good;
  for (uint32_t i = threadIdx.x; i < row.draft_tokens * shape.d_k; i += kThreads) {
    const uint64_t token_head =
        (uint64_t{row.first_token} + i / shape.d_k) * shape.head_count + head;
    const uint32_t c = i % shape.d_k;
    const float raw = LoadAs(dtype, launch.inputs.gate, token_head * shape.d_k + c);
    good = good && IsFinite(raw);
    const float gate = raw + layer.dt_bias[uint64_t{head} * shape.d_k + c];
    launch.outputs.log_alpha[token_head * shape.d_k + c] =
        layer.kda_gate == KdaGate::kSoftplus ? LogDecay(rate, Softplus(gate))
                                             : layer.gate_lower_bound * Sigmoid(rate * gate);
  }
  return good;
}

__device__ void Flag(uint32_t* poison, bool good, PoisonFlags flag) {
  if (!__all_sync(0xffffffffu, good) && threadIdx.x % 32 == 0) atomicOr(poison, flag);
}

__global__ void __launch_bounds__(kThreads)
    PrepareKernel(__grid_constant__ const RawLaunch launch) {
  const uint32_t groups = launch.shape.key_group_count;
  const uint32_t segments = 2 * groups + launch.shape.head_count;
  const uint64_t items = uint64_t{launch.step->row_count} * segments;
  for (uint64_t i = blockIdx.x; i < items; i += gridDim.x) {
    const DeviceRow& row = launch.rows[i / segments];
    if (row.slot == kNone || row.draft_tokens == 0) continue;
    const auto index = static_cast<uint32_t>(i % segments);
    bool good = Convolve(launch, row, SegmentOf(launch, index));
    if (index >= 2 * groups) good = PrepareGates(launch, row, index - 2 * groups) && good;
    Flag(&launch.poison[i / segments], good, kPoisonInput);
  }
}

__global__ void __launch_bounds__(kThreads)
    SkipKernel(__grid_constant__ const RawLaunch launch, const float* sum, void* output) {
  const uint32_t heads = launch.shape.head_count, d_v = launch.shape.d_v;
  const uint64_t items = uint64_t{launch.step->row_count} * heads;
  for (uint64_t i = blockIdx.x; i < items; i += gridDim.x) {
    const DeviceRow& row = launch.rows[i / heads];
    const auto head = static_cast<uint32_t>(i % heads);
    bool good = true;
    for (uint32_t at = threadIdx.x; at < row.draft_tokens * d_v; at += kThreads) {
      const uint64_t index =
          ((uint64_t{row.first_token} + at / d_v) * heads + head) * d_v + at % d_v;
      float o = 0;
      if (row.slot != kNone) {
        const float v = LoadAs(launch.formats.activation, launch.outputs.v, index);
        o = fmaf(launch.layer.d[head], v, sum[index]);
      }
      good = IsFinite(StoreAs(launch.formats.output, output, index, o)) && good;
    }
    Flag(&launch.poison[i / heads], good, kPoisonOverflow);
  }
}

uint32_t Blocks(uint64_t items) {
  return static_cast<uint32_t>(items < kBlocksMax ? items : kBlocksMax);
}

}  // namespace

cudaError_t EnqueuePrepare(const RawLaunch& launch, cudaStream_t stream) {
  const uint64_t segments = 2 * launch.shape.key_group_count + launch.shape.head_count;
  PrepareKernel<<<Blocks(launch.rows_max * segments), kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

cudaError_t EnqueueSkip(const RawLaunch& launch, const float* sum, void* output,
                        cudaStream_t stream) {
  SkipKernel<<<Blocks(uint64_t{launch.rows_max} * launch.shape.head_count), kThreads, 0, stream>>>(
      launch, sum, output);
  return cudaGetLastError();
}

}  // namespace ssmd::cuda
