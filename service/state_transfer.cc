#include "service/state_transfer.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "service/validate.h"

namespace ssmd {
namespace {

constexpr uint32_t kFormatVersion = 1;
constexpr uint64_t kMessageOverheadBytes = 1024;  // of a chunk's message, generously
constexpr float kFp16Max = 65504.0f;

uint64_t StateBytes(const LayerShape& shape) { return shape.state_elements() * sizeof(float); }

uint64_t WindowBytes(const LayerShape& shape, const Formats& formats) {
  if (shape.conv_width == 0) return 0;
  return uint64_t{shape.conv_width - 1} * shape.conv_channels() * DtypeBytes(formats.activation);
}

// The first difference between two values of a field; OK when there is none.
class FieldComparison {
 public:
  void Compare(absl::string_view field, absl::string_view expected, absl::string_view actual) {
    if (!status_.ok() || expected == actual) return;
    const std::string path = absl::StrCat("descriptor.", field);
    status_ = InvalidField(path, absl::StrCat(path, ": expected ", expected, ", got ", actual));
  }
  void Compare(absl::string_view field, uint64_t expected, uint64_t actual) {
    Compare(field, absl::StrCat(expected), absl::StrCat(actual));
  }
  const absl::Status& status() const { return status_; }

 private:
  absl::Status status_;
};

std::string Named(const std::string& name, int number) {
  return name.empty() ? absl::StrCat(number) : name;
}

float ReadElement(const std::byte* at, Dtype dtype) {
  if (dtype == Dtype::kFp32) {
    float value;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  uint16_t half;
  std::memcpy(&half, at, sizeof(half));
  return dtype == Dtype::kBf16 ? Bf16ToFloat(half) : Fp16ToFloat(half);
}

const char* ComponentName(bool is_state) { return is_state ? "COMPONENT_STATE" : "COMPONENT_CONV"; }

}  // namespace

uint64_t ChunkBytesMax(const ServerConfig& config) {
  return std::min<uint64_t>(config.chunk_bytes_max,
                            config.message_bytes_max - kMessageOverheadBytes) /
         4 * 4;
}

v1::StateDescriptor DescribeState(const Model& model, uint64_t position) {
  v1::StateDescriptor descriptor;
  descriptor.set_format_version(kFormatVersion);
  descriptor.set_model_id(model.id);
  descriptor.set_position(position);
  descriptor.set_state_dtype(v1::DATA_TYPE_FP32);
  descriptor.set_state_order(v1::STATE_ORDER_HEAD_DV_DK);
  const Geometry& geometry = model.store->geometry();
  if (!geometry.raw.empty()) {
    descriptor.set_conv_dtype(static_cast<v1::DataType>(geometry.formats.activation));
    descriptor.set_conv_order(v1::CONV_ORDER_TIME_CHANNEL);
  }
  for (size_t i = 0; i < geometry.layers.size(); ++i) {
    const LayerShape& shape = geometry.layers[i];
    v1::LayerStateDescriptor& layer = *descriptor.add_layers();
    layer.set_layer_id(model.layer_ids[i]);
    layer.set_family(static_cast<v1::Family>(shape.family));
    layer.set_head_count(shape.head_count);
    layer.set_d_k(shape.d_k);
    layer.set_d_v(shape.d_v);
    if (shape.conv_width > 0) layer.set_conv_channels(shape.conv_channels());
    layer.set_conv_width(shape.conv_width);
  }
  return descriptor;
}

absl::Status CheckDescriptor(const Model& model, const v1::StateDescriptor& actual) {
  const v1::StateDescriptor expected = DescribeState(model, actual.position());
  FieldComparison fields;
  if (actual.position() > kPositionMax)
    fields.Compare("position", absl::StrCat("at most ", kPositionMax),
                   absl::StrCat(actual.position()));
  fields.Compare("format_version", expected.format_version(), actual.format_version());
  fields.Compare("model_id", absl::StrFormat("0x%016x", expected.model_id()),
                 absl::StrFormat("0x%016x", actual.model_id()));
  const auto dtype = [](v1::DataType type) { return Named(v1::DataType_Name(type), type); };
  fields.Compare("state_dtype", dtype(expected.state_dtype()), dtype(actual.state_dtype()));
  fields.Compare("state_order", v1::StateOrder_Name(expected.state_order()),
                 Named(v1::StateOrder_Name(actual.state_order()), actual.state_order()));
  fields.Compare("conv_dtype", dtype(expected.conv_dtype()), dtype(actual.conv_dtype()));
  const bool either_order = expected.conv_order() != v1::CONV_ORDER_UNSPECIFIED &&
                            actual.conv_order() == v1::CONV_ORDER_CHANNEL_TIME;
  if (!either_order)
    fields.Compare("conv_order", v1::ConvOrder_Name(expected.conv_order()),
                   Named(v1::ConvOrder_Name(actual.conv_order()), actual.conv_order()));
  fields.Compare("layers", absl::StrCat(expected.layers_size(), " layers"),
                 absl::StrCat(actual.layers_size(), " layers"));
  for (int i = 0; i < std::min(expected.layers_size(), actual.layers_size()); ++i) {
    const v1::LayerStateDescriptor& want = expected.layers(i);
    const v1::LayerStateDescriptor& have = actual.layers(i);
    const std::string at = absl::StrCat("layers[", i, "].");
    fields.Compare(at + "layer_id", want.layer_id(), have.layer_id());
    fields.Compare(at + "family", v1::Family_Name(want.family()),
                   Named(v1::Family_Name(have.family()), have.family()));
    fields.Compare(at + "head_count", want.head_count(), have.head_count());
    fields.Compare(at + "d_k", want.d_k(), have.d_k());
    fields.Compare(at + "d_v", want.d_v(), have.d_v());
    fields.Compare(at + "conv_channels", want.conv_channels(), have.conv_channels());
    fields.Compare(at + "conv_width", want.conv_width(), have.conv_width());
  }
  SSMD_RETURN_IF_ERROR(fields.status());
  return CheckWorkerWindow("descriptor.worker_window", actual.worker_window());
}

struct StateChecksum::Impl {
  XXH3_state_t state;
};

StateChecksum::StateChecksum() : impl_(std::make_unique<Impl>()) {
  XXH3_64bits_reset(&impl_->state);
}
StateChecksum::~StateChecksum() = default;
void StateChecksum::Update(const void* bytes, size_t count) {
  XXH3_64bits_update(&impl_->state, bytes, count);
}
uint64_t StateChecksum::value() const { return XXH3_64bits_digest(&impl_->state); }

// ---- import

StateAssembler::StateAssembler(const Model* model, const v1::StateDescriptor& descriptor,
                               uint64_t chunk_bytes_max, StateImport* import)
    : model_(model),
      import_(import),
      position_(descriptor.position()),
      chunk_bytes_max_(chunk_bytes_max),
      channel_time_(descriptor.conv_order() == v1::CONV_ORDER_CHANNEL_TIME) {
  const Geometry& geometry = model->store->geometry();
  for (const LayerShape& shape : geometry.layers) {
    Layer layer;
    layer.state.bytes = layer.state.missing = StateBytes(shape);
    layer.state.element_bytes = sizeof(float);
    layer.conv.bytes = layer.conv.missing = WindowBytes(shape, geometry.formats);
    layer.conv.element_bytes = DtypeBytes(geometry.formats.activation);
    layers_.push_back(std::move(layer));
  }
  if (!geometry.raw.empty()) windows_.resize(geometry.layers.size());
}

absl::Status StateAssembler::Fill(Part& part, const v1::StateChunk& chunk) {
  const std::string who =
      absl::StrCat("layer_id ", chunk.layer_id(), " ",
                   ComponentName(chunk.component() == v1::StateChunk::COMPONENT_STATE));
  const uint64_t size = chunk.data().size(), offset = chunk.offset_bytes();
  const auto refuse = [&](absl::string_view field, absl::string_view expected,
                          const std::string& actual) {
    return InvalidField(
        absl::StrCat("chunk.", field),
        absl::StrCat("chunk.", field, ": ", who, ": expected ", expected, ", got ", actual));
  };
  if (part.bytes == 0) {
    return refuse("component", "COMPONENT_STATE only (post-conv form keeps no window)",
                  "COMPONENT_CONV");
  }
  if (size == 0 || size > chunk_bytes_max_)
    return refuse("data", absl::StrCat("1..", chunk_bytes_max_, " bytes (chunk_bytes_max)"),
                  absl::StrCat(size));
  if (offset % part.element_bytes != 0)
    return refuse("offset_bytes", absl::StrCat("a multiple of ", part.element_bytes),
                  absl::StrCat(offset));
  if (size % part.element_bytes != 0)
    return refuse("data", absl::StrCat("a multiple of ", part.element_bytes, " bytes"),
                  absl::StrCat(size));
  if (offset > part.bytes || size > part.bytes - offset)
    return refuse("offset_bytes", absl::StrCat("bytes within [0, ", part.bytes, ")"),
                  absl::StrCat("[", offset, ", ", offset, " + ", size, ")"));
  const size_t first = offset / part.element_bytes, count = size / part.element_bytes;
  if (part.seen.empty() && !part.complete()) {  // its first chunk
    part.seen.resize(part.bytes / part.element_bytes);
    part.buffer.resize((part.bytes + sizeof(float) - 1) / sizeof(float));
  }
  for (size_t i = first; i < first + count; ++i) {
    if (!part.complete() && !part.seen[i]) continue;
    return refuse("offset_bytes", "bytes that did not come before",
                  absl::StrCat("byte ", i * part.element_bytes, " again"));
  }
  std::fill_n(part.seen.begin() + static_cast<ptrdiff_t>(first), count, true);
  std::memcpy(reinterpret_cast<std::byte*>(part.buffer.data()) + offset, chunk.data().data(), size);
  part.missing -= size;
  return absl::OkStatus();
}

absl::Status StateAssembler::CheckValues(uint32_t layer_id, const Part& part, Dtype dtype,
                                         float limit) const {
  const auto* bytes = reinterpret_cast<const std::byte*>(part.buffer.data());
  for (uint64_t at = 0; at < part.bytes; at += part.element_bytes) {
    const float value = ReadElement(bytes + at, dtype);
    if (std::abs(value) <= limit) continue;  // not NaN either
    return InvalidField("chunk.data",
                        absl::StrCat("chunk.data: layer_id ", layer_id, ": the value at byte ", at,
                                     ", ", value, ", is not one that the model can hold"));
  }
  return absl::OkStatus();
}

absl::Status StateAssembler::Add(const v1::StateChunk& chunk) {
  const auto found = model_->layer_index.find(chunk.layer_id());
  if (found == model_->layer_index.end()) {
    return InvalidField("chunk.layer_id",
                        absl::StrCat("chunk.layer_id: expected a layer of model ",
                                     model_->description.name, ", got ", chunk.layer_id()));
  }
  const bool is_state = chunk.component() == v1::StateChunk::COMPONENT_STATE;
  if (!is_state && chunk.component() != v1::StateChunk::COMPONENT_CONV) {
    return InvalidField(
        "chunk.component",
        absl::StrCat("chunk.component: expected COMPONENT_STATE or COMPONENT_CONV, got ",
                     Named(v1::StateChunk::Component_Name(chunk.component()), chunk.component())));
  }
  Layer& layer = layers_[found->second];
  Part& part = is_state ? layer.state : layer.conv;
  SSMD_RETURN_IF_ERROR(Fill(part, chunk));
  if (!part.complete()) return absl::OkStatus();
  part.seen = {};
  const Formats& formats = model_->store->geometry().formats;
  if (is_state) {
    const bool has_fp16 =
        formats.checkpoint_hp == Dtype::kFp16 || formats.checkpoint_lp == Dtype::kFp16;
    SSMD_RETURN_IF_ERROR(CheckValues(chunk.layer_id(), part, Dtype::kFp32,
                                     has_fp16 ? kFp16Max : std::numeric_limits<float>::max()));
    SSMD_RETURN_IF_ERROR(import_->WriteLayer(found->second, position_, part.buffer));
  } else {
    SSMD_RETURN_IF_ERROR(
        CheckValues(chunk.layer_id(), part, formats.activation, std::numeric_limits<float>::max()));
  }
  HashInTurn();
  return absl::OkStatus();
}

void StateAssembler::HashInTurn() {
  const Geometry& geometry = model_->store->geometry();
  for (; next_hashed_ < layers_.size(); ++next_hashed_) {
    Layer& layer = layers_[next_hashed_];
    if (!layer.state.complete() || !layer.conv.complete()) return;
    checksum_.Update(layer.state.buffer.data(), layer.state.bytes);
    layer.state.buffer = {};
    if (layer.conv.bytes == 0) continue;
    checksum_.Update(layer.conv.buffer.data(), layer.conv.bytes);
    windows_[next_hashed_] = TakeWindow(geometry.layers[next_hashed_], layer.conv);
  }
}

// The window as the store wants it: [w - 1, channels].
std::vector<std::byte> StateAssembler::TakeWindow(const LayerShape& shape, Part& part) const {
  const auto* from = reinterpret_cast<const std::byte*>(part.buffer.data());
  std::vector<std::byte> window(part.bytes);
  const size_t size = part.element_bytes, tokens = shape.conv_width - 1,
               channels = shape.conv_channels();
  if (!channel_time_) {
    std::memcpy(window.data(), from, part.bytes);
  } else {
    for (size_t channel = 0; channel < channels; ++channel)
      for (size_t token = 0; token < tokens; ++token)
        std::memcpy(&window[(token * channels + channel) * size],
                    from + (channel * tokens + token) * size, size);
  }
  part.buffer = {};
  return window;
}

absl::StatusOr<SequenceState> StateAssembler::Finish(uint64_t checksum) {
  for (size_t i = 0; i < layers_.size(); ++i) {
    for (const Part* part : {&layers_[i].state, &layers_[i].conv}) {
      if (part->complete()) continue;
      return InvalidField("chunk.component",
                          absl::StrCat("finish: layer_id ", model_->layer_ids[i], " ",
                                       ComponentName(part == &layers_[i].state), ": expected ",
                                       part->bytes, " bytes, got ", part->bytes - part->missing));
    }
  }
  if (checksum_.value() != checksum) {
    return WithDetail(
        absl::DataLossError(absl::StrFormat("finish.checksum: the bytes that came have 0x%016x, "
                                            "their sender computed 0x%016x",
                                            checksum_.value(), checksum)),
        detail::kField, "finish.checksum");
  }
  return import_->Finish(position_, windows_);
}

// ---- export

bool StateReader::AdvanceComponent() {
  const Geometry& geometry = model_->store->geometry();
  if (component_ == v1::StateChunk::COMPONENT_STATE && geometry.layers[layer_].conv_width > 0) {
    component_ = v1::StateChunk::COMPONENT_CONV;
    return true;
  }
  component_ = v1::StateChunk::COMPONENT_STATE;
  return ++layer_ < geometry.layers.size();
}

absl::Status StateReader::LoadComponent() {
  const Geometry& geometry = model_->store->geometry();
  const LayerShape& shape = geometry.layers[layer_];
  offset_ = 0;
  if (component_ == v1::StateChunk::COMPONENT_STATE) {
    size_ = StateBytes(shape);
    bytes_.resize(shape.state_elements());
    return source_->ReadLayer(layer_, absl::MakeSpan(bytes_));
  }
  size_ = WindowBytes(shape, geometry.formats);
  bytes_.resize((size_ + sizeof(float) - 1) / sizeof(float));
  return source_->ReadWindow(layer_,
                             absl::MakeSpan(reinterpret_cast<std::byte*>(bytes_.data()), size_));
}

absl::StatusOr<bool> StateReader::Next(v1::ExportStateResponse& message) {
  switch (stage_) {
    case Stage::kDescriptor:
      *message.mutable_state() = DescribeState(*model_, source_->position());
      message.mutable_state()->set_worker_window(source_->worker_window());
      SSMD_RETURN_IF_ERROR(LoadComponent());
      stage_ = Stage::kChunks;
      return true;
    case Stage::kChunks: {
      v1::StateChunk& chunk = *message.mutable_chunk();
      chunk.set_layer_id(model_->layer_ids[layer_]);
      chunk.set_component(component_);
      chunk.set_offset_bytes(offset_);
      const uint64_t count = std::min(chunk_bytes_, size_ - offset_);
      chunk.set_data(reinterpret_cast<const char*>(bytes_.data()) + offset_, count);
      checksum_.Update(chunk.data().data(), count);
      offset_ += count;
      if (offset_ < size_) return true;
      if (AdvanceComponent()) {
        SSMD_RETURN_IF_ERROR(LoadComponent());
      } else {
        stage_ = Stage::kFinish;
      }
      return true;
    }
    case Stage::kFinish:
      message.mutable_finish()->set_checksum(checksum_.value());
      stage_ = Stage::kDone;
      return true;
    case Stage::kDone:
      break;
  }
  return false;
}

}  // namespace ssmd
