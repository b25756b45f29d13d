#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "kernels/cpu/control_block.h"
#include "kernels/cpu/pool.h"
#include "kernels/cpu/raw_kernel.h"
#include "kernels/cpu/verify_kernel.h"
#include "kernels/mutex.h"

namespace ssmd::cpu {
namespace {

constexpr int kPoisonByte = 0xff;  // NaN in FP32, BF16 and FP16

// A launch that moves fewer bytes of checkpoints runs on the caller. Split over two virtual cores,
// six launches of 512 KiB took 296 us instead of 175, of 1 MiB 433 instead of 396.
constexpr uint64_t kSplitBytesMin = 1 << 20;

struct Layer {
  LayerShape shape;
  PageLayout page;
  RingLayout ring;
  std::optional<RawLayer> raw;  // raw form
  Pool pages;                   // [page]
  Pool rings;                   // [slot]
  std::byte* PageAt(PageIndex index) const { return pages.data() + ToInt(index) * page.page_bytes; }
  std::byte* RingAt(SlotIndex index) const { return rings.data() + ToInt(index) * ring.slot_bytes; }
  // Raw form: the convolution inputs of one position.
  std::byte* ConvRow(SlotIndex index, uint64_t position) const {
    return RingAt(index) + ring.conv.offset_bytes +
           RingRow(position, ring.conv_rows) * ring.conv.row_bytes;
  }
  uint64_t conv_payload_bytes(const Formats& formats) const {
    return uint64_t{shape.conv_channels()} * DtypeBytes(formats.activation);
  }
};

// Bytes of one token in each packed tensor.
struct TokenBytes {
  TokenBytes(const LayerShape& shape, const Formats& formats)
      : element(DtypeBytes(formats.activation)),
        keys(element * shape.key_group_count * shape.d_k),
        values(element * shape.head_count * shape.d_v),
        heads(element * shape.head_count),
        projection(element * shape.conv_channels()),
        gate(heads * shape.d_k),
        floats(sizeof(float) * shape.head_count),
        log_alpha(floats * shape.decays_per_head()) {}
  const uint64_t element, keys, values, heads, projection, gate, floats, log_alpha;
};

// Pointer into a packed per-token tensor; null stays null.
template <typename T>
T* AtToken(T* tensor, uint64_t token, uint64_t bytes_per_token) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return tensor == nullptr
             ? nullptr
             : reinterpret_cast<T*>(reinterpret_cast<Byte*>(tensor) + token * bytes_per_token);
}
VerifyInputs AtToken(const VerifyInputs& in, uint64_t token, const TokenBytes& bytes) {
  return {.q = AtToken(in.q, token, bytes.keys),
          .k = AtToken(in.k, token, bytes.keys),
          .v = AtToken(in.v, token, bytes.values),
          .log_alpha = AtToken(in.log_alpha, token, bytes.log_alpha),
          .beta = AtToken(in.beta, token, bytes.floats),
          .value_scale = AtToken(in.value_scale, token, bytes.floats)};
}
RawInputs AtToken(const RawInputs& in, uint64_t token, const TokenBytes& bytes) {
  return {.projection = AtToken(in.projection, token, bytes.projection),
          .dt = AtToken(in.dt, token, bytes.heads),
          .a = AtToken(in.a, token, bytes.heads),
          .b = AtToken(in.b, token, bytes.heads),
          .gate = AtToken(in.gate, token, bytes.gate)};
}
RawOutputs AtToken(const RawOutputs& out, uint64_t token, const TokenBytes& bytes) {
  return {.q = AtToken(out.q, token, bytes.keys),
          .k = AtToken(out.k, token, bytes.keys),
          .v = AtToken(out.v, token, bytes.values),
          .log_alpha = AtToken(out.log_alpha, token, bytes.log_alpha),
          .beta = AtToken(out.beta, token, bytes.floats),
          .value_scale = AtToken(out.value_scale, token, bytes.floats)};
}

class CpuBackend : public Backend {
 public:
  CpuBackend(const BackendSpec& spec, Executor* executor, TaskQueue* background,
             std::vector<Layer> layers)
      : spec_(spec),
        executor_(executor),
        layers_(std::move(layers)),
        flushes_(
            static_cast<uint32_t>(layers_.size()),
            [this](const BackgroundFlush& flush, uint32_t layer) { FoldLayer(flush, layer); },
            background),
        control_(spec, &flushes_) {
    if (!spec_.poison_garbage) return;
    for (const Layer& layer : layers_) {
      std::memset(layer.rings.data(), kPoisonByte, spec_.slot_count * layer.ring.slot_bytes);
      for (uint32_t page = 1; page < spec_.page_count; ++page) {
        std::memset(layer.PageAt(PageIndex{page}), kPoisonByte, layer.page.page_bytes);
      }
    }
  }

