// The steps that are timed: which rows hold how many records, and which of them fold.
#pragma once

#include "bench/kernels/check.h"
#include "bench/kernels/self_check.h"
#include "bench/kernels/timing.h"
#include "bench/kernels/world.h"

namespace ssmd::bench {

enum class Steps {
  kEmpty,         // no fold, h = 0
  kFull,          // no fold, the largest h without one: 14 at T = 1, L - T
  kFlush,         // every row folds 16 records
  kStaggered,     // whole windows, one token accepted a step; folds spread over the steps
  kInPhase,       // the same with all rows folding in the same step
  kAllAccepted,   // as staggered, T tokens accepted a step
  kConventional,  // one read and one write of the state; T = 1
};
const char* StepsName(Steps steps);

struct Measurement {
  double microseconds = 0;  // per launch, median
  Traffic traffic;          // per launch
  int repetitions = 0;
  HeadErrors errors;  // of a few random rows and heads of the same launches
  bool good = false;
};

// Layers that together are colder than the L2.
uint32_t ColdLayers(const LayerShape& shape, uint32_t batch);

// Times `verify` over the steps of a scenario, round all layers of the world, and compares a few
// heads with float64.
Measurement Measure(World& world, const LayerShape& shape, Dtype output, Steps steps,
                    int repetitions, const VerifyFunction& verify);

}  // namespace ssmd::bench
