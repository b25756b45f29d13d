// CpuDevice and its backend: pools in host memory, kernels on an Executor.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/cpu/background_flushes.h"
#include "kernels/device.h"

namespace ssmd::cpu {

// The memory and the executor of this machine.
class CpuDevice : public Device {
 public:
  // `background` runs background flushes; null: they run when they are needed. Both outlive the
  // device.
  CpuDevice(uint64_t state_bytes_max, Executor* executor, TaskQueue* background = nullptr)
      : Device(state_bytes_max), executor_(executor), background_(background) {}

  const char* name() const override { return "cpu"; }
  absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(const BackendSpec& spec) override;
  Executor* executor() const { return executor_; }

 private:
  Executor* const executor_;
  TaskQueue* const background_;
};

}  // namespace ssmd::cpu
