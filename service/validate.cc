#include "service/validate.h"

#include <cstring>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace ssmd {
namespace {

absl::Status Expected(absl::string_view field, absl::string_view expected,
                      absl::string_view actual) {
  return InvalidField(field, absl::StrCat(field, ": expected ", expected, ", got ", actual));
}

v1::DataType ToProtoType(Dtype dtype) { return static_cast<v1::DataType>(dtype); }
static_assert(static_cast<int>(Dtype::kFp32) == v1::DATA_TYPE_FP32);
static_assert(static_cast<int>(Dtype::kBf16) == v1::DATA_TYPE_BF16);
static_assert(static_cast<int>(Dtype::kFp16) == v1::DATA_TYPE_FP16);

// ---- tensors

bool IsAbsent(const v1::Tensor& tensor) {
  return tensor.dtype() == v1::DATA_TYPE_UNSPECIFIED && tensor.shape().empty() &&
         tensor.data().empty();
}

// Bytes of a dense tensor; nothing when they do not fit 64 bits.
std::optional<uint64_t> TensorBytes(absl::Span<const uint64_t> shape, Dtype dtype) {
  uint64_t bytes = DtypeBytes(dtype);
  for (const uint64_t extent : shape)
    if (__builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
  return bytes;
}

absl::Status CheckTensor(absl::string_view name, const v1::Tensor& tensor, Dtype dtype,
                         absl::Span<const uint64_t> shape) {
  if (IsAbsent(tensor))
    return Expected(name, absl::StrCat(DtypeName(dtype), " [", absl::StrJoin(shape, ", "), "]"),
                    "none");
  if (tensor.dtype() != ToProtoType(dtype)) {
    return Expected(absl::StrCat(name, ".dtype"), v1::DataType_Name(ToProtoType(dtype)),
                    v1::DataType_IsValid(tensor.dtype()) ? v1::DataType_Name(tensor.dtype())
                                                         : absl::StrCat(tensor.dtype()));
  }
  if (!std::equal(shape.begin(), shape.end(), tensor.shape().begin(), tensor.shape().end())) {
    // A shape of the wire may be long; its head says enough.
    const auto& actual = tensor.shape();
    const int shown = std::min(actual.size(), 8);
    return Expected(absl::StrCat(name, ".shape"),
                    absl::StrCat("[", absl::StrJoin(shape, ", "), "]"),
                    absl::StrCat("[", absl::StrJoin(actual.begin(), actual.begin() + shown, ", "),
                                 shown < actual.size() ? ", ...]" : "]"));
  }
  const std::optional<uint64_t> bytes = TensorBytes(shape, dtype);
  if (!bytes.has_value())
    return Expected(absl::StrCat(name, ".shape"), "a size that fits 64 bits",
                    absl::StrCat("[", absl::StrJoin(shape, ", "), "]"));
  if (tensor.data().size() != *bytes)
    return Expected(absl::StrCat(name, ".data"), absl::StrCat(*bytes, " bytes"),
                    absl::StrCat(tensor.data().size(), " bytes"));
  return absl::OkStatus();
}

absl::Status CheckAbsent(absl::string_view name, const v1::Tensor& tensor, Family family) {
  if (IsAbsent(tensor)) return absl::OkStatus();
  return Expected(name, absl::StrCat("none for a ", FamilyName(family), " layer"), "a tensor");
}

}  // namespace

absl::Status CheckClientName(const std::string& client_name) {
  if (client_name.size() <= kNameBytesMax) return absl::OkStatus();
  return Expected("client_name", absl::StrCat("at most ", kNameBytesMax, " bytes"),
                  absl::StrCat(client_name.size()));
}

absl::StatusOr<SnapshotKey> ParseSnapshotKey(absl::string_view field, const v1::SnapshotKey& key) {
  if (key.digest().empty() || key.digest().size() > 64)
    return Expected(absl::StrCat(field, ".digest"), "1..64 bytes",
                    absl::StrCat(key.digest().size()));
  return SnapshotKey{key.digest(), key.position()};
}

absl::StatusOr<std::vector<SequenceId>> ParseSequenceIds(const ProtoIds& ids, uint32_t count_max) {
  if (ids.empty() || static_cast<uint32_t>(ids.size()) > count_max)
    return Expected("sequence_ids", absl::StrCat("1..", count_max, " ids"),
                    absl::StrCat(ids.size()));
  std::vector<SequenceId> parsed;
  absl::flat_hash_map<uint64_t, int> first_index;
  for (int i = 0; i < ids.size(); ++i) {
    const auto [first, is_new] = first_index.emplace(ids[i], i);
    if (!is_new) {
      const std::string field = absl::StrCat("sequence_ids[", i, "]");
      return InvalidField(field, absl::StrFormat("%s duplicates sequence_ids[%d] (0x%016x)", field,
                                                 first->second, ids[i]));
    }
    parsed.push_back(SequenceId{ids[i]});
  }
  return parsed;
}

absl::StatusOr<ParsedStep> ParseBeginStep(const v1::BeginStepRequest& request,
                                          const StepLimits& limits) {
  const int rows = request.sequence_ids_size();
  if (request.versions_size() != rows)
    return Expected("versions", absl::StrCat(rows, " entries (as sequence_ids)"),
                    absl::StrCat(request.versions_size()));
  if (request.draft_tokens_size() != rows)
    return Expected("draft_tokens", absl::StrCat(rows, " entries (as sequence_ids)"),
                    absl::StrCat(request.draft_tokens_size()));
  SSMD_ASSIGN_OR_RETURN(const std::vector<SequenceId> ids,
                        ParseSequenceIds(request.sequence_ids(), limits.rows_max));
  ParsedStep parsed;
  for (int i = 0; i < rows; ++i) {
    if (request.draft_tokens(i) > limits.draft_tokens_max)
      return Expected(absl::StrCat("draft_tokens[", i, "]"),
                      absl::StrCat("0..", limits.draft_tokens_max, " (draft_tokens_max)"),
                      absl::StrCat(request.draft_tokens(i)));
    parsed.request.rows.push_back({.sequence = ids[i],
                                   .version = request.versions(i),
                                   .draft_tokens = request.draft_tokens(i)});
  }
  parsed.request.auto_commit = request.auto_commit();
  if (request.step_timeout_ms() > limits.step_timeout_ms_max)
    return Expected("step_timeout_ms", absl::StrCat("0..", limits.step_timeout_ms_max),
                    absl::StrCat(request.step_timeout_ms()));
  parsed.step_timeout_ms =
      request.step_timeout_ms() == 0 ? limits.step_timeout_ms_max : request.step_timeout_ms();
  return parsed;
}

const void* AlignedBytes(absl::string_view bytes, size_t alignment,
                         std::vector<std::unique_ptr<float[]>>& aligned) {
  if (reinterpret_cast<uintptr_t>(bytes.data()) % alignment == 0) return bytes.data();
  aligned.push_back(std::make_unique<float[]>((bytes.size() + sizeof(float) - 1) / sizeof(float)));
  std::memcpy(aligned.back().get(), bytes.data(), bytes.size());
  return aligned.back().get();
}

absl::StatusOr<ParsedTensors> ParseVerifyTensors(const v1::VerifyRequest& request,
                                                 const TensorExpectations& expected) {
  const LayerShape& layer = expected.shape;
  const uint64_t tokens = expected.token_count;
  const Dtype activation = expected.formats.activation;
  const std::vector<uint64_t> keys = {tokens, layer.key_group_count, layer.d_k};
  const std::vector<uint64_t> values = {tokens, layer.head_count, layer.d_v};
  const std::vector<uint64_t> per_head = {tokens, layer.head_count};
  const std::vector<uint64_t> per_channel = {tokens, layer.head_count, layer.d_k};
  SSMD_RETURN_IF_ERROR(CheckTensor("q", request.q(), activation, keys));
  SSMD_RETURN_IF_ERROR(CheckTensor("k", request.k(), activation, keys));
  SSMD_RETURN_IF_ERROR(CheckTensor("v", request.v(), activation, values));
  SSMD_RETURN_IF_ERROR(CheckTensor("log_alpha", request.log_alpha(), Dtype::kFp32,
                                   layer.family == Family::kKda ? per_channel : per_head));
  if (layer.is_delta_rule()) {
    SSMD_RETURN_IF_ERROR(CheckTensor("beta", request.beta(), Dtype::kFp32, per_head));
    SSMD_RETURN_IF_ERROR(CheckAbsent("value_scale", request.value_scale(), layer.family));
  } else {
    SSMD_RETURN_IF_ERROR(CheckAbsent("beta", request.beta(), layer.family));
    if (!IsAbsent(request.value_scale()))
      SSMD_RETURN_IF_ERROR(
          CheckTensor("value_scale", request.value_scale(), Dtype::kFp32, per_head));
  }

  ParsedTensors parsed;
  parsed.output_bytes = TensorBytes(values, expected.formats.output).value_or(UINT64_MAX);
  constexpr uint64_t kReplyOverheadBytes = 128;  // every other field of VerifyResponse
  if (parsed.output_bytes > expected.message_bytes_max ||
      parsed.output_bytes + kReplyOverheadBytes > expected.message_bytes_max) {
    return ErrorWithReason(
        absl::StatusCode::kResourceExhausted, reason::kLimit,
        absl::StrCat("output: ", parsed.output_bytes, " bytes do not fit message_bytes_max ",
                     expected.message_bytes_max, "; send fewer rows in a step"));
  }
  const auto at = [&parsed](const v1::Tensor& tensor, Dtype dtype) {
    return AlignedBytes(tensor.data(), DtypeBytes(dtype), parsed.aligned);
  };
  const auto floats = [&at](const v1::Tensor& tensor) {
    return IsAbsent(tensor) ? nullptr : static_cast<const float*>(at(tensor, Dtype::kFp32));
  };
  parsed.inputs = {.q = at(request.q(), activation),
                   .k = at(request.k(), activation),
                   .v = at(request.v(), activation),
                   .log_alpha = floats(request.log_alpha()),
                   .beta = floats(request.beta()),
                   .value_scale = floats(request.value_scale())};
  return parsed;
}

void ToProto(const Capacity& capacity, v1::ModelCapacity& proto) {
  proto.set_sequences_max(capacity.sequences_max);
  proto.set_snapshots_max(capacity.snapshots_max);
  proto.set_spare_pages(capacity.spare_pages);
  proto.set_rows_max(capacity.rows_max);
  proto.set_steps_max(capacity.steps_max);
}

void ToProto(const Model& model, v1::ModelFootprint& footprint) {
  const Geometry& geometry = model.store->geometry();
  footprint.set_checkpoint_bytes(geometry.checkpoint_bytes());
  footprint.set_ring_bytes(geometry.ring_bytes());
  footprint.set_record_bytes(geometry.record_bytes());
  footprint.set_reserved_bytes(model.reserved_bytes);
  footprint.set_ring_records(geometry.ring_records());
}

void ToProto(const SequenceState& state, v1::SequenceInfo& info) {
  info.set_sequence_id(static_cast<uint64_t>(state.id));
  info.set_version(state.version);
  info.set_position(state.position);
  info.set_floor(state.floor);
  info.set_committed_records(static_cast<uint32_t>(state.position - state.floor));
  info.set_open_step_id(static_cast<uint64_t>(state.open_step));
}

void SetOutput(const TensorExpectations& expected, v1::Tensor& output) {
  output.set_dtype(ToProtoType(expected.formats.output));
  for (const uint64_t extent :
       {expected.token_count, uint64_t{expected.shape.head_count}, uint64_t{expected.shape.d_v}})
    output.add_shape(extent);
  output.mutable_data()->resize(expected.token_count * expected.shape.head_count *
                                expected.shape.d_v * DtypeBytes(expected.formats.output));
}

}  // namespace ssmd
