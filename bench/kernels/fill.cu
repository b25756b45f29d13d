#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "bench/kernels/device.h"
#include "bench/kernels/fill.h"

namespace ssmd::bench {
namespace {

__device__ uint32_t Hash(uint64_t x) {
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ull;
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ull;
  x ^= x >> 32;
  return static_cast<uint32_t>(x);
}
__device__ float Uniform(uint64_t x) { return (Hash(x) + 0.5f) * 0x1p-32f; }

template <typename T>
__global__ void FillKernel(Runs runs, Fill fill, float scale, uint64_t seed) {
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < runs.count * runs.rows;
       i += stride) {
    const float u = fminf(Uniform(2 * i + seed * 0x9e3779b97f4a7c15ull), 0.99999994f);
    float value = u;
    if (fill != Fill::kUnit) {
      const float angle = 6.2831853f * Uniform(2 * i + 1 + seed * 0x9e3779b97f4a7c15ull);
      value = sqrtf(-2 * __logf(u)) * __cosf(angle);
      if (fill == Fill::kNegative) value = -fabsf(value);
    }
    auto* run = static_cast<char*>(runs.first) + i / runs.count * runs.pitch_bytes;
    reinterpret_cast<T*>(run)[i % runs.count] = T(value * scale);
  }
}

template <typename T>
void Launch(const Runs& runs, Fill fill, float scale, uint64_t seed) {
  constexpr int kBlocks = 2048, kThreads = 256;
  FillKernel<T><<<kBlocks, kThreads>>>(runs, fill, scale, seed);
  SSMD_CUDA_CHECK(cudaGetLastError());
}

__global__ void PoisonKernel(std::byte* rings, cuda::DeviceRingLayout ring, cuda::RingRuns runs,
                             uint32_t run_count, const cuda::DeviceRow* rows) {
  const cuda::DeviceRow row = rows[blockIdx.x];
  if (row.slot == ToInt(kNoSlot)) return;
  const uint64_t run_words = uint64_t{ring.ring_records} * runs.row_bytes / 4;
  auto* words = reinterpret_cast<uint32_t*>(rings + row.slot * ring.slot_bytes + runs.offset_bytes);
  for (uint64_t i = threadIdx.x; i < run_count * run_words; i += blockDim.x) {
    const uint64_t r = i % run_words * 4 / runs.row_bytes;
    const uint64_t first = row.base % ring.ring_records;
    if ((r + ring.ring_records - first) % ring.ring_records >= row.tail - row.base)
      words[i] = 0xffffffffu;
  }
}

}  // namespace

void PoisonUnownedRecords(const cuda::VerifyLaunch& launch, const cuda::DeviceRow* rows,
                          uint32_t row_count) {
  const uint32_t heads = launch.shape.head_count, groups = launch.shape.key_group_count;
  auto poison = [&](const cuda::RingRuns& runs, uint32_t run_count) {
    if (runs.row_bytes == 0) return;
    PoisonKernel<<<row_count, 256>>>(launch.rings, launch.ring, runs, run_count, rows);
    SSMD_CUDA_CHECK(cudaGetLastError());
  };
  poison(launch.ring.key, groups);
  poison(launch.ring.value, heads);
  poison(launch.ring.log_alpha, launch.shape.family == Family::kKda ? heads : groups);
  poison(launch.ring.value_scale, groups);
}

void FillRandom(const Runs& runs, Dtype dtype, Fill fill, float scale, uint64_t seed) {
  if (runs.count * runs.rows == 0) return;
  if (dtype == Dtype::kFp32) Launch<float>(runs, fill, scale, seed);
  if (dtype == Dtype::kBf16) Launch<__nv_bfloat16>(runs, fill, scale, seed);
  if (dtype == Dtype::kFp16) Launch<__half>(runs, fill, scale, seed);
}

}  // namespace ssmd::bench
