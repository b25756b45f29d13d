// State straight from memory to registers and back: 8 lanes a row, rows of one head per block, a
// grid that fills the chip and strides over (row, head, block of rows).
#include <cuda_bf16.h>

#include <algorithm>

#include "bench/kernels/conventional.h"
#include "kernels/cuda/sm90/ptx.cuh"

namespace ssmd::bench {
namespace {

namespace ptx = cuda::ptx;
constexpr int kDk = 128, kVectors = kDk / 32;

__device__ float4 WidenKeys(const uint2* keys) {
  const float2 low = ptx::WidenBf16(keys->x), high = ptx::WidenBf16(keys->y);
  return {low.x, low.y, high.x, high.y};
}
__device__ float Dot(float4 a, float4 b) {
  return fmaf(a.x, b.x, a.y * b.y) + fmaf(a.z, b.z, a.w * b.w);
}

template <Family family, int warps, int rows_per_thread, bool streaming>
__global__ void __launch_bounds__(warps * 32)
    ConventionalKernel(const __grid_constant__ cuda::VerifyLaunch launch) {
  constexpr int kBlockRows = warps * 4 * rows_per_thread;
  const uint32_t lane = threadIdx.x % 32, column = lane % 8;
  const uint32_t heads = launch.shape.head_count, d_v = launch.shape.d_v;
  const uint32_t blocks_per_head = d_v / kBlockRows;
  const uint32_t items = launch.rows_max * heads * blocks_per_head;
  ptx::WaitForPrevious();
  ptx::AllowNext();
  for (uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
    const uint32_t block = item % blocks_per_head, head = item / blocks_per_head % heads;
    const uint32_t index = item / blocks_per_head / heads;
    const cuda::DeviceRow& row = launch.rows[index];
    const uint32_t first_row =
        block * kBlockRows + threadIdx.x / 32 * 4 * rows_per_thread + lane / 8;
    auto* state = reinterpret_cast<float4*>(
                      launch.pages + uint64_t{row.source_page} * launch.page.page_bytes +
                      (uint64_t{head} * d_v + first_row) * kDk * sizeof(float)) +
                  column;
    float4 tile[rows_per_thread][kVectors];
#pragma unroll
    for (int r = 0; r < rows_per_thread; ++r) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const float4* address = state + r * kDk + 8 * i;
        tile[r][i] = streaming ? __ldcs(address) : *address;
      }
    }
    const uint64_t token = row.first_token;
    const uint64_t group =
        token * launch.shape.key_group_count + head / launch.shape.heads_per_group();
    const auto* q = reinterpret_cast<const uint2*>(launch.inputs.q) + group * (kDk / 4) + column;
    const auto* k = reinterpret_cast<const uint2*>(launch.inputs.k) + group * (kDk / 4) + column;
    const uint64_t token_head = token * heads + head;
    const float* scales =
        family == Family::kMamba2 ? launch.inputs.value_scale : launch.inputs.beta;
    const float scale = scales[token_head];
    float4 alpha[kVectors], key[kVectors], query[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      key[i] = WidenKeys(k + 8 * i);
      query[i] = WidenKeys(q + 8 * i);
      if constexpr (family == Family::kKda) {
        const float4 log = reinterpret_cast<const float4*>(launch.inputs.log_alpha +
                                                           token_head * kDk)[8 * i + column];
        alpha[i] = {__expf(log.x), __expf(log.y), __expf(log.z), __expf(log.w)};
      } else {
        const float decay = __expf(launch.inputs.log_alpha[token_head]);
        alpha[i] = {decay, decay, decay, decay};
      }
    }
    const auto* values =
        static_cast<const __nv_bfloat16*>(launch.inputs.v) + token_head * d_v + first_row;
    auto* outputs = static_cast<__nv_bfloat16*>(launch.output) + token_head * d_v + first_row;
#pragma unroll
    for (int r = 0; r < rows_per_thread; ++r) {
      float read = 0;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float4& s = tile[r][i];
        s = {s.x * alpha[i].x, s.y * alpha[i].y, s.z * alpha[i].z, s.w * alpha[i].w};
        if (family != Family::kMamba2) read += Dot(s, key[i]);
      }
      if (family != Family::kMamba2) {
        for (int offset = 4; offset > 0; offset /= 2) read += __shfl_xor_sync(~0u, read, offset);
      }
      const float u = scale * (__bfloat162float(values[4 * r]) - read);
      float output = 0;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float4& s = tile[r][i];
        s = {fmaf(u, key[i].x, s.x), fmaf(u, key[i].y, s.y), fmaf(u, key[i].z, s.z),
             fmaf(u, key[i].w, s.w)};
        output += Dot(s, query[i]);
        if (streaming) {
          __stcs(state + r * kDk + 8 * i, s);
        } else {
          state[r * kDk + 8 * i] = s;
        }
      }
      for (int offset = 4; offset > 0; offset /= 2) output += __shfl_xor_sync(~0u, output, offset);
      if (column == 0) outputs[4 * r] = __float2bfloat16(output);
    }
  }
}

template <Family family, int warps, int rows_per_thread, bool streaming>
cudaError_t Launch(const cuda::VerifyLaunch& launch, cudaStream_t stream) {
  auto* kernel = ConventionalKernel<family, warps, rows_per_thread, streaming>;
  static const uint32_t resident = [&] {
    int device = 0, sms = 0, blocks = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, warps * 32, 0);
    return static_cast<uint32_t>(sms * blocks);
  }();
  const uint32_t items =
      launch.rows_max * launch.shape.head_count * launch.shape.d_v / (warps * 4 * rows_per_thread);
  cudaLaunchAttribute dependent{};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = std::min(items, resident);
  config.blockDim = warps * 32;
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, launch);
}

template <int rows_per_thread, bool streaming>
cudaError_t Dispatch(const cuda::VerifyLaunch& launch, cudaStream_t stream) {
  constexpr int r = rows_per_thread;
  switch (launch.shape.family) {
    case Family::kMamba2:
      return launch.shape.d_v == 80 ? Launch<Family::kMamba2, 5, r, streaming>(launch, stream)
                                    : Launch<Family::kMamba2, 4, r, streaming>(launch, stream);
    case Family::kGdn:
      return Launch<Family::kGdn, 4, r, streaming>(launch, stream);
    case Family::kKda:
      return Launch<Family::kKda, 4, r, streaming>(launch, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

const ConventionalVariant kConventionalVariants[4] = {{"2 rows", Dispatch<2, false>},
                                                      {"2 rows, streaming", Dispatch<2, true>},
                                                      {"4 rows", Dispatch<4, false>},
                                                      {"4 rows, streaming", Dispatch<4, true>}};

cudaError_t LaunchConventional(const cuda::VerifyLaunch& launch, cudaStream_t stream) {
  return kConventionalVariants[0].launch(launch, stream);
}

}  // namespace ssmd::bench
