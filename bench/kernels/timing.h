// Times sequences of launches as replays of one CUDA graph.
#pragma once

#include <functional>
#include <vector>

#include "bench/kernels/device.h"

namespace ssmd::bench {

// Captures launch(0) .. launch(count - 1) on a stream, then replays the graph `repetitions` times
// after some to warm up. Returns the median of the replays in microseconds per launch.
double MedianMicroseconds(int count, int repetitions,
                          const std::function<cudaError_t(int, cudaStream_t)>& launch);

// Bytes per microsecond that plain kernels reach on 2 GiB.
struct Ceilings {
  double read = 0, write = 0;
};
Ceilings MeasureCeilings();

}  // namespace ssmd::bench
