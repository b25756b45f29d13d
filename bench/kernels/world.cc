#include "bench/kernels/world.h"

#include <algorithm>
#include <numeric>

#include "bench/kernels/fill.h"

namespace ssmd::bench {

const std::vector<BenchShape>& BenchShapes() {
  static const std::vector<BenchShape> shapes = {
      {"Nano-4B", {Family::kMamba2, 96, 8, 128, 80}},
      {"Super-120B", {Family::kMamba2, 128, 8, 128, 64}},
      {"Qwen-4B", {Family::kGdn, 32, 16, 128, 128}},
      {"Qwen-122B", {Family::kGdn, 64, 16, 128, 128}},
      {"KDA-32", {Family::kKda, 32, 32, 128, 128}},
      {"KDA-64", {Family::kKda, 64, 64, 128, 128}},
  };
  return shapes;
}

World::World(const LayerShape& shape, uint32_t batch, uint32_t layers, Dtype output,
             uint32_t tokens, uint32_t draft_tokens_max, uint64_t seed)
    : shape_(shape),
      formats_{.output = output},
      batch_(batch),
      layers_(layers),
      tokens_(tokens),
      rule_{kWindow, draft_tokens_max, 0, kWindow + 2 * draft_tokens_max},
      page_(MakePageLayout(shape, formats_)),
      ring_(cuda::MakeDeviceRingLayout(shape, formats_, rule_.ring_records)),
      random_(seed),
      pages_(uint64_t{layers} * 2 * batch * page_.page_bytes),
      rings_(uint64_t{layers} * batch * ring_.slot_bytes),
      q_(uint64_t{batch} * tokens * shape.key_group_count * shape.d_k * 2),
      k_(q_.size()),
      v_(uint64_t{batch} * tokens * shape.head_count * shape.d_v * 2),
      outputs_(uint64_t{batch} * tokens * shape.head_count * shape.d_v * DtypeBytes(output)),
      log_alpha_(uint64_t{batch} * tokens * shape.head_count * shape.decays_per_head()),
      scale_(uint64_t{batch} * tokens * shape.head_count),
      poison_(batch),
      counters_(layers) {
  const Dtype activation = formats_.activation;
  FillRandom({pages_.get(), pages_.size() / 4}, Dtype::kFp32, Fill::kNormal, 1, seed + 1);
  FillRandom({q_.get(), q_.size() / 2}, activation, Fill::kNormal, 0.09f, seed + 2);
  FillRandom({k_.get(), k_.size() / 2}, activation, Fill::kNormal, 0.09f, seed + 3);
  FillRandom({v_.get(), v_.size() / 2}, activation, Fill::kNormal, 1, seed + 4);
  FillRandom({log_alpha_.get(), log_alpha_.size()}, Dtype::kFp32, Fill::kNegative, 0.1f, seed + 5);
  FillRandom({scale_.get(), scale_.size()}, Dtype::kFp32, Fill::kUnit, 1, seed + 6);
  auto fill_runs = [&](const cuda::RingRuns& runs, uint32_t count, Dtype dtype, Fill fill,
                       float scale, uint64_t run_seed) {
    if (runs.row_bytes == 0) return;
    FillRandom({rings_.get() + runs.offset_bytes,
                uint64_t{count} * ring_.ring_records * runs.row_bytes / DtypeBytes(dtype),
                uint64_t{layers} * batch, ring_.slot_bytes},
               dtype, fill, scale, run_seed);
  };
  const uint32_t heads = shape.head_count, groups = shape.key_group_count;
  fill_runs(ring_.key, groups, activation, Fill::kNormal, 0.09f, seed + 7);
  fill_runs(ring_.value, heads, shape.is_delta_rule() ? formats_.correction : activation,
            Fill::kNormal, 1, seed + 8);
  fill_runs(ring_.log_alpha, shape.family == Family::kKda ? heads : groups, Dtype::kFp32,
            Fill::kNegative, 0.1f, seed + 9);
  fill_runs(ring_.value_scale, groups, Dtype::kFp32, Fill::kUnit, 1, seed + 10);
  SSMD_CUDA_CHECK(cudaMemset(counters_.get(), 0, counters_.size() * 4));
  SSMD_CUDA_CHECK(cudaMemset(poison_.get(), 0, poison_.size() * 4));
  SSMD_CUDA_CHECK(cudaDeviceSynchronize());
}

RowSet World::Upload(std::vector<cuda::DeviceRow> rows) const {
  RowSet set;
  uint32_t tokens = 0;
  for (const cuda::DeviceRow& row : rows) tokens += row.draft_tokens;
  set.rows = DeviceArray<cuda::DeviceRow>(rows);
  set.step = DeviceArray<cuda::DeviceStep>(
      std::vector<cuda::DeviceStep>{{static_cast<uint32_t>(rows.size()), tokens}});
  set.host = std::move(rows);
  return set;
}

RowSet World::MakeRows(const std::vector<uint32_t>& committed, const std::vector<bool>& folds) {
  std::vector<uint32_t> slots(batch_), pages(batch_);
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), random_);
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), random_);
  std::vector<cuda::DeviceRow> rows(batch_);
  for (uint32_t i = 0; i < batch_; ++i) {
    const uint64_t base = random_() >> 20;
    rows[i] = {.base = base,
               .tail = base + committed[i],
               .fold_to = base + committed[i],
               .rounding_key = 0,
               .slot = slots[i],
               .draft_tokens = tokens_,
               .first_token = i * tokens_,
               .source_page = pages[i],
               .target_page = folds[i] ? batch_ + pages[i] : ToInt(kNoPage),
               .installs_flush = 0};
  }
  return Upload(std::move(rows));
}

