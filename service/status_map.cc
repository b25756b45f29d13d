#include "service/status_map.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kernels/status.h"

namespace ssmd {
namespace {

struct CodeRow {
  absl::StatusCode code;
  grpc::StatusCode grpc_code;
  const char* name;
};

constexpr CodeRow kCodes[] = {
    {absl::StatusCode::kOk, grpc::OK, "OK"},
    {absl::StatusCode::kCancelled, grpc::CANCELLED, "CANCELLED"},
    {absl::StatusCode::kUnknown, grpc::UNKNOWN, "UNKNOWN"},
    {absl::StatusCode::kInvalidArgument, grpc::INVALID_ARGUMENT, "INVALID_ARGUMENT"},
    {absl::StatusCode::kDeadlineExceeded, grpc::DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"},
    {absl::StatusCode::kNotFound, grpc::NOT_FOUND, "NOT_FOUND"},
    {absl::StatusCode::kAlreadyExists, grpc::ALREADY_EXISTS, "ALREADY_EXISTS"},
    {absl::StatusCode::kPermissionDenied, grpc::PERMISSION_DENIED, "PERMISSION_DENIED"},
    {absl::StatusCode::kResourceExhausted, grpc::RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED"},
    {absl::StatusCode::kFailedPrecondition, grpc::FAILED_PRECONDITION, "FAILED_PRECONDITION"},
    {absl::StatusCode::kAborted, grpc::ABORTED, "ABORTED"},
    {absl::StatusCode::kOutOfRange, grpc::OUT_OF_RANGE, "OUT_OF_RANGE"},
    {absl::StatusCode::kUnimplemented, grpc::UNIMPLEMENTED, "UNIMPLEMENTED"},
    {absl::StatusCode::kInternal, grpc::INTERNAL, "INTERNAL"},
    {absl::StatusCode::kUnavailable, grpc::UNAVAILABLE, "UNAVAILABLE"},
    {absl::StatusCode::kDataLoss, grpc::DATA_LOSS, "DATA_LOSS"},
    {absl::StatusCode::kUnauthenticated, grpc::UNAUTHENTICATED, "UNAUTHENTICATED"},
};

const CodeRow& FindCode(absl::StatusCode code) {
  for (const CodeRow& row : kCodes)
    if (row.code == code) return row;
  return kCodes[2];
}

// Cuts at a character boundary: the text must stay valid UTF-8.
std::string BoundedMessage(absl::string_view message) {
  if (message.size() <= kErrorMessageBytesMax) return std::string(message);
  size_t end = kErrorMessageBytesMax - 3;
  while (end > 0 && (static_cast<unsigned char>(message[end]) & 0xc0u) == 0x80u) --end;
  return absl::StrCat(message.substr(0, end), "...");
}

}  // namespace

const char* CodeName(absl::StatusCode code) { return FindCode(code).name; }

google::rpc::Status ToRpcStatus(const absl::Status& status) {
  google::rpc::Status details;
  if (status.ok()) return details;
  const CodeRow& row = FindCode(status.code());
  const std::string message = BoundedMessage(status.message());

  google::rpc::ErrorInfo info;
  info.set_domain(std::string(kErrorDomain));
  info.set_reason(row.name);
  google::rpc::BadRequest bad_request;
  google::rpc::RetryInfo retry;
  status.ForEachPayload([&](absl::string_view key, const absl::Cord& value) {
    if (!absl::ConsumePrefix(&key, "ssmd/")) return;
    const std::string text(value);
    uint64_t retry_after_ms = 0;
    if (key == "reason") {
      info.set_reason(text);
    } else if (key == "field") {
      auto* violation = bad_request.add_field_violations();
      violation->set_field(text);
      violation->set_description(message);
    } else if (key == "retry_after_ms") {
      if (!absl::SimpleAtoi(text, &retry_after_ms)) return;
      retry.mutable_retry_delay()->set_seconds(static_cast<int64_t>(retry_after_ms / 1000));
      retry.mutable_retry_delay()->set_nanos(
          static_cast<int32_t>(retry_after_ms % 1000 * 1'000'000));
    } else {
      (*info.mutable_metadata())[std::string(key)] = text;
    }
  });

  details.set_code(row.grpc_code);
  details.set_message(message);
  details.add_details()->PackFrom(info);
  if (bad_request.field_violations_size() > 0) details.add_details()->PackFrom(bad_request);
  if (retry.has_retry_delay()) details.add_details()->PackFrom(retry);
  return details;
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const google::rpc::Status details = ToRpcStatus(status);
  return grpc::Status(static_cast<grpc::StatusCode>(details.code()), details.message(),
                      details.SerializeAsString());
}

}  // namespace ssmd
