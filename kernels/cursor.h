// Ring arithmetic and the flush rule: pure functions, one definition for host and device.
//
// Positions are absolute token counts (uint64). A sequence's committed records are [base, tail),
// its checkpoint page is the state at `base`, h = tail - base. Everything a plan decides is a
// function of (base, tail, window, T) and the model's FlushRule: never of timing.
#pragma once

#include <cstdint>

#include "kernels/formats.h"

namespace ssmd {

// Limits of one model that the flush rule needs. Checked once, at registration
// (state_store/geometry.h).
struct FlushRule {
  uint32_t window_records = 16;      // L: most committed records when every fold is done in time
  uint32_t draft_tokens_max = 8;     // T_max <= L - K
  uint32_t rollback_tokens_min = 0;  // K: committed records that a fold leaves in the ring
  uint32_t ring_records = 32;        // R >= L + 2 T_max: slack for rows whose fold is put off
};

SSMD_HOST_DEVICE constexpr uint64_t RingRow(uint64_t position, uint32_t ring_records) {
  return position % ring_records;
}

// A fold is due: the step's records would pass the window, and there is something to fold.
SSMD_HOST_DEVICE constexpr bool FoldIsDue(uint64_t h, uint32_t draft_tokens, uint32_t window,
                                          const FlushRule& rule) {
  return h + draft_tokens > window && h > rule.rollback_tokens_min;
}

// A due fold can be put off no longer: without it the step after this one might not fit the ring.
SSMD_HOST_DEVICE constexpr bool FoldIsMandatory(uint64_t h, uint32_t draft_tokens,
                                                const FlushRule& rule) {
  return h + draft_tokens + rule.draft_tokens_max > rule.ring_records;
}

// The position a fold moves the checkpoint to.
SSMD_HOST_DEVICE constexpr uint64_t FoldTo(uint64_t tail, const FlushRule& rule) {
  return tail - rule.rollback_tokens_min;
}

}  // namespace ssmd
