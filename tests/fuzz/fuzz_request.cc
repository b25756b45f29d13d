// The libFuzzer program of one request type; SSMD_FUZZ_TYPE is its name.
#include <spdlog/spdlog.h>

#include "tests/fuzz/world.h"

#define SSMD_TEXT_INNER(x) #x
#define SSMD_TEXT(x) SSMD_TEXT_INNER(x)

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  spdlog::set_level(spdlog::level::off);
  ssmd::fuzz::Run(SSMD_TEXT(SSMD_FUZZ_TYPE), data, size);
  return 0;
}
