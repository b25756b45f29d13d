// FlushDenormals: while one lives, FP32 denormals count as zero on this thread.
//
// Decays reach every magnitude, and an x86 core takes a microcode assist of some 150 cycles for
// denormal operands: records of 2^-126 made a verify of 16 tokens 1.5 times slower, KDA 3 times.
// What is lost is below 2^-126. Elsewhere denormals cost nothing, and this does nothing.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace ssmd::cpu {

class FlushDenormals {
 public:
#if defined(__SSE2__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kFlushToZero = 0x8000;
  static constexpr unsigned kDenormalsAreZero = 0x0040;
  const unsigned saved_;

 public:
#else
  FlushDenormals() {}
#endif
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;
};

}  // namespace ssmd::cpu