cuda::VerifyLaunch World::Launch(const RowSet& rows, uint32_t layer) const {
  cuda::VerifyLaunch launch;
  launch.shape = shape_;
  launch.formats = formats_;
  launch.page = page_;
  launch.ring = ring_;
  launch.rule = rule_;
  launch.pages = pages_.get() + uint64_t{layer} * 2 * batch_ * page_.page_bytes;
  launch.rings = rings_.get() + uint64_t{layer} * batch_ * ring_.slot_bytes;
  launch.step = rows.step.get();
  launch.rows = rows.rows.get();
  launch.rows_max = batch_;
  launch.draft_tokens_max = tokens_;
  launch.inputs = {.q = q_.get(),
                   .k = k_.get(),
                   .v = v_.get(),
                   .log_alpha = log_alpha_.get(),
                   .beta = shape_.is_delta_rule() ? scale_.get() : nullptr,
                   .value_scale = shape_.is_delta_rule() ? nullptr : scale_.get()};
  launch.output = outputs_.get();
  launch.poison = poison_.get();
  launch.work_counter = counters_.get() + layer;
  launch.layer = layer;
  return launch;
}

Traffic World::TrafficOf(const RowSet& rows) const {
  const double heads = shape_.head_count, groups = shape_.key_group_count;
  const double decay_runs = shape_.family == Family::kKda ? heads : groups;
  const double record = groups * ring_.key.row_bytes + heads * ring_.value.row_bytes +
                        decay_runs * ring_.log_alpha.row_bytes +
                        groups * ring_.value_scale.row_bytes;
  const double state = static_cast<double>(page_.hp_bytes);
  const double input =
      static_cast<double>(q_.size() + k_.size() + v_.size()) / batch_ / tokens_ +
      4.0 * static_cast<double>(log_alpha_.size() + scale_.size()) / batch_ / tokens_;
  const double output = static_cast<double>(outputs_.size()) / batch_ / tokens_;
  Traffic traffic;
  for (const cuda::DeviceRow& row : rows.host) {
    if (row.draft_tokens == 0 || row.slot == ToInt(kNoSlot)) continue;
    traffic.read +=
        state + static_cast<double>(row.tail - row.base) * record + row.draft_tokens * input;
    traffic.write +=
        row.draft_tokens * (output + record) + (row.target_page != ToInt(kNoPage) ? state : 0.0);
  }
  return traffic;
}

Traffic World::ConventionalTraffic() const {
  const double state = static_cast<double>(page_.hp_bytes) * batch_;
  const double input = static_cast<double>(q_.size() + k_.size() + v_.size()) +
                       4.0 * static_cast<double>(log_alpha_.size() + scale_.size());
  return {state + input, state + static_cast<double>(outputs_.size())};
}

void World::Poison(uint32_t layer) const {
  SSMD_CUDA_CHECK(cudaMemset(outputs_.get(), 0xff, outputs_.size()));
  const uint64_t half = uint64_t{batch_} * page_.page_bytes;
  SSMD_CUDA_CHECK(cudaMemset(pages_.get() + (2 * uint64_t{layer} + 1) * half, 0xff, half));
}

std::vector<uint32_t> World::PoisonFlags() const {
  return ToHost<uint32_t>(poison_.get(), poison_.size());
}
uint32_t World::WorkCounter(uint32_t layer) const {
  return ToHost<uint32_t>(counters_.get() + layer, 1)[0];
}

}  // namespace ssmd::bench
