// State that leaves and enters over the wire: descriptors, chunks, checksum. No gRPC here.
//
// Bytes on the wire
//   STATE  FP32 [head, d_v, d_k] of one layer, little-endian
//   CONV   activation dtype [w - 1, channels], oldest token first (import: also [channels, w - 1])
//   checksum: XXH3-64 over all of it as sent: layers in descriptor order, STATE then CONV
//
// Thread-compatible.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "service/models.h"
#include "ssmd/v1/state_service.pb.h"
#include "state_store/store.h"

namespace ssmd {

// The largest chunk: what was configured, as far as a message holds it. A multiple of 4.
uint64_t ChunkBytesMax(const ServerConfig& config);

// What an export of this model says it is.
v1::StateDescriptor DescribeState(const Model& model, uint64_t position);

// Errors: INVALID_ARGUMENT naming the first field that differs, as "descriptor.layers[2].d_k".
absl::Status CheckDescriptor(const Model& model, const v1::StateDescriptor& descriptor);

class StateChecksum {
 public:
  StateChecksum();
  ~StateChecksum();
  void Update(const void* bytes, size_t count);
  uint64_t value() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Puts the chunks of one import together and hands complete layers to the store.
//
// Chunks come in any order. A layer's state is held until it is complete and its turn in the
// checksum has come: of chunks that come in the order of an export, one layer at a time.
class StateAssembler {
 public:
  // Requires: CheckDescriptor accepted `descriptor`. `model` and `import` outlive it.
  StateAssembler(const Model* model, const v1::StateDescriptor& descriptor,
                 uint64_t chunk_bytes_max, StateImport* import);

  // Errors: INVALID_ARGUMENT naming the field (unknown layer or component, size, alignment, bounds,
  // bytes that came before, values that no checkpoint holds); those of StateImport::WriteLayer.
  absl::Status Add(const v1::StateChunk& chunk);

  // Errors: INVALID_ARGUMENT naming the first incomplete component; DATA_LOSS for the checksum;
  // those of StateImport::Finish.
  absl::StatusOr<SequenceState> Finish(uint64_t checksum);

 private:
  // One component of one layer. `seen` has a bit per element: what came must not come again.
  struct Part {
    uint64_t bytes = 0;  // 0: the model has none
    uint64_t missing = 0;
    uint32_t element_bytes = 0;
    std::vector<bool> seen;
    std::vector<float> buffer;  // of floats: the store reads a state where it lies
    bool complete() const { return missing == 0; }
  };
  struct Layer {
    Part state, conv;
  };

  absl::Status Fill(Part& part, const v1::StateChunk& chunk);
  absl::Status CheckValues(uint32_t layer_id, const Part& part, Dtype dtype, float limit) const;
  void HashInTurn();
  std::vector<std::byte> TakeWindow(const LayerShape& shape, Part& part) const;

  const Model* const model_;
  StateImport* const import_;
  const uint64_t position_;
  const uint64_t chunk_bytes_max_;
  const bool channel_time_;
  std::vector<Layer> layers_;  // in the order of the geometry
  std::vector<std::vector<std::byte>> windows_;
  size_t next_hashed_ = 0;  // layer
  StateChecksum checksum_;
};

// Reads one export out, message after message; holds one layer.
class StateReader {
 public:
  // `chunk_bytes`: a positive multiple of 4. `model` outlives it.
  StateReader(const Model* model, std::unique_ptr<StateExport> source, uint64_t chunk_bytes)
      : model_(model), source_(std::move(source)), chunk_bytes_(chunk_bytes) {}

  // Fills the next message; false: there was none left. Errors: INTERNAL.
  absl::StatusOr<bool> Next(v1::ExportStateResponse& message);

 private:
  absl::Status LoadComponent();
  bool AdvanceComponent();  // to the next one that has bytes; false: there is none

  const Model* const model_;
  const std::unique_ptr<StateExport> source_;
  const uint64_t chunk_bytes_;
  enum class Stage { kDescriptor, kChunks, kFinish, kDone } stage_ = Stage::kDescriptor;
  uint32_t layer_ = 0;
  v1::StateChunk::Component component_ = v1::StateChunk::COMPONENT_STATE;
  std::vector<float> bytes_;  // of the component; floats for their alignment
  uint64_t size_ = 0, offset_ = 0;
  StateChecksum checksum_;
};

}  // namespace ssmd
