#include "service/server.h"

#include <grpcpp/ext/channelz_service_plugin.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/gpu_device.h"
#include "service/handlers.h"
#include "service/listen.h"
#include "service/model_files.h"
#include "service/other_services.h"
#include "service/status_pages.h"

namespace ssmd {
namespace {

constexpr absl::Duration kFinishGrace = absl::Seconds(1);
constexpr absl::Duration kDrainPoll = absl::Milliseconds(10);

// "host:0" with the port that was chosen.
std::string WithPort(absl::string_view address, int port) {
  return absl::StrCat(address.substr(0, address.rfind(':')), ":", port);
}

// What --listen-insecure, or one of TLS and tokens without the other, leaves open.
void WarnOfExposure(absl::string_view flag, const ServerConfig& config) {
  if (config.tokens_file.empty() && config.tls_client_ca.empty())
    spdlog::warn(
        "{}: whoever reaches it may read and change every state (no --tokens, no "
        "--tls-client-ca)",
        std::string(flag));
  if (config.tls_cert.empty())
    spdlog::warn("{}: states{} travel unencrypted (no --tls-cert)", std::string(flag),
                 config.tokens_file.empty() ? "" : " and tokens");
}

// Null: the CPU. Any error of the GPU's runtime means that there is none.
absl::StatusOr<std::unique_ptr<Device>> ChooseGpu(const ServerConfig& config) {
  if (config.backend == "cpu") return nullptr;
  auto gpu = MakeGpuDevice(config.state_bytes_max);
  if (gpu.ok()) {
    spdlog::info("backend cuda: {}", gpu->description);
    return std::move(gpu->device);
  }
  const std::string why(gpu.status().message());
  if (config.backend == "cuda")
    return absl::UnavailableError(absl::StrCat("--backend=cuda: ", why));
  spdlog::info("backend cpu ({})", why);
  return nullptr;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerConfig& config,
                                                      ServerOptions options) {
  SSMD_RETURN_IF_ERROR(ValidateConfig(config));
  const bool start_sweeper = options.start_sweeper;
  SSMD_ASSIGN_OR_RETURN(std::unique_ptr<Device> gpu, ChooseGpu(config));
  std::unique_ptr<Server> server(new Server(config, std::move(options), std::move(gpu)));
  if (server->core_.auth.enabled()) {
    const absl::Status loaded = server->core_.auth.Load();
    if (!loaded.ok()) return InvalidField("--tokens", absl::StrCat("--tokens: ", loaded.message()));
  }
  SSMD_RETURN_IF_ERROR(server->StartPages());  // first: probes see us start
  SSMD_RETURN_IF_ERROR(server->RegisterModelFiles());
  SSMD_ASSIGN_OR_RETURN(const auto credentials, MakeServerCredentials(config));
  const bool two_doors = !config.admin_listen.empty();
  SSMD_RETURN_IF_ERROR(server->Listen("--listen", config.listen,
                                      two_doors ? Door::kPublic : Door::kOnly, credentials,
                                      server->public_));
  if (two_doors)
    SSMD_RETURN_IF_ERROR(server->Listen("--admin-listen", config.admin_listen, Door::kAdmin,
                                        credentials, server->admin_));
  server->core_.ReportHealthTo([raw = server.get()](bool serving) {
    for (grpc::Server* each : raw->GrpcServers())
      each->GetHealthCheckService()->SetServingStatus(serving);
  });
  server->core_.serving = true;
  if (start_sweeper) server->sweeper_ = std::thread([raw = server.get()] { raw->SweepLoop(); });
  return server;
}

Server::Server(const ServerConfig& config, ServerOptions options, std::unique_ptr<Device> gpu)
    : core_(config, std::move(options.clock), std::move(gpu)) {}

Server::~Server() { Shutdown(absl::ZeroDuration()); }

absl::Status Server::RegisterModelFiles() {
  for (const std::string& path : core_.config.model_files) {
    SSMD_ASSIGN_OR_RETURN(const v1::RegisterModelRequest request, ReadModelFile(path));
    v1::RegisterModelResponse response;
    const absl::Status status = handlers::RegisterModel(core_, Principal{}, request, response);
    if (!status.ok())
      return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
  }
  return absl::OkStatus();
}

absl::Status Server::Listen(absl::string_view flag, const std::string& address, Door door,
                            const std::shared_ptr<grpc::ServerCredentials>& credentials,
                            Entrance& entrance) {
  const ServerConfig& config = core_.config;
  SSMD_RETURN_IF_ERROR(CheckSocketFolder(flag, address, config));
  if (!IsLocalAddress(address)) WarnOfExposure(flag, config);
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::channelz::experimental::InitChannelzService();
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(address, credentials, &port);
  builder.SetMaxReceiveMessageSize(static_cast<int>(config.message_bytes_max));
  builder.SetMaxSendMessageSize(static_cast<int>(config.message_bytes_max));
  // Two servers on one port would split the sequences of one client between them.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // Clients may probe an idle connection this often.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5'000);
  if (core_.auth.enabled() || door != Door::kOnly) {
    std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> guards;
    guards.push_back(GuardOtherServices(&core_.auth, door));
    builder.experimental().SetInterceptorCreators(std::move(guards));
  }
  entrance.service = MakeStateService(&core_, door);
  entrance.admin = MakeAdminService(&core_, door);
  builder.RegisterService(entrance.service.get());
  builder.RegisterService(entrance.admin.get());
  entrance.server = builder.BuildAndStart();
  if (entrance.server == nullptr || port == 0) {
    entrance.server = nullptr;
    return absl::UnavailableError(absl::StrCat(flag, ": cannot listen on '", address,
                                               "': expected a free host:port or unix:path"));
  }
  SSMD_RETURN_IF_ERROR(RestrictSocket(flag, address, config));
  entrance.address = absl::StartsWith(address, "unix:") ? address : WithPort(address, port);
  grpc::HealthCheckServiceInterface* health = entrance.server->GetHealthCheckService();
  health->SetServingStatus(v1::StateService::service_full_name(), true);  // makes it known
  return absl::OkStatus();
}

std::vector<grpc::Server*> Server::GrpcServers() const {
  std::vector<grpc::Server*> servers;
  for (const Entrance* entrance : {&public_, &admin_})
    if (entrance->server != nullptr) servers.push_back(entrance->server.get());
  return servers;
}

absl::Status Server::StartPages() {
  const std::string& address = core_.config.metrics_listen;
  if (address.empty()) return absl::OkStatus();
  SSMD_ASSIGN_OR_RETURN(pages_, HttpServer::Start(address, StatusPages(&core_)));
  metrics_address_ = WithPort(address, pages_->port());
  return absl::OkStatus();
}

void Server::SweepLoop() {
  const std::chrono::milliseconds interval(core_.config.sweep_interval_ms);
  std::unique_lock<std::mutex> lock(mu_);
  while (!stop_.wait_for(lock, interval, [this] { return stopping_; })) {
    lock.unlock();
    core_.Sweep();
    lock.lock();
  }
}

void Server::Shutdown(absl::Duration drain_timeout) {
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (stopping_) return;
  }
  core_.Stop();
  if (const std::vector<grpc::Server*> servers = GrpcServers(); !servers.empty()) {
    const absl::Time end = absl::Now() + drain_timeout;
    while (core_.LiveSequences() > 0 && absl::Now() < end) absl::SleepFor(kDrainPoll);
    core_.streams.DrainAll();
    const auto grace = absl::ToChronoTime(absl::Now() + kFinishGrace);
    for (grpc::Server* server : servers) server->Shutdown(grace);
    public_.server.reset();  // after these no reactor is left
    admin_.server.reset();
    spdlog::info("stopped serving");
  }
  core_.verify_queue.Stop();
  {
    const std::lock_guard<std::mutex> lock(mu_);
    stopping_ = true;
  }
  stop_.notify_all();
  if (sweeper_.joinable()) sweeper_.join();
  pages_.reset();  // up to 2 s: README.md, "Stopping"
}

}  // namespace ssmd
