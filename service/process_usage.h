// What the kernel says about this process (Linux: /proc/self).
#pragma once

#include <cstdint>

namespace ssmd {

struct ProcessUsage {
  double start_time_seconds = 0;  // Unix time
  double cpu_seconds = 0;         // user and system, all threads
  uint64_t resident_bytes = 0;
};

// Zeros where /proc cannot be read.
ProcessUsage ReadProcessUsage();

}  // namespace ssmd
