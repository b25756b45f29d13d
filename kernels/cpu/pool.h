// Pool: memory of one layer's pages or rings, counted against the device's budget.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/device.h"

namespace ssmd::cpu {

// Anonymous zeroed pages, counted against the device's budget.
class Pool {
 public:
  Pool() = default;
  static absl::StatusOr<Pool> Make(Device* device, uint64_t bytes) {
    Pool pool;
    if (bytes == 0) return pool;
    SSMD_RETURN_IF_ERROR(device->Reserve(bytes));
    pool.device_ = device;
    pool.bytes_ = bytes;
    void* address =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) {
      return ErrorWithReason(
          absl::StatusCode::kResourceExhausted, reason::kNoMemory,
          absl::StrCat("mmap of ", bytes, " bytes failed: ", std::strerror(errno)));
    }
    pool.data_ = static_cast<std::byte*>(address);
    return pool;
  }
  Pool(Pool&& other) noexcept { *this = std::move(other); }
  Pool& operator=(Pool&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Pool() {
    if (data_ != nullptr) munmap(data_, bytes_);
    if (device_ != nullptr) device_->Return(bytes_);
  }
  std::byte* data() const { return data_; }

 private:
  Device* device_ = nullptr;
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace ssmd::cpu
