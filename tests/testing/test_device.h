// The device that tests of a backend run on: SSMD_TEST_BACKEND=cpu (the default) or cuda.
#pragma once

#include <cstdlib>
#include <memory>
#include <string>

#include "kernels/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/gpu_device.h"

namespace ssmd::testing {

inline bool TestsRunOnCuda() {
  const char* text = std::getenv("SSMD_TEST_BACKEND");
  const std::string name = text == nullptr ? "cpu" : text;
  SSMD_CHECK(name == "cpu" || name == "cuda", "SSMD_TEST_BACKEND: expected cpu or cuda, got '%s'",
             name.c_str());
  return name == "cuda";
}

// `background` runs background flushes of a CPU backend when the test says so; a GPU runs them by
// itself.
inline std::unique_ptr<Device> MakeTestDevice(uint64_t state_bytes_max, Executor* executor,
                                              cpu::TaskQueue* background = nullptr) {
  if (!TestsRunOnCuda())
    return std::make_unique<cpu::CpuDevice>(state_bytes_max, executor, background);
  auto gpu = MakeGpuDevice(state_bytes_max);
  SSMD_CHECK(gpu.ok(), "%s", gpu.status().ToString().c_str());
  return std::move(gpu->device);
}

}  // namespace ssmd::testing
