// The control stream: kernels that run control_logic.h and move what belongs to slots.
//
// Every function enqueues on `stream`, which is the one control stream of the model, and returns;
// none allocates, synchronises or reads back. Pointers are device memory.
#pragma once

#include "kernels/cuda/control_logic.h"

namespace ssmd::cuda {

// What copying and poisoning need to know of a layer; an array of them lies in device memory.
struct DeviceLayer {
  DeviceRingLayout ring;
  PageLayout page;
  std::byte* rings = nullptr;
  std::byte* pages = nullptr;
  uint32_t key_groups = 0, heads = 0;
  uint32_t conv_history = 0;  // w - 1; 0 in post_conv form
  bool channelwise = false;
};

// `row_count`: one word. The outcome is in control.reports[step].
cudaError_t EnqueuePlan(const ControlState& control, uint32_t step, const DevicePlanRow* rows,
                        const uint32_t* row_count, cudaStream_t stream);
// accepted [rows]. The outcome is in control.commit_results[step].
cudaError_t EnqueueCommit(const ControlState& control, uint32_t step, const uint32_t* accepted,
                          cudaStream_t stream);
cudaError_t EnqueueAbort(const ControlState& control, uint32_t step, cudaStream_t stream);

// `result`: one, written.
cudaError_t EnqueueSlotOp(const ControlState& control, const SlotArguments& arguments,
                          ControlResult* result, cudaStream_t stream);

// Copies the records [source.base, position) and the convolution window before them, all layers, if
// `result` is that of a kCopy that went well. Drafts are never copied: an open step may be writing
// them.
cudaError_t EnqueueCopyRecords(const ControlState& control, const DeviceLayer* layers,
                               uint32_t layer_count, const SlotArguments& arguments,
                               const ControlResult* result, cudaStream_t stream);

// Fills what no record owns with 0xff: in the rings of `slot`, unless kNone or a step is open on
// it, and in pages that became free.
cudaError_t EnqueuePoison(const ControlState& control, const DeviceLayer* layers,
                          uint32_t layer_count, uint32_t slot, cudaStream_t stream);

}  // namespace ssmd::cuda
