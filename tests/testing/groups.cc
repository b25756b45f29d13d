#include "tests/testing/groups.h"

#include <algorithm>
#include <cstring>

#include "gtest/gtest.h"
#include "kernels/check.h"
#include "tests/testing/test_device.h"
#ifdef SSMD_HAVE_CUDA
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/verify_dispatch.h"
#include "kernels/cuda/verify_general.h"
#endif

namespace ssmd::testing {

#ifdef SSMD_HAVE_CUDA
namespace {

constexpr uint32_t kSlots = 3, kSlot = 1;  // neighbours must stay as they are
constexpr uint32_t kPages = 4, kSource = 1, kTarget = 2;
const cuda::VerifyKernel* chosen_kernel = nullptr;

void Must(cudaError_t error) {
  SSMD_CHECK(error == cudaSuccess, "cuda: %s", cudaGetErrorString(error));
}

// A copy of host bytes on the GPU, and back.
class Mirror {
 public:
  explicit Mirror(std::vector<std::byte> bytes) : bytes_(std::move(bytes)) {
    Must(cudaMalloc(&data_, std::max<size_t>(bytes_.size(), 1)));
    Must(cudaMemcpy(data_, bytes_.data(), bytes_.size(), cudaMemcpyHostToDevice));
  }
  Mirror(const void* from, uint64_t count)
      : Mirror({static_cast<const std::byte*>(from), static_cast<const std::byte*>(from) + count}) {
  }
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;
  ~Mirror() { cudaFree(data_); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  const std::vector<std::byte>& before() const { return bytes_; }
  std::vector<std::byte> Now() const {
    std::vector<std::byte> now(bytes_.size());
    Must(cudaMemcpy(now.data(), data_, now.size(), cudaMemcpyDeviceToHost));
    return now;
  }

 private:
  std::vector<std::byte> bytes_;
  void* data_ = nullptr;
};

// Calls move(bytes in the CPU's ring, bytes in the GPU's, count) for every payload of every row.
template <typename F>
void ForEachPayload(const cpu::GroupItem& item, const cuda::DeviceRingLayout& gpu, std::byte* ring,
                    F&& move) {
  const LayerShape& s = *item.shape;
  const RingLayout& layout = *item.ring_layout;
  const uint32_t activation = DtypeBytes(item.formats->activation);
  const uint32_t value = s.is_delta_rule() ? DtypeBytes(item.formats->correction) : activation;
  const uint32_t groups = s.key_group_count, heads = s.head_count;
  auto component = [&](const RingComponent& from, const cuda::RingRuns& to, uint32_t runs,
                       uint64_t bytes) {
    if (from.row_bytes == 0) return;
    for (uint32_t run = 0; run < runs; ++run) {
      for (uint64_t row = 0; row < layout.ring_records; ++row) {
        move(item.ring + from.offset_bytes + row * from.row_bytes + run * bytes,
             ring + to.offset_bytes + (run * layout.ring_records + row) * to.row_bytes, bytes);
      }
    }
  };
  const bool channelwise = s.family == Family::kKda;
  const uint64_t scalars = s.heads_per_group() * sizeof(float);
  component(layout.key, gpu.key, groups, s.d_k * activation);
  component(layout.value, gpu.value, heads, s.d_v * value);
  component(layout.log_alpha, gpu.log_alpha, channelwise ? heads : groups,
            channelwise ? s.d_k * sizeof(float) : scalars);
  component(layout.value_scale, gpu.value_scale, groups, scalars);
  component(layout.target, gpu.target, heads, s.d_v * activation);
  component(layout.beta, gpu.beta, groups, scalars);
}

// Ring and pages of an item on the GPU, between neighbours full of NaN.
struct Pools {
  explicit Pools(const cpu::GroupItem& item)
      : page(MakePageLayout(*item.shape, *item.formats)),
        ring(
            cuda::MakeDeviceRingLayout(*item.shape, *item.formats, item.ring_layout->ring_records)),
        pages(Pages(item)),
        rings(Rings(item)) {}

