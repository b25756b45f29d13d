// HttpServer: a few fixed paths over plain HTTP: metrics, probes, status page. Reads only.
//
// Bounded: kHttpThreads requests run at one time, as many again wait, a peer that says nothing for
// kHttpTimeoutMs is cut off, a request head is at most 16 KiB, connections are not kept alive. GET
// and HEAD of a known path are answered, anything else is 404 or 405.
//
// Thread-safe. Handlers run on threads of the server and must be thread-safe too. The destructor
// waits for them, and up to 2 s for the thread that accepts (README.md, "Stopping").
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

struct mg_connection;
struct mg_context;

namespace ssmd {

inline constexpr int kHttpThreads = 4;
inline constexpr int kHttpTimeoutMs = 5'000;

struct HttpReply {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};

class HttpServer {
 public:
  using Pages = std::map<std::string, std::function<HttpReply()>>;  // by path: "/metrics"

  // `address`: host:port, port 0 for any free one. Errors: UNAVAILABLE naming --metrics-listen.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address, Pages pages);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const;

 private:
  explicit HttpServer(Pages pages) : pages_(std::move(pages)) {}
  static int Serve(mg_connection* connection);

  const Pages pages_;
  mg_context* context_ = nullptr;
};

}  // namespace ssmd
