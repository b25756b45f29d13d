// Device: where backends live, with one memory budget that the models of a process share.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "kernels/backend.h"

namespace ssmd {

// Outlives its backends. Thread-safe.
class Device {
 public:
  explicit Device(uint64_t state_bytes_max) : bytes_max_(state_bytes_max) {}
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  virtual const char* name() const = 0;  // "cpu", "cuda": that of its backends

  // Reserves and initialises all that a model needs.
  // Errors: RESOURCE_EXHAUSTED + NO_MEMORY when the budget (or the machine) has not enough left;
  // UNIMPLEMENTED, naming what, when this device cannot do what `spec` asks.
  virtual absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(const BackendSpec& spec) = 0;

  uint64_t bytes_max() const { return bytes_max_; }
  uint64_t bytes_used() const { return bytes_used_.load(std::memory_order_relaxed); }

  // Claims bytes of the budget; RESOURCE_EXHAUSTED + NO_MEMORY when they are not there.
  absl::Status Reserve(uint64_t bytes);
  void Return(uint64_t bytes) { bytes_used_.fetch_sub(bytes, std::memory_order_relaxed); }

 private:
  const uint64_t bytes_max_;
  std::atomic<uint64_t> bytes_used_{0};
};

}  // namespace ssmd
