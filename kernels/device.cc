#include "kernels/device.h"

#include "absl/strings/str_cat.h"

namespace ssmd {

absl::Status Device::Reserve(uint64_t bytes) {
  uint64_t used = bytes_used_.load(std::memory_order_relaxed);
  do {
    if (bytes > bytes_max_ - used) {
      return ErrorWithReason(absl::StatusCode::kResourceExhausted, reason::kNoMemory,
                             absl::StrCat("pool of ", bytes, " bytes: ", used, " of ", bytes_max_,
                                          " state bytes are in use"));
    }
  } while (!bytes_used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  return absl::OkStatus();
}

}  // namespace ssmd
