// Random device memory: normally distributed, from a counter hash, so the same everywhere.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/verify_launch.h"

namespace ssmd::bench {

enum class Fill : uint8_t {
  kNormal,    // scale * N(0, 1)
  kNegative,  // -scale * |N(0, 1)|: log decays
  kUnit,      // scale * uniform in (0, 1)
};

// `rows` runs of `count` elements of `dtype`, `pitch_bytes` apart. Ends the program on a CUDA
// error.
struct Runs {
  void* first = nullptr;
  size_t count = 0;
  size_t rows = 1;
  size_t pitch_bytes = 0;
};
void FillRandom(const Runs& runs, Dtype dtype, Fill fill, float scale, uint64_t seed);

// 0xff (NaN) in every ring row that no committed record of these slots owns: what must not be read.
void PoisonUnownedRecords(const cuda::VerifyLaunch& launch, const cuda::DeviceRow* rows,
                          uint32_t row_count);

}  // namespace ssmd::bench
