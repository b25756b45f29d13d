#include "kernels/cuda/cuda_backend.h"

#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "kernels/cuda/model.h"
#include "kernels/mutex.h"

namespace ssmd::cuda {
namespace {

constexpr uint64_t kStagingBytes = 4u << 20;  // at most; of two halves, for Verify and control each

void Must(cudaError_t error, const char* what) {
  SSMD_CHECK(error == cudaSuccess, "cuda: %s: %s; the device's state is lost", what,
             cudaGetErrorString(error));
}
void Must(const absl::Status& status) {
  SSMD_CHECK(status.ok(), "cuda: %s; the device's state is lost", status.ToString().c_str());
}

// Small things that kernels of the control stream read or write.
struct ControlWords {
  ControlResult result;
  DeviceFold fold;
  uint32_t one = 1;
  uint32_t row_count = 0;
};

// One tensor of a Verify, host memory and bytes per token.
struct Tensor {
  const void* host;
  uint64_t token_bytes;
};

class CudaBackend : public Backend {
 public:
  static absl::StatusOr<std::unique_ptr<Backend>> Create(const BackendSpec& spec, Device* device) {
    std::unique_ptr<CudaBackend> backend(new CudaBackend);
    SSMD_RETURN_IF_ERROR(backend->Init(spec, device));
    return backend;
  }
  ~CudaBackend() override { cudaDeviceSynchronize(); }

  const char* name() const override { return "cuda"; }

  void ClearSlot(SlotIndex slot, uint32_t window, uint64_t rounding_key) override {
    MutexLock lock(&mu_);
    RunSlotOp({.op = SlotOp::kClear,
               .slot = ToInt(slot),
               .window = window,
               .rounding_key = rounding_key});
  }

  absl::StatusOr<PlanReport> Plan(const PlanParams& params) override;
  absl::StatusOr<VerifyReport> Verify(const VerifyParams& params) override;
  absl::Status Commit(const CommitParams& params) override;

  void Abort(StepIndex step) override {
    MutexLock lock(&mu_);
    JoinFlushes();
    Must(EnqueueAbort(model_->control(), ToInt(step), control_.get()), "abort");
    ControlResult result;
    Read(&result, model_->control().commit_results + ToInt(step));
    SSMD_CHECK(result.code == ControlCode::kOk, "abort of step entry %u that is not open",
               ToInt(step));
    EndStep(step);
  }

  absl::Status Rollback(SlotIndex slot, uint64_t version, uint64_t position) override {
    MutexLock lock(&mu_);
    return ToStatus(RunSlotOp({.op = SlotOp::kRollback,
                               .slot = ToInt(slot),
                               .version = version,
                               .position = position}),
                    slot, version, position);
  }

  absl::StatusOr<bool> FlushSlot(SlotIndex slot) override;

  absl::Status BeginImport(SlotIndex slot, uint64_t version) override {
    MutexLock lock(&mu_);
    const ControlResult result =
        RunSlotOp({.op = SlotOp::kBeginImport, .slot = ToInt(slot), .version = version});
    if (result.code == ControlCode::kNoPage) {
      return ErrorWithReason(absl::StatusCode::kResourceExhausted, reason::kNoPage,
                             "ImportState: no page is free; raise capacity.spare_pages or retry");
    }
    return ToStatus(result, slot, version, 0);
  }
  void WriteImport(SlotIndex slot, uint32_t layer, uint64_t position,
                   absl::Span<const float> state) override;
  void EndImport(SlotIndex slot, uint64_t position,
                 absl::Span<const std::vector<std::byte>> windows) override;
  void AbortImport(SlotIndex slot) override {
    MutexLock lock(&mu_);
    RunSlotOp({.op = SlotOp::kAbortImport, .slot = ToInt(slot)});
  }

  absl::Status CopySlot(const CopySlotParams& params) override;

  void ReleaseSlot(SlotIndex slot) override {
    MutexLock lock(&mu_);
    RunSlotOp({.op = SlotOp::kRelease, .slot = ToInt(slot)});
  }

