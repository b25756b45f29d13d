// The CPU kernels: one work item is one row of a step and one key group of one layer.
//
//   verify, the paper's eq. 6 and 9-11 restated; gamma is a scalar per head, in KDA a vector over
//   d_k
//     q~_s = gamma_{1:h+s} * q_s, k~_s likewise
//     O_s  = S q~_s + sum_{j <= h+s} u_j W_js                  W_js = k_j^T (gamma_{j+1:h+s} * q_s)
//     u_s  = beta_s (v_s - S k~_s - sum_{j < h+s} u_j A_js)    A_js = k_j^T (gamma_{j+1:h+s} * k_s)
//            by forward substitution in s; Mamba-2: u = dt * x
//   fold
//     S'   = S * gamma_{1:n} + sum_{j <= n} u_j (gamma_{j+1:n} * k_j)^T,  n = fold_to - base
//
//   re-derivation, two precisions and delta rules, where the page that is read is HP
//     u_j  = beta_j (v_j - S k~_j - sum_{i < j} u_i A_ij)    for all committed records, v and beta
//            as recorded. These u replace the recorded ones, which were computed against LP, in S'
//            and in this step's O and u_s; they are FP32 and never written back. They are not
//            rounded as a record is: that rounding pays for storage, and nothing stores them.
//
// S q~, S k~ and S' come from ONE pass over the checkpoint. HP and LP of S' are each rounded from
// the same FP32 values: HP, read back into the recurrence, stochastically, LP to nearest. Decays
// are summed as logs in double; a product of decays is the exp of such a sum, never of a positive
// number. (KDA splits a product at h, and multiplies the few alphas between two drafts.) Everything
// else is FP32, where denormals count as zero. A correction is rounded to the record's dtype before
// it is used, so a published record is what the next token sees.
//
// Deterministic: one thread per item, fixed order, no atomics. The bytes of a row do not depend on
// its batch, nor on a fold; for scalar decays not even on how many drafts came with a token. They
// do depend on the machine's vector instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/params.h"

namespace ssmd::cpu {

// Everything one item needs; pointers are already resolved to the row's slot, pages and first
// token.
struct GroupItem {
  const LayerShape* shape = nullptr;
  const Formats* formats = nullptr;
  const RingLayout* ring_layout = nullptr;
  std::byte* ring =
      nullptr;  // the slot's ring of this layer; the item appends its heads' and group's records
  // Checkpoints are [head, d_v, d_k], whole layers. The source is HP for a fold or replay, else LP
  // where there is one.
  const std::byte* source = nullptr;
  Dtype source_dtype = Dtype::kFp32;
  std::byte* target_hp = nullptr;  // checkpoint_hp; null: no fold
  std::byte* target_lp = nullptr;  // checkpoint_lp; null without one
  RoundingKey rounding;            // of the target; fold_position = fold_to
  uint64_t base = 0;
  uint64_t tail = 0;
  uint64_t fold_to = 0;
  uint32_t draft_tokens = 0;    // 1..kDraftTokensMax
  uint32_t group = 0;           // key group
  VerifyInputs inputs;          // strides as in VerifyInputs, from the row's first token
  const float* skip = nullptr;  // FP32 [head]: o += skip * v, Mamba-2's D x; or null
  void* output = nullptr;       // output dtype [T, head, d_v] of this row
};

// Returns PoisonFlags. Poisoned or not, only this row's drafts, outputs and target are written.
uint32_t VerifyGroup(const GroupItem& item);

// state FP32 [head, d_v, d_k] (only this group's heads are written) := replay of records [base,
// tail). Uses shape, formats, ring_layout, ring, source, base, tail and group of the item.
void ReplayGroup(const GroupItem& item, float* state);

// Folds records [base, tail) into the targets: the bytes that a fold of VerifyGroup with fold_to =
// tail writes. Uses what ReplayGroup does, targets and rounding. Returns PoisonFlags.
uint32_t FoldGroup(const GroupItem& item);

// Writes this group's heads of `state`, FP32 [head, d_v, d_k], to the targets. Uses shape, formats,
// targets, rounding and group. Returns PoisonFlags.
uint32_t StoreGroup(const GroupItem& item, const float* state);

// The vector instruction set in use, for logs and benchmarks ("AVX3_SPR", "AVX2", ...).
const char* VectorTarget();

}  // namespace ssmd::cpu
