#include "client/tools/metrics_page.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <memory>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ssmd::client {
namespace {

constexpr size_t kPageBytesMax = 16 << 20;
constexpr timeval kSocketTimeout = {.tv_sec = 5, .tv_usec = 0};

}  // namespace

absl::StatusOr<Samples> FetchMetrics(const std::string& address) {
  const auto failure = [&address](absl::string_view why) {
    return absl::UnavailableError(absl::StrCat("metrics at ", address, ": ", why));
  };
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return failure("expected host:port");
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const std::string host = address.substr(0, colon), port = address.substr(colon + 1);
  if (int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0)
    return failure(gai_strerror(error));
  absl::Cleanup free_addresses = [found] { freeaddrinfo(found); };

  const int fd = socket(found->ai_family, found->ai_socktype | SOCK_CLOEXEC, found->ai_protocol);
  if (fd < 0) return failure("no socket");
  absl::Cleanup close_socket = [fd] { close(fd); };
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &kSocketTimeout, sizeof kSocketTimeout);
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &kSocketTimeout, sizeof kSocketTimeout);
  if (connect(fd, found->ai_addr, found->ai_addrlen) != 0) return failure("cannot connect");
  const std::string request =
      absl::StrCat("GET /metrics HTTP/1.0\r\nHost: ", host, "\r\nConnection: close\r\n\r\n");
  if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(request.size()))
    return failure("cannot send");
  std::string reply;
  char buffer[16384];
  ssize_t received;
  while ((received = recv(fd, buffer, sizeof buffer, 0)) > 0 && reply.size() < kPageBytesMax)
    reply.append(buffer, static_cast<size_t>(received));
  if (received < 0) return failure("no answer");
  const size_t body = reply.find("\r\n\r\n");
  const std::string status_line = reply.substr(0, reply.find("\r\n"));
  if (!absl::StartsWith(reply, "HTTP/1.") || !absl::StrContains(status_line, " 200 ") ||
      body == std::string::npos)
    return failure(absl::StrCat("answered '", status_line.substr(0, 60), "'"));
  return ParseMetrics(reply.substr(body + 4));
}

Samples ParseMetrics(const std::string& page) {
  Samples samples;
  for (absl::string_view line : absl::StrSplit(page, '\n')) {
    if (line.empty() || line[0] == '#') continue;
    const size_t space = line.rfind(' ');
    double value = 0.0;
    if (space == absl::string_view::npos || !absl::SimpleAtod(line.substr(space + 1), &value))
      continue;
    samples[std::string(line.substr(0, space))] = value;
  }
  return samples;
}

double SumOf(const Samples& samples, const std::string& name, const std::string& label) {
  double sum = 0.0;
  for (const auto& [key, value] : samples)
    if ((key == name || absl::StartsWith(key, name + "{")) && absl::StrContains(key, label))
      sum += value;
  return sum;
}

}  // namespace ssmd::client
