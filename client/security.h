// How a client proves who it is, and whom it believes.
#pragma once

#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ssmd::client {

struct Security {
  // TLS, when ca_file is named: PEM files, read when the client connects. A certificate and its key
  // for mutual TLS: both or none.
  std::string ca_file, cert_file, key_file;
  std::string server_name;  // in the server's certificate; "": that of the target
  // Sent with every call, over TLS or not. The file's first word; it wins over `token`. A worker
  // whose token is replaced connects again.
  std::string token_file, token;
};

// Errors, here and below: NOT_FOUND naming the file; INVALID_ARGUMENT.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeChannelCredentials(
    const Security& security);

// The token to send, or "".
absl::StatusOr<std::string> ReadToken(const Security& security);

}  // namespace ssmd::client
