#include "client/security.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"

namespace ssmd::client {
namespace {

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream contents;
  if (!file || !(contents << file.rdbuf()))
    return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
  return std::move(contents).str();
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeChannelCredentials(
    const Security& security) {
  if (security.cert_file.empty() != security.key_file.empty())
    return absl::InvalidArgumentError("a client's certificate needs its key, and the reverse");
  if (security.ca_file.empty()) {
    if (security.cert_file.empty() && security.server_name.empty())
      return grpc::InsecureChannelCredentials();
    return absl::InvalidArgumentError("TLS needs the file of the authority that is believed");
  }
  grpc::SslCredentialsOptions options;
  auto read = ReadFile(security.ca_file);
  if (!read.ok()) return read.status();
  options.pem_root_certs = *std::move(read);
  if (!security.cert_file.empty()) {
    if (read = ReadFile(security.cert_file); !read.ok()) return read.status();
    options.pem_cert_chain = *std::move(read);
    if (read = ReadFile(security.key_file); !read.ok()) return read.status();
    options.pem_private_key = *std::move(read);
  }
  return grpc::SslCredentials(options);
}

absl::StatusOr<std::string> ReadToken(const Security& security) {
  if (security.token_file.empty()) return security.token;
  auto text = ReadFile(security.token_file);
  if (!text.ok()) return text.status();
  std::istringstream words(*text);
  std::string token;
  if (!(words >> token))
    return absl::InvalidArgumentError(absl::StrCat(security.token_file, ": no token in it"));
  return token;
}

}  // namespace ssmd::client