  const char* name() const override { return "cpu"; }

  void ClearSlot(SlotIndex slot, uint32_t window, uint64_t rounding_key) override {
    MutexLock lock(&mu_);
    control_.ClearSlot(slot, window, rounding_key);
    AfterMutation(slot);
  }

  absl::StatusOr<PlanReport> Plan(const PlanParams& params) override {
    MutexLock lock(&mu_);
    auto report = control_.Plan(params);
    if (spec_.poison_garbage) control_.CheckInvariants();
    return report;
  }

  absl::StatusOr<VerifyReport> Verify(const VerifyParams& params) override;

  absl::Status Commit(const CommitParams& params) override {
    MutexLock lock(&mu_);
    const std::vector<StepRow> rows =
        spec_.poison_garbage ? control_.rows(params.step) : std::vector<StepRow>();
    SSMD_RETURN_IF_ERROR(control_.Commit(params));
    for (const StepRow& row : rows) {
      if (row.slot != kNoSlot) AfterMutation(row.slot);
    }
    return absl::OkStatus();
  }

  void Abort(StepIndex step) override {
    MutexLock lock(&mu_);
    const std::vector<StepRow> rows =
        spec_.poison_garbage ? control_.rows(step) : std::vector<StepRow>();
    control_.Abort(step);
    for (const StepRow& row : rows) {
      if (row.slot != kNoSlot) AfterMutation(row.slot);
    }
  }

  absl::Status Rollback(SlotIndex slot, uint64_t version, uint64_t position) override {
    MutexLock lock(&mu_);
    SSMD_RETURN_IF_ERROR(control_.Rollback(slot, version, position));
    AfterMutation(slot);
    return absl::OkStatus();
  }

  absl::Status CopySlot(const CopySlotParams& params) override;

  void ReleaseSlot(SlotIndex slot) override {
    MutexLock lock(&mu_);
    control_.ReleaseSlot(slot);
    AfterMutation(slot);  // a released cursor owns no record
  }

  absl::StatusOr<bool> FlushSlot(SlotIndex slot) override {
    MutexLock lock(&mu_);
    SSMD_ASSIGN_OR_RETURN(const bool flushed, control_.FlushSlot(slot));
    AfterMutation(slot);
    return flushed;
  }

  absl::Status BeginImport(SlotIndex slot, uint64_t version) override {
    MutexLock lock(&mu_);
    return control_.BeginImport(slot, version);
  }
  void WriteImport(SlotIndex slot, uint32_t layer, uint64_t position,
                   absl::Span<const float> state) override;
  void EndImport(SlotIndex slot, uint64_t position,
                 absl::Span<const std::vector<std::byte>> windows) override;
  void AbortImport(SlotIndex slot) override {
    MutexLock lock(&mu_);
    control_.AbortImport(slot);
    AfterMutation(slot);
  }

  absl::Status ReadWindow(SlotIndex slot, uint32_t layer, uint64_t position,
                          absl::Span<std::byte> window) override;

