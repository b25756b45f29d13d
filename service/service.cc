#include "service/service.h"

#include <spdlog/spdlog.h>

#include <chrono>
#include <concepts>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "service/admin_handlers.h"
#include "service/fence.h"
#include "service/handlers.h"
#include "service/status_map.h"
#include "service/steps_stream.h"
#include "service/transfers.h"

namespace ssmd {
namespace {

using Context = grpc::CallbackServerContext;

// Answers a stream that the Authorizer refused; owns itself.
template <typename Reactor>
class RefusedStream final : public Reactor {
 public:
  explicit RefusedStream(const absl::Status& status) { this->Finish(ToGrpcStatus(status)); }
  void OnDone() override { delete this; }
};

// One unary call, from the parsed request to OnDone. Owns itself: gRPC calls OnDone exactly once,
// after Complete, and nothing of ours may touch the call between Complete and then.
template <typename Request, typename Response>
class Call final : public grpc::ServerUnaryReactor {
 public:
  Call(ServiceCore& core_in, Method method, Context* context, const Request* request_in,
       Response* response_in)
      : core(core_in),
        request(*request_in),
        response(*response_in),
        context_(context),
        method_(method),
        begun_(core.clock()) {
    response.set_server_epoch(core.epoch);
  }

  // Answers the call; the last use of it. Any thread, exactly once.
  void Complete(const absl::Status& status) {
    // A Commit, say, releases what a stream holds back for it.
    const uint64_t session_id = session ? static_cast<uint64_t>(session->id()) : 0;
    if (session) core.streams.StepMayHaveEnded(session->id());
    session
        .End();  // the lease counts from here; before the reply, so that the client sees it renewed
    const absl::Duration duration = core.clock() - begun_;
    core.metrics.CountRpc(method_, status.code(), duration);
    core.LogAnswer(method_, RequestName(), session_id, status);
    Finish(ToGrpcStatus(status));
  }

  // OK unless nobody waits for the answer any more.
  absl::Status CheckWanted() const {
    if (cancelled_.load(std::memory_order_relaxed))
      return absl::CancelledError("the call was cancelled before it ran");
    if (context_->deadline() <= std::chrono::system_clock::now())
      return absl::DeadlineExceededError("the call's deadline passed before it ran");
    return absl::OkStatus();
  }

  void OnCancel() override {
    cancelled_.store(true, std::memory_order_relaxed);
    core.metrics.CountCancelled();
  }
  void OnDone() override { delete this; }

  ServiceCore& core;
  const Request& request;
  Response& response;
  SessionCall session;  // empty for calls without a context

 private:
  ~Call() override = default;

  // The caller's x-request-id (cut to 64 bytes), else its address.
  std::string RequestName() const {
    const auto& metadata = context_->client_metadata();
    const auto named = metadata.find("x-request-id");
    if (named == metadata.end()) return context_->peer();
    return std::string(named->second.data(), std::min<size_t>(named->second.size(), 64));
  }

  Context* const context_;
  const Method method_;
  const absl::Time begun_;
  std::atomic<bool> cancelled_{false};
};

// Puts a checked Verify on the queue; the worker that takes it answers the call.
template <typename VerifyCall>
absl::Status Enqueue(VerifyCall* call, handlers::PreparedVerify prepared) {
  struct Task {
    handlers::PreparedVerify prepared;
    absl::Time queued;
  };
  auto task = std::make_shared<Task>(Task{std::move(prepared), call->core.clock()});
  return call->core.verify_queue.Push(
      [call, task] {
        const absl::Time begun = call->core.clock();
        absl::Status status = call->CheckWanted();
        if (status.ok() && call->session.closing())
          status = ErrorWithReason(absl::StatusCode::kNotFound, reason::kSessionExpired,
                                   "the session was closed");
        if (status.ok()) {
          status = handlers::RunVerify(task->prepared, call->session->id(), call->response);
          call->core.CountVerify(call->request.step_id(), begun - task->queued,
                                 call->core.clock() - begun, call->response.committed());
        }
        call->Complete(status);
      },
      call->request.ByteSizeLong());
}

class StateServiceImpl final : public v1::StateService::CallbackService {
 public:
  StateServiceImpl(ServiceCore* core, Door door) : core_(*core), door_(door) {}

