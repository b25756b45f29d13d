#include "service/process_usage.h"

#include <time.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

namespace ssmd {
namespace {

// Start of this process in seconds since boot: field 22 of /proc/self/stat. The second field is a
// name that may hold spaces, so fields are counted from its closing bracket.
double SecondsFromBootToStart() {
  std::ifstream file("/proc/self/stat");
  const std::string stat{std::istreambuf_iterator<char>(file), {}};
  const size_t bracket = stat.rfind(')');
  if (bracket == std::string::npos) return 0;
  std::istringstream fields(stat.substr(bracket + 1));
  std::string skipped;
  for (int field = 3; field < 22; ++field) fields >> skipped;
  double ticks = 0;
  fields >> ticks;
  return ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

double Now(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double StartTime() { return Now(CLOCK_REALTIME) - Now(CLOCK_BOOTTIME) + SecondsFromBootToStart(); }

}  // namespace

ProcessUsage ReadProcessUsage() {
  static const double start = StartTime();  // once: the wall clock may be set meanwhile
  uint64_t pages_total = 0, pages_resident = 0;
  std::ifstream("/proc/self/statm") >> pages_total >> pages_resident;
  return {.start_time_seconds = start,
          .cpu_seconds = Now(CLOCK_PROCESS_CPUTIME_ID),
          .resident_bytes = pages_resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE))};
}

}  // namespace ssmd
