// Client: the RPCs of ssmd.v1.StateService and AdminService as typed, synchronous calls.
//
//   auto client = Client::Connect("127.0.0.1:7070");
//   auto model = (*client)->RegisterModel(spec);
//   auto session = (*client)->OpenSession();        // session.h: everything about sequences
//
// Every call has a deadline (CallOptions, default Options::call_timeout) that covers all its
// attempts; retry.h says what is sent again and when. A call returns the server's reply or an
// absl::Status with the server's code, a message that starts with the method's name, and details
// (errors.h).
//
// Thread-safe: any number of threads may call at a time. Sessions keep the connection alive and may
// outlive their Client.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/errors.h"
#include "client/retry.h"
#include "client/security.h"
#include "ssmd/v1/admin_service.grpc.pb.h"
#include "ssmd/v1/state_service.grpc.pb.h"

namespace ssmd::client {

class Caller;
class Session;

struct CallOptions {
  absl::Duration timeout = absl::ZeroDuration();  // zero: Options::call_timeout
};

struct SessionOptions {
  absl::Duration lease = absl::ZeroDuration();  // zero: the server's default
  std::string client_name;                      // for the server's logs; at most 128 bytes
  // How long the server keeps the sequences for AdoptSequences when the lease ends; zero: not.
  absl::Duration adoption = absl::ZeroDuration();
  // How often the background thread renews the lease; zero: a third of the granted lease.
  absl::Duration keep_alive_interval = absl::ZeroDuration();
};

class Client {
 public:
  struct Options {
    absl::Duration connect_timeout = absl::Seconds(5);
    absl::Duration call_timeout = absl::Seconds(30);
    RetryEnvironment environment = SystemRetryEnvironment();
    Security security;
  };

  // Connects to a gRPC target ("host:port", "unix:/path", "dns:///..."), as options.security says,
  // and asks for its capabilities. Errors: those of security.h; UNAVAILABLE when there is no server
  // within connect_timeout, or one that does not agree about TLS; UNAUTHENTICATED.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& target,
                                                         const Options& options);
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& target);

  // Uses a channel of the caller's: other credentials, an in-process server. Does not connect, and
  // takes only the token of options.security.
  static std::unique_ptr<Client> FromChannel(std::shared_ptr<grpc::Channel> channel,
                                             const Options& options);

  absl::StatusOr<v1::RegisterModelResponse> RegisterModel(const v1::ModelSpec& spec,
                                                          const v1::ModelCapacity& capacity = {},
                                                          const CallOptions& call = {});
  // model_id 0: the server's limits only.
  absl::StatusOr<v1::GetCapabilitiesResponse> GetCapabilities(uint64_t model_id = 0,
                                                              const CallOptions& call = {});
  absl::StatusOr<v1::GetStatusResponse> GetStatus(const CallOptions& call = {});

  // AdminService, for whoever operates the server.
  absl::StatusOr<v1::DrainResponse> Drain(bool resume = false, const CallOptions& call = {});
  // `level`: trace, debug, info, warn, error or off.
  absl::StatusOr<v1::SetLogLevelResponse> SetLogLevel(const std::string& level,
                                                      const CallOptions& call = {});
  // `after`: next_after of the page before; 0: from the start.
  absl::StatusOr<v1::ListSessionsResponse> ListSessions(uint64_t after = 0, uint32_t page_size = 0,
                                                        const CallOptions& call = {});
  // Waits for the session's calls in flight.
  absl::StatusOr<v1::EvictSessionResponse> EvictSession(uint64_t session_id,
                                                        const CallOptions& call = {});
  absl::StatusOr<v1::EvictSnapshotsResponse> EvictSnapshots(
      const v1::EvictSnapshotsRequest& request, const CallOptions& call = {});

  // Opens a session and starts the thread that keeps it alive.
  absl::StatusOr<std::unique_ptr<Session>> OpenSession(const SessionOptions& options = {},
                                                       const CallOptions& call = {});

 private:
  explicit Client(std::shared_ptr<Caller> caller) : caller_(std::move(caller)) {}

  const std::shared_ptr<Caller> caller_;
};

}  // namespace ssmd::client

namespace ssmd {
using client::Client;
}  // namespace ssmd