  grpc::ServerUnaryReactor* Verify(Context* context, const v1::VerifyRequest* request,
                                   v1::VerifyResponse* response) override {
    auto* call = new Call(core_, Method::kVerify, context, request, response);
    const absl::Status status = [&]() -> absl::Status {
      SSMD_ASSIGN_OR_RETURN(call->session, Enter(Method::kVerify, *context, *request));
      SSMD_ASSIGN_OR_RETURN(handlers::PreparedVerify prepared,
                            handlers::PrepareVerify(core_, *call->session, *request));
      return Enqueue(call, std::move(prepared));
    }();
    if (!status.ok()) call->Complete(status);  // not queued
    return call;
  }

  grpc::ServerBidiReactor<v1::StepsRequest, v1::StepsResponse>* Steps(Context* context) override {
    auto caller = Authorize(Method::kSteps, *context);
    if (!caller.ok())
      return Refuse<grpc::ServerBidiReactor<v1::StepsRequest, v1::StepsResponse>>(Method::kSteps,
                                                                                  caller.status());
    return ServeSteps(core_, *caller);
  }

  grpc::ServerUnaryReactor* CloseSession(Context* context, const v1::CloseSessionRequest* request,
                                         v1::CloseSessionResponse* response) override {
    auto* call = new Call(core_, Method::kCloseSession, context, request, response);
    auto entered = Enter(Method::kCloseSession, *context, *request);
    if (!entered.ok()) {
      call->Complete(entered.status());
      return call;
    }
    // Runs when the session's last call has ended: most often at the end of this function.
    const absl::Status closing = core_.sessions.Close(*entered, [call](Store::Released released) {
      call->response.set_sequences_released(released.sequences);
      call->response.set_steps_aborted(released.steps);
      call->Complete(absl::OkStatus());
    });
    if (!closing.ok()) call->Complete(closing);
    return call;
  }

  grpc::ServerReadReactor<v1::ImportStateRequest>* ImportState(
      Context* context, v1::ImportStateResponse* response) override {
    auto caller = Authorize(Method::kImportState, *context);
    if (!caller.ok())
      return Refuse<grpc::ServerReadReactor<v1::ImportStateRequest>>(Method::kImportState,
                                                                     caller.status());
    return ServeImport(core_, *caller, context, response);
  }

