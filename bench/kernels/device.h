// Device memory and CUDA errors of the kernel benchmark: any error ends the program.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

namespace ssmd::bench {

inline void CheckCuda(cudaError_t error, const char* what, int line) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "line %d: %s: %s\n", line, what, cudaGetErrorString(error));
  std::exit(1);
}
#define SSMD_CUDA_CHECK(expression) ::ssmd::bench::CheckCuda((expression), #expression, __LINE__)

// Uninitialised device memory of `count` T.
template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(size_t count) : count_(count) {
    if (count != 0) SSMD_CUDA_CHECK(cudaMalloc(&data_, count * sizeof(T)));
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    SSMD_CUDA_CHECK(
        cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }
  T* get() const { return static_cast<T*>(data_); }
  size_t size() const { return count_; }

 private:
  void* data_ = nullptr;
  size_t count_ = 0;
};

template <typename T>
std::vector<T> ToHost(const void* device, size_t count) {
  std::vector<T> host(count);
  SSMD_CUDA_CHECK(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

}  // namespace ssmd::bench
