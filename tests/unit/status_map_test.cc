// service/status_map.cc: every code, every detail, and the bound on messages.
#include "service/status_map.h"

#include <gtest/gtest.h>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kernels/status.h"

namespace ssmd {
namespace {

struct Details {
  google::rpc::Status status;
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest bad_request;
  google::rpc::RetryInfo retry;
};

Details Decode(const grpc::Status& status) {
  Details details;
  EXPECT_TRUE(details.status.ParseFromString(status.error_details()));
  for (const auto& any : details.status.details()) {
    any.UnpackTo(&details.info);
    any.UnpackTo(&details.bad_request);
    any.UnpackTo(&details.retry);
  }
  return details;
}

TEST(StatusMap, KeepsEveryCode) {
  struct Case {
    absl::StatusCode code;
    grpc::StatusCode expected;
    const char* name;
  };
  const Case cases[] = {
      {absl::StatusCode::kCancelled, grpc::CANCELLED, "CANCELLED"},
      {absl::StatusCode::kUnknown, grpc::UNKNOWN, "UNKNOWN"},
      {absl::StatusCode::kInvalidArgument, grpc::INVALID_ARGUMENT, "INVALID_ARGUMENT"},
      {absl::StatusCode::kDeadlineExceeded, grpc::DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"},
      {absl::StatusCode::kNotFound, grpc::NOT_FOUND, "NOT_FOUND"},
      {absl::StatusCode::kPermissionDenied, grpc::PERMISSION_DENIED, "PERMISSION_DENIED"},
      {absl::StatusCode::kResourceExhausted, grpc::RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED"},
      {absl::StatusCode::kFailedPrecondition, grpc::FAILED_PRECONDITION, "FAILED_PRECONDITION"},
      {absl::StatusCode::kAborted, grpc::ABORTED, "ABORTED"},
      {absl::StatusCode::kOutOfRange, grpc::OUT_OF_RANGE, "OUT_OF_RANGE"},
      {absl::StatusCode::kUnimplemented, grpc::UNIMPLEMENTED, "UNIMPLEMENTED"},
      {absl::StatusCode::kInternal, grpc::INTERNAL, "INTERNAL"},
      {absl::StatusCode::kUnavailable, grpc::UNAVAILABLE, "UNAVAILABLE"},
      {absl::StatusCode::kDataLoss, grpc::DATA_LOSS, "DATA_LOSS"},
  };
  for (const Case& c : cases) {
    const grpc::Status mapped = ToGrpcStatus(absl::Status(c.code, "what happened"));
    EXPECT_EQ(mapped.error_code(), c.expected) << c.name;
    EXPECT_EQ(mapped.error_message(), "what happened");
    const Details details = Decode(mapped);
    EXPECT_EQ(details.status.code(), c.expected);
    EXPECT_EQ(details.status.message(), "what happened");
    EXPECT_EQ(details.info.domain(), "ssmd");
    EXPECT_EQ(details.info.reason(), c.name);  // no reason given: the code's name
    EXPECT_EQ(details.status.details_size(), 1);
  }
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  EXPECT_EQ(ToGrpcStatus(absl::OkStatus()).error_details(), "");
}

TEST(StatusMap, CarriesReasonFieldAndRetry) {
  const Details details = Decode(ToGrpcStatus(WithDetail(
      Exhausted(reason::kNoSlot, "sequences_max: 4 are live", 1250), detail::kField, "count")));
  EXPECT_EQ(details.info.reason(), "NO_SLOT");
  ASSERT_EQ(details.bad_request.field_violations_size(), 1);
  EXPECT_EQ(details.bad_request.field_violations(0).field(), "count");
  EXPECT_EQ(details.bad_request.field_violations(0).description(), "sequences_max: 4 are live");
  EXPECT_EQ(details.retry.retry_delay().seconds(), 1);
  EXPECT_EQ(details.retry.retry_delay().nanos(), 250'000'000);
}

TEST(StatusMap, OtherDetailsBecomeMetadata) {
  absl::Status status =
      ErrorWithReason(absl::StatusCode::kOutOfRange, reason::kRollbackFloor, "position 3");
  status = WithDetail(status, detail::kFloor, "12");
  status = WithDetail(status, "ssmd/tail", "20");
  status.SetPayload("somebody/else", absl::Cord("x"));
  const Details details = Decode(ToGrpcStatus(status));
  EXPECT_EQ(details.info.reason(), "ROLLBACK_FLOOR");
  EXPECT_EQ(details.info.metadata().size(), 2u);
  EXPECT_EQ(details.info.metadata().at("floor"), "12");
  EXPECT_EQ(details.info.metadata().at("tail"), "20");
}

TEST(StatusMap, CutsLongMessagesAtACharacter) {
  std::string message(kErrorMessageBytesMax - 4, 'x');
  for (int i = 0; i < 100; ++i) message += "\xc3\xa9";  // two bytes each
  const grpc::Status mapped = ToGrpcStatus(absl::InvalidArgumentError(message));
  EXPECT_LE(mapped.error_message().size(), kErrorMessageBytesMax);
  EXPECT_EQ(mapped.error_message().substr(kErrorMessageBytesMax - 5), "x...");
  EXPECT_EQ(Decode(mapped).status.message(), mapped.error_message());
}

TEST(StatusMap, AsAMessageOfABatch) {
  const google::rpc::Status ok = ToRpcStatus(absl::OkStatus());
  EXPECT_EQ(ok.code(), 0);
  EXPECT_EQ(ok.details_size(), 0);
  const absl::Status status =
      ErrorWithReason(absl::StatusCode::kAborted, reason::kVersionMismatch, "row 1: stale");
  const google::rpc::Status message = ToRpcStatus(status);
  EXPECT_EQ(message.code(), grpc::ABORTED);
  EXPECT_EQ(message.message(), "row 1: stale");
  EXPECT_EQ(message.SerializeAsString(), ToGrpcStatus(status).error_details());
}

}  // namespace
}  // namespace ssmd
