#include "client/errors.h"

#include <grpcpp/support/status.h>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace ssmd::client {
namespace {

constexpr absl::string_view kReason = "ssmd/reason";
constexpr absl::string_view kField = "ssmd/field";
constexpr absl::string_view kRetryAfterNs = "ssmd/retry_after_ns";
constexpr absl::string_view kStateLost = "STATE_LOST";
constexpr absl::string_view kSessionExpired = "SESSION_EXPIRED";

std::string Payload(const absl::Status& status, absl::string_view key) {
  auto payload = status.GetPayload(key);
  return payload.has_value() ? std::string(*payload) : std::string();
}

void AddDetail(const google::protobuf::Any& any, absl::Status& status) {
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest bad_request;
  google::rpc::RetryInfo retry;
  if (any.Is<google::rpc::ErrorInfo>() && any.UnpackTo(&info)) {
    status.SetPayload(kReason, absl::Cord(info.reason()));
    for (const auto& [key, value] : info.metadata())
      status.SetPayload(absl::StrCat("ssmd/", key), absl::Cord(value));
  } else if (any.Is<google::rpc::BadRequest>() && any.UnpackTo(&bad_request)) {
    if (bad_request.field_violations_size() > 0)
      status.SetPayload(kField, absl::Cord(bad_request.field_violations(0).field()));
  } else if (any.Is<google::rpc::RetryInfo>() && any.UnpackTo(&retry)) {
    const absl::Duration delay = absl::Seconds(retry.retry_delay().seconds()) +
                                 absl::Nanoseconds(retry.retry_delay().nanos());
    status.SetPayload(
        kRetryAfterNs,
        absl::Cord(absl::StrCat(std::max<int64_t>(0, absl::ToInt64Nanoseconds(delay)))));
  }
}

}  // namespace

std::string ErrorReason(const absl::Status& status) { return Payload(status, kReason); }
std::string ErrorField(const absl::Status& status) { return Payload(status, kField); }

std::string ErrorMetadata(const absl::Status& status, absl::string_view key) {
  return Payload(status, absl::StrCat("ssmd/", key));
}

std::optional<uint64_t> ErrorFloor(const absl::Status& status) {
  uint64_t floor = 0;
  if (!absl::SimpleAtoi(ErrorMetadata(status, "floor"), &floor)) return std::nullopt;
  return floor;
}

std::optional<absl::Duration> ErrorRetryAfter(const absl::Status& status) {
  int64_t nanoseconds = 0;
  if (!absl::SimpleAtoi(Payload(status, kRetryAfterNs), &nanoseconds)) return std::nullopt;
  return absl::Nanoseconds(nanoseconds);
}

bool IsStateLost(const absl::Status& status) { return ErrorReason(status) == kStateLost; }

bool IsSessionExpired(const absl::Status& status) { return ErrorReason(status) == kSessionExpired; }

absl::Status StateLostError(absl::string_view message) {
  absl::Status status = absl::FailedPreconditionError(message);
  status.SetPayload(kReason, absl::Cord(kStateLost));
  return status;
}

absl::Status FromGrpcStatus(const grpc::Status& status, absl::string_view method) {
  if (status.ok()) return absl::OkStatus();
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) details.Clear();
  details.set_code(status.error_code());
  details.set_message(status.error_message());
  return FromRpcStatus(details, method);
}

absl::Status FromRpcStatus(const google::rpc::Status& status, absl::string_view method) {
  if (status.code() == 0) return absl::OkStatus();
  const auto code = static_cast<absl::StatusCode>(status.code());
  // A server that lacks a method says nothing but UNIMPLEMENTED.
  const std::string what =
      status.message().empty() ? absl::StatusCodeToString(code) : status.message();
  absl::Status result(code, absl::StrCat(method, ": ", what));
  for (const google::protobuf::Any& any : status.details()) AddDetail(any, result);
  return result;
}

}  // namespace ssmd::client