  absl::Status ReadState(SlotIndex slot, uint32_t layer, uint64_t position,
                         absl::Span<float> state) override;
  absl::Status ReadWindow(SlotIndex slot, uint32_t layer, uint64_t position,
                          absl::Span<std::byte> window) override;

  SlotCursor ReadCursor(SlotIndex slot) override {
    MutexLock lock(&mu_);
    const DeviceSlot& at = ReadSlot(slot);
    return {.base = at.base,
            .tail = at.tail,
            .high_water = at.high_water,
            .version = at.version,
            .rounding_key = at.rounding_key,
            .page = PageIndex{at.page},
            .window = at.window};
  }

  PageCounts ReadPageCounts() override {
    MutexLock lock(&mu_);
    ControlCounters counters;
    Read(&counters, model_->control().counters);
    return {.total = model_->spec().page_count - 1,
            .free = counters.free,
            .step_targets = counters.step_targets};
  }

  BackgroundBytes ReadBackgroundBytes() override {
    MutexLock lock(&mu_);
    return background_;
  }

 private:
  CudaBackend() = default;
  absl::Status Init(const BackendSpec& spec, Device* device);

  // ---- control stream; each returns when its work is done

  void JoinFlushes() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    Must(model_->EnqueueFlushJoin(control_.get()), "waiting for flushes");
  }
  template <typename T>
  void Read(T* to, const T* from) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    Must(control_staging_.ToHost(to, from, sizeof(T), control_.get()));
  }
  template <typename T>
  void Write(T* to, const T& from) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    Must(control_staging_.ToDevice(to, &from, sizeof(T), control_.get()));
  }
  // As of the last commit or operation of the slot; plans move nothing that is read from here.
  const DeviceSlot& ReadSlot(SlotIndex slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::optional<DeviceSlot>& mirror = slots_[ToInt(slot)];
    if (!mirror.has_value()) Read(&mirror.emplace(), model_->control().slots + ToInt(slot));
    return *mirror;
  }
  ControlResult RunSlotOp(const SlotArguments& arguments) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    JoinFlushes();
    slots_[arguments.slot].reset();
    Must(EnqueueSlotOp(model_->control(), arguments, &words_->result, control_.get()), "slot");
    Poison(arguments.slot);
    ControlResult result;
    Read(&result, &words_->result);
    SSMD_CHECK(result.code != ControlCode::kBroken, "slot %u is in no state for operation %u",
               arguments.slot, static_cast<uint32_t>(arguments.op));
    return result;
  }
  // Fills what nobody owns with NaN, of `slot` (kNone: pages only).
  void Poison(uint32_t slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!model_->spec().poison_garbage) return;
    Must(EnqueuePoison(model_->control(), model_->device_layers(),
                       static_cast<uint32_t>(model_->layers().size()), slot, control_.get()),
         "poisoning");
  }
  void EndStep(StepIndex step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (const uint32_t slot : steps_[ToInt(step)].slots) {
      slots_[slot].reset();
      Poison(slot);
    }
    steps_[ToInt(step)] = {};
  }
  void CountFlushes(uint64_t flushes, uint64_t records) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (const Model::Layer& layer : model_->layers()) {
      background_.checkpoint_hp_read += flushes * layer.page.hp_bytes;
      background_.checkpoint_hp_write += flushes * layer.page.hp_bytes;
      background_.checkpoint_lp_write += flushes * layer.page.lp_bytes;
      background_.ring_read += records * layer.record_bytes;
    }
  }
  static absl::Status ToStatus(const ControlResult& result, SlotIndex slot, uint64_t version,
                               uint64_t position);

  // ---- Verify

  std::vector<Tensor> TensorsOf(const VerifyParams& params) const;

  struct StepInfo {
    uint32_t row_count = 0;
    uint32_t draft_tokens_max = 0;
    uint64_t token_count = 0;
    std::vector<uint32_t> slots;  // of its rows but padding
  };

  std::unique_ptr<Model> model_;
  Mutex mu_;  // the control stream
  Stream control_;
  Staging control_staging_ ABSL_GUARDED_BY(mu_);
  std::vector<StepInfo> steps_ ABSL_GUARDED_BY(mu_);
  std::vector<std::optional<DeviceSlot>> slots_ ABSL_GUARDED_BY(mu_);  // what was read of them
  BackgroundBytes background_ ABSL_GUARDED_BY(mu_);
  Buffer words_buffer_, plan_rows_, accepted_, state_, window_;
  ControlWords* words_ = nullptr;  // device memory

  Mutex verify_mu_ ABSL_ACQUIRED_BEFORE(mu_);  // one Verify at a time
  Stream verify_;
  Staging verify_staging_ ABSL_GUARDED_BY(verify_mu_);
  Buffer inputs_, output_, poison_, poison_host_;
};

