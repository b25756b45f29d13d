#include <algorithm>
#include <cstdint>

#include "bench/kernels/timing.h"

namespace ssmd::bench {
namespace {

constexpr int kThreads = 512;
constexpr int kUnroll = 8;

__global__ void ReadKernel(const uint4* data, size_t count, uint4* sink) {
  uint4 sum{};
  const size_t step = size_t{gridDim.x} * kThreads * kUnroll;
  for (size_t i = size_t{blockIdx.x} * kThreads * kUnroll + threadIdx.x; i < count; i += step) {
    uint4 x[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) x[j] = __ldcs(data + i + j * kThreads);
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      sum.x ^= x[j].x;
      sum.y ^= x[j].y;
      sum.z ^= x[j].z;
      sum.w ^= x[j].w;
    }
  }
  if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x12345678u) *sink = sum;  // so that it is computed
}

__global__ void WriteKernel(uint4* data, size_t count, uint32_t value) {
  const size_t step = size_t{gridDim.x} * kThreads;
  for (size_t i = size_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step)
    __stcs(data + i, uint4{value, value ^ static_cast<uint32_t>(i), value, value});
}

}  // namespace

double MedianMicroseconds(int count, int repetitions,
                          const std::function<cudaError_t(int, cudaStream_t)>& launch) {
  constexpr int kWarmUps = 2;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  cudaEvent_t start, end;
  SSMD_CUDA_CHECK(cudaStreamCreate(&stream));
  SSMD_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < count; ++i) SSMD_CUDA_CHECK(launch(i, stream));
  SSMD_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  SSMD_CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
  SSMD_CUDA_CHECK(cudaEventCreate(&start));
  SSMD_CUDA_CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kWarmUps + repetitions; ++i) {
    SSMD_CUDA_CHECK(cudaEventRecord(start, stream));
    SSMD_CUDA_CHECK(cudaGraphLaunch(executable, stream));
    SSMD_CUDA_CHECK(cudaEventRecord(end, stream));
    SSMD_CUDA_CHECK(cudaStreamSynchronize(stream));
    float milliseconds = 0;
    SSMD_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start, end));
    if (i >= kWarmUps) times.push_back(milliseconds);
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  SSMD_CUDA_CHECK(cudaEventDestroy(start));
  SSMD_CUDA_CHECK(cudaEventDestroy(end));
  SSMD_CUDA_CHECK(cudaGraphExecDestroy(executable));
  SSMD_CUDA_CHECK(cudaGraphDestroy(graph));
  SSMD_CUDA_CHECK(cudaStreamDestroy(stream));
  return 1000.0 * times[times.size() / 2] / count;
}

Ceilings MeasureCeilings() {
  constexpr size_t kBytes = size_t{2} << 30, kCount = kBytes / sizeof(uint4);
  constexpr int kRepetitions = 15;
  DeviceArray<uint4> data(kCount), sink(1);
  int device = 0, sms = 0;
  SSMD_CUDA_CHECK(cudaGetDevice(&device));
  SSMD_CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  const int blocks = 4 * sms;
  Ceilings ceilings;
  ceilings.write = kBytes / MedianMicroseconds(2, kRepetitions, [&](int i, cudaStream_t stream) {
                     WriteKernel<<<blocks, kThreads, 0, stream>>>(data.get(), kCount, 77u + i);
                     return cudaGetLastError();
                   });
  ceilings.read = kBytes / MedianMicroseconds(2, kRepetitions, [&](int, cudaStream_t stream) {
                    ReadKernel<<<blocks, kThreads, 0, stream>>>(data.get(), kCount, sink.get());
                    return cudaGetLastError();
                  });
  return ceilings;
}

}  // namespace ssmd::bench
