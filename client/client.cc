#include "client/client.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/caller.h"
#include "client/session.h"

namespace ssmd::client {
namespace {

// Largest message that this client accepts; requests are limited by the server alone.
constexpr int kReceiveBytesMax = 512 << 20;

grpc::ChannelArguments MakeChannelArguments() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kReceiveBytesMax);
  arguments.SetMaxSendMessageSize(-1);
  // Attempts are ours alone (retry.h); gRPC would add its own.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // Finds a dead peer under a call that waits. ssmd accepts a ping every 5 s; between calls the
  // session's own KeepAlive does the same work, so no pings are sent then.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30 * 1000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10 * 1000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 0);
  // After a restart of the server, be back well within the attempts of a call.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  return arguments;
}

}  // namespace

absl::Status Caller::Attempt(const RetryRule& rule, bool has_request_id, const CallOptions& call,
                             absl::FunctionRef<grpc::Status(grpc::ClientContext&)> attempt) const {
  const RetryEnvironment& environment = options_.environment;
  const absl::Duration timeout =
      call.timeout > absl::ZeroDuration() ? call.timeout : options_.call_timeout;
  const absl::Time deadline = environment.now() + timeout;
  RetrySchedule schedule(rule, has_request_id, deadline);
  while (true) {
    grpc::ClientContext context;
    Authenticate(context);
    // The transport counts real time; the environment's clock may be a test's.
    context.set_deadline(absl::ToChronoTime(absl::Now() + (deadline - environment.now())));
    absl::Status status = FromGrpcStatus(attempt(context), rule.name);
    if (status.ok() || schedule.EarlierSucceeded(status)) return absl::OkStatus();
    const std::optional<absl::Duration> delay = schedule.Next(status, environment);
    if (!delay.has_value()) {
      if (schedule.attempts() == 1) return status;
      absl::Status last(status.code(),
                        absl::StrCat(status.message(), " (attempt ", schedule.attempts(), ")"));
      status.ForEachPayload(
          [&](absl::string_view key, const absl::Cord& value) { last.SetPayload(key, value); });
      return last;
    }
    environment.sleep(*delay);
  }
}

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const std::string& target,
                                                        const Options& options) {
  auto credentials = MakeChannelCredentials(options.security);
  if (!credentials.ok()) return credentials.status();
  auto token = ReadToken(options.security);
  if (!token.ok()) return token.status();
  grpc::ChannelArguments arguments = MakeChannelArguments();
  if (!options.security.server_name.empty())
    arguments.SetSslTargetNameOverride(options.security.server_name);
  auto channel = grpc::CreateCustomChannel(target, *credentials, arguments);
  if (!channel->WaitForConnected(absl::ToChronoTime(absl::Now() + options.connect_timeout)))
    return absl::UnavailableError(absl::StrCat("no server at ", target, " within ",
                                               absl::FormatDuration(options.connect_timeout)));
  Options with_token = options;
  with_token.security.token = *std::move(token);
  std::unique_ptr<Client> client = FromChannel(std::move(channel), with_token);
  auto capabilities = client->GetCapabilities(0, {.timeout = options.connect_timeout});
  if (!capabilities.ok()) return capabilities.status();
  return client;
}

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const std::string& target) {
  return Connect(target, Options());
}

std::unique_ptr<Client> Client::FromChannel(std::shared_ptr<grpc::Channel> channel,
                                            const Options& options) {
  return std::unique_ptr<Client>(new Client(std::make_shared<Caller>(std::move(channel), options)));
}

absl::StatusOr<v1::RegisterModelResponse> Client::RegisterModel(const v1::ModelSpec& spec,
                                                                const v1::ModelCapacity& capacity,
                                                                const CallOptions& call) {
  v1::RegisterModelRequest request;
  *request.mutable_spec() = spec;
  *request.mutable_capacity() = capacity;
  return caller_->Call(Method::kRegisterModel, &Caller::Stub::RegisterModel, request, call);
}

absl::StatusOr<v1::GetCapabilitiesResponse> Client::GetCapabilities(uint64_t model_id,
                                                                    const CallOptions& call) {
  v1::GetCapabilitiesRequest request;
  request.set_model_id(model_id);
  return caller_->Call(Method::kGetCapabilities, &Caller::Stub::GetCapabilities, request, call);
}

absl::StatusOr<v1::GetStatusResponse> Client::GetStatus(const CallOptions& call) {
  return caller_->Call(Method::kGetStatus, &Caller::Stub::GetStatus, v1::GetStatusRequest(), call);
}

absl::StatusOr<v1::DrainResponse> Client::Drain(bool resume, const CallOptions& call) {
  v1::DrainRequest request;
  request.set_resume(resume);
  return caller_->CallAdmin(Method::kDrain, &Caller::AdminStub::Drain, request, call);
}

absl::StatusOr<v1::SetLogLevelResponse> Client::SetLogLevel(const std::string& level,
                                                            const CallOptions& call) {
  v1::SetLogLevelRequest request;
  request.set_level(level);
  return caller_->CallAdmin(Method::kSetLogLevel, &Caller::AdminStub::SetLogLevel, request, call);
}

absl::StatusOr<v1::ListSessionsResponse> Client::ListSessions(uint64_t after, uint32_t page_size,
                                                              const CallOptions& call) {
  v1::ListSessionsRequest request;
  request.set_after(after);
  request.set_page_size(page_size);
  return caller_->CallAdmin(Method::kListSessions, &Caller::AdminStub::ListSessions, request, call);
}

absl::StatusOr<v1::EvictSessionResponse> Client::EvictSession(uint64_t session_id,
                                                              const CallOptions& call) {
  v1::EvictSessionRequest request;
  request.set_session_id(session_id);
  return caller_->CallAdmin(Method::kEvictSession, &Caller::AdminStub::EvictSession, request, call);
}

absl::StatusOr<v1::EvictSnapshotsResponse> Client::EvictSnapshots(
    const v1::EvictSnapshotsRequest& request, const CallOptions& call) {
  return caller_->CallAdmin(Method::kEvictSnapshots, &Caller::AdminStub::EvictSnapshots, request,
                            call);
}

absl::StatusOr<std::unique_ptr<Session>> Client::OpenSession(const SessionOptions& options,
                                                             const CallOptions& call) {
  return Session::Open(caller_, options, call);
}

}  // namespace ssmd::client
