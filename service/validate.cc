#include "service/validate.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/escaping.h"
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

absl::Status CheckDistinct(const ProtoIds& ids, bool zeros_may_repeat) {
  absl::flat_hash_map<uint64_t, int> first_index;
  for (int i = 0; i < ids.size(); ++i) {
    if (zeros_may_repeat && ids[i] == 0) continue;
    const auto [first, is_new] = first_index.emplace(ids[i], i);
    if (is_new) continue;
    const std::string field = absl::StrCat("sequence_ids[", i, "]");
    return InvalidField(field, absl::StrFormat("%s duplicates sequence_ids[%d] (0x%016x)", field,
                                               first->second, ids[i]));
  }
  return absl::OkStatus();
}

// A tensor that a Verify may carry, and whether this layer's does.
struct TensorRule {
  const char* name;
  const v1::Tensor& tensor;
  enum { kRequired, kOptional, kOtherFamily, kOtherForm } presence;
  Dtype dtype = Dtype::kNone;
  std::vector<uint64_t> shape = {};
};

absl::Status CheckRule(const TensorRule& rule, const TensorExpectations& expected) {
  if (rule.presence == TensorRule::kOptional && IsAbsent(rule.tensor)) return absl::OkStatus();
  if (rule.presence == TensorRule::kRequired || rule.presence == TensorRule::kOptional)
    return CheckTensor(rule.name, rule.tensor, rule.dtype, rule.shape);
  if (IsAbsent(rule.tensor)) return absl::OkStatus();
  return Expected(rule.name,
                  rule.presence == TensorRule::kOtherForm
                      ? absl::StrCat("none in ", expected.raw ? "raw" : "post-conv", " form")
                      : absl::StrCat("none for a ", FamilyName(expected.shape.family), " layer"),
                  "a tensor");
}

std::vector<TensorRule> TensorRules(const v1::VerifyRequest& request,
                                    const TensorExpectations& expected) {
  const LayerShape& layer = expected.shape;
  const uint64_t tokens = expected.token_count;
  const Dtype activation = expected.formats.activation;
  const std::vector<uint64_t> keys = {tokens, layer.key_group_count, layer.d_k};
  const std::vector<uint64_t> values = {tokens, layer.head_count, layer.d_v};
  const std::vector<uint64_t> per_head = {tokens, layer.head_count};
  const std::vector<uint64_t> per_channel = {tokens, layer.head_count, layer.d_k};
  const bool mamba = layer.family == Family::kMamba2, kda = layer.family == Family::kKda;
  const auto in = [&](bool raw_form, bool has, bool optional = false) {
    if (raw_form != expected.raw) return TensorRule::kOtherForm;
    if (!has) return TensorRule::kOtherFamily;
    return optional ? TensorRule::kOptional : TensorRule::kRequired;
  };
  return {
      {"q", request.q(), in(false, true), activation, keys},
      {"k", request.k(), in(false, true), activation, keys},
      {"v", request.v(), in(false, true), activation, values},
      {"log_alpha", request.log_alpha(), in(false, true), Dtype::kFp32,
       kda ? per_channel : per_head},
      {"beta", request.beta(), in(false, !mamba), Dtype::kFp32, per_head},
      {"value_scale", request.value_scale(), in(false, mamba, true), Dtype::kFp32, per_head},
      {"projection",
       request.projection(),
       in(true, true),
       activation,
       {tokens, layer.conv_channels()}},
      {"dt", request.dt(), in(true, mamba), activation, per_head},
      {"a", request.a(), in(true, layer.family == Family::kGdn), activation, per_head},
      {"b", request.b(), in(true, !mamba), activation, per_head},
      {"gate", request.gate(), in(true, kda), activation, per_channel},
  };
}

constexpr uint32_t kPageTokenSeed = 0x73736d64;  // of its check: garbage is refused, not guessed at

void PutLittleEndian(std::string& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i) & 0xff));
}

uint64_t GetLittleEndian(absl::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i > 0; --i)
    value = value << 8 | static_cast<unsigned char>(bytes[i - 1]);
  return value;
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
  SSMD_RETURN_IF_ERROR(CheckDistinct(ids, /*zeros_may_repeat=*/false));
  std::vector<SequenceId> parsed;
  for (const uint64_t id : ids) parsed.push_back(SequenceId{id});
  return parsed;
}

absl::StatusOr<std::vector<std::string>> ParseDigests(
    const google::protobuf::RepeatedPtrField<std::string>& digests) {
  if (digests.empty() || digests.size() > kLookupDigestsMax)
    return Expected("digests", absl::StrCat("1..", kLookupDigestsMax, " digests"),
                    absl::StrCat(digests.size()));
  for (int i = 0; i < digests.size(); ++i)
    if (digests[i].empty() || digests[i].size() > 64)
      return Expected(absl::StrCat("digests[", i, "]"), "1..64 bytes",
                      absl::StrCat(digests[i].size()));
  return std::vector<std::string>(digests.begin(), digests.end());
}

absl::StatusOr<uint32_t> ParsePageSize(uint32_t page_size) {
  if (page_size > kSnapshotPageMax)
    return Expected("page_size", absl::StrCat("0..", kSnapshotPageMax), absl::StrCat(page_size));
  return page_size == 0 ? kSnapshotPageDefault : page_size;
}

