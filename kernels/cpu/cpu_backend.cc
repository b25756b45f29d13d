#include "kernels/cpu/cpu_backend.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/check.h"
#include "kernels/cpu/control_block.h"
#include "kernels/cpu/verify_kernel.h"

namespace ssmd::cpu {
namespace {

constexpr int kPoisonByte = 0xff;  // NaN in FP32, BF16 and FP16

// Anonymous zeroed pages, counted against the device's budget.
class Pool {
 public:
  Pool() = default;
  static absl::StatusOr<Pool> Make(CpuDevice* device, uint64_t bytes) {
    Pool pool;
    if (bytes == 0) return pool;
    if (!device->Reserve(bytes)) {
      return ErrorWithReason(absl::StatusCode::kResourceExhausted, reason::kNoMemory,
                             absl::StrCat("pool of ", bytes, " bytes: ", device->bytes_used(),
                                          " of ", device->bytes_max(), " state bytes are in use"));
    }
    pool.device_ = device;
    pool.bytes_ = bytes;
    void* address =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) {
      return ErrorWithReason(
          absl::StatusCode::kResourceExhausted, reason::kNoMemory,
          absl::StrCat("mmap of ", bytes, " bytes failed: ", std::strerror(errno)));
    }
    pool.data_ = static_cast<std::byte*>(address);
    return pool;
  }
  Pool(Pool&& other) noexcept { *this = std::move(other); }
  Pool& operator=(Pool&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Pool() {
    if (data_ != nullptr) munmap(data_, bytes_);
    if (device_ != nullptr) device_->Return(bytes_);
  }
  std::byte* data() const { return data_; }

 private:
  CpuDevice* device_ = nullptr;
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

struct Layer {
  LayerShape shape;
  PageLayout page;
  RingLayout ring;
  Pool pages;  // [page]
  Pool rings;  // [slot]
  std::byte* PageAt(PageIndex index) const { return pages.data() + ToInt(index) * page.page_bytes; }
  std::byte* RingAt(SlotIndex index) const { return rings.data() + ToInt(index) * ring.slot_bytes; }
};

// Pointer into a packed per-token tensor; null stays null.
template <typename T>
const T* AtToken(const T* tensor, uint64_t token, uint64_t bytes_per_token) {
  return tensor == nullptr ? nullptr
                           : reinterpret_cast<const T*>(reinterpret_cast<const std::byte*>(tensor) +
                                                        token * bytes_per_token);
}

class CpuBackend : public Backend {
 public:
  CpuBackend(const BackendSpec& spec, Executor* executor, std::vector<Layer> layers)
      : spec_(spec), executor_(executor), layers_(std::move(layers)), control_(spec) {
    if (!spec_.poison_garbage) return;
    for (const Layer& layer : layers_) {
      std::memset(layer.rings.data(), kPoisonByte, spec_.slot_count * layer.ring.slot_bytes);
      for (uint32_t page = 1; page < spec_.page_count; ++page) {
        std::memset(layer.PageAt(PageIndex{page}), kPoisonByte, layer.page.page_bytes);
      }
    }
  }

  const char* name() const override { return "cpu"; }

  void ClearSlot(SlotIndex slot, uint32_t window) override {
    absl::MutexLock lock(&mu_);
    control_.ClearSlot(slot, window);
    AfterMutation(slot);
  }

  absl::StatusOr<PlanReport> Plan(const PlanParams& params) override {
    absl::MutexLock lock(&mu_);
    auto report = control_.Plan(params);
    if (spec_.poison_garbage) control_.CheckInvariants();
    return report;
  }

  absl::StatusOr<VerifyReport> Verify(const VerifyParams& params) override;

  absl::Status Commit(const CommitParams& params) override {
    absl::MutexLock lock(&mu_);
    const std::vector<StepRow> rows =
        spec_.poison_garbage ? control_.rows(params.step) : std::vector<StepRow>();
    SSMD_RETURN_IF_ERROR(control_.Commit(params));
    for (const StepRow& row : rows) AfterMutation(row.slot);
    return absl::OkStatus();
  }

  void Abort(StepIndex step) override {
    absl::MutexLock lock(&mu_);
    const std::vector<StepRow> rows =
        spec_.poison_garbage ? control_.rows(step) : std::vector<StepRow>();
    control_.Abort(step);
    for (const StepRow& row : rows) AfterMutation(row.slot);
  }

  absl::Status Rollback(SlotIndex slot, uint64_t version, uint64_t position) override {
    absl::MutexLock lock(&mu_);
    SSMD_RETURN_IF_ERROR(control_.Rollback(slot, version, position));
    AfterMutation(slot);
    return absl::OkStatus();
  }

  absl::Status CopySlot(const CopySlotParams& params) override;

  void ReleaseSlot(SlotIndex slot) override {
    absl::MutexLock lock(&mu_);
    control_.ReleaseSlot(slot);
    AfterMutation(slot);  // a released cursor owns no record
  }

  absl::Status ReadState(SlotIndex slot, uint32_t layer, uint64_t position,
                         absl::Span<float> state) override;

  SlotCursor ReadCursor(SlotIndex slot) override {
    absl::MutexLock lock(&mu_);
    return control_.cursor(slot);
  }

  PageCounts ReadPageCounts() override {
    absl::MutexLock lock(&mu_);
    return control_.page_counts();
  }

 private:
  // Fills what nobody owns with NaN and checks the control block. Requires: no step is open on
  // `slot`.
  void AfterMutation(SlotIndex slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  GroupItem MakeItem(const Layer& layer, SlotIndex slot, PageIndex source) const {
    return {.shape = &layer.shape,
            .formats = &spec_.formats,
            .ring_layout = &layer.ring,
            .ring = layer.RingAt(slot),
            .source = reinterpret_cast<const float*>(layer.PageAt(source))};
  }

  const BackendSpec spec_;
  Executor* const executor_;
  const std::vector<Layer> layers_;
  absl::Mutex mu_;  // the control stream
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
  }
}

absl::StatusOr<VerifyReport> CpuBackend::Verify(const VerifyParams& params) {
  SSMD_CHECK(params.layer < layers_.size(), "layer %u of %zu", params.layer, layers_.size());
  const Layer& layer = layers_[params.layer];
  const LayerShape& shape = layer.shape;
  const std::vector<StepRow>* rows = nullptr;
  {
    absl::MutexLock lock(&mu_);
    rows = &control_.rows(
        params.step);  // immutable while the step is open, which the caller guarantees
  }

  struct LiveRow {
    uint32_t row;
    uint64_t first_token;
  };
  std::vector<LiveRow> live;
  uint64_t token = 0;
  for (uint32_t i = 0; i < rows->size(); ++i) {
    if ((*rows)[i].draft_tokens == 0) continue;
    live.push_back({i, token});
    token += (*rows)[i].draft_tokens;
  }
  SSMD_CHECK(token == params.token_count, "%lu tokens for a plan of %lu",
             static_cast<unsigned long>(params.token_count), static_cast<unsigned long>(token));

  const uint64_t activation_bytes = DtypeBytes(spec_.formats.activation);
  const uint64_t key_bytes = uint64_t{shape.key_group_count} * shape.d_k * activation_bytes;
  const uint64_t value_bytes = uint64_t{shape.head_count} * shape.d_v * activation_bytes;
  const uint64_t head_bytes = uint64_t{shape.head_count} * sizeof(float);
  const uint64_t output_bytes =
      uint64_t{shape.head_count} * shape.d_v * DtypeBytes(spec_.formats.output);

  std::vector<std::atomic<uint32_t>> flags(live.size());
  executor_->ParallelFor(live.size() * shape.key_group_count, [&](size_t i) {
    const LiveRow& at = live[i / shape.key_group_count];
    const StepRow& row = (*rows)[at.row];
    const VerifyInputs& in = params.inputs;
    GroupItem item = MakeItem(layer, row.slot, row.source_page);
    if (row.target_page != kNoPage)
      item.target = reinterpret_cast<float*>(layer.PageAt(row.target_page));
    item.base = row.base;
    item.tail = row.tail;
    item.fold_to = row.fold_to;
    item.draft_tokens = row.draft_tokens;
    item.group = static_cast<uint32_t>(i % shape.key_group_count);
    item.inputs = {
        .q = AtToken(in.q, at.first_token, key_bytes),
        .k = AtToken(in.k, at.first_token, key_bytes),
        .v = AtToken(in.v, at.first_token, value_bytes),
        .log_alpha = AtToken(in.log_alpha, at.first_token, head_bytes * shape.decays_per_head()),
        .beta = AtToken(in.beta, at.first_token, head_bytes),
        .value_scale = AtToken(in.value_scale, at.first_token, head_bytes)};
    item.output = static_cast<std::byte*>(params.output) + at.first_token * output_bytes;
    const uint32_t poison = VerifyGroup(item);
    if (poison != kPoisonNone)
      flags[i / shape.key_group_count].fetch_or(poison, std::memory_order_relaxed);
  });

  VerifyReport report;
  for (size_t i = 0; i < live.size(); ++i) {
    const uint32_t poison = flags[i].load(std::memory_order_relaxed);
    if (poison != kPoisonNone) report.poisoned.push_back({live[i].row, poison});
  }
  return report;
}

absl::Status CpuBackend::CopySlot(const CopySlotParams& params) {
  absl::MutexLock lock(&mu_);
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
  absl::MutexLock lock(&mu_);  // holds plans back while it replays: an administrative path
  const SlotCursor& cursor = control_.cursor(slot);
  if (position < cursor.base || position > cursor.tail) {
    return OutsideWindow(absl::StrCat("position ", position, " is outside the window [",
                                      cursor.base, ", ", cursor.tail, "]"),
                         cursor.base, cursor.tail);
  }
  executor_->ParallelFor(layer.shape.key_group_count, [&](size_t group) {
    GroupItem item = MakeItem(layer, slot, cursor.page);
    item.base = cursor.base;
    item.tail = position;
    item.group = static_cast<uint32_t>(group);
    ReplayGroup(item, state.data());
  });
  return absl::OkStatus();
}

}  // namespace

bool CpuDevice::Reserve(uint64_t bytes) {
  uint64_t used = bytes_used_.load(std::memory_order_relaxed);
  do {
    if (bytes > bytes_max_ - used) return false;
  } while (!bytes_used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  return true;
}

void CpuDevice::Return(uint64_t bytes) { bytes_used_.fetch_sub(bytes, std::memory_order_relaxed); }

absl::StatusOr<std::unique_ptr<Backend>> CpuDevice::CreateBackend(const BackendSpec& spec) {
  if (spec.formats.checkpoint_hp != Dtype::kFp32 || spec.formats.two_precision()) {
    return absl::UnimplementedError(
        absl::StrCat("cpu backend: checkpoint formats ", DtypeName(spec.formats.checkpoint_hp), "/",
                     DtypeName(spec.formats.checkpoint_lp), "; fp32/none is built"));
  }
  std::vector<Layer> layers;
  for (const LayerShape& shape : spec.layers) {
    Layer layer{.shape = shape,
                .page = MakePageLayout(shape, spec.formats),
                .ring = MakeRingLayout(shape, spec.formats, spec.rule.ring_records),
                .pages = {},
                .rings = {}};
    SSMD_ASSIGN_OR_RETURN(layer.pages, Pool::Make(this, spec.page_count * layer.page.page_bytes));
    SSMD_ASSIGN_OR_RETURN(layer.rings, Pool::Make(this, spec.slot_count * layer.ring.slot_bytes));
    layers.push_back(std::move(layer));
  }
  return std::make_unique<CpuBackend>(spec, executor_, std::move(layers));
}

}  // namespace ssmd::cpu
