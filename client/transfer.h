// Reading a state out of the server and into it (ExportState, ImportState), as typed streams.
//
// A state is a descriptor and the bytes of its components: per layer the state and, in raw form,
// the convolution window. They travel in one order, which the checksum is defined over: layers as
// in the descriptor, STATE before CONV, offsets ascending. Session::ExportState pushes them into a
// StateSink in that order; Session::ImportState pulls them from a StateSource. Both compute the
// checksum (XXH3-64). state_file.h has a sink and a source for files.
#pragma once

#include <cstdint>
#include <functional>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ssmd/v1/state_service.grpc.pb.h"

namespace ssmd::client {

struct SequenceRef {
  uint64_t id = 0;
  uint64_t version = 0;  // expected
};

struct StateComponent {
  uint32_t layer_id = 0;
  v1::StateChunk::Component component = v1::StateChunk::COMPONENT_UNSPECIFIED;
  uint64_t bytes = 0;
  uint64_t first = 0;  // where it begins among the bytes of all components
};

// In order. Errors: INVALID_ARGUMENT for unknown dtypes and sizes that overflow.
absl::StatusOr<std::vector<StateComponent>> ComponentsOf(const v1::StateDescriptor& descriptor);
uint64_t TotalBytes(absl::Span<const StateComponent> components);

// Where an export goes. An error of either call ends the export with it.
class StateSink {
 public:
  virtual ~StateSink() = default;
  // Once per attempt, before its bytes: what an attempt before it wrote is void.
  virtual absl::Status Begin(const v1::StateDescriptor& descriptor) = 0;
  virtual absl::Status Write(const StateComponent& component, uint64_t offset_bytes,
                             absl::string_view data) = 0;
};

// Where an import comes from.
class StateSource {
 public:
  virtual ~StateSource() = default;
  virtual const v1::StateDescriptor& descriptor() const = 0;
  // Fills `to` with the component's bytes from `offset_bytes` on.
  virtual absl::Status Read(const StateComponent& component, uint64_t offset_bytes,
                            absl::Span<char> to) = 0;
};

// A sequence at its tail, or a stored snapshot.
using ExportSource = std::variant<SequenceRef, v1::SnapshotKey>;

struct ExportSummary {
  v1::StateDescriptor descriptor;
  uint64_t bytes = 0;
  uint64_t checksum = 0;
  uint64_t server_epoch = 0;
};

// One attempt each; what Session is made of. An error of the sink or the source is put into `own`;
// the call itself is then CANCELLED, which nobody repeats.
grpc::Status RunExport(grpc::ClientContext& context, v1::StateService::StubInterface& stub,
                       const v1::ExportStateRequest& request, StateSink& sink, absl::Status& own,
                       ExportSummary& summary);
grpc::Status RunImport(grpc::ClientContext& context, v1::StateService::StubInterface& stub,
                       const v1::ImportStateRequest::Header& header, StateSource& source,
                       absl::Status& own, v1::ImportStateResponse& reply);

}  // namespace ssmd::client