  absl::Status ReadState(SlotIndex slot, uint32_t layer, uint64_t position,
                         absl::Span<float> state) override;

  SlotCursor ReadCursor(SlotIndex slot) override {
    MutexLock lock(&mu_);
    return control_.cursor(slot);
  }

  PageCounts ReadPageCounts() override {
    MutexLock lock(&mu_);
    return control_.page_counts();
  }

  BackgroundBytes ReadBackgroundBytes() override {
    return {.checkpoint_hp_read = background_hp_.load(std::memory_order_relaxed),
            .checkpoint_hp_write = background_hp_.load(std::memory_order_relaxed),
            .checkpoint_lp_write = background_lp_.load(std::memory_order_relaxed),
            .ring_read = background_ring_.load(std::memory_order_relaxed)};
  }

 private:
  // Fills what nobody owns with NaN and checks the control block. Requires: no step is open on
  // `slot`.
  void AfterMutation(SlotIndex slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // One layer of a background flush. Takes no lock: the flush owns its pages and records until it
  // is dropped.
  void FoldLayer(const BackgroundFlush& flush, uint32_t index);

  // An item that reads HP, or LP where there is one and `reads_hp` is false.
  GroupItem MakeItem(const Layer& layer, SlotIndex slot, PageIndex source, bool reads_hp) const {
    const bool lp = !reads_hp && spec_.formats.two_precision();
    return {.shape = &layer.shape,
            .formats = &spec_.formats,
            .ring_layout = &layer.ring,
            .ring = layer.RingAt(slot),
            .source = layer.PageAt(source) + (lp ? layer.page.lp_offset_bytes : 0),
            .source_dtype = lp ? spec_.formats.checkpoint_lp : spec_.formats.checkpoint_hp};
  }

  void SetTarget(GroupItem& item, const Layer& layer, PageIndex page,
                 const RoundingKey& rounding) const {
    item.target_hp = layer.PageAt(page);
    if (spec_.formats.two_precision()) item.target_lp = item.target_hp + layer.page.lp_offset_bytes;
    item.rounding = rounding;
  }

  const BackendSpec spec_;
  Executor* const executor_;
  const std::vector<Layer> layers_;
  std::atomic<uint64_t> background_hp_{0}, background_lp_{0}, background_ring_{0};
  BackgroundFlushes flushes_;
  Mutex mu_;  // the control stream
  ControlBlock control_ ABSL_GUARDED_BY(mu_);
};

template <typename F>
void ForEachComponent(const RingLayout& ring, F&& function) {
  for (const RingComponent& component :
       {ring.key, ring.value, ring.log_alpha, ring.value_scale, ring.target, ring.beta}) {
    if (component.row_bytes != 0) function(component);
  }
}

void CpuBackend::AfterMutation(SlotIndex slot) {
  const std::vector<PageIndex> freed = control_.TakeFreed();
  if (!spec_.poison_garbage) return;
  control_.CheckInvariants();
  const SlotCursor& cursor = control_.cursor(slot);
  const uint64_t h = cursor.tail - cursor.base;
  for (const Layer& layer : layers_) {
    for (const PageIndex page : freed)
      std::memset(layer.PageAt(page), kPoisonByte, layer.page.page_bytes);
    ForEachComponent(layer.ring, [&](const RingComponent& component) {
      for (uint64_t p = cursor.tail; p < cursor.tail + (layer.ring.ring_records - h); ++p) {
        std::memset(layer.RingAt(slot) + component.offset_bytes +
                        RingRow(p, layer.ring.ring_records) * component.row_bytes,
                    kPoisonByte, component.row_bytes);
      }
    });
    if (layer.ring.conv_rows == 0) continue;
    const uint64_t history = std::min<uint64_t>(cursor.base, layer.shape.conv_width - 1);
    for (uint64_t p = cursor.tail; p < cursor.tail + (layer.ring.conv_rows - h - history); ++p) {
      std::memset(layer.ConvRow(slot, p), kPoisonByte, layer.ring.conv.row_bytes);
    }
  }
}

absl::StatusOr<VerifyReport> CpuBackend::Verify(const VerifyParams& params) {
  SSMD_CHECK(params.layer < layers_.size(), "layer %u of %zu", params.layer, layers_.size());
  const Layer& layer = layers_[params.layer];
  const LayerShape& shape = layer.shape;
  const std::vector<StepRow>* rows = nullptr;
  {
    MutexLock lock(&mu_);
    rows = &control_.rows(
        params.step);  // immutable while the step is open, which the caller guarantees
  }

  const uint64_t output_bytes =
      uint64_t{shape.head_count} * shape.d_v * DtypeBytes(spec_.formats.output);

  struct LiveRow {
    uint32_t row;
    uint64_t first_token;
  };
  std::vector<LiveRow> live;
  uint64_t token = 0;
  for (uint32_t i = 0; i < rows->size(); ++i) {
    const StepRow& row = (*rows)[i];
    if (row.slot == kNoSlot) {
      std::memset(static_cast<std::byte*>(params.output) + token * output_bytes, 0,
                  row.draft_tokens * output_bytes);
    } else if (row.draft_tokens > 0) {
      live.push_back({i, token});
    }
    token += row.draft_tokens;
  }
  SSMD_CHECK(token == params.token_count, "%lu tokens for a plan of %lu",
             static_cast<unsigned long>(params.token_count), static_cast<unsigned long>(token));

  const TokenBytes bytes(shape, spec_.formats);
  std::optional<RawBuffer> raw_buffer;
  if (layer.raw.has_value()) raw_buffer.emplace(shape, spec_.formats, token);

  std::vector<std::atomic<uint32_t>> flags(live.size());
  const auto verify_group = [&](size_t i) {
    const LiveRow& at = live[i / shape.key_group_count];
    const StepRow& row = (*rows)[at.row];
    const uint32_t group = static_cast<uint32_t>(i % shape.key_group_count);
    const bool folds = row.target_page != kNoPage;
    GroupItem item = MakeItem(layer, row.slot, row.source_page, folds);
    if (folds) {
      SetTarget(item, layer, row.target_page,
                {spec_.rounding_seed, row.rounding_key, params.layer, row.fold_to});
    }
    item.base = row.base;
    item.tail = row.tail;
    item.fold_to = row.fold_to;
    item.draft_tokens = row.draft_tokens;
    item.group = group;
    item.inputs = AtToken(params.inputs, at.first_token, bytes);
    uint32_t poison = kPoisonNone;
    if (layer.raw.has_value()) {
      const RawOutputs prepared = AtToken(raw_buffer->outputs(), at.first_token, bytes);
      poison = PrepareGroup({.shape = &shape,
                             .formats = &spec_.formats,
                             .layer = &*layer.raw,
                             .ring_layout = &layer.ring,
                             .ring = item.ring,
                             .tail = row.tail,
                             .draft_tokens = row.draft_tokens,
                             .group = group,
                             .inputs = AtToken(params.raw, at.first_token, bytes),
                             .outputs = prepared});
      item.inputs = prepared.view();
      if (!layer.raw->d.empty()) item.skip = layer.raw->d.data();
    }
    item.output = static_cast<std::byte*>(params.output) + at.first_token * output_bytes;
    poison |= VerifyGroup(item);
    if (poison != kPoisonNone)
      flags[i / shape.key_group_count].fetch_or(poison, std::memory_order_relaxed);
  };
  const size_t items = live.size() * shape.key_group_count;
  if (live.size() * layer.page.page_bytes < kSplitBytesMin) {
    for (size_t i = 0; i < items; ++i) verify_group(i);
  } else {
    executor_->ParallelFor(items, verify_group);
  }

  VerifyReport report;
  for (size_t i = 0; i < live.size(); ++i) {
    const uint32_t poison = flags[i].load(std::memory_order_relaxed);
    if (poison != kPoisonNone) report.poisoned.push_back({live[i].row, poison});
  }
  return report;
}

void CpuBackend::FoldLayer(const BackgroundFlush& flush, uint32_t index) {
  const Layer& layer = layers_[index];
  for (uint32_t group = 0; group < layer.shape.key_group_count; ++group) {
    GroupItem item = MakeItem(layer, flush.slot, flush.source, true);
    SetTarget(item, layer, flush.target,
              {spec_.rounding_seed, flush.rounding_key, index, flush.to});
    item.base = flush.from;
    item.tail = flush.to;
    item.group = group;
    FoldGroup(item);  // what leaves its format's range poisons the steps that read the page
  }
  background_hp_.fetch_add(layer.page.hp_bytes, std::memory_order_relaxed);
  background_lp_.fetch_add(layer.page.lp_bytes, std::memory_order_relaxed);
  background_ring_.fetch_add((flush.to - flush.from) * layer.ring.record_bytes(),
                             std::memory_order_relaxed);
}

absl::Status CpuBackend::CopySlot(const CopySlotParams& params) {
  MutexLock lock(&mu_);
  SSMD_RETURN_IF_ERROR(control_.CopySlot(params));
  // Records [base, position) only: never drafts, whose rows an open step of the source may be
  // writing now.
  const uint64_t base = control_.cursor(params.source).base;
  for (const Layer& layer : layers_) {
    const std::byte* from = layer.RingAt(params.source);
    std::byte* to = layer.RingAt(params.target);
    ForEachComponent(layer.ring, [&](const RingComponent& component) {
      for (uint64_t p = base; p < params.position; ++p) {
        const uint64_t offset =
            component.offset_bytes + RingRow(p, layer.ring.ring_records) * component.row_bytes;
        std::memcpy(to + offset, from + offset, component.row_bytes);
      }
    });
    if (layer.ring.conv_rows == 0) continue;
    // The window before `base` too: a child may be rolled back that far.
    const uint64_t history = std::min<uint64_t>(base, layer.shape.conv_width - 1);
    for (uint64_t p = base - history; p < params.position; ++p) {
      std::memcpy(layer.ConvRow(params.target, p), layer.ConvRow(params.source, p),
                  layer.ring.conv.row_bytes);
    }
  }
  AfterMutation(params.target);
  return absl::OkStatus();
}

absl::Status CpuBackend::ReadState(SlotIndex slot, uint32_t index, uint64_t position,
                                   absl::Span<float> state) {
  SSMD_CHECK(index < layers_.size(), "layer %u of %zu", index, layers_.size());
  const Layer& layer = layers_[index];
  SSMD_CHECK(state.size() == layer.shape.state_elements(), "state of %zu elements, expected %lu",
             state.size(), static_cast<unsigned long>(layer.shape.state_elements()));
  MutexLock lock(&mu_);  // holds plans back while it replays: an administrative path
  const SlotCursor& cursor = control_.cursor(slot);
  SSMD_RETURN_IF_ERROR(control_.CheckInWindow(cursor, position));
  executor_->ParallelFor(layer.shape.key_group_count, [&](size_t group) {
    GroupItem item = MakeItem(layer, slot, cursor.page, true);
    item.base = cursor.base;
    item.tail = position;
    item.group = static_cast<uint32_t>(group);
    ReplayGroup(item, state.data());
  });
  return absl::OkStatus();
}

void CpuBackend::WriteImport(SlotIndex slot, uint32_t index, uint64_t position,
                             absl::Span<const float> state) {
  const Layer& layer = layers_[index];
  SSMD_CHECK(state.size() == layer.shape.state_elements(), "state of %zu elements", state.size());
  PageIndex page = kNoPage;
  uint64_t rounding_key = 0;
  {
    MutexLock lock(&mu_);
    page = control_.import_page(slot);
    rounding_key = control_.cursor(slot).rounding_key;
  }
  SSMD_CHECK(page != kNoPage, "no import is open on slot %u", ToInt(slot));
  executor_->ParallelFor(layer.shape.key_group_count, [&](size_t group) {
    GroupItem item = MakeItem(layer, slot, page, true);
    SetTarget(item, layer, page, {spec_.rounding_seed, rounding_key, index, position});
    item.group = static_cast<uint32_t>(group);
    StoreGroup(item,
               state.data());  // what leaves its format's range poisons the steps that read it
  });
}

void CpuBackend::EndImport(SlotIndex slot, uint64_t position,
                           absl::Span<const std::vector<std::byte>> windows) {
  MutexLock lock(&mu_);
  control_.EndImport(slot, position);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    if (layer.ring.conv_rows == 0) continue;
    const uint32_t rows = layer.shape.conv_width - 1;
    const uint64_t row_bytes = layer.conv_payload_bytes(spec_.formats);
    SSMD_CHECK(windows[i].size() == rows * row_bytes, "window of %zu bytes", windows[i].size());
    for (uint64_t row = 0; row < rows; ++row) {
      if (position + row < rows)
        continue;  // before position 0: zeros by definition, no row owns them
      std::memcpy(layer.ConvRow(slot, position + row - rows), &windows[i][row * row_bytes],
                  row_bytes);
    }
  }
  AfterMutation(slot);
}

absl::Status CpuBackend::ReadWindow(SlotIndex slot, uint32_t index, uint64_t position,
                                    absl::Span<std::byte> window) {
  const Layer& layer = layers_[index];
  const uint32_t rows = layer.shape.conv_width - 1;
  const uint64_t row_bytes = layer.conv_payload_bytes(spec_.formats);
  SSMD_CHECK(layer.ring.conv_rows > 0 && window.size() == rows * row_bytes, "window of %zu bytes",
             window.size());
  MutexLock lock(&mu_);
  SSMD_RETURN_IF_ERROR(control_.CheckInWindow(control_.cursor(slot), position));
  for (uint64_t row = 0; row < rows; ++row) {
    std::byte* to = &window[row * row_bytes];
    if (position + row < rows) {
      std::memset(to, 0, row_bytes);
    } else {
      std::memcpy(to, layer.ConvRow(slot, position + row - rows), row_bytes);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CpuDevice::CreateBackend(const BackendSpec& spec) {
  const auto [hp, lp] = std::pair{spec.formats.checkpoint_hp, spec.formats.checkpoint_lp};
  if ((hp != Dtype::kFp32 && hp != Dtype::kFp16) || (lp != Dtype::kNone && lp != Dtype::kFp16)) {
    return absl::UnimplementedError(
        absl::StrCat("cpu backend: checkpoint formats ", DtypeName(hp), "/", DtypeName(lp),
                     "; fp32 or fp16, with fp16 or none for reads, are built"));
  }
  std::vector<Layer> layers;
  for (const LayerShape& shape : spec.layers) {
    Layer layer{.shape = shape,
                .page = MakePageLayout(shape, spec.formats),
                .ring = MakeRingLayout(shape, spec.formats, spec.rule.ring_records),
                .raw = {},
                .pages = {},
                .rings = {}};
    SSMD_ASSIGN_OR_RETURN(layer.pages, Pool::Make(this, spec.page_count * layer.page.page_bytes));
    SSMD_ASSIGN_OR_RETURN(layer.rings, Pool::Make(this, spec.slot_count * layer.ring.slot_bytes));
    if (!spec.raw.empty()) layer.raw.emplace(shape, spec.raw[layers.size()]);
    layers.push_back(std::move(layer));
  }
  return std::make_unique<CpuBackend>(spec, executor_, background_, std::move(layers));
}

}  // namespace ssmd::cpu