absl::Status CudaBackend::Init(const BackendSpec& spec, Device* device) {
  SSMD_ASSIGN_OR_RETURN(model_, Model::Create(spec, device));
  SSMD_ASSIGN_OR_RETURN(control_, Stream::Make(Priority::kHigh));
  SSMD_ASSIGN_OR_RETURN(verify_, Stream::Make(Priority::kHigh));
  uint64_t input_bytes = 0, output_bytes = 0, state_elements = 0, window_bytes = 0;
  for (uint32_t i = 0; i < spec.layers.size(); ++i) {
    const LayerShape& shape = spec.layers[i];
    uint64_t sum = 0;
    for (const Tensor& tensor : TensorsOf({.layer = i}))
      sum += RoundUp(model_->tokens_max() * tensor.token_bytes, 256);
    input_bytes = std::max(input_bytes, sum);
    output_bytes =
        std::max<uint64_t>(output_bytes, model_->tokens_max() * shape.head_count * shape.d_v *
                                             DtypeBytes(spec.formats.output));
    state_elements = std::max<uint64_t>(state_elements, shape.state_elements());
    if (shape.conv_width > 0) {
      window_bytes =
          std::max<uint64_t>(window_bytes, uint64_t{shape.conv_width - 1} * shape.conv_channels() *
                                               DtypeBytes(spec.formats.activation));
    }
  }
  auto make_staging = [](uint64_t most) {
    return Staging::Make(std::clamp<uint64_t>(most, 4096, kStagingBytes));
  };
  SSMD_ASSIGN_OR_RETURN(Staging control_staging, make_staging(state_elements * sizeof(float)));
  SSMD_ASSIGN_OR_RETURN(Staging verify_staging, make_staging(std::max(input_bytes, output_bytes)));
  SSMD_ASSIGN_OR_RETURN(poison_host_, Buffer::Pinned(spec.rows_max * sizeof(uint32_t)));
  auto allocate = [&](Buffer& buffer, uint64_t bytes) -> absl::Status {
    SSMD_ASSIGN_OR_RETURN(buffer, Buffer::OnDevice(device, bytes));
    return absl::OkStatus();
  };
  SSMD_RETURN_IF_ERROR(allocate(inputs_, input_bytes));
  SSMD_RETURN_IF_ERROR(allocate(output_, output_bytes));
  SSMD_RETURN_IF_ERROR(allocate(poison_, spec.rows_max * sizeof(uint32_t)));
  SSMD_RETURN_IF_ERROR(allocate(words_buffer_, sizeof(ControlWords)));
  SSMD_RETURN_IF_ERROR(allocate(plan_rows_, spec.rows_max * sizeof(DevicePlanRow)));
  SSMD_RETURN_IF_ERROR(allocate(accepted_, spec.rows_max * sizeof(uint32_t)));
  SSMD_RETURN_IF_ERROR(allocate(state_, state_elements * sizeof(float)));
  SSMD_RETURN_IF_ERROR(allocate(window_, window_bytes));
  words_ = words_buffer_.as<ControlWords>();
  const ControlWords words{};
  SSMD_RETURN_IF_CUDA_ERROR(cudaMemcpy(words_, &words, sizeof(words), cudaMemcpyHostToDevice));
  {
    MutexLock lock(&verify_mu_);
    verify_staging_ = std::move(verify_staging);
  }
  MutexLock lock(&mu_);
  control_staging_ = std::move(control_staging);
  steps_.resize(spec.step_count);
  slots_.resize(spec.slot_count);
  return absl::OkStatus();
}

