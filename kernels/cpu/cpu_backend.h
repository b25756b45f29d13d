// CpuDevice and its backend: pools in host memory, kernels on an Executor.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "kernels/backend.h"
#include "kernels/cpu/background_flushes.h"

namespace ssmd::cpu {

// Memory budget and executor that the backends of one process share. Outlives its backends.
// Thread-safe.
class CpuDevice {
 public:
  // `background` runs background flushes; null: they run when they are needed. Both outlive the
  // device.
  CpuDevice(uint64_t state_bytes_max, Executor* executor, TaskQueue* background = nullptr)
      : bytes_max_(state_bytes_max), executor_(executor), background_(background) {}

  // Reserves and initialises all pools of a model.
  // Errors: RESOURCE_EXHAUSTED + NO_MEMORY when the budget (or the machine) has not enough left.
  absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(const BackendSpec& spec);

  uint64_t bytes_max() const { return bytes_max_; }
  uint64_t bytes_used() const { return bytes_used_.load(std::memory_order_relaxed); }
  Executor* executor() const { return executor_; }

  // Claims bytes of the budget; false when they are not there.
  bool Reserve(uint64_t bytes);
  void Return(uint64_t bytes);

 private:
  const uint64_t bytes_max_;
  Executor* const executor_;
  TaskQueue* const background_;
  std::atomic<uint64_t> bytes_used_{0};
};

}  // namespace ssmd::cpu
