// What each RPC does: parsed request in, reply filled, one absl::Status out. No gRPC here.
//
// The caller may make the call: the Authorizer has said so. Handlers with a Session run after the
// fence besides (service.cc): epoch and session are right, and the session cannot expire before the
// call ends; what they name is looked for among the session's tenant's own. The reply's
// server_epoch is filled already. All are thread-safe and none computes: Verify comes in two
// halves, and the second one runs on a worker of the queue.
#pragma once

#include "service/core.h"
#include "service/validate.h"
#include "ssmd/v1/state_service.pb.h"

namespace ssmd::handlers {

absl::Status RegisterModel(ServiceCore&, const Principal&, const v1::RegisterModelRequest&,
                           v1::RegisterModelResponse&);
absl::Status GetCapabilities(ServiceCore&, const Principal&, const v1::GetCapabilitiesRequest&,
                             v1::GetCapabilitiesResponse&);
absl::Status OpenSession(ServiceCore&, const Principal&, const v1::OpenSessionRequest&,
                         v1::OpenSessionResponse&);
absl::Status GetStatus(ServiceCore&, const Principal&, const v1::GetStatusRequest&,
                       v1::GetStatusResponse&);

absl::Status KeepAlive(ServiceCore&, Session&, const v1::KeepAliveRequest&, v1::KeepAliveResponse&);
absl::Status CreateSequences(ServiceCore&, Session&, const v1::CreateSequencesRequest&,
                             v1::CreateSequencesResponse&);
absl::Status ForkSequences(ServiceCore&, Session&, const v1::ForkSequencesRequest&,
                           v1::ForkSequencesResponse&);
absl::Status ReleaseSequences(ServiceCore&, Session&, const v1::ReleaseSequencesRequest&,
                              v1::ReleaseSequencesResponse&);
absl::Status GetSequences(ServiceCore&, Session&, const v1::GetSequencesRequest&,
                          v1::GetSequencesResponse&);
absl::Status BeginStep(ServiceCore&, Session&, const v1::BeginStepRequest&, v1::BeginStepResponse&);
absl::Status Commit(ServiceCore&, Session&, const v1::CommitRequest&, v1::CommitResponse&);
absl::Status AbortStep(ServiceCore&, Session&, const v1::AbortStepRequest&, v1::AbortStepResponse&);
absl::Status Rollback(ServiceCore&, Session&, const v1::RollbackRequest&, v1::RollbackResponse&);
absl::Status CreateSnapshot(ServiceCore&, Session&, const v1::CreateSnapshotRequest&,
                            v1::CreateSnapshotResponse&);
absl::Status DeleteSnapshot(ServiceCore&, Session&, const v1::DeleteSnapshotRequest&,
                            v1::DeleteSnapshotResponse&);
absl::Status UnregisterModel(ServiceCore&, Session&, const v1::UnregisterModelRequest&,
                             v1::UnregisterModelResponse&);
absl::Status AdoptSequences(ServiceCore&, Session&, const v1::AdoptSequencesRequest&,
                            v1::AdoptSequencesResponse&);
absl::Status FlushSequences(ServiceCore&, Session&, const v1::FlushSequencesRequest&,
                            v1::FlushSequencesResponse&);
absl::Status LookupPrefix(ServiceCore&, Session&, const v1::LookupPrefixRequest&,
                          v1::LookupPrefixResponse&);
absl::Status ListSnapshots(ServiceCore&, Session&, const v1::ListSnapshotsRequest&,
                           v1::ListSnapshotsResponse&);

// A Verify whose request has been checked; points into the request, which must outlive it.
struct PreparedVerify {
  ModelRef model;
  uint32_t layer_id = 0;  // the worker's number
  VerifyRequest request;  // output not set
  TensorExpectations expected;
  ParsedTensors tensors;
};
absl::StatusOr<PreparedVerify> PrepareVerify(ServiceCore&, Session&, const v1::VerifyRequest&);
absl::Status RunVerify(PreparedVerify& prepared, OwnerId owner, v1::VerifyResponse& response);

}  // namespace ssmd::handlers