absl::Status CudaBackend::ToStatus(const ControlResult& result, SlotIndex slot, uint64_t version,
                                   uint64_t position) {
  switch (result.code) {
    case ControlCode::kVersionMismatch:
      return ErrorWithReason(
          absl::StatusCode::kAborted, reason::kVersionMismatch,
          absl::StrCat("slot ", ToInt(slot), " has version ", result.a, ", expected ", version));
    case ControlCode::kOutsideWindow:
      return OutsideWindow(absl::StrCat("position ", position, " is outside the window [", result.a,
                                        ", ", result.b, "]; further back needs a snapshot"),
                           result.a, result.b);
    default:
      return absl::OkStatus();
  }
}

absl::StatusOr<PlanReport> CudaBackend::Plan(const PlanParams& params) {
  const BackendSpec& spec = model_->spec();
  SSMD_CHECK(params.rows.size() <= spec.rows_max, "%zu rows of %u", params.rows.size(),
             spec.rows_max);
  std::vector<DevicePlanRow> rows;
  StepInfo info{.row_count = static_cast<uint32_t>(params.rows.size())};
  for (const PlanRow& row : params.rows) {
    rows.push_back({row.version, ToInt(row.slot), row.draft_tokens});
    info.token_count += row.draft_tokens;
    info.draft_tokens_max = std::max(info.draft_tokens_max, row.draft_tokens);
    if (row.slot != kNoSlot) info.slots.push_back(ToInt(row.slot));
  }
  const uint32_t step = ToInt(params.step);
  MutexLock lock(&mu_);
  JoinFlushes();
  Must(control_staging_.ToDevice(plan_rows_.data(), rows.data(), rows.size() * sizeof(rows[0]),
                                 control_.get()));
  Write(&words_->row_count, info.row_count);
  Must(
      model_->EnqueuePlan(step, plan_rows_.as<DevicePlanRow>(), &words_->row_count, control_.get()),
      "plan");
  DevicePlanReport report;
  Read(&report, model_->control().reports + step);
  const ControlResult& result = report.result;
  SSMD_CHECK(result.code != ControlCode::kBroken,
             "a row (%u) plans a slot that is not idle, too many drafts, or an open step entry",
             result.row);
  if (result.code == ControlCode::kNoPage) {
    return ErrorWithReason(absl::StatusCode::kResourceExhausted, reason::kNoPage,
                           absl::StrCat("BeginStep: ", result.a, " rows must fold, ", result.b,
                                        " pages are free; raise capacity.spare_pages or retry"));
  }
  if (result.code == ControlCode::kVersionMismatch) {
    const PlanRow& row = params.rows[result.row];
    return ToStatus(result, row.slot, row.version, 0);
  }
  CountFlushes(report.report.background_started, report.background_records);
  steps_[step] = std::move(info);
  return report.report;
}

absl::Status CudaBackend::Commit(const CommitParams& params) {
  const uint32_t step = ToInt(params.step);
  MutexLock lock(&mu_);
  SSMD_CHECK(params.accepted.size() == steps_[step].row_count, "%zu counts for %u rows",
             params.accepted.size(), steps_[step].row_count);
  JoinFlushes();
  Must(control_staging_.ToDevice(accepted_.data(), params.accepted.data(),
                                 params.accepted.size() * sizeof(uint32_t), control_.get()));
  Must(model_->EnqueueCommit(step, accepted_.as<uint32_t>(), control_.get()), "commit");
  ControlResult result;
  Read(&result, model_->control().commit_results + step);
  SSMD_CHECK(result.code != ControlCode::kBroken, "commit of step entry %u that is not open", step);
  if (result.code == ControlCode::kAcceptedTooMany) {
    return absl::OutOfRangeError(absl::StrCat("accepted[", result.row, "] is ", result.a,
                                              ", row has ", result.b, " drafts"));
  }
  EndStep(params.step);
  return absl::OkStatus();
}

