#include "client/demo/sequence_cache.h"

#include "absl/strings/str_cat.h"

namespace ssmd::demo {

absl::Status SequenceCache::Truncate(uint64_t position) {
  if (position > position_)
    return absl::OutOfRangeError(absl::StrCat("position ", position, " > ", position_));
  for (uint32_t layer = 0; layer < kAttentionLayers; ++layer) {
    keys_[layer].resize(position * kModelDim);
    values_[layer].resize(position * kModelDim);
  }
  position_ = position;
  return absl::OkStatus();
}

void SequenceCache::Save(SafetensorsWriter& writer) const {
  writer.AddInts("cache.position", {static_cast<int32_t>(position_)});
  for (uint32_t layer = 0; layer < kAttentionLayers; ++layer) {
    writer.AddFloats(absl::StrCat("cache.keys.", layer), {position_, kModelDim}, keys_[layer]);
    writer.AddFloats(absl::StrCat("cache.values.", layer), {position_, kModelDim}, values_[layer]);
  }
}

absl::StatusOr<SequenceCache> SequenceCache::Load(const Safetensors& file) {
  SequenceCache cache;
  auto position = file.Ints("cache.position", {1});
  if (!position.ok()) return position.status();
  if ((*position)[0] < 0) return absl::InvalidArgumentError("cache.position is negative");
  cache.position_ = static_cast<uint64_t>((*position)[0]);
  for (uint32_t layer = 0; layer < kAttentionLayers; ++layer) {
    auto keys = file.Floats(absl::StrCat("cache.keys.", layer), {cache.position_, kModelDim});
    if (!keys.ok()) return keys.status();
    auto values = file.Floats(absl::StrCat("cache.values.", layer), {cache.position_, kModelDim});
    if (!values.ok()) return values.status();
    cache.keys_[layer] = *std::move(keys);
    cache.values_[layer] = *std::move(values);
  }
  return cache;
}

}  // namespace ssmd::demo
