// What a verify kernel is given, and the rows of a planned step as the device holds them.
//
// Everything that varies from step to step (row count, cursors, pages, T) is read from device
// memory, so that one captured graph serves every step.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/ring_layout.h"
#include "kernels/params.h"

namespace ssmd::cuda {

inline constexpr uint32_t kNone = 0xffffffffu;  // no page, no slot, no row
static_assert(static_cast<uint32_t>(kNoPage) == kNone && static_cast<uint32_t>(kNoSlot) == kNone);

// One row, written by the plan kernel, immutable until the step ends. A row with T = 0 and a
// padding row (slot == kNoSlot) read and write nothing but, padding, zeros to their outputs.
struct DeviceRow {
  uint64_t base, tail;  // committed records [base, tail)
  uint64_t fold_to;     // meaningful when target_page != kNoPage
  uint64_t rounding_key;
  uint32_t slot;
  uint32_t draft_tokens;  // T
  uint32_t first_token;   // of this row in the packed inputs and outputs
  uint32_t source_page;
  uint32_t target_page;     // kNoPage: the row only reads
  uint32_t installs_flush;  // 0 or 1
};

// The step as a whole. A plan that failed has row_count 0: its verifies do nothing.
struct DeviceStep {
  uint32_t row_count;
  uint32_t token_count;
};

// One layer of one step. Pointers are device memory; pools start at this layer.
struct VerifyLaunch {
  LayerShape shape;
  Formats formats;
  PageLayout page;
  DeviceRingLayout ring;
  FlushRule rule;
  std::byte* pages = nullptr;        // [page]; source pages are read, target pages written
  std::byte* rings = nullptr;        // [slot]; drafts are written behind `tail`
  const DeviceStep* step = nullptr;  // on the device
  const DeviceRow* rows = nullptr;   // [rows_max], of which step->row_count are meaningful
  uint32_t rows_max = 0;             // bounds the grid
  uint32_t draft_tokens_max = 0;     // T of no row exceeds it; of this step where the host knows it
  uint32_t tokens_min = 1;           // rows of fewer tokens are left to another launch
  bool rows_settled = false;         // the kernel before this one on the stream wrote neither step,
                              // rows, pages nor records of this layer: they may be read early
  VerifyInputs inputs;               // post-convolution form, device pointers
  void* output = nullptr;            // output dtype [tokens, head, d_v]
  uint32_t* poison = nullptr;        // [rows_max] PoisonFlags, or-ed
  uint32_t* work_counter = nullptr;  // one word, 0 before and after every launch
  uint64_t rounding_seed = 0;        // of the model
  uint32_t layer = 0;                // index into BackendSpec::layers; part of the rounding key
};

}  // namespace ssmd::cuda