absl::StatusOr<bool> CudaBackend::FlushSlot(SlotIndex slot) {
  MutexLock lock(&mu_);
  const ControlResult result = RunSlotOp({.op = SlotOp::kBeginFlush, .slot = ToInt(slot)});
  if (result.code == ControlCode::kNothing) return false;
  if (result.code == ControlCode::kNoPage) {
    return ErrorWithReason(absl::StatusCode::kResourceExhausted, reason::kNoPage,
                           "FlushSequences: no page is free; raise capacity.spare_pages or retry");
  }
  Must(model_->EnqueueFolds(1, control_.get()), "flush");
  RunSlotOp({.op = SlotOp::kEndFlush, .slot = ToInt(slot)});
  CountFlushes(1, result.a);
  return true;
}

absl::Status CudaBackend::CopySlot(const CopySlotParams& params) {
  const SlotArguments arguments{.op = SlotOp::kCopy,
                                .slot = ToInt(params.source),
                                .target = ToInt(params.target),
                                .window = params.window,
                                .position = params.position,
                                .rounding_key = params.rounding_key};
  MutexLock lock(&mu_);
  JoinFlushes();
  slots_[arguments.target].reset();
  Must(EnqueueSlotOp(model_->control(), arguments, &words_->result, control_.get()), "copy");
  Must(EnqueueCopyRecords(model_->control(), model_->device_layers(),
                          static_cast<uint32_t>(model_->layers().size()), arguments,
                          &words_->result, control_.get()),
       "copy of records");
  ControlResult result;
  Read(&result, &words_->result);
  SSMD_CHECK(result.code != ControlCode::kBroken, "copy of slot %u to %u", arguments.slot,
             arguments.target);
  if (result.code == ControlCode::kOk) Poison(arguments.target);
  return ToStatus(result, params.source, 0, params.position);
}

absl::Status CudaBackend::ReadState(SlotIndex slot, uint32_t index, uint64_t position,
                                    absl::Span<float> state) {
  SSMD_CHECK(index < model_->layers().size(), "layer %u of %zu", index, model_->layers().size());
  const LayerShape& shape = model_->layers()[index].shape;
  SSMD_CHECK(state.size() == shape.state_elements(), "state of %zu elements, expected %lu",
             state.size(), static_cast<unsigned long>(shape.state_elements()));
  MutexLock lock(&mu_);  // holds plans back while it replays: an administrative path
  const DeviceSlot& at = ReadSlot(slot);
  if (position < at.base || position > at.tail) {
    return ToStatus({ControlCode::kOutsideWindow, kNone, at.base, at.tail}, slot, 0, position);
  }
  Write(&words_->fold, {at.base, position, at.rounding_key, ToInt(slot), at.page, kNone});
  Must(
      model_->EnqueueReplay(index, &words_->fold, &words_->one, state_.as<float>(), control_.get()),
      "replay");
  Must(control_staging_.ToHost(state.data(), state_.data(), state.size() * sizeof(float),
                               control_.get()));
  return absl::OkStatus();
}

void CudaBackend::WriteImport(SlotIndex slot, uint32_t index, uint64_t position,
                              absl::Span<const float> state) {
  const Model::Layer& layer = model_->layers()[index];
  SSMD_CHECK(state.size() == layer.shape.state_elements(), "state of %zu elements", state.size());
  MutexLock lock(&mu_);
  const DeviceSlot& at = ReadSlot(slot);
  SSMD_CHECK(at.import_page != kNone, "no import is open on slot %u", ToInt(slot));
  Must(control_staging_.ToDevice(state_.data(), state.data(), state.size() * sizeof(float),
                                 control_.get()));
  Must(model_->EnqueueStoreState(index, at.import_page,
                                 {.model_seed = model_->spec().rounding_seed,
                                  .sequence_key = at.rounding_key,
                                  .layer = index,
                                  .fold_position = position},
                                 state_.as<float>(), control_.get()),
       "import");
  Must(cudaStreamSynchronize(control_.get()), "import");
}