  grpc::ServerWriteReactor<v1::ExportStateResponse>* ExportState(
      Context* context, const v1::ExportStateRequest* request) override {
    auto caller = Authorize(Method::kExportState, *context);
    if (!caller.ok())
      return Refuse<grpc::ServerWriteReactor<v1::ExportStateResponse>>(Method::kExportState,
                                                                       caller.status());
    return ServeExport(core_, *caller, context, request);
  }

// The other RPCs are alike: authorize, fence if the handler takes a session, run the handler,
// answer.
#define SSMD_UNARY(name)                                                             \
  grpc::ServerUnaryReactor* name(Context* context, const v1::name##Request* request, \
                                 v1::name##Response* response) override {            \
    return Serve(Method::k##name, context, request, response, handlers::name);       \
  }
  SSMD_UNARY(RegisterModel)
  SSMD_UNARY(GetCapabilities)
  SSMD_UNARY(OpenSession)
  SSMD_UNARY(GetStatus)
  SSMD_UNARY(KeepAlive)
  SSMD_UNARY(CreateSequences)
  SSMD_UNARY(ForkSequences)
  SSMD_UNARY(ReleaseSequences)
  SSMD_UNARY(GetSequences)
  SSMD_UNARY(BeginStep)
  SSMD_UNARY(Commit)
  SSMD_UNARY(AbortStep)
  SSMD_UNARY(Rollback)
  SSMD_UNARY(CreateSnapshot)
  SSMD_UNARY(DeleteSnapshot)
  SSMD_UNARY(UnregisterModel)
  SSMD_UNARY(AdoptSequences)
  SSMD_UNARY(FlushSequences)
  SSMD_UNARY(LookupPrefix)
  SSMD_UNARY(ListSnapshots)
#undef SSMD_UNARY

 private:
  absl::StatusOr<Principal> Authorize(Method method, const Context& context) const {
    return core_.auth.Authorize(door_, method, context);
  }

  // The session of a call, by a caller who may make it.
  template <typename Request>
  absl::StatusOr<SessionCall> Enter(Method method, const Context& context, const Request& request) {
    SSMD_ASSIGN_OR_RETURN(const Principal caller, Authorize(method, context));
    return Fence(core_, caller, request.has_context(), request.context());
  }

  template <typename Reactor>
  Reactor* Refuse(Method method, const absl::Status& status) {
    core_.metrics.CountRpc(method, status.code(), absl::ZeroDuration());
    spdlog::debug("{} refused: {}", MethodName(method), status.ToString());
    return new RefusedStream<Reactor>(status);
  }

  template <typename Request, typename Response, typename Handler>
  grpc::ServerUnaryReactor* Serve(Method method, Context* context, const Request* request,
                                  Response* response, Handler handler) {
    auto* call = new Call<Request, Response>(core_, method, context, request, response);
    call->Complete([&]() -> absl::Status {
      if constexpr (std::invocable<Handler, ServiceCore&, const Principal&, const Request&,
                                   Response&>) {
        SSMD_ASSIGN_OR_RETURN(const Principal caller, Authorize(method, *context));
        return handler(core_, caller, *request, *response);
      } else {
        SSMD_ASSIGN_OR_RETURN(call->session, Enter(method, *context, *request));
        return handler(core_, *call->session, *request, *response);
      }
    }());
    return call;
  }

  ServiceCore& core_;
  const Door door_;
};

class AdminServiceImpl final : public v1::AdminService::CallbackService {
 public:
  AdminServiceImpl(ServiceCore* core, Door door) : core_(*core), door_(door) {}

  // Answered when the session's last call in flight has ended.
  grpc::ServerUnaryReactor* EvictSession(Context* context, const v1::EvictSessionRequest* request,
                                         v1::EvictSessionResponse* response) override {
    auto* call = new Call(core_, Method::kEvictSession, context, request, response);
    const absl::Status evicting = [&]() -> absl::Status {
      SSMD_RETURN_IF_ERROR(Authorize(Method::kEvictSession, *context).status());
      return handlers::EvictSession(core_, *request, [call](Store::Released released) {
        call->response.set_sequences_released(released.sequences);
        call->response.set_steps_aborted(released.steps);
        call->Complete(absl::OkStatus());
      });
    }();
    if (!evicting.ok()) call->Complete(evicting);
    return call;
  }

#define SSMD_UNARY(name)                                                             \
  grpc::ServerUnaryReactor* name(Context* context, const v1::name##Request* request, \
                                 v1::name##Response* response) override {            \
    auto* call = new Call(core_, Method::k##name, context, request, response);       \
    const auto caller = Authorize(Method::k##name, *context);                        \
    call->Complete(caller.ok() ? handlers::name(core_, *caller, *request, *response) \
                               : caller.status());                                   \
    return call;                                                                     \
  }
  SSMD_UNARY(Drain)
  SSMD_UNARY(SetLogLevel)
  SSMD_UNARY(ListSessions)
  SSMD_UNARY(EvictSnapshots)
#undef SSMD_UNARY

 private:
  absl::StatusOr<Principal> Authorize(Method method, const Context& context) const {
    return core_.auth.Authorize(door_, method, context);
  }

  ServiceCore& core_;
  const Door door_;
};

}  // namespace

std::unique_ptr<v1::AdminService::CallbackService> MakeAdminService(ServiceCore* core, Door door) {
  return std::make_unique<AdminServiceImpl>(core, door);
}

std::unique_ptr<v1::StateService::CallbackService> MakeStateService(ServiceCore* core, Door door) {
  return std::make_unique<StateServiceImpl>(core, door);
}

}  // namespace ssmd
