#include "client/demo/sequence_cache.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ssmd::demo {

void ConvWindow::ForgetBefore(int64_t position) {
  if (position <= first_) return;
  rows_.erase(rows_.begin(), rows_.begin() + (position - first_) * channels_);
  first_ = position;
}

SequenceCache::SequenceCache() {
  for (size_t layer = 0; layer < kSsmShapes.size(); ++layer)
    conv_[layer] = ConvWindow(ConvChannels(kSsmShapes[layer].family));
}

absl::Status SequenceCache::Truncate(uint64_t position) {
  const int64_t end = static_cast<int64_t>(position), window_begin = end - (kConvWidth - 1);
  if (position > position_)
    return absl::OutOfRangeError(absl::StrCat("position ", position, " > ", position_));
  for (const ConvWindow& window : conv_)
    if (!window.Holds(window_begin))
      return absl::OutOfRangeError(
          absl::StrCat("the convolution windows before position ", position, " are gone"));
  for (ConvWindow& window : conv_) {
    window.Truncate(end);
    window.ForgetBefore(window_begin - kRollbackTokens);
  }
  for (uint32_t layer = 0; layer < kAttentionLayers; ++layer) {
    keys_[layer].resize(position * kModelDim);
    values_[layer].resize(position * kModelDim);
  }
  position_ = position;
  return absl::OkStatus();
}

void SequenceCache::Save(SafetensorsWriter& writer) const {
  writer.AddInts("cache.position", {static_cast<int32_t>(position_)});
  for (size_t layer = 0; layer < conv_.size(); ++layer) {
    const ConvWindow& window = conv_[layer];
    writer.AddInts(absl::StrCat("cache.conv.", layer, ".first"),
                   {static_cast<int32_t>(window.first_)});
    writer.AddFloats(absl::StrCat("cache.conv.", layer, ".rows"),
                     {window.rows_.size() / window.channels_, window.channels_}, window.rows_);
  }
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
  for (size_t layer = 0; layer < cache.conv_.size(); ++layer) {
    ConvWindow& window = cache.conv_[layer];
    const std::string name = absl::StrCat("cache.conv.", layer);
    auto first = file.Ints(absl::StrCat(name, ".first"), {1});
    if (!first.ok()) return first.status();
    window.first_ = (*first)[0];
    const int64_t rows = static_cast<int64_t>(cache.position_) - window.first_;
    if (window.first_ < 1 - int64_t{kConvWidth} || rows < kConvWidth - 1)
      return absl::InvalidArgumentError(absl::StrCat(name, ": too short a window"));
    auto values =
        file.Floats(absl::StrCat(name, ".rows"), {static_cast<uint64_t>(rows), window.channels_});
    if (!values.ok()) return values.status();
    window.rows_ = *std::move(values);
  }
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
