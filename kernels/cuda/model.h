// Model: one registered model on a GPU: its memory, and its steps as stream-ordered functions.
//
// A step is EnqueuePlan, EnqueueVerify for every layer in any order, EnqueueCommit. They allocate
// nothing, synchronise nothing and copy nothing to the host, so a step can be captured as a graph
// and replayed with other rows: everything that varies is read from device memory. What went wrong
// is in control().reports and control().commit_results; a plan that failed makes its verifies and
// its commit do nothing.
//
// Streams: plans, commits and everything else of control.h go to one control stream, in order.
// Verifies of a step come after its plan and before its commit, and one at a time, since raw form
// has one set of working memory; the caller orders streams. In background mode EnqueuePlan forks
// the flushes it starts to a stream of their own; EnqueueFlushJoin, before the next plan or slot
// operation (and before a capture ends), makes a stream wait for them.
//
// Thread-compatible. Tensors are device memory, aligned to 16 bytes.
#pragma once

#include <memory>
#include <vector>

#include "kernels/cuda/control.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/raw.h"
#include "kernels/cuda/verify_dispatch.h"
#include "kernels/cuda/verify_general.h"

namespace ssmd::cuda {

class Model {
 public:
  // Reserves and initialises everything. Errors: as Device::CreateBackend.
  static absl::StatusOr<std::unique_ptr<Model>> Create(const BackendSpec& spec, Device* budget);
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  struct Layer {
    LayerShape shape;
    PageLayout page;
    DeviceRingLayout ring;
    Buffer pages, rings, raw_parameters;
    DeviceRawLayer raw;         // raw form
    uint64_t record_bytes = 0;  // of one token, padding included
    std::byte* PageAt(uint32_t page_index) const {
      return pages.data() + page_index * page.page_bytes;
    }
    // Raw form: the convolution inputs of one position.
    std::byte* ConvRow(uint32_t slot, uint64_t position) const {
      return rings.data() + slot * ring.slot_bytes + ring.conv.offset_bytes +
             RingRow(position, ring.conv_rows) * ring.conv.row_bytes;
    }
  };

  const BackendSpec& spec() const { return spec_; }
  const std::vector<Layer>& layers() const { return layers_; }
  const ControlState& control() const { return control_; }
  const DeviceLayer* device_layers() const { return device_layers_; }
  uint64_t tokens_max() const { return uint64_t{spec_.rows_max} * spec_.rule.draft_tokens_max; }

  // Makes steps of index `step` of the rows in device memory.
  cudaError_t EnqueuePlan(uint32_t step, const DevicePlanRow* rows, const uint32_t* row_count,
                          cudaStream_t control);
  cudaError_t EnqueueFlushJoin(cudaStream_t stream);

  struct VerifyArguments {
    uint32_t step = 0, layer = 0;
    VerifyInputs inputs;  // post_conv form
    RawInputs raw;        // raw form
    void* output = nullptr;
    uint32_t* poison = nullptr;            // [rows_max] PoisonFlags, or-ed
    uint32_t draft_tokens_max = 0;         // of this step; 0: not known, so the registration's
    bool rows_settled = false;             // as in VerifyLaunch; raw form sees to it itself
    const VerifyKernel* kernel = nullptr;  // null: the first that can
  };
  cudaError_t EnqueueVerify(const VerifyArguments& arguments, cudaStream_t stream);

  cudaError_t EnqueueCommit(uint32_t step, const uint32_t* accepted, cudaStream_t control) {
    return cuda::EnqueueCommit(control_, step, accepted, control);
  }

  // Every layer of the folds in control().folds, of which there are at most `folds_max`.
  cudaError_t EnqueueFolds(uint32_t folds_max, cudaStream_t stream);
  // One layer of `fold`, in device memory, into `state`, FP32 [head, d_v, d_k].
  cudaError_t EnqueueReplay(uint32_t layer, const DeviceFold* fold, const uint32_t* one,
                            float* state, cudaStream_t stream);
  // Writes `state`, FP32 [head, d_v, d_k], to one layer of a page.
  cudaError_t EnqueueStoreState(uint32_t layer, uint32_t page, const RoundingKey& rounding,
                                const float* state, cudaStream_t stream);

 private:
  Model() = default;
  absl::Status Init(const BackendSpec& spec, Device* budget);
  absl::Status InitControl(Device* budget);
  absl::Status InitLayer(const LayerShape& shape, const RawParameters* raw, Device* budget);
  absl::Status InitRawScratch(Device* budget);
  template <typename T>
  absl::Status Allocate(T*& array, uint64_t count, Device* budget);
  FoldLaunch MakeFold(uint32_t layer) const;

  BackendSpec spec_;
  std::vector<Layer> layers_;
  std::vector<Buffer> arrays_;
  ControlState control_;
  DeviceLayer* device_layers_ = nullptr;
  DeviceRawOutputs raw_outputs_;  // raw form: what a verify is prepared in
  float* raw_sum_ = nullptr;      // raw form with a skip: outputs before it, FP32
  uint32_t* work_counter_ = nullptr;
  Stream flush_stream_;
  Event planned_, flushed_;
};

}  // namespace ssmd::cuda