void CudaBackend::EndImport(SlotIndex slot, uint64_t position,
                            absl::Span<const std::vector<std::byte>> windows) {
  MutexLock lock(&mu_);
  RunSlotOp({.op = SlotOp::kEndImport, .slot = ToInt(slot), .position = position});
  for (size_t i = 0; i < model_->layers().size(); ++i) {
    const Model::Layer& layer = model_->layers()[i];
    if (layer.ring.conv_rows == 0) continue;
    const uint32_t rows = layer.shape.conv_width - 1;
    const uint64_t row_bytes =
        uint64_t{layer.shape.conv_channels()} * DtypeBytes(model_->spec().formats.activation);
    SSMD_CHECK(windows[i].size() == rows * row_bytes, "window of %zu bytes", windows[i].size());
    for (uint64_t row = 0; row < rows; ++row) {
      if (position + row < rows) continue;  // before position 0: zeros, and no row owns them
      Must(control_staging_.ToDevice(layer.ConvRow(ToInt(slot), position + row - rows),
                                     &windows[i][row * row_bytes], row_bytes, control_.get()));
    }
  }
  Must(cudaStreamSynchronize(control_.get()), "end of an import");
}

absl::Status CudaBackend::ReadWindow(SlotIndex slot, uint32_t index, uint64_t position,
                                     absl::Span<std::byte> window) {
  const Model::Layer& layer = model_->layers()[index];
  const uint32_t rows = layer.shape.conv_width - 1;
  const uint64_t row_bytes = window.size() / rows;
  SSMD_CHECK(
      layer.ring.conv_rows > 0 && row_bytes == uint64_t{layer.shape.conv_channels()} *
                                                   DtypeBytes(model_->spec().formats.activation),
      "window of %zu bytes", window.size());
  MutexLock lock(&mu_);
  const DeviceSlot& at = ReadSlot(slot);
  if (position < at.base || position > at.tail)
    return ToStatus({ControlCode::kOutsideWindow, kNone, at.base, at.tail}, slot, 0, position);
  for (uint64_t row = 0; row < rows; ++row) {
    std::byte* to = window_.data() + row * row_bytes;
    Must(position + row < rows
             ? cudaMemsetAsync(to, 0, row_bytes, control_.get())
             : cudaMemcpyAsync(to, layer.ConvRow(ToInt(slot), position + row - rows), row_bytes,
                               cudaMemcpyDeviceToDevice, control_.get()),
         "window");
  }
  Must(control_staging_.ToHost(window.data(), window_.data(), window.size(), control_.get()));
  return absl::OkStatus();
}

// All inputs of a layer in one order; those that it does not have are left out.
std::vector<Tensor> CudaBackend::TensorsOf(const VerifyParams& params) const {
  const Formats& formats = model_->spec().formats;
  const LayerShape& s = model_->layers()[params.layer].shape;
  const uint64_t element = DtypeBytes(formats.activation), heads = s.head_count;
  const bool mamba2 = s.family == Family::kMamba2, kda = s.family == Family::kKda;
  const RawInputs& raw = params.raw;
  const VerifyInputs& in = params.inputs;
  if (!model_->spec().raw.empty()) {
    return {{raw.projection, element * s.conv_channels()},
            {raw.dt, mamba2 ? element * heads : 0},
            {raw.a, s.family == Family::kGdn ? element * heads : 0},
            {raw.b, mamba2 ? 0 : element * heads},
            {raw.gate, kda ? element * heads * s.d_k : 0}};
  }
  const uint64_t keys = element * s.key_group_count * s.d_k, floats = sizeof(float) * heads;
  return {{in.q, keys},
          {in.k, keys},
          {in.v, element * heads * s.d_v},
          {in.log_alpha, floats * s.decays_per_head()},
          {in.beta, mamba2 ? 0 : floats},
          {in.value_scale, mamba2 ? floats : 0}};
}

