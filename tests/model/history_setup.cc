// What a history is about: a random model and its inputs.
#include "tests/model/history_run.h"

#include <algorithm>
#include <array>

#include "tests/testing/raw_inputs.h"
#include "tests/testing/test_device.h"

namespace ssmd::testing {

void History::Setup() {
  auto pick = [&](auto... values) {
    const std::array options = {values...};
    return options[Below(options.size())];
  };
  LayerStates empty;
  const bool raw = OneIn(3);
  const size_t layer_count = 1 + Below(3);
  bool has_delta_rule = false;
  for (size_t i = 0; i < layer_count; ++i) {
    LayerShape shape{.family = pick(Family::kMamba2, Family::kGdn, Family::kKda)};
    shape.key_group_count = pick(1u, 2u);
    shape.head_count = shape.key_group_count * pick(1u, 2u);
    shape.d_k = pick(16u, 32u);
    shape.d_v = pick(8u, 24u);
    has_delta_rule |= shape.is_delta_rule();
    if (raw) shape.conv_width = pick(2u, 3u, 4u);
    geometry_.layers.push_back(shape);
  }
  geometry_.formats.activation = pick(Dtype::kFp32, Dtype::kBf16, Dtype::kFp16);
  geometry_.formats.correction = has_delta_rule ? pick(Dtype::kFp16, Dtype::kFp32) : Dtype::kNone;
  geometry_.window_records = pick(4u, 5u, 6u, 16u, 20u);
  geometry_.draft_tokens_max =
      1 + static_cast<uint32_t>(Below(std::min(geometry_.window_records, 16u)));
  const uint32_t slack = geometry_.window_records - geometry_.draft_tokens_max;
  geometry_.rollback_tokens_min = OneIn(2) ? 0 : static_cast<uint32_t>(Below(slack + 1));
  if (background_) geometry_.flush_mode = FlushMode::kBackground;
  capacity_ = {.sequences_max = 3 + static_cast<uint32_t>(Below(5)),
               .snapshots_max = static_cast<uint32_t>(Below(4)),
               .spare_pages = 1 + static_cast<uint32_t>(Below(3)),
               .rows_max = 4,
               .steps_max = 2};

  if (OneIn(3)) geometry_.formats.checkpoint_lp = Dtype::kFp16;
  if (OneIn(4)) geometry_.formats.checkpoint_hp = Dtype::kFp16;
  geometry_.rounding_seed = random_();
  for (const LayerShape& shape : geometry_.layers) {
    if (!raw) {
      empty.push_back(
          {reference::Recurrence(FamilyName(shape.family),
                                 {shape.head_count, shape.key_group_count, shape.d_k, shape.d_v})});
      continue;
    }
    RawParameters parameters = RandomRawParameters(
        shape, {.conv_bias = OneIn(2), .dt_bias = OneIn(2), .d = OneIn(2), .lower_bound = OneIn(2)},
        random_);
    if (!parameters.qk_l2_norm) {  // keys near norm 1 all the same
      for (float& weight : parameters.conv_weight) weight *= 0.3f;
    }
    geometry_.raw.push_back(parameters);
    empty.push_back({RawOracle(shape, parameters, geometry_.formats.activation)});
  }

  inputs_.of.resize(kVocabulary);
  magnitudes_.resize(layer_count, {.alpha = 0});
  for (int token = 0; token < kVocabulary; ++token) {
    for (size_t layer = 0; layer < layer_count; ++layer) {
      const LayerShape& shape = geometry_.layers[layer];
      LayerInput& made_input = inputs_.of[token].emplace_back();
      if (raw) {
        made_input.raw = RandomRawToken(shape, geometry_.formats.activation, 1.0f, random_);
        continue;
      }
      made_input.post_conv = RandomToken(shape, geometry_.formats.activation, random_);
      Cover(magnitudes_[layer], made_input.post_conv, shape.d_k);
    }
  }

  device_ = MakeTestDevice(uint64_t{1} << 30, &pool_, &queue_);
  auto store = Store::Create({.geometry = geometry_, .capacity = capacity_, .poison_garbage = true},
                             [&](const BackendSpec& spec) { return device_->CreateBackend(spec); });
  if (!store.ok()) return Fail(store.status().ToString());
  store_ = *std::move(store);
  model_ = std::make_unique<StoreModel>(inputs_, std::move(empty), geometry_.rollback_tokens_min);
}

}  // namespace ssmd::testing