  std::vector<std::byte> Pages(const cpu::GroupItem& item) const {
    std::vector<std::byte> bytes(kPages * page.page_bytes, std::byte{0xff});
    const bool lp = item.formats->two_precision() && item.target_hp == nullptr &&
                    item.source_dtype == item.formats->checkpoint_lp && item.draft_tokens > 0;
    std::memcpy(&bytes[kSource * page.page_bytes + (lp ? page.lp_offset_bytes : 0)], item.source,
                lp ? page.lp_bytes : page.hp_bytes);
    return bytes;
  }
  std::vector<std::byte> Rings(const cpu::GroupItem& item) const {
    std::vector<std::byte> bytes(kSlots * ring.slot_bytes, std::byte{0xff});
    ForEachPayload(
        item, ring, &bytes[kSlot * ring.slot_bytes],
        [](const std::byte* from, std::byte* to, uint64_t n) { std::memcpy(to, from, n); });
    return bytes;
  }
  // Copies results back, and checks that nothing else was written.
  void Collect(const cpu::GroupItem& item) const {
    std::vector<std::byte> now = pages.Now();
    std::byte* target = &now[kTarget * page.page_bytes];
    if (item.target_hp != nullptr) std::memcpy(item.target_hp, target, page.hp_bytes);
    if (item.target_lp != nullptr)
      std::memcpy(item.target_lp, target + page.lp_offset_bytes, page.lp_bytes);
    std::memset(target, 0xff, page.hp_bytes);
    std::memset(target + page.lp_offset_bytes, 0xff, page.lp_bytes);
    EXPECT_TRUE(now == pages.before()) << "a page that is no target was written";

    now = rings.Now();
    std::byte* slot = &now[kSlot * ring.slot_bytes];
    ForEachPayload(item, ring, slot, [](std::byte* to, const std::byte* from, uint64_t n) {
      std::memcpy(to, from, n);
    });
    std::memcpy(slot, &rings.before()[kSlot * ring.slot_bytes], ring.slot_bytes);
    EXPECT_TRUE(now == rings.before()) << "another slot's ring was written";
  }

