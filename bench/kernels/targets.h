// Times that the kernels are to reach on one H200: microseconds per step of one layer, folds
// included. Zero: none is set.
#pragma once

#include <cstdint>
#include <string_view>

#include "bench/kernels/scenario.h"

namespace ssmd::bench {

inline constexpr uint32_t kBatches[] = {1, 8, 32, 128, 256, 512};

// T = 1, averaged over windows of 16 steps.
struct DecodeTargets {
  std::string_view shape;
  double microseconds[6];  // as kBatches
};
inline constexpr DecodeTargets kDecodeTargets[] = {
    {"Nano-4B", {3.3, 10.2, 36, 134, 262, 524}},
    {"Super-120B", {3.3, 10.6, 37, 140, 274, 545}},
    {"Qwen-4B", {3.3, 7, 20.5, 72, 141, 281}},
    {"Qwen-122B", {3.6, 11.2, 38, 141, 277, 552}},
    {"KDA-32", {0, 0, 0, 0, 152, 0}},
    {"KDA-64", {0, 0, 0, 0, 304, 0}},
};

// B = 256, averaged over whole windows with one and with all tokens accepted.
struct VerifyTargets {
  std::string_view shape;
  uint32_t tokens;
  double one_accepted, all_accepted;
};
inline constexpr VerifyTargets kVerifyTargets[] = {
    {"Super-120B", 2, 282, 300}, {"Super-120B", 4, 292, 344}, {"Super-120B", 8, 315, 430},
    {"Qwen-122B", 2, 285, 303},  {"Qwen-122B", 4, 299, 350},  {"Qwen-122B", 8, 328, 445},
};

inline double TargetMicroseconds(std::string_view shape, uint32_t tokens, uint32_t batch,
                                 Steps steps) {
  const bool one_accepted = steps == Steps::kStaggered || steps == Steps::kInPhase;
  if (!one_accepted && steps != Steps::kAllAccepted) return 0;
  for (const DecodeTargets& targets : kDecodeTargets) {
    for (size_t i = 0; i < std::size(kBatches); ++i) {
      if (tokens == 1 && targets.shape == shape && kBatches[i] == batch)
        return targets.microseconds[i];
    }
  }
  for (const VerifyTargets& targets : kVerifyTargets) {
    if (targets.shape == shape && targets.tokens == tokens && batch == 256)
      return one_accepted ? targets.one_accepted : targets.all_accepted;
  }
  return 0;
}

}  // namespace ssmd::bench
