#include "client/transfer.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/checksum.h"
#include "client/tensor.h"

namespace ssmd::client {
namespace {

constexpr uint64_t kChunkBytes = 256 << 10;  // unless the server takes less

// A failure of this side, in the form of a call's.
grpc::Status Local(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

grpc::Status Bad(const std::string& what) { return {grpc::StatusCode::DATA_LOSS, what}; }

// What follows in the one order that the bytes have.
class Cursor {
 public:
  explicit Cursor(absl::Span<const StateComponent> components) : components_(components) { Skip(); }
  bool done() const { return index_ == components_.size(); }
  const StateComponent& component() const { return components_[index_]; }
  uint64_t offset() const { return offset_; }
  uint64_t left() const { return component().bytes - offset_; }
  void Advance(uint64_t bytes) {
    offset_ += bytes;
    Skip();
  }

 private:
  void Skip() {
    while (index_ < components_.size() && offset_ == components_[index_].bytes) {
      ++index_;
      offset_ = 0;
    }
  }
  const absl::Span<const StateComponent> components_;
  size_t index_ = 0;
  uint64_t offset_ = 0;
};

uint64_t ChunkBytes(const grpc::ClientContext& context, v1::StateService::StubInterface& stub) {
  grpc::ClientContext own;
  own.set_deadline(context.deadline());
  v1::GetCapabilitiesResponse limits;
  if (!stub.GetCapabilities(&own, v1::GetCapabilitiesRequest(), &limits).ok() ||
      limits.chunk_bytes_max() == 0)
    return kChunkBytes;
  return std::min<uint64_t>(kChunkBytes, limits.chunk_bytes_max());
}

}  // namespace

absl::StatusOr<std::vector<StateComponent>> ComponentsOf(const v1::StateDescriptor& descriptor) {
  std::vector<StateComponent> components;
  uint64_t end = 0;
  const auto add = [&](uint32_t layer, v1::StateChunk::Component component, uint64_t a, uint64_t b,
                       uint64_t c, v1::DataType dtype) {
    uint64_t bytes = DataTypeBytes(dtype);
    if (bytes == 0) return false;
    for (const uint64_t extent : {a, b, c})
      if (__builtin_mul_overflow(bytes, extent, &bytes)) return false;
    components.push_back({layer, component, bytes, end});
    return !__builtin_add_overflow(end, bytes, &end);
  };
  for (const v1::LayerStateDescriptor& layer : descriptor.layers()) {
    bool good = add(layer.layer_id(), v1::StateChunk::COMPONENT_STATE, layer.head_count(),
                    layer.d_v(), layer.d_k(), descriptor.state_dtype());
    if (good && layer.conv_channels() > 0)
      good = layer.conv_width() > 0 &&
             add(layer.layer_id(), v1::StateChunk::COMPONENT_CONV, layer.conv_width() - 1,
                 layer.conv_channels(), 1, descriptor.conv_dtype());
    if (!good)
      return absl::InvalidArgumentError(absl::StrCat("state descriptor: layer ", layer.layer_id(),
                                                     " has an unknown dtype or a size of more "
                                                     "than 64 bits"));
  }
  return components;
}

uint64_t TotalBytes(absl::Span<const StateComponent> components) {
  return components.empty() ? 0 : components.back().first + components.back().bytes;
}

grpc::Status RunExport(grpc::ClientContext& context, v1::StateService::StubInterface& stub,
                       const v1::ExportStateRequest& request, StateSink& sink, absl::Status& own,
                       ExportSummary& summary) {
  summary = {};
  const auto reader = stub.ExportState(&context, request);
  // Ends the stream early; its own status is then of no interest.
  const auto give_up = [&](grpc::Status status) {
    context.TryCancel();
    reader->Finish();
    return status;
  };
  v1::ExportStateResponse reply;
  if (!reader->Read(&reply)) {
    const grpc::Status status = reader->Finish();
    return status.ok() ? Bad("the export is empty") : status;
  }
  if (!reply.has_state()) return give_up(Bad("the export has no descriptor"));
  summary.server_epoch = reply.server_epoch();
  summary.descriptor = reply.state();
  const auto components = ComponentsOf(summary.descriptor);
  if (!components.ok()) return give_up(Local(components.status()));
  own = sink.Begin(summary.descriptor);
  if (!own.ok()) return give_up(grpc::Status::CANCELLED);

  Cursor cursor(*components);
  Checksum checksum;
  bool finished = false;
  while (!finished && reader->Read(&reply)) {
    if (reply.has_finish()) {
      summary.checksum = reply.finish().checksum();
      finished = true;
      continue;
    }
    const v1::StateChunk& chunk = reply.chunk();
    if (cursor.done() || chunk.layer_id() != cursor.component().layer_id ||
        chunk.component() != cursor.component().component ||
        chunk.offset_bytes() != cursor.offset() || chunk.data().empty() ||
        chunk.data().size() > cursor.left())
      return give_up(Bad(absl::StrCat("a chunk of layer ", chunk.layer_id(), " at offset ",
                                      chunk.offset_bytes(), " is out of order")));
    checksum.Add(chunk.data());
    summary.bytes += chunk.data().size();
    own = sink.Write(cursor.component(), chunk.offset_bytes(), chunk.data());
    if (!own.ok()) return give_up(grpc::Status::CANCELLED);
    cursor.Advance(chunk.data().size());
  }
  if (!finished) {
    const grpc::Status status = reader->Finish();
    return status.ok() ? Bad("the export ended early") : status;
  }
  if (!cursor.done()) return give_up(Bad("the export lacks bytes"));
  if (checksum.value() != summary.checksum)
    return give_up(Bad("the exported bytes do not match the server's checksum"));
  while (reader->Read(&reply)) {
  }
  return reader->Finish();
}

grpc::Status RunImport(grpc::ClientContext& context, v1::StateService::StubInterface& stub,
                       const v1::ImportStateRequest::Header& header, StateSource& source,
                       absl::Status& own, v1::ImportStateResponse& reply) {
  reply.Clear();
  const auto components = ComponentsOf(source.descriptor());
  if (!components.ok()) return Local(components.status());
  const uint64_t chunk_bytes = ChunkBytes(context, stub);
  const auto writer = stub.ImportState(&context, &reply);
  v1::ImportStateRequest request;
  *request.mutable_header() = header;
  *request.mutable_header()->mutable_state() = source.descriptor();
  bool open = writer->Write(request);
  Checksum checksum;
  // A Write that fails means that the server has answered: Finish has its status.
  for (Cursor cursor(*components); open && !cursor.done();) {
    v1::StateChunk& chunk = *request.mutable_chunk();
    chunk.set_layer_id(cursor.component().layer_id);
    chunk.set_component(cursor.component().component);
    chunk.set_offset_bytes(cursor.offset());
    std::string& data = *chunk.mutable_data();
    data.resize(std::min(chunk_bytes, cursor.left()));
    own = source.Read(cursor.component(), cursor.offset(), {data.data(), data.size()});
    if (!own.ok()) {
      context.TryCancel();
      writer->Finish();
      return grpc::Status::CANCELLED;
    }
    checksum.Add(data);
    open = writer->Write(request);
    cursor.Advance(data.size());
  }
  if (open) {
    request.mutable_finish()->set_checksum(checksum.value());
    writer->Write(request);
  }
  writer->WritesDone();
  return writer->Finish();
}

}  // namespace ssmd::client
