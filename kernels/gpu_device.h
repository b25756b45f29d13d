// The GPU of this process, if it has one: the seam to kernels/cuda for code that is built with and
// without CUDA.
#pragma once

#include <memory>

#include "kernels/device.h"

namespace ssmd {

struct GpuDevice {
  std::unique_ptr<Device> device;
  std::string description;  // "NVIDIA H200, compute capability 9.0, 139 GiB"
};

// Errors: UNAVAILABLE, saying why, when there is none that this build can use: no device, no
// driver, no code for it, or no CUDA in this build.
absl::StatusOr<GpuDevice> MakeGpuDevice(uint64_t state_bytes_max);

}  // namespace ssmd
