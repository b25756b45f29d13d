#include "service/transfers.h"

#include <mutex>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "service/fence.h"
#include "service/state_transfer.h"
#include "service/status_map.h"
#include "service/validate.h"

namespace ssmd {
namespace {

absl::Status SessionGone(OwnerId owner) {
  return ErrorWithReason(
      absl::StatusCode::kNotFound, reason::kSessionExpired,
      absl::StrFormat("session 0x%016x ended during the call", static_cast<uint64_t>(owner)));
}

// What both directions share. mu_ is recursive: from a thread that is not gRPC's, an operation that
// completes at once runs its reaction (which finds finished_ set) inside the call that started it.
class StreamBase : public Transfer {
 public:
  StreamBase(ServiceCore& core, const Principal& caller, Method method,
             grpc::CallbackServerContext* context)
      : core_(core), caller_(caller), context_(context), method_(method), begun_(core.clock()) {}

 protected:
  void Count(const absl::Status& status) {
    core_.metrics.CountRpc(method_, status.code(), core_.clock() - begun_);
    core_.LogAnswer(method_, context_->peer(), 0, status);
  }

  ServiceCore& core_;
  const Principal caller_;
  grpc::CallbackServerContext* const context_;
  const Method method_;
  const absl::Time begun_;

  std::recursive_mutex mu_;
  // Guarded by mu_.
  bool finished_ = false;
  OwnerId owner_{};
  ModelRef model_;  // declared before what its store lends
};

class ImportStream final : public grpc::ServerReadReactor<v1::ImportStateRequest>,
                           public StreamBase {
 public:
  ImportStream(ServiceCore& core, const Principal& caller, grpc::CallbackServerContext* context,
               v1::ImportStateResponse* response)
      : StreamBase(core, caller, Method::kImportState, context), response_(*response) {
    response_.set_server_epoch(core.epoch);
  }
  void Start(std::shared_ptr<ImportStream> self) {
    self_ = std::move(self);
    StartRead(&message_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      End(context_->IsCancelled()
              ? absl::CancelledError("the import was cancelled")
              : InvalidField("finish", "finish: the stream ended before it; nothing changed"));
      return;
    }
    SessionCall call;
    bool complete = false;
    const absl::Status status = Take(call, complete);
    call.End();  // without mu_: it may end the session, and that calls SessionEnded
    if (!status.ok() || complete) {
      End(status);
      return;
    }
    std::lock_guard lock(mu_);
    if (!finished_) StartRead(&message_);
  }
  void OnCancel() override { core_.metrics.CountCancelled(); }
  void OnDone() override {
    std::shared_ptr<ImportStream> keep;  // outlives the lock
    std::lock_guard lock(mu_);
    keep = std::move(self_);
  }

  void SessionEnded() override { End(SessionGone(owner_)); }

 private:
  // Works the message in. `call` is the session's for as long as that takes.
  absl::Status Take(SessionCall& call, bool& complete) {
    using Request = v1::ImportStateRequest;
    const bool is_header = message_.message_case() == Request::kHeader;
    if (is_header == opened_) {
      return InvalidField("header", is_header ? "header: expected once, got a second one"
                                              : "header: expected as the first message");
    }
    if (is_header) {
      opened_ = true;
      SSMD_ASSIGN_OR_RETURN(call, Fence(core_, caller_, message_.header().has_context(),
                                        message_.header().context()));
      return Open(call->id());
    }
    SSMD_ASSIGN_OR_RETURN(call, Reenter(core_, caller_, method_, owner_));
    std::lock_guard lock(mu_);
    if (finished_) return SessionGone(owner_);
    switch (message_.message_case()) {
      case Request::kChunk:
        return assembler_->Add(message_.chunk());
      case Request::kFinish: {
        SSMD_ASSIGN_OR_RETURN(const SequenceState state,
                              assembler_->Finish(message_.finish().checksum()));
        response_.set_version(state.version);
        response_.set_position(state.position);
        complete = true;
        return absl::OkStatus();
      }
      default:
        return InvalidField("message", "message: expected a chunk or finish, got none");
    }
  }

  absl::Status Open(OwnerId owner) {
    const v1::ImportStateRequest::Header& header = message_.header();
    std::lock_guard lock(mu_);
    SSMD_ASSIGN_OR_RETURN(model_, core_.models.Find(header.model_id(), caller_.tenant));
    owner_ = owner;
    SSMD_RETURN_IF_ERROR(CheckDescriptor(*model_, header.state()));
    SSMD_RETURN_IF_ERROR(core_.transfers.Add(owner, self_, /*is_import=*/true));
    SSMD_ASSIGN_OR_RETURN(
        import_, model_->store->BeginImport(
                     owner, {.id = SequenceId{header.sequence_id()}, .version = header.version()}));
    assembler_ = std::make_unique<StateAssembler>(model_.get(), header.state(),
                                                  ChunkBytesMax(core_.config), import_.get());
    return absl::OkStatus();
  }

  void End(const absl::Status& status) {
    std::shared_ptr<ImportStream> keep;  // outlives the lock
    core_.transfers.Remove(this);
    std::lock_guard lock(mu_);
    keep = self_;
    if (std::exchange(finished_, true)) return;
    assembler_.reset();
    import_.reset();  // unless it is finished, the sequence is as it was
    model_.reset();
    Count(status);
    Finish(ToGrpcStatus(status));
  }

  v1::ImportStateResponse& response_;
  v1::ImportStateRequest message_;
  bool opened_ = false;  // only reactions to reads look at it, and those come one by one
  // Guarded by mu_.
  std::shared_ptr<ImportStream> self_;
  std::unique_ptr<StateImport> import_;
  std::unique_ptr<StateAssembler> assembler_;
};

class ExportStream final : public grpc::ServerWriteReactor<v1::ExportStateResponse>,
                           public StreamBase {
 public:
  ExportStream(ServiceCore& core, const Principal& caller, grpc::CallbackServerContext* context)
      : StreamBase(core, caller, Method::kExportState, context) {}

  void Start(std::shared_ptr<ExportStream> self, const v1::ExportStateRequest& request) {
    self_ = std::move(self);
    SessionCall call;
    const absl::Status status = Open(request, call);
    call.End();
    if (status.ok()) {
      WriteNext();
    } else {
      End(status);
    }
  }

  void OnWriteDone(bool ok) override {
    if (!ok) {
      End(absl::CancelledError("the export was cancelled"));
      return;
    }
    auto call = Reenter(core_, caller_, method_, owner_);
    if (!call.ok()) {
      End(call.status());
      return;
    }
    call->End();  // renews the lease
    WriteNext();
  }
  void OnCancel() override { core_.metrics.CountCancelled(); }
  void OnDone() override {
    std::shared_ptr<ExportStream> keep;  // outlives the lock
    std::lock_guard lock(mu_);
    keep = std::move(self_);
    done_ = true;
  }

  // The peer may not be reading: a status would wait behind the chunk that is under way.
  void SessionEnded() override {
    core_.transfers.Remove(this);
    std::lock_guard lock(mu_);
    reader_.reset();
    if (!finished_ && !done_) context_->TryCancel();
  }

 private:
  absl::Status Open(const v1::ExportStateRequest& request, SessionCall& call) {
    SSMD_ASSIGN_OR_RETURN(call, Fence(core_, caller_, request.has_context(), request.context()));
    const uint64_t chunk_bytes_max = ChunkBytesMax(core_.config);
    if (request.chunk_bytes() % 4 != 0 || request.chunk_bytes() > chunk_bytes_max) {
      return InvalidField("chunk_bytes",
                          absl::StrCat("chunk_bytes: expected a multiple of 4 in 0..",
                                       chunk_bytes_max, ", got ", request.chunk_bytes()));
    }
    std::lock_guard lock(mu_);
    owner_ = call->id();
    SSMD_ASSIGN_OR_RETURN(model_, core_.models.Find(request.model_id(), caller_.tenant));
    std::unique_ptr<StateExport> source;
    switch (request.source_case()) {
      case v1::ExportStateRequest::kSequenceId: {
        SSMD_ASSIGN_OR_RETURN(
            source, model_->store->BeginExport(owner_, {.id = SequenceId{request.sequence_id()},
                                                        .version = request.version()}));
        break;
      }
      case v1::ExportStateRequest::kSnapshot: {
        SSMD_ASSIGN_OR_RETURN(const SnapshotKey key,
                              ParseSnapshotKey("snapshot", request.snapshot()));
        SSMD_ASSIGN_OR_RETURN(source, model_->store->BeginExport(ScopedKey(caller_.tenant, key)));
        break;
      }
      default:
        return InvalidField("source", "source: expected sequence_id or snapshot, got none");
    }
    SSMD_RETURN_IF_ERROR(core_.transfers.Add(owner_, self_, /*is_import=*/false));
    reader_ = std::make_unique<StateReader>(
        model_.get(), std::move(source),
        request.chunk_bytes() == 0 ? chunk_bytes_max : request.chunk_bytes());
    return absl::OkStatus();
  }

  void WriteNext() {
    std::lock_guard lock(mu_);
    if (finished_) return;
    if (reader_ == nullptr) {
      End(SessionGone(owner_));
      return;
    }
    message_.Clear();
    message_.set_server_epoch(core_.epoch);
    const absl::StatusOr<bool> next = reader_->Next(message_);
    if (next.ok() && *next) {
      StartWrite(&message_);
    } else {
      End(next.status());
    }
  }

  void End(const absl::Status& status) {
    std::shared_ptr<ExportStream> keep;  // outlives the lock
    core_.transfers.Remove(this);
    std::lock_guard lock(mu_);
    keep = self_;
    if (std::exchange(finished_, true)) return;
    reader_.reset();
    model_.reset();
    Count(status);
    Finish(ToGrpcStatus(status));
  }

  v1::ExportStateResponse message_;
  // Guarded by mu_.
  std::shared_ptr<ExportStream> self_;
  std::unique_ptr<StateReader> reader_;
  bool done_ = false;
};

}  // namespace

grpc::ServerReadReactor<v1::ImportStateRequest>* ServeImport(ServiceCore& core,
                                                             const Principal& caller,
                                                             grpc::CallbackServerContext* context,
                                                             v1::ImportStateResponse* response) {
  auto stream = std::make_shared<ImportStream>(core, caller, context, response);
  ImportStream* const reactor = stream.get();
  reactor->Start(std::move(stream));
  return reactor;
}

grpc::ServerWriteReactor<v1::ExportStateResponse>* ServeExport(
    ServiceCore& core, const Principal& caller, grpc::CallbackServerContext* context,
    const v1::ExportStateRequest* request) {
  auto stream = std::make_shared<ExportStream>(core, caller, context);
  ExportStream* const reactor = stream.get();
  reactor->Start(std::move(stream), *request);
  return reactor;
}

}  // namespace ssmd
