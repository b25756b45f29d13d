#include "kernels/cuda/model.h"

#include <cmath>
#include <limits>

#include "kernels/check.h"
#include "kernels/cuda/verify_general.h"

namespace ssmd::cuda {
namespace {

constexpr int kPoisonByte = 0xff;  // NaN in every format

uint64_t RecordBytes(const LayerShape& shape, const DeviceRingLayout& ring) {
  const uint64_t groups = shape.key_group_count, heads = shape.head_count;
  const uint64_t decay_runs = shape.family == Family::kKda ? heads : groups;
  return groups * (ring.key.row_bytes + ring.value_scale.row_bytes + ring.beta.row_bytes) +
         heads * (ring.value.row_bytes + ring.target.row_bytes) +
         decay_runs * ring.log_alpha.row_bytes;
}

// Parameters in the order in which the kernels read them, one after another.
struct PackedRaw {
  PackedRaw(const LayerShape& shape, const RawParameters& p) {
    const size_t channels = shape.conv_channels(), w = shape.conv_width;
    SSMD_CHECK(p.conv_weight.size() == channels * w, "conv_weight of %zu values",
               p.conv_weight.size());
    SSMD_CHECK(p.a_log.size() == shape.head_count, "a_log of %zu values", p.a_log.size());
    taps = Place(p.conv_weight);
    for (size_t c = 0; c < channels; ++c) {
      for (size_t tap = 0; tap < w; ++tap)
        values[taps + tap * channels + c] = p.conv_weight[c * w + tap];
    }
    std::vector<float> absent = p.conv_bias;
    absent.resize(channels);
    bias = Place(absent);
    rate = Place(p.a_log);
    for (size_t head = 0; head < shape.head_count; ++head) {
      float& x = values[rate + head];
      x = std::min(std::exp(x), std::numeric_limits<float>::max());
    }
    absent = p.dt_bias;
    absent.resize(size_t{shape.head_count} * shape.decays_per_head());
    dt_bias = Place(absent);
    d = Place(p.d);
  }
  size_t Place(const std::vector<float>& part) {
    const size_t at = values.size();
    values.insert(values.end(), part.begin(), part.end());
    return at;
  }
  std::vector<float> values;
  size_t taps, bias, rate, dt_bias, d;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> Model::Create(const BackendSpec& spec, Device* budget) {
  std::unique_ptr<Model> model(new Model);
  SSMD_RETURN_IF_ERROR(model->Init(spec, budget));
  return model;
}

template <typename T>
absl::Status Model::Allocate(T*& array, uint64_t count, Device* budget) {
  SSMD_ASSIGN_OR_RETURN(Buffer buffer, Buffer::OnDevice(budget, count * sizeof(T)));
  array = buffer.as<T>();
  if (array != nullptr) SSMD_RETURN_IF_CUDA_ERROR(cudaMemset(array, 0, count * sizeof(T)));
  arrays_.push_back(std::move(buffer));
  return absl::OkStatus();
}

absl::Status Model::Init(const BackendSpec& spec, Device* budget) {
  spec_ = spec;
  for (size_t i = 0; i < spec.layers.size(); ++i)
    SSMD_RETURN_IF_ERROR(
        InitLayer(spec.layers[i], spec.raw.empty() ? nullptr : &spec.raw[i], budget));
  std::vector<DeviceLayer> layers;
  for (const Layer& layer : layers_) {
    layers.push_back({.ring = layer.ring,
                      .page = layer.page,
                      .rings = layer.rings.data(),
                      .pages = layer.pages.data(),
                      .key_groups = layer.shape.key_group_count,
                      .heads = layer.shape.head_count,
                      .conv_history = layer.shape.conv_width == 0 ? 0 : layer.shape.conv_width - 1,
                      .channelwise = layer.shape.family == Family::kKda});
  }
  SSMD_RETURN_IF_ERROR(Allocate(device_layers_, layers.size(), budget));
  SSMD_RETURN_IF_CUDA_ERROR(cudaMemcpy(
      device_layers_, layers.data(), layers.size() * sizeof(DeviceLayer), cudaMemcpyHostToDevice));
  SSMD_RETURN_IF_ERROR(Allocate(work_counter_, 1, budget));
  if (!spec.raw.empty()) SSMD_RETURN_IF_ERROR(InitRawScratch(budget));
  SSMD_RETURN_IF_ERROR(InitControl(budget));
  SSMD_ASSIGN_OR_RETURN(flush_stream_, Stream::Make(Priority::kLow));
  SSMD_ASSIGN_OR_RETURN(planned_, Event::Make());
  SSMD_ASSIGN_OR_RETURN(flushed_, Event::Make());
  SSMD_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());
  return absl::OkStatus();
}

absl::Status Model::InitLayer(const LayerShape& shape, const RawParameters* raw, Device* budget) {
  if (!GeneralSupports(shape, spec_.formats, spec_.rule.draft_tokens_max)) {
    return absl::UnimplementedError(absl::StrCat(
        "cuda backend: ", FamilyName(shape.family), " with checkpoint formats ",
        DtypeName(spec_.formats.checkpoint_hp), "/", DtypeName(spec_.formats.checkpoint_lp),
        "; fp32 or fp16, with fp16 or none for reads, are built"));
  }
  Layer layer{.shape = shape,
              .page = MakePageLayout(shape, spec_.formats),
              .ring = MakeDeviceRingLayout(shape, spec_.formats, spec_.rule.ring_records),
              .pages = {},
              .rings = {},
              .raw_parameters = {},
              .raw = {}};
  layer.record_bytes = RecordBytes(shape, layer.ring);
  const uint64_t page_bytes = spec_.page_count * layer.page.page_bytes;
  const uint64_t ring_bytes = spec_.slot_count * layer.ring.slot_bytes;
  SSMD_ASSIGN_OR_RETURN(layer.pages, Buffer::OnDevice(budget, page_bytes));
  SSMD_ASSIGN_OR_RETURN(layer.rings, Buffer::OnDevice(budget, ring_bytes));
  const int fill = spec_.poison_garbage ? kPoisonByte : 0;
  SSMD_RETURN_IF_CUDA_ERROR(cudaMemset(layer.pages.data(), fill, page_bytes));
  SSMD_RETURN_IF_CUDA_ERROR(cudaMemset(layer.rings.data(), fill, ring_bytes));
  SSMD_RETURN_IF_CUDA_ERROR(cudaMemset(layer.PageAt(ToInt(kZeroPage)), 0, layer.page.page_bytes));
  if (raw != nullptr) {
    const PackedRaw packed(shape, *raw);
    const uint64_t bytes = packed.values.size() * sizeof(float);
    SSMD_ASSIGN_OR_RETURN(layer.raw_parameters, Buffer::OnDevice(budget, bytes));
    SSMD_RETURN_IF_CUDA_ERROR(cudaMemcpy(layer.raw_parameters.data(), packed.values.data(), bytes,
                                         cudaMemcpyHostToDevice));
    const float* values = layer.raw_parameters.as<float>();
    layer.raw = {.taps = values + packed.taps,
                 .bias = values + packed.bias,
                 .rate = values + packed.rate,
                 .dt_bias = values + packed.dt_bias,
                 .d = raw->d.empty() ? nullptr : values + packed.d,
                 .qk_l2_norm = raw->qk_l2_norm,
                 .kda_gate = raw->kda_gate,
                 .gate_lower_bound = raw->gate_lower_bound};
  }
  layers_.push_back(std::move(layer));
  return absl::OkStatus();
}

absl::Status Model::InitRawScratch(Device* budget) {
  uint64_t keys = 0, values = 0, decays = 0, heads = 0, skips = 0;
  for (const Layer& layer : layers_) {
    const LayerShape& s = layer.shape;
    keys = std::max<uint64_t>(keys, uint64_t{s.key_group_count} * s.d_k);
    values = std::max<uint64_t>(values, uint64_t{s.head_count} * s.d_v);
    decays = std::max<uint64_t>(decays, uint64_t{s.head_count} * s.decays_per_head());
    heads = std::max<uint64_t>(heads, s.head_count);
    if (layer.raw.d != nullptr) skips = std::max<uint64_t>(skips, uint64_t{s.head_count} * s.d_v);
  }
  const uint64_t tokens = tokens_max(), activation = DtypeBytes(spec_.formats.activation);
  auto bytes = [&](void*& to, uint64_t count) {
    std::byte* array = nullptr;
    absl::Status status = Allocate(array, count, budget);
    to = array;
    return status;
  };
  SSMD_RETURN_IF_ERROR(bytes(raw_outputs_.q, tokens * keys * activation));
  SSMD_RETURN_IF_ERROR(bytes(raw_outputs_.k, tokens * keys * activation));
  SSMD_RETURN_IF_ERROR(bytes(raw_outputs_.v, tokens * values * activation));
  SSMD_RETURN_IF_ERROR(Allocate(raw_outputs_.log_alpha, tokens * decays, budget));
  SSMD_RETURN_IF_ERROR(Allocate(raw_outputs_.beta, tokens * heads, budget));
  SSMD_RETURN_IF_ERROR(Allocate(raw_outputs_.value_scale, tokens * heads, budget));
  return Allocate(raw_sum_, tokens * skips, budget);
}

absl::Status Model::InitControl(Device* budget) {
  ControlState& c = control_;
  c.rule = spec_.rule;
  c.flush_mode = spec_.flush_mode;
  c.folds_max = spec_.folds_max;
  c.slot_count = spec_.slot_count;
  c.page_count = spec_.page_count;
  c.step_count = spec_.step_count;
  c.rows_max = spec_.rows_max;
  const uint64_t rows = spec_.rows_max;
  SSMD_RETURN_IF_ERROR(Allocate(c.slots, c.slot_count, budget));
  SSMD_RETURN_IF_ERROR(Allocate(c.page_refs, c.page_count, budget));
  SSMD_RETURN_IF_ERROR(Allocate(c.free_pages, c.page_count, budget));
  SSMD_RETURN_IF_ERROR(Allocate(c.page_freed, c.page_count, budget));
  SSMD_RETURN_IF_ERROR(Allocate(c.counters, 1, budget));
  SSMD_RETURN_IF_ERROR(Allocate(c.step_states, c.step_count, budget));
  SSMD_RETURN_IF_ERROR(Allocate(c.steps, c.step_count, budget));
  SSMD_RETURN_IF_ERROR(Allocate(c.rows, c.step_count * rows, budget));
  SSMD_RETURN_IF_ERROR(Allocate(c.reports, c.step_count, budget));
  SSMD_RETURN_IF_ERROR(Allocate(c.commit_results, c.step_count, budget));
  SSMD_RETURN_IF_ERROR(Allocate(c.scratch, kScratchArrays * rows + kHistogramWords, budget));
  SSMD_RETURN_IF_ERROR(Allocate(c.folds, rows, budget));
  SSMD_RETURN_IF_ERROR(Allocate(c.fold_count, 1, budget));

  const std::vector<DeviceSlot> slots(c.slot_count);
  std::vector<uint32_t> free;
  for (uint32_t page = c.page_count; page > 1; --page) free.push_back(page - 1);
  const ControlCounters counters{.free = static_cast<uint32_t>(free.size())};
  const uint32_t one = 1;  // reference of the zero page: it is never free
  auto upload = [](void* to, const void* from, uint64_t bytes) {
    return CudaStatus(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  };
  SSMD_RETURN_IF_ERROR(upload(c.slots, slots.data(), slots.size() * sizeof(DeviceSlot)));
  SSMD_RETURN_IF_ERROR(upload(c.free_pages, free.data(), free.size() * sizeof(uint32_t)));
  SSMD_RETURN_IF_ERROR(upload(c.counters, &counters, sizeof(counters)));
  return upload(c.page_refs + ToInt(kZeroPage), &one, sizeof(one));
}

cudaError_t Model::EnqueuePlan(uint32_t step, const DevicePlanRow* rows, const uint32_t* row_count,
                               cudaStream_t control) {
  cudaError_t error = cuda::EnqueuePlan(control_, step, rows, row_count, control);
  if (error != cudaSuccess || spec_.flush_mode != FlushMode::kBackground) return error;
  if ((error = cudaEventRecord(planned_.get(), control)) != cudaSuccess) return error;
  if ((error = cudaStreamWaitEvent(flush_stream_.get(), planned_.get())) != cudaSuccess)
    return error;
  if ((error = EnqueueFolds(spec_.rows_max, flush_stream_.get())) != cudaSuccess) return error;
  return cudaEventRecord(flushed_.get(), flush_stream_.get());
}

cudaError_t Model::EnqueueFlushJoin(cudaStream_t stream) {
  if (spec_.flush_mode != FlushMode::kBackground) return cudaSuccess;
  return cudaStreamWaitEvent(stream, flushed_.get());
}

cudaError_t Model::EnqueueVerify(const VerifyArguments& arguments, cudaStream_t stream) {
  const Layer& layer = layers_[arguments.layer];
  VerifyLaunch launch{.shape = layer.shape,
                      .formats = spec_.formats,
                      .page = layer.page,
                      .ring = layer.ring,
                      .rule = spec_.rule,
                      .pages = layer.pages.data(),
                      .rings = layer.rings.data(),
                      .step = control_.steps + arguments.step,
                      .rows = control_.step_rows(arguments.step),
                      .rows_max = spec_.rows_max,
                      .draft_tokens_max = arguments.draft_tokens_max != 0
                                              ? arguments.draft_tokens_max
                                              : spec_.rule.draft_tokens_max,
                      .rows_settled = arguments.rows_settled,
                      .inputs = arguments.inputs,
                      .output = arguments.output,
                      .poison = arguments.poison,
                      .work_counter = work_counter_,
                      .rounding_seed = spec_.rounding_seed,
                      .layer = arguments.layer};
  auto run = [&] {
    const VerifyKernel* kernel =
        arguments.kernel != nullptr ? arguments.kernel : FindVerifyKernel(launch);
    return kernel == nullptr ? cudaErrorNotSupported : kernel->enqueue(launch, stream);
  };
  if (spec_.raw.empty()) return run();

  RawLaunch raw{.shape = layer.shape,
                .formats = spec_.formats,
                .ring = layer.ring,
                .rings = layer.rings.data(),
                .step = launch.step,
                .rows = launch.rows,
                .rows_max = spec_.rows_max,
                .layer = layer.raw,
                .inputs = arguments.raw,
                .outputs = raw_outputs_,
                .poison = arguments.poison};
  if (const cudaError_t error = EnqueuePrepare(raw, stream); error != cudaSuccess) return error;
  launch.rows_settled = true;  // what comes before it writes inputs and convolution rows alone
  launch.inputs = {raw_outputs_.q, raw_outputs_.k, raw_outputs_.v, raw_outputs_.log_alpha};
  if (layer.shape.is_delta_rule()) {
    launch.inputs.beta = raw_outputs_.beta;
  } else {
    launch.inputs.value_scale = raw_outputs_.value_scale;
  }
  const bool skips = layer.raw.d != nullptr;
  if (skips) {  // D x is added before the one rounding to the output's dtype
    launch.formats.output = Dtype::kFp32;
    launch.output = raw_sum_;
  }
  if (const cudaError_t error = run(); error != cudaSuccess) return error;
  return skips ? EnqueueSkip(raw, raw_sum_, arguments.output, stream) : cudaSuccess;
}

FoldLaunch Model::MakeFold(uint32_t index) const {
  const Layer& layer = layers_[index];
  return {.shape = layer.shape,
          .formats = spec_.formats,
          .page = layer.page,
          .ring = layer.ring,
          .pages = layer.pages.data(),
          .rings = layer.rings.data(),
          .folds = control_.folds,
          .count = control_.fold_count,
          .rounding_seed = spec_.rounding_seed,
          .layer = index};
}

cudaError_t Model::EnqueueFolds(uint32_t folds_max, cudaStream_t stream) {
  for (uint32_t index = 0; index < layers_.size(); ++index) {
    FoldLaunch fold = MakeFold(index);
    fold.folds_max = folds_max;
    if (const cudaError_t error = EnqueueFold(fold, stream); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t Model::EnqueueReplay(uint32_t index, const DeviceFold* fold, const uint32_t* one,
                                 float* state, cudaStream_t stream) {
  FoldLaunch launch = MakeFold(index);
  launch.folds = fold;
  launch.count = one;
  launch.folds_max = 1;
  launch.replay = state;
  return EnqueueFold(launch, stream);
}

cudaError_t Model::EnqueueStoreState(uint32_t index, uint32_t page, const RoundingKey& rounding,
                                     const float* state, cudaStream_t stream) {
  const Layer& layer = layers_[index];
  return cuda::EnqueueStoreState({.shape = layer.shape,
                                  .formats = spec_.formats,
                                  .page = layer.page,
                                  .pages = layer.pages.data(),
                                  .state = state,
                                  .target = page,
                                  .rounding = rounding},
                                 stream);
}

}  // namespace ssmd::cuda
