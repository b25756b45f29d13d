// Whole exports and imports over real streams, and steps in either input form.
#pragma once

#include "tests/e2e/harness.h"
#include "tests/testing/raw_specs.h"

namespace ssmd::e2e {

struct Exported {
  grpc::Status status;
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest bad_request;
  v1::StateDescriptor state;
  std::vector<v1::StateChunk> chunks;
  uint64_t checksum = 0;
  bool finished = false;
  bool ok() const { return status.ok(); }
  std::string bytes() const {
    std::string all;
    for (const v1::StateChunk& chunk : chunks) all += chunk.data();
    return all;
  }
};

inline Exported Export(Client& client, const v1::ExportStateRequest& request) {
  Exported exported;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + Client::kDeadline);
  client.AddToken(context);
  auto reader = client.stub->ExportState(&context, request);
  v1::ExportStateResponse message;
  while (reader->Read(&message)) {
    EXPECT_EQ(message.server_epoch(), client.epoch);
    EXPECT_FALSE(exported.finished);
    if (message.has_state()) exported.state = message.state();
    if (message.has_chunk()) exported.chunks.push_back(message.chunk());
    if (message.has_finish()) {
      exported.checksum = message.finish().checksum();
      exported.finished = true;
    }
  }
  exported.status = reader->Finish();
  google::rpc::RetryInfo retry;
  DecodeDetails(exported.status, exported.info, exported.bad_request, retry);
  return exported;
}

inline Exported ExportSequence(Client& client, uint64_t id, uint64_t version,
                               uint32_t chunk_bytes = 0) {
  auto request = client.Make<v1::ExportStateRequest>();
  request.set_sequence_id(id);
  request.set_version(version);
  request.set_chunk_bytes(chunk_bytes);
  return Export(client, request);
}

// An import, message by message.
class ImportCall {
 public:
  explicit ImportCall(Client& client) : stub_(*client.stub) {
    context.set_deadline(std::chrono::system_clock::now() + Client::kDeadline);
    client.AddToken(context);
    writer_ = stub_.ImportState(&context, &reply_.body);
  }
  bool Header(Client& client, uint64_t id, uint64_t version, const v1::StateDescriptor& state) {
    v1::ImportStateRequest message;
    client.FillContext(*message.mutable_header()->mutable_context());
    message.mutable_header()->set_model_id(client.model_id);
    message.mutable_header()->set_sequence_id(id);
    message.mutable_header()->set_version(version);
    *message.mutable_header()->mutable_state() = state;
    return writer_->Write(message);
  }
  bool Chunk(const v1::StateChunk& chunk) {
    v1::ImportStateRequest message;
    *message.mutable_chunk() = chunk;
    return writer_->Write(message);
  }
  bool FinishMessage(uint64_t checksum) {
    v1::ImportStateRequest message;
    message.mutable_finish()->set_checksum(checksum);
    return writer_->Write(message);
  }
  bool Write(const v1::ImportStateRequest& message) { return writer_->Write(message); }
  // Half-closes and waits for the answer.
  Reply<v1::ImportStateResponse> End() {
    writer_->WritesDone();
    return Await();
  }
  // Waits for the answer; the server ends the stream.
  Reply<v1::ImportStateResponse> Await() {
    reply_.status = writer_->Finish();
    DecodeDetails(reply_.status, reply_.info, reply_.bad_request, reply_.retry);
    return reply_;
  }

  grpc::ClientContext context;

 private:
  Stub& stub_;
  Reply<v1::ImportStateResponse> reply_;
  std::unique_ptr<grpc::ClientWriter<v1::ImportStateRequest>> writer_;
};

inline Reply<v1::ImportStateResponse> Import(Client& client, uint64_t id, uint64_t version,
                                             const Exported& from) {
  ImportCall call(client);
  call.Header(client, id, version, from.state);
  for (const v1::StateChunk& chunk : from.chunks)
    if (!call.Chunk(chunk)) break;  // refused: the status says why
  call.FinishMessage(from.checksum);
  return call.End();
}

// Tensors of a layer of RawSpec.
inline v1::VerifyRequest PackRaw(uint32_t layer_id, uint32_t tokens,
                                 const testing::PackedRawInputs& packed) {
  const LayerShape shape = testing::RawShape(layer_id);
  const auto fill = [](v1::Tensor* tensor, std::initializer_list<uint64_t> extents,
                       const std::vector<std::byte>& data) {
    tensor->set_dtype(v1::DATA_TYPE_FP32);
    for (const uint64_t extent : extents) tensor->add_shape(extent);
    tensor->set_data(reinterpret_cast<const char*>(data.data()), data.size());
  };
  const uint64_t n = tokens, heads = shape.head_count;
  v1::VerifyRequest request;
  request.set_layer_id(layer_id);
  fill(request.mutable_projection(), {n, shape.conv_channels()}, packed.projection);
  if (!packed.dt.empty()) fill(request.mutable_dt(), {n, heads}, packed.dt);
  if (!packed.a.empty()) fill(request.mutable_a(), {n, heads}, packed.a);
  if (!packed.b.empty()) fill(request.mutable_b(), {n, heads}, packed.b);
  if (!packed.gate.empty()) fill(request.mutable_gate(), {n, heads, shape.d_k}, packed.gate);
  return request;
}

// Tensors of random tokens for one layer of SmallSpec or RawSpec.
inline v1::VerifyRequest RandomTensors(uint32_t layer_id, bool raw, uint32_t tokens,
                                       std::mt19937_64& random) {
  if (!raw) {
    std::vector<reference::Token> made;
    for (uint32_t i = 0; i < tokens; ++i)
      made.push_back(testing::RandomToken(ShapeOf(layer_id), Dtype::kFp32, random));
    return PackTensors(layer_id, made);
  }
  testing::PackedRawInputs packed;
  for (uint32_t i = 0; i < tokens; ++i)
    packed.Append(testing::RandomRawToken(testing::RawShape(layer_id), Dtype::kFp32, 1.0f, random),
                  Dtype::kFp32);
  return PackRaw(layer_id, tokens, packed);
}

// One step's tensors, layer by layer: what two sequences are fed alike.
inline std::vector<v1::VerifyRequest> RandomStep(bool raw, uint32_t tokens,
                                                 std::mt19937_64& random) {
  std::vector<v1::VerifyRequest> layers;
  for (const uint32_t id : {3, 5, 9}) layers.push_back(RandomTensors(id, raw, tokens, random));
  if (raw) layers.push_back(RandomTensors(11, raw, tokens, random));
  return layers;
}

// A step of one row: outputs of all layers, `accepted` tokens committed.
inline std::string Decode(Client& client, uint64_t id, uint64_t version,
                          std::vector<v1::VerifyRequest> layers, uint32_t accepted) {
  const auto tokens =
      static_cast<uint32_t>((layers[0].has_q() ? layers[0].q() : layers[0].projection()).shape(0));
  const uint64_t step = client.Begin({{id, version, tokens}});
  std::string outputs;
  for (v1::VerifyRequest& layer : layers) {
    client.FillContext(*layer.mutable_context());
    layer.set_model_id(client.model_id);
    layer.set_step_id(step);
    const auto verified = client.Call(&Stub::Verify, layer);
    EXPECT_TRUE(verified.ok()) << verified.status.error_message();
    outputs += verified.body.output().data();
  }
  client.Commit(step, {accepted});
  return outputs;
}

inline std::vector<float> Floats(const std::string& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

}  // namespace ssmd::e2e