  PageLayout page;
  cuda::DeviceRingLayout ring;
  Mirror pages, rings;
};

uint32_t VerifyOnGpu(const cpu::GroupItem& item) {
  const LayerShape& s = *item.shape;
  const Formats& f = *item.formats;
  const uint64_t T = item.draft_tokens, activation = DtypeBytes(f.activation);
  const Pools pools(item);
  const uint64_t keys = T * s.key_group_count * s.d_k * activation, heads = T * s.head_count;
  const Mirror q(item.inputs.q, keys), k(item.inputs.k, keys);
  const Mirror v(item.inputs.v, heads * s.d_v * activation);
  const Mirror log_alpha(item.inputs.log_alpha, heads * s.decays_per_head() * sizeof(float));
  const float* per_head = s.is_delta_rule() ? item.inputs.beta : item.inputs.value_scale;
  const Mirror scalars(per_head, per_head == nullptr ? 0 : heads * sizeof(float));
  const Mirror output(
      std::vector<std::byte>(heads * s.d_v * DtypeBytes(f.output), std::byte{0xff}));
  const bool folds = item.target_hp != nullptr;
  // The row is the second of three: a padding row before it, an empty one behind it.
  const cuda::DeviceRow row{.base = item.base,
                            .tail = item.tail,
                            .fold_to = item.fold_to,
                            .rounding_key = item.rounding.sequence_key,
                            .slot = kSlot,
                            .draft_tokens = item.draft_tokens,
                            .first_token = 0,
                            .source_page = kSource,
                            .target_page = folds ? kTarget : cuda::kNone,
                            .installs_flush = 0};
  cuda::DeviceRow padding{}, empty{};
  padding.slot = padding.source_page = padding.target_page = cuda::kNone;
  empty.source_page = empty.target_page = cuda::kNone;
  const cuda::DeviceRow all[] = {padding, row, empty};
  const cuda::DeviceStep one{3, item.draft_tokens};
  const Mirror rows(all, sizeof(all)), step(&one, sizeof(one));
  const Mirror poison(std::vector<std::byte>(3 * sizeof(uint32_t))),
      counter(std::vector<std::byte>(sizeof(uint32_t)));

  cuda::VerifyLaunch launch{
      .shape = s,
      .formats = f,
      .page = pools.page,
      .ring = pools.ring,
      .rule = {},
      .pages = pools.pages.as<std::byte>(),
      .rings = pools.rings.as<std::byte>(),
      .step = step.as<cuda::DeviceStep>(),
      .rows = rows.as<cuda::DeviceRow>(),
      .rows_max = 3,
      .draft_tokens_max = item.draft_tokens,
      .inputs = {q.as<void>(), k.as<void>(), v.as<void>(), log_alpha.as<float>()},
      .output = output.as<void>(),
      .poison = poison.as<uint32_t>(),
      .work_counter = counter.as<uint32_t>(),
      .rounding_seed = item.rounding.model_seed,
      .layer = item.rounding.layer};
  launch.rule =
      RuleOf(item.draft_tokens, folds ? static_cast<uint32_t>(item.tail - item.fold_to) : 0,
             item.ring_layout->ring_records);
  if (per_head != nullptr)
    (s.is_delta_rule() ? launch.inputs.beta : launch.inputs.value_scale) = scalars.as<float>();
  const cuda::VerifyKernel* kernel =
      chosen_kernel != nullptr ? chosen_kernel : cuda::FindVerifyKernel(launch);
  if (kernel == nullptr || !kernel->supports(launch)) {
    ADD_FAILURE() << "no kernel for this launch";
    return kPoisonNone;
  }
  Must(kernel->enqueue(launch, nullptr));
  Must(cudaDeviceSynchronize());
  pools.Collect(item);
  const std::vector<std::byte> result = output.Now();
  std::memcpy(item.output, result.data(), result.size());
  EXPECT_EQ(counter.Now(), counter.before());
  uint32_t flags[3];
  std::memcpy(flags, poison.Now().data(), sizeof(flags));
  EXPECT_EQ(flags[0] | flags[2], 0u);
  return flags[1];
}

void FoldOnGpu(const cpu::GroupItem& item, float* state) {
  const Pools pools(item);
  const cuda::DeviceFold fold{item.base, item.tail, item.rounding.sequence_key,
                              kSlot,     kSource,   kTarget};
  const uint32_t one = 1;
  const Mirror folds(&fold, sizeof(fold)), count(&one, sizeof(one));
  const Mirror replay(std::vector<std::byte>(item.shape->state_elements() * sizeof(float)));
  Must(cuda::EnqueueFold({.shape = *item.shape,
                          .formats = *item.formats,
                          .page = pools.page,
                          .ring = pools.ring,
                          .pages = pools.pages.as<std::byte>(),
                          .rings = pools.rings.as<std::byte>(),
                          .folds = folds.as<cuda::DeviceFold>(),
                          .count = count.as<uint32_t>(),
                          .folds_max = 1,
                          .replay = state == nullptr ? nullptr : replay.as<float>(),
                          .rounding_seed = item.rounding.model_seed,
                          .layer = item.rounding.layer},
                         nullptr));
  Must(cudaDeviceSynchronize());
  pools.Collect(item);
  if (state == nullptr) return;
  const std::vector<std::byte> result = replay.Now();
  std::memcpy(state, result.data(), result.size());
}

}  // namespace

void RunVerifyKernel(const cuda::VerifyKernel* kernel) { chosen_kernel = kernel; }

#else
namespace {
uint32_t VerifyOnGpu(const cpu::GroupItem&) { SSMD_CHECK(false, "built without CUDA"); }
void FoldOnGpu(const cpu::GroupItem&, float*) { SSMD_CHECK(false, "built without CUDA"); }
}  // namespace
#endif

uint32_t VerifyGroups(cpu::GroupItem item, const std::vector<uint32_t>& groups) {
  if (TestsRunOnCuda()) return VerifyOnGpu(item);
  uint32_t flags = kPoisonNone;
  for (const uint32_t group : groups) {
    item.group = group;
    flags |= cpu::VerifyGroup(item);
  }
  return flags;
}

void ReplayGroups(cpu::GroupItem item, float* state) {
  if (TestsRunOnCuda()) {
    item.target_hp = item.target_lp = nullptr;
    item.draft_tokens = 0;
    return FoldOnGpu(item, state);
  }
  for (item.group = 0; item.group < item.shape->key_group_count; ++item.group)
    cpu::ReplayGroup(item, state);
}

uint32_t FoldGroups(cpu::GroupItem item) {
  if (TestsRunOnCuda()) {
    FoldOnGpu(item, nullptr);
    return kPoisonNone;  // a fold of its own reports none: the steps that read its page do
  }
  uint32_t flags = kPoisonNone;
  for (item.group = 0; item.group < item.shape->key_group_count; ++item.group)
    flags |= cpu::FoldGroup(item);
  return flags;
}

}  // namespace ssmd::testing
