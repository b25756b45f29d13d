// Server: one running state service in this process: gRPC, metrics page, sweeper.
//
// Threads: gRPC's own (parse, validate, store control calls), verify_workers (Verify),
// compute_threads (kernels), one sweeper (leases, step deadlines), the pages' (http_server.h).
// Thread-safe, but for destruction.
#pragma once

#include <grpcpp/server.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "service/core.h"
#include "service/http_server.h"
#include "service/service.h"

namespace ssmd {

struct ServerOptions {
  Clock clock = MonotonicClock();
  bool start_sweeper = true;  // false: only Sweep() ends leases and steps
};

class Server {
 public:
  // Serves from the moment it returns. Errors: INVALID_ARGUMENT (ValidateConfig, the files of TLS
  // and tokens, the folder of a socket); those of ReadModelFile and RegisterModel, naming the file;
  // UNAVAILABLE naming the flag whose address or device cannot be had.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerConfig& config,
                                                       ServerOptions options = {});
  ~Server();  // Shutdown(absl::ZeroDuration()) if that was not called
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // What clients connect to, with the port that was chosen.
  const std::string& address() const { return public_.address; }
  const std::string& admin_address() const { return admin_.address; }      // "": none of its own
  const std::string& metrics_address() const { return metrics_address_; }  // "": off
  uint64_t epoch() const { return core_.epoch; }
  // For tests that compare with the store, and for embedders.
  ServiceCore& core() { return core_; }

  void Sweep() { core_.Sweep(); }

  // Health turns NOT_SERVING; new models, sessions and sequences are refused; the rest goes on.
  void BeginDrain() { core_.Drain(); }

  // Drains for good, then waits until no sequence lives (at most `drain_timeout`), then ends: calls
  // in flight get kFinishGrace more, running kernels always finish. Idempotent.
  void Shutdown(absl::Duration drain_timeout);

 private:
  Server(const ServerConfig& config, ServerOptions options, std::unique_ptr<Device> gpu);
  absl::Status RegisterModelFiles();
  // One address and its gRPC server. A core may have several.
  struct Entrance {
    std::unique_ptr<v1::StateService::CallbackService> service;
    std::unique_ptr<v1::AdminService::CallbackService> admin;
    std::unique_ptr<grpc::Server> server;  // destroyed first
    std::string address;
  };
  absl::Status Listen(absl::string_view flag, const std::string& address, Door door,
                      const std::shared_ptr<grpc::ServerCredentials>& credentials,
                      Entrance& entrance);
  std::vector<grpc::Server*> GrpcServers() const;
  absl::Status StartPages();
  void SweepLoop();

  ServiceCore core_;
  Entrance public_, admin_;
  std::unique_ptr<HttpServer> pages_;
  std::string metrics_address_;

  // Not an absl::Mutex: that counts its timeouts on the wall clock, and sweeps would stall while it
  // is set back.
  std::mutex mu_;
  std::condition_variable stop_;
  bool stopping_ = false;  // guarded by mu_
  std::thread sweeper_;
};

}  // namespace ssmd
