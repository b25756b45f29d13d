#include "kernels/gpu_device.h"

#ifdef SSMD_HAVE_CUDA
#include "kernels/cuda/cuda_backend.h"
#endif

namespace ssmd {

#ifdef SSMD_HAVE_CUDA
absl::StatusOr<GpuDevice> MakeGpuDevice(uint64_t state_bytes_max) {
  SSMD_ASSIGN_OR_RETURN(auto device, cuda::CudaDevice::Create(state_bytes_max));
  const std::string description = device->description();
  return GpuDevice{std::move(device), description};
}
#else
absl::StatusOr<GpuDevice> MakeGpuDevice(uint64_t) {
  return absl::UnavailableError("cuda: not in this build (it was configured without nvcc)");
}
#endif

}  // namespace ssmd
