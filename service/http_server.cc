#include "service/http_server.h"

#include <civetweb.h>
#include <spdlog/spdlog.h>

#include <string_view>

#include "absl/strings/str_cat.h"

namespace ssmd {
namespace {

int Log(const mg_connection*, const char* message) {
  spdlog::debug("metrics page: {}", message);
  return 1;  // not to stderr as well
}

void Write(mg_connection* connection, const HttpReply& reply, bool with_body) {
  // The page is one file that brings all it needs; nothing else may run in it or be fetched by it.
  const std::string head = absl::StrCat(
      "HTTP/1.1 ", reply.status, " ", mg_get_response_code_text(connection, reply.status),
      "\r\nContent-Type: ", reply.content_type, "\r\nContent-Length: ", reply.body.size(),
      reply.status == 405 ? "\r\nAllow: GET, HEAD" : "",
      "\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nContent-Security-Policy: "
      "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
      "connect-src 'self'; img-src data:\r\nConnection: close\r\n\r\n");
  mg_write(connection, head.data(), head.size());
  if (with_body) mg_write(connection, reply.body.data(), reply.body.size());
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address,
                                                              Pages pages) {
  std::unique_ptr<HttpServer> server(new HttpServer(std::move(pages)));
  const std::string threads = absl::StrCat(kHttpThreads), timeout = absl::StrCat(kHttpTimeoutMs);
  const char* options[] = {"listening_ports",
                           address.c_str(),
                           "num_threads",
                           threads.c_str(),
                           "connection_queue",
                           threads.c_str(),
                           "request_timeout_ms",
                           timeout.c_str(),
                           "enable_keep_alive",
                           "no",
                           nullptr};
  mg_callbacks callbacks{};
  callbacks.begin_request = Serve;
  callbacks.log_message = Log;
  server->context_ = mg_start(&callbacks, server.get(), options);
  if (server->context_ == nullptr)
    return absl::UnavailableError(absl::StrCat("--metrics-listen: cannot listen on '", address,
                                               "': expected a free host:port"));
  return server;
}

HttpServer::~HttpServer() {
  if (context_ != nullptr) mg_stop(context_);
}

int HttpServer::port() const {
  mg_server_port port{};
  return mg_get_server_ports(context_, 1, &port) == 1 ? port.port : 0;
}

int HttpServer::Serve(mg_connection* connection) {
  const mg_request_info& request = *mg_get_request_info(connection);
  const auto* server = static_cast<const HttpServer*>(request.user_data);
  const std::string_view method = request.request_method;
  const auto page = server->pages_.find(request.local_uri == nullptr ? "" : request.local_uri);
  HttpReply reply;
  if (page == server->pages_.end()) {
    reply = {.status = 404, .body = "no such page\n"};
  } else if (method != "GET" && method != "HEAD") {
    reply = {.status = 405, .body = "only GET and HEAD\n"};
  } else {
    reply = page->second();
  }
  Write(connection, reply, method != "HEAD");
  return reply.status;
}

}  // namespace ssmd
