#include "service/listen.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/status.h"
#include "service/config_file.h"

namespace ssmd {
namespace {

constexpr absl::string_view kUnixPrefix = "unix:";
constexpr mode_t kOthers = 0007;
constexpr mode_t kOwnerAndGroup = 0660;  // reading and writing, of a socket

// Callers are told apart by tokens, or somebody said that they need not be.
bool IsOpenToOthers(const ServerConfig& config) {
  return !config.tokens_file.empty() || config.listen_insecure;
}

// "127.1.2.3", all four numbers.
bool IsLoopbackIpv4(absl::string_view host) {
  const std::vector<absl::string_view> parts = absl::StrSplit(host, '.');
  if (parts.size() != 4 || parts[0] != "127") return false;
  for (const absl::string_view part : parts) {
    uint32_t number = 0;
    if (!absl::SimpleAtoi(part, &number) || number > 255) return false;
  }
  return true;
}

absl::Status CheckPem(absl::string_view flag, const std::string& path, absl::string_view what) {
  const absl::StatusOr<std::string> text = ReadWholeFile(path);
  if (!text.ok()) return InvalidField(flag, absl::StrCat(flag, ": ", text.status().message()));
  if (absl::StrContains(*text, "-----BEGIN ") && absl::StrContains(*text, what))
    return absl::OkStatus();
  return InvalidField(
      flag, absl::StrCat(flag, ": ", path, ": expected PEM with a ", what, ", found none"));
}

// The folder of a Unix socket; "": the address is another.
std::string SocketFolder(absl::string_view address) {
  if (!absl::ConsumePrefix(&address, kUnixPrefix)) return "";
  absl::ConsumePrefix(&address, "//");  // unix:///path is unix:/path
  const size_t slash = address.rfind('/');
  if (slash == absl::string_view::npos) return ".";
  return slash == 0 ? "/" : std::string(address.substr(0, slash));
}

std::string SocketPath(absl::string_view address) {
  absl::ConsumePrefix(&address, kUnixPrefix);
  absl::ConsumePrefix(&address, "//");
  return std::string(address);
}

}  // namespace

bool IsLocalAddress(absl::string_view address) {
  if (absl::StartsWith(address, kUnixPrefix)) return true;
  absl::string_view host = address.substr(0, address.rfind(':'));
  return host == "localhost" || host == "[::1]" || IsLoopbackIpv4(host);
}

absl::Status CheckExposure(const ServerConfig& config) {
  if (!config.tls_cert.empty() || !config.tokens_file.empty() || config.listen_insecure)
    return absl::OkStatus();
  const std::pair<absl::string_view, absl::string_view> addresses[] = {
      {"--listen", config.listen}, {"--admin-listen", config.admin_listen}};
  for (const auto& [flag, address] : addresses) {
    if (address.empty() || IsLocalAddress(address)) continue;
    return InvalidField(
        flag, absl::StrCat(flag, ": '", address,
                           "' can be reached from other machines, and everybody there could read "
                           "and change every state: give --tls-cert and --tls-key, or --tokens, "
                           "or say --listen-insecure"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(
    const ServerConfig& config) {
  if (config.tls_cert.empty()) return grpc::InsecureServerCredentials();
  // gRPC would log a mistake and refuse every handshake.
  SSMD_RETURN_IF_ERROR(CheckPem("--tls-cert", config.tls_cert, "CERTIFICATE"));
  SSMD_RETURN_IF_ERROR(CheckPem("--tls-key", config.tls_key, "PRIVATE KEY"));
  if (!config.tls_client_ca.empty())
    SSMD_RETURN_IF_ERROR(CheckPem("--tls-client-ca", config.tls_client_ca, "CERTIFICATE"));
  const unsigned reload_seconds = (config.tls_reload_ms + 999) / 1000;
  auto files = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      config.tls_key, config.tls_cert, config.tls_client_ca, reload_seconds);
  grpc::experimental::TlsServerCredentialsOptions options(std::move(files));
  options.watch_identity_key_cert_pairs();
  if (!config.tls_client_ca.empty()) {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return grpc::experimental::TlsServerCredentials(options);
}

absl::Status CheckSocketFolder(absl::string_view flag, absl::string_view address,
                               const ServerConfig& config) {
  const std::string folder = SocketFolder(address);
  if (folder.empty() || IsOpenToOthers(config)) return absl::OkStatus();
  struct stat info {};
  if (stat(folder.c_str(), &info) != 0)
    return InvalidField(flag, absl::StrCat(flag, ": ", folder, ": ", std::strerror(errno)));
  const bool ours = info.st_uid == geteuid() || info.st_uid == 0;
  if (ours && (info.st_mode & kOthers) == 0) return absl::OkStatus();
  return InvalidField(
      flag, absl::StrFormat("%s: who may enter %s may call: expected a folder of this user's, or "
                            "root's, that is closed to others (mode 0700 or 0770), got mode %04o "
                            "of user %d; or give --tokens, or say --listen-insecure",
                            flag, folder, info.st_mode & 07777, info.st_uid));
}

absl::Status RestrictSocket(absl::string_view flag, absl::string_view address,
                            const ServerConfig& config) {
  const std::string folder = SocketFolder(address);
  if (folder.empty() || IsOpenToOthers(config)) return absl::OkStatus();
  const std::string path = SocketPath(address);
  struct stat info {};
  if (stat(folder.c_str(), &info) == 0 && chmod(path.c_str(), info.st_mode & kOwnerAndGroup) == 0)
    return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat(flag, ": ", path, ": cannot set its mode: ", std::strerror(errno)));
}

}  // namespace ssmd
