// SSMD_CHECK: a broken invariant is a bug; print what was expected and stop before state is
// corrupted.
//
// On in every build. Host only. (Debian 12's Abseil has no absl/log, hence this one macro.)
#pragma once

#include <cstdio>
#include <cstdlib>

#define SSMD_CHECK(condition, ...)                                                           \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::fprintf(stderr, "%s:%d: broken invariant: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                                     \
      std::fputc('\n', stderr);                                                              \
      std::abort();                                                                          \
    }                                                                                        \
  } while (0)