absl::StatusOr<VerifyReport> CudaBackend::Verify(const VerifyParams& params) {
  SSMD_CHECK(params.layer < model_->layers().size(), "layer %u of %zu", params.layer,
             model_->layers().size());
  MutexLock verify_lock(&verify_mu_);
  uint32_t row_count = 0, draft_tokens_max = 0;
  {
    MutexLock lock(&mu_);
    const StepInfo& info = steps_[ToInt(params.step)];
    SSMD_CHECK(info.token_count == params.token_count, "%lu tokens for a plan of %lu",
               static_cast<unsigned long>(params.token_count),
               static_cast<unsigned long>(info.token_count));
    row_count = info.row_count;
    draft_tokens_max = info.draft_tokens_max;
  }
  std::vector<const void*> on_device;
  uint64_t at = 0;
  for (const Tensor& tensor : TensorsOf(params)) {
    const uint64_t bytes = params.token_count * tensor.token_bytes;
    if (tensor.host == nullptr || bytes == 0) {
      on_device.push_back(nullptr);
      continue;
    }
    on_device.push_back(inputs_.data() + at);
    SSMD_RETURN_IF_ERROR(
        verify_staging_.ToDevice(inputs_.data() + at, tensor.host, bytes, verify_.get()));
    at += RoundUp(bytes, 256);
  }
  Model::VerifyArguments arguments{.step = ToInt(params.step),
                                   .layer = params.layer,
                                   .output = output_.data(),
                                   .poison = poison_.as<uint32_t>(),
                                   .draft_tokens_max = draft_tokens_max};
  if (model_->spec().raw.empty()) {
    arguments.inputs = {on_device[0],
                        on_device[1],
                        on_device[2],
                        static_cast<const float*>(on_device[3]),
                        static_cast<const float*>(on_device[4]),
                        static_cast<const float*>(on_device[5])};
  } else {
    arguments.raw = {on_device[0], on_device[1], on_device[2], on_device[3], on_device[4]};
  }
  SSMD_RETURN_IF_CUDA_ERROR(
      cudaMemsetAsync(poison_.data(), 0, row_count * sizeof(uint32_t), verify_.get()));
  SSMD_RETURN_IF_CUDA_ERROR(model_->EnqueueVerify(arguments, verify_.get()));
  const LayerShape& shape = model_->layers()[params.layer].shape;
  const uint64_t output_bytes =
      params.token_count * shape.head_count * shape.d_v * DtypeBytes(model_->spec().formats.output);
  SSMD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(poison_host_.data(), poison_.data(),
                                            row_count * sizeof(uint32_t), cudaMemcpyDeviceToHost,
                                            verify_.get()));
  SSMD_RETURN_IF_ERROR(
      verify_staging_.ToHost(params.output, output_.data(), output_bytes, verify_.get()));
  SSMD_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(verify_.get()));
  VerifyReport report;
  for (uint32_t row = 0; row < row_count; ++row) {
    const uint32_t flags = poison_host_.as<uint32_t>()[row];
    if (flags != kPoisonNone) report.poisoned.push_back({row, flags});
  }
  return report;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Create(uint64_t state_bytes_max) {
  auto unavailable = [](cudaError_t error) {
    return absl::UnavailableError(absl::StrCat("cuda: ", cudaGetErrorString(error)));
  };
  int count = 0, device = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess)
    return unavailable(error);
  if (count == 0) return unavailable(cudaErrorNoDevice);
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess)
    return unavailable(error);
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, device); error != cudaSuccess)
    return unavailable(error);
  // A device that this build has no code for is none.
  if (const cudaError_t error = ProbeKernels(); error != cudaSuccess) return unavailable(error);
  return std::unique_ptr<CudaDevice>(new CudaDevice(
      state_bytes_max,
      absl::StrFormat("%s, compute capability %d.%d, %d GiB", properties.name, properties.major,
                      properties.minor, static_cast<int>(properties.totalGlobalMem >> 30))));
}

absl::StatusOr<std::unique_ptr<Backend>> CudaDevice::CreateBackend(const BackendSpec& spec) {
  return CudaBackend::Create(spec, this);
}

}  // namespace ssmd::cuda
