// Request checks: ssmd.v1 messages -> plain structs. Pure functions; protobuf stops here.
//
// A failure is INVALID_ARGUMENT (or UNIMPLEMENTED for what is valid but not built), names the field
// in its detail and says what was expected and what came: "q.shape: expected [4, 2, 128], got [4,
// 128]". Results of Parse* may be handed to the store without further checks of form; what depends
// on the store's state (versions, owners, open steps) is the store's to check.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "service/models.h"
#include "ssmd/v1/state_service.pb.h"
#include "state_store/store.h"

namespace ssmd {

inline constexpr size_t kNameBytesMax = 128;

absl::StatusOr<ModelDescription> ParseModelSpec(const v1::ModelSpec& spec);
Capacity ParseCapacity(
    const v1::ModelCapacity& capacity);  // zeros stay zero; limits: ValidateCapacity

absl::Status CheckClientName(const std::string& client_name);
absl::StatusOr<SnapshotKey> ParseSnapshotKey(absl::string_view field, const v1::SnapshotKey& key);

using ProtoIds = google::protobuf::RepeatedField<google::protobuf::uint64>;
// 1..count_max distinct ids.
absl::StatusOr<std::vector<SequenceId>> ParseSequenceIds(const ProtoIds& ids, uint32_t count_max);

// 1..1,024 digests of 1..64 bytes.
inline constexpr int kLookupDigestsMax = 1024;
absl::StatusOr<std::vector<std::string>> ParseDigests(
    const google::protobuf::RepeatedPtrField<std::string>& digests);

inline constexpr uint32_t kSnapshotPageDefault = 100, kSnapshotPageMax = 1000;
absl::StatusOr<uint32_t> ParsePageSize(uint32_t page_size);
// Page tokens name the last key that was listed; they are bound to a model and checked.
std::string MakePageToken(uint64_t model_id, const SnapshotKey& last);
absl::StatusOr<SnapshotKey> ParsePageToken(uint64_t model_id, absl::string_view token);

absl::Status CheckWorkerWindow(absl::string_view field, const std::string& window);

struct StepLimits {
  uint32_t rows_max = 0;
  uint32_t draft_tokens_max = 0;
  uint32_t step_timeout_ms_max = 0;
};
// Padding rows may repeat; other ids may not.
struct ParsedStep {
  StepRequest request;  // deadline not set
  uint32_t step_timeout_ms = 0;
};
absl::StatusOr<ParsedStep> ParseBeginStep(const v1::BeginStepRequest& request,
                                          const StepLimits& limits);

// What the tensors of one Verify must be.
struct TensorExpectations {
  LayerShape shape;
  Formats formats;
  bool raw = false;  // the model's input form
  uint64_t token_count = 0;
  uint64_t message_bytes_max = 0;  // the reply must fit
};
struct ParsedTensors {
  VerifyInputs inputs;  // post_conv form; points into the request, or into `aligned`
  RawInputs raw;        // raw form; likewise
  uint64_t output_bytes = 0;
  // Copies of tensors whose bytes were not aligned to their element (a std::string's never are).
  std::vector<std::unique_ptr<float[]>> aligned;
};
// Tensors of the other form, and those that the layer's family does not have, MUST be absent. The
// request must outlive the result.
absl::StatusOr<ParsedTensors> ParseVerifyTensors(const v1::VerifyRequest& request,
                                                 const TensorExpectations& expected);

// `bytes`, or a copy of them in `aligned` when they do not start at a multiple of `alignment`.
const void* AlignedBytes(absl::string_view bytes, size_t alignment,
                         std::vector<std::unique_ptr<float[]>>& aligned);

// ---- and back

void ToProto(const ModelDescription& description, v1::ModelSpec& spec);
void ToProto(const Capacity& capacity, v1::ModelCapacity& proto);
void ToProto(const Model& model, v1::ModelFootprint& footprint);
void ToProto(const SnapshotKey& key, v1::SnapshotKey& proto);
void ToProto(const SequenceState& state, v1::SequenceInfo& info);
void SetOutput(const TensorExpectations& expected,
               v1::Tensor& output);  // dtype, shape, room for data

}  // namespace ssmd
