// The kernels of the backend that tests run on, one row of one layer at a time, in the terms of the
// CPU's: whole layers of a GroupItem whose ring and pages are host memory in the CPU's layout.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/cpu/verify_kernel.h"

namespace ssmd::cuda {
struct VerifyKernel;
}

namespace ssmd::testing {

// As cpu::VerifyGroup for each group, on a CPU in the order given.
uint32_t VerifyGroups(cpu::GroupItem item, const std::vector<uint32_t>& groups);

// As cpu::ReplayGroup and cpu::FoldGroup for all groups.
void ReplayGroups(cpu::GroupItem item, float* state);
uint32_t FoldGroups(cpu::GroupItem item);

// The rule of a model whose steps are like this one: its largest T, K, R.
inline FlushRule RuleOf(uint32_t draft_tokens, uint32_t kept, uint32_t ring_records) {
  const uint32_t draft_tokens_max = std::max(draft_tokens, 4u);
  return {ring_records - 2 * draft_tokens_max, draft_tokens_max, kept, ring_records};
}

// On a GPU: the entry of the dispatch table that VerifyGroups runs; null: the one it chooses.
void RunVerifyKernel(const cuda::VerifyKernel* kernel);

}  // namespace ssmd::testing
