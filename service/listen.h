// Where a server listens and how it proves who it is: the rule of what may be listened on, the
// credentials of a port, and the mode of a Unix socket.
//
// Unix sockets. gRPC 1.51 does not say which user is at the other end of one, so the file system
// decides who may connect: the socket's folder must be closed to others, and the socket gets the
// folder's bits for owner and group.
#pragma once

#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "service/config.h"

namespace ssmd {

// Addresses that no other machine reaches: unix:path, localhost, 127.0.0.0/8, [::1]; by their text,
// without a resolver.
bool IsLocalAddress(absl::string_view address);

// Without TLS, tokens or --listen-insecure only local addresses may be listened on.
// Errors: INVALID_ARGUMENT naming the flag that asks for more.
absl::Status CheckExposure(const ServerConfig& config);

// TLS when the configuration names a certificate, else plaintext. Rotated files are taken up within
// tls_reload_ms, rounded up to seconds, by connections made after that.
// Errors: INVALID_ARGUMENT naming the flag whose file cannot be read or is not PEM.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(
    const ServerConfig& config);

// Before a bind; no effect on other addresses. Errors: INVALID_ARGUMENT naming the folder when
// users other than this one, root and the folder's group may enter it, unless tokens tell callers
// apart or --listen-insecure is set.
absl::Status CheckSocketFolder(absl::string_view flag, absl::string_view address,
                               const ServerConfig& config);
// After it. Errors: UNAVAILABLE.
absl::Status RestrictSocket(absl::string_view flag, absl::string_view address,
                            const ServerConfig& config);

}  // namespace ssmd
