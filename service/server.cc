#include "service/server.h"

#include <grpcpp/ext/channelz_service_plugin.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <prometheus/exposer.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/gpu_device.h"
#include "service/handlers.h"
#include "service/model_files.h"

namespace ssmd {
namespace {

constexpr absl::Duration kFinishGrace = absl::Seconds(1);
constexpr absl::Duration kDrainPoll = absl::Milliseconds(10);

// "host:0" with the port that was chosen.
std::string WithPort(absl::string_view address, int port) {
  return absl::StrCat(address.substr(0, address.rfind(':')), ":", port);
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
  SSMD_RETURN_IF_ERROR(server->RegisterModelFiles());
  SSMD_RETURN_IF_ERROR(server->StartMetrics());  // first: who is told that we serve can scrape us
  SSMD_RETURN_IF_ERROR(server->Listen());
  if (start_sweeper) server->sweeper_ = std::thread([raw = server.get()] { raw->SweepLoop(); });
  return server;
}

Server::Server(const ServerConfig& config, ServerOptions options, std::unique_ptr<Device> gpu)
    : core_(config, std::move(options.clock), std::move(gpu)), service_(MakeStateService(&core_)) {}

Server::~Server() { Shutdown(absl::ZeroDuration()); }

absl::Status Server::RegisterModelFiles() {
  for (const std::string& path : core_.config.model_files) {
    SSMD_ASSIGN_OR_RETURN(const v1::RegisterModelRequest request, ReadModelFile(path));
    v1::RegisterModelResponse response;
    const absl::Status status = handlers::RegisterModel(core_, request, response);
    if (!status.ok())
      return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
  }
  return absl::OkStatus();
}

absl::Status Server::Listen() {
  const ServerConfig& config = core_.config;
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::channelz::experimental::InitChannelzService();
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(config.listen, grpc::InsecureServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(static_cast<int>(config.message_bytes_max));
  builder.SetMaxSendMessageSize(static_cast<int>(config.message_bytes_max));
  // Two servers on one port would split the sequences of one client between them.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // Clients may probe an idle connection this often.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5'000);
  builder.RegisterService(service_.get());
  grpc_server_ = builder.BuildAndStart();
  if (grpc_server_ == nullptr || port == 0) {
    grpc_server_ = nullptr;
    return absl::UnavailableError(absl::StrCat("--listen: cannot listen on '", config.listen,
                                               "': expected a free host:port or unix:path"));
  }
  address_ =
      absl::StartsWith(config.listen, "unix:") ? config.listen : WithPort(config.listen, port);
  grpc::HealthCheckServiceInterface* health = grpc_server_->GetHealthCheckService();
  health->SetServingStatus(true);
  health->SetServingStatus(v1::StateService::service_full_name(), true);
  return absl::OkStatus();
}

absl::Status Server::StartMetrics() {
  const std::string& address = core_.config.metrics_listen;
  if (address.empty()) return absl::OkStatus();
  SSMD_RETURN_IF_ERROR(StartExposer(address, exposer_));
  exposer_->RegisterCollectable(core_.metrics.registry());
  exposer_->RegisterCollectable(core_.collector);
  const std::vector<int> ports = exposer_->GetListeningPorts();
  metrics_address_ = ports.empty() ? address : WithPort(address, ports.front());
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

void Server::BeginDrain() {
  if (core_.draining.exchange(true) || grpc_server_ == nullptr) return;
  grpc_server_->GetHealthCheckService()->SetServingStatus(false);
  spdlog::info("draining: {} sequences live, {} sessions open", core_.LiveSequences(),
               core_.sessions.size());
}

void Server::Shutdown(absl::Duration drain_timeout) {
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (stopping_) return;
  }
  BeginDrain();
  if (grpc_server_ != nullptr) {
    const absl::Time end = absl::Now() + drain_timeout;
    while (core_.LiveSequences() > 0 && absl::Now() < end) absl::SleepFor(kDrainPoll);
    core_.streams.DrainAll();
    grpc_server_->Shutdown(absl::ToChronoTime(absl::Now() + kFinishGrace));
    grpc_server_.reset();  // after this no reactor is left
    spdlog::info("stopped serving");
  }
  core_.verify_queue.Stop();
  {
    const std::lock_guard<std::mutex> lock(mu_);
    stopping_ = true;
  }
  stop_.notify_all();
  if (sweeper_.joinable()) sweeper_.join();
  exposer_.reset();  // up to 2 s: README.md, "Stopping"
}

}  // namespace ssmd
