// CudaDevice and its backend: the GPU behind kernels/backend.h, for the store and the inline
// service.
//
// Each call copies what it is given in, runs the stream-ordered functions of model.h, and copies
// results out through pinned memory of fixed size. Control operations run on one stream under one
// mutex; Verifies on a second, one at a time; background flushes on a third.
//
// A CUDA error in a control operation ends the process: it is sticky, and with the device the state
// is lost. In a Verify it is INTERNAL.
#pragma once

#include <memory>

#include "kernels/device.h"

namespace ssmd::cuda {

class CudaDevice : public Device {
 public:
  // The current CUDA device (CUDA_VISIBLE_DEVICES chooses it).
  // Errors: UNAVAILABLE, saying why, when there is none that this build can use.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Create(uint64_t state_bytes_max);

  const char* name() const override { return "cuda"; }
  absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(const BackendSpec& spec) override;
  // "NVIDIA H200, compute capability 9.0, 139 GiB".
  const std::string& description() const { return description_; }

 private:
  CudaDevice(uint64_t state_bytes_max, std::string description)
      : Device(state_bytes_max), description_(std::move(description)) {}

  const std::string description_;
};

}  // namespace ssmd::cuda
