// Working memory of one thread that runs the verify kernels: allocated once per thread, 2.1 MiB.
//
// Only the leading part of each array that a shape needs is touched: at 128 x 128, h = 15 and T = 1
// that is 40 KiB. Strides are compact (d_k, and d_v padded to 16 floats), so it stays in cache.
#pragma once

#include <cstddef>

#include "kernels/layout.h"

namespace ssmd::cpu {

// Most query-like vectors of a row: T queries, and for delta rules T draft keys behind them.
inline constexpr size_t kVectorsMax = 2 * kDraftTokensMax;
// Rows of a state that re-derive their u together, before they are folded: they stay in the
// first-level cache, so the checkpoint is still read once.
inline constexpr size_t kSolveRows = 16;

struct VerifyScratch {
  // Per key group.
  alignas(64) float x[kVectorsMax * kDimMax];             // q_1..q_T, k_1..k_T         [m][d_k]
  alignas(64) float keys[kRingRecordsMax * kDimMax];      // of all h + T records       [j][d_k]
  alignas(64) float dots[kVectorsMax * kRingRecordsMax];  // k_j . x_m                [m][j]
  // Per head.
  alignas(64) float u[kRingRecordsMax * kDimMax];           // u_j, or dt_j x_j    [j][d_v]
  alignas(64) float fold_u[kRingRecordsMax * kDimMax];      // gamma_{j+1:n} u_j   [j][d_v]
  alignas(64) float weight[kVectorsMax * kRingRecordsMax];  // W above A           [m][j]
  alignas(64) float accumulator[kVectorsMax * kDimMax];     // S x~_m, then o, u   [m][d_v]
  alignas(64) float gamma[kDimMax];                         // gamma_{1:n} of the fold
  alignas(64) double log_decay[kRingRecordsMax];            // sums of log alpha from `base`
  alignas(64) float exponent[kRingRecordsMax];
  alignas(64) float target[kDimMax];   // v of one token
  alignas(64) float rounded[kDimMax];  // an output as its reader sees it
  // Four or sixteen rows of the checkpoint, when it is not FP32, and four of S' on their way to a
  // page.
  alignas(64) float rows[kSolveRows * kDimMax];
  alignas(64) float folded[4 * kDimMax];
  // Per head, where u is re-derived. `record_dots` is per key group.
  alignas(64) float record_dots[kRingRecordsMax * kRingRecordsMax];    // k_i . k_j      [j][i]
  alignas(64) float record_weight[kRingRecordsMax * kRingRecordsMax];  // A_ij           [j][i]
  alignas(64) float record_x[kRingRecordsMax * kDimMax];      // k~_j, channelwise only  [j][d_k]
  alignas(64) float record_alpha[kRingRecordsMax * kDimMax];  // channelwise only        [j][d_k]
  alignas(64) float read_scale[kRingRecordsMax];              // S k~_j = read_scale_j S x_j
  // Per head, channelwise decays only.
  alignas(64) float decayed_keys[kRingRecordsMax * kDimMax];  // gamma_{j+1:h} * k_j [j][d_k]
  alignas(64) float fold_keys[kRingRecordsMax * kDimMax];     // gamma_{j+1:n} * k_j [j][d_k]
  alignas(64) float decayed_x[kVectorsMax * kDimMax];         // x~_m                [m][d_k]
  alignas(64) float draft_alpha[kDraftTokensMax * kDimMax];   // alpha_{h+s}         [s][d_k]
  alignas(64) float decay[kDimMax];
  alignas(64) float walked[kDimMax];
  alignas(64) double channel_sum[kDimMax];
};

}  // namespace ssmd::cpu
