// Correctness of a verify kernel on hostile steps, before anything is timed.
#pragma once

#include <functional>
#include <string>

#include "bench/kernels/world.h"

namespace ssmd::bench {

using VerifyFunction = std::function<cudaError_t(const cuda::VerifyLaunch&, cudaStream_t)>;

// Rows of up to `tokens` tokens that fold, do not fold, are padding or carry none, at random ring
// origins, with NaN wherever nobody may read: outputs, folded states and records against float64;
// the same bytes from five launches and from permuted rows; a poisoned row is reported and disturbs
// no other. Prints what failed. Returns true if nothing did.
bool SelfCheck(const std::string& name, const LayerShape& shape, Dtype output, uint32_t tokens,
               const VerifyFunction& verify);

}  // namespace ssmd::bench