// model id, position, digest, check of these; in hex, since strings of the wire are text.
std::string MakePageToken(uint64_t model_id, const SnapshotKey& last) {
  std::string bytes;
  PutLittleEndian(bytes, model_id, 8);
  PutLittleEndian(bytes, last.position, 8);
  bytes += last.digest;
  PutLittleEndian(bytes, XXH32(bytes.data(), bytes.size(), kPageTokenSeed), 4);
  return absl::BytesToHexString(bytes);
}

absl::StatusOr<SnapshotKey> ParsePageToken(uint64_t model_id, absl::string_view token) {
  const auto refuse = [] {
    return Expected("page_token", "next_page_token of ListSnapshots of this model", "another text");
  };
  constexpr size_t kFixedBytes = 20;
  const bool is_hex = token.find_first_not_of("0123456789abcdef") == absl::string_view::npos;
  if (!is_hex || token.size() % 2 != 0 || token.size() <= 2 * kFixedBytes ||
      token.size() > 2 * (kFixedBytes + 64))
    return refuse();
  const std::string text = absl::HexStringToBytes(token);
  const absl::string_view bytes = absl::string_view(text).substr(0, text.size() - 4);
  if (GetLittleEndian(absl::string_view(text).substr(bytes.size())) !=
          XXH32(bytes.data(), bytes.size(), kPageTokenSeed) ||
      GetLittleEndian(bytes.substr(0, 8)) != model_id)
    return refuse();
  return SnapshotKey{std::string(bytes.substr(16)), GetLittleEndian(bytes.substr(8, 8))};
}

absl::Status CheckWorkerWindow(absl::string_view field, const std::string& window) {
  if (window.size() <= kWorkerWindowBytesMax) return absl::OkStatus();
  return Expected(field, absl::StrCat("at most ", kWorkerWindowBytesMax, " bytes"),
                  absl::StrCat(window.size()));
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
  if (!request.commit_modes().empty() && request.commit_modes_size() != rows)
    return Expected("commit_modes", absl::StrCat("none, or ", rows, " entries (as sequence_ids)"),
                    absl::StrCat(request.commit_modes_size()));
  if (rows == 0 || static_cast<uint32_t>(rows) > limits.rows_max)
    return Expected("sequence_ids", absl::StrCat("1..", limits.rows_max, " ids"),
                    absl::StrCat(rows));
  SSMD_RETURN_IF_ERROR(CheckDistinct(request.sequence_ids(), /*zeros_may_repeat=*/true));
  ParsedStep parsed;
  for (int i = 0; i < rows; ++i) {
    const v1::CommitMode mode = request.commit_modes().empty()
                                    ? v1::COMMIT_MODE_UNSPECIFIED
                                    : static_cast<v1::CommitMode>(request.commit_modes(i));
    if (!v1::CommitMode_IsValid(mode))
      return Expected(absl::StrCat("commit_modes[", i, "]"),
                      "COMMIT_MODE_COUNTS or COMMIT_MODE_ALL",
                      absl::StrCat(static_cast<int>(mode)));
    if (request.sequence_ids(i) == 0 && request.versions(i) != 0)
      return Expected(absl::StrCat("versions[", i, "]"), "0 for a padding row (sequence_id 0)",
                      absl::StrCat(request.versions(i)));
    if (request.draft_tokens(i) > limits.draft_tokens_max)
      return Expected(absl::StrCat("draft_tokens[", i, "]"),
                      absl::StrCat("0..", limits.draft_tokens_max, " (draft_tokens_max)"),
                      absl::StrCat(request.draft_tokens(i)));
    parsed.request.rows.push_back({.sequence = SequenceId{request.sequence_ids(i)},
                                   .version = request.versions(i),
                                   .draft_tokens = request.draft_tokens(i),
                                   .commit_all = mode == v1::COMMIT_MODE_ALL});
  }
  parsed.request.auto_commit = request.auto_commit();
  parsed.request.allow_partial = request.allow_partial();
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
  for (const TensorRule& rule : TensorRules(request, expected))
    SSMD_RETURN_IF_ERROR(CheckRule(rule, expected));

  const LayerShape& layer = expected.shape;
  const Dtype activation = expected.formats.activation;
  const std::vector<uint64_t> values = {expected.token_count, layer.head_count, layer.d_v};
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
  const auto activations = [&](const v1::Tensor& tensor) {
    return IsAbsent(tensor) ? nullptr : at(tensor, activation);
  };
  const auto floats = [&at](const v1::Tensor& tensor) {
    return IsAbsent(tensor) ? nullptr : static_cast<const float*>(at(tensor, Dtype::kFp32));
  };
  parsed.inputs = {.q = activations(request.q()),
                   .k = activations(request.k()),
                   .v = activations(request.v()),
                   .log_alpha = floats(request.log_alpha()),
                   .beta = floats(request.beta()),
                   .value_scale = floats(request.value_scale())};
  parsed.raw = {.projection = activations(request.projection()),
                .dt = activations(request.dt()),
                .a = activations(request.a()),
                .b = activations(request.b()),
                .gate = activations(request.gate())};
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
  footprint.set_conv_bytes(geometry.conv_bytes());
}

void ToProto(const SnapshotKey& key, v1::SnapshotKey& proto) {
  proto.set_digest(key.digest);
  proto.set_position(key.position);
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
