// Owners of what the CUDA runtime gives out, and its errors as statuses. Host only.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/device.h"

#define SSMD_RETURN_IF_CUDA_ERROR(expression)                                   \
  do {                                                                          \
    if (const cudaError_t ssmd_error = (expression); ssmd_error != cudaSuccess) \
      return ::ssmd::cuda::CudaStatus(ssmd_error, #expression);                 \
  } while (0)

namespace ssmd::cuda {

inline absl::Status CudaStatus(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message = absl::StrCat(what, ": ", cudaGetErrorString(error));
  if (error != cudaErrorMemoryAllocation) return absl::InternalError(message);
  cudaGetLastError();  // not sticky: the next call must not see it again
  return ErrorWithReason(absl::StatusCode::kResourceExhausted, reason::kNoMemory, message);
}

// Memory of the GPU, counted against a budget; or pinned memory of the host, which is not.
class Buffer {
 public:
  Buffer() = default;
  static absl::StatusOr<Buffer> OnDevice(Device* budget, uint64_t bytes) {
    Buffer buffer;
    if (bytes == 0) return buffer;
    SSMD_RETURN_IF_ERROR(budget->Reserve(bytes));
    buffer.budget_ = budget;
    buffer.bytes_ = bytes;
    SSMD_RETURN_IF_CUDA_ERROR(cudaMalloc(&buffer.data_, bytes));
    return buffer;
  }
  static absl::StatusOr<Buffer> Pinned(uint64_t bytes) {
    Buffer buffer;
    SSMD_RETURN_IF_CUDA_ERROR(cudaMallocHost(&buffer.data_, bytes));
    buffer.bytes_ = bytes;
    return buffer;
  }
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(budget_, other.budget_);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) budget_ != nullptr ? cudaFree(data_) : cudaFreeHost(data_);
    if (budget_ != nullptr) budget_->Return(bytes_);
  }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  uint64_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  uint64_t bytes_ = 0;
  Device* budget_ = nullptr;
};

// kHigh and kLow differ where the device has priorities.
enum class Priority { kHigh, kLow };

class Stream {
 public:
  Stream() = default;
  static absl::StatusOr<Stream> Make(Priority priority) {
    int least = 0, greatest = 0;
    SSMD_RETURN_IF_CUDA_ERROR(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    Stream stream;
    SSMD_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithPriority(
        &stream.stream_, cudaStreamNonBlocking, priority == Priority::kHigh ? greatest : least));
    return stream;
  }
  Stream(Stream&& other) noexcept { *this = std::move(other); }
  Stream& operator=(Stream&& other) noexcept {
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~Stream() {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Orders streams; carries no time.
class Event {
 public:
  Event() = default;
  static absl::StatusOr<Event> Make() {
    Event event;
    SSMD_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&event.event_, cudaEventDisableTiming));
    return event;
  }
  Event(Event&& other) noexcept { *this = std::move(other); }
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~Event() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// Copies between pageable host memory and the device through two pinned halves of fixed size, so
// that one half is filled while the other is copied. Thread-compatible.
class Staging {
 public:
  Staging() = default;
  static absl::StatusOr<Staging> Make(uint64_t half_bytes) {
    Staging staging;
    for (Half& half : staging.halves_) {
      SSMD_ASSIGN_OR_RETURN(half.buffer, Buffer::Pinned(half_bytes));
      SSMD_ASSIGN_OR_RETURN(half.done, Event::Make());
    }
    return staging;
  }

  // `from` may be changed as soon as this returns.
  absl::Status ToDevice(void* to, const void* from, uint64_t bytes, cudaStream_t stream) {
    for (uint64_t at = 0; at < bytes;) {
      Half& half = NextHalf();
      SSMD_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(half.done.get()));
      const uint64_t part = std::min(bytes - at, half.buffer.bytes());
      std::memcpy(half.buffer.data(), static_cast<const std::byte*>(from) + at, part);
      SSMD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(static_cast<std::byte*>(to) + at,
                                                half.buffer.data(), part, cudaMemcpyHostToDevice,
                                                stream));
      SSMD_RETURN_IF_CUDA_ERROR(cudaEventRecord(half.done.get(), stream));
      at += part;
    }
    return absl::OkStatus();
  }

  // Returns when `to` is complete, and with it all earlier work of the stream.
  absl::Status ToHost(void* to, const void* from, uint64_t bytes, cudaStream_t stream) {
    struct Part {
      Half* half;
      std::byte* to;
      uint64_t bytes;
    } last{};
    auto take = [](const Part& part) -> absl::Status {
      if (part.half == nullptr) return absl::OkStatus();
      SSMD_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(part.half->done.get()));
      std::memcpy(part.to, part.half->buffer.data(), part.bytes);
      return absl::OkStatus();
    };
    for (uint64_t at = 0; at < bytes;) {
      Half& half = NextHalf();
      SSMD_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(half.done.get()));
      const uint64_t part = std::min(bytes - at, half.buffer.bytes());
      SSMD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(half.buffer.data(),
                                                static_cast<const std::byte*>(from) + at, part,
                                                cudaMemcpyDeviceToHost, stream));
      SSMD_RETURN_IF_CUDA_ERROR(cudaEventRecord(half.done.get(), stream));
      SSMD_RETURN_IF_ERROR(take(last));
      last = {&half, static_cast<std::byte*>(to) + at, part};
      at += part;
    }
    return take(last);
  }

 private:
  struct Half {
    Buffer buffer;
    Event done;  // of the last copy through it
  };
  Half& NextHalf() { return halves_[next_++ % 2]; }

  std::array<Half, 2> halves_;
  uint64_t next_ = 0;
};

}  // namespace ssmd::cuda
