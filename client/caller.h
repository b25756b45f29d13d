// Caller: one call with its deadline and its attempts. Shared by Client and Session; private
// to client/. Thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>

#include "absl/functional/function_ref.h"
#include "client/client.h"

namespace ssmd::client {

class Caller {
 public:
  using Stub = v1::StateService::StubInterface;
  using AdminStub = v1::AdminService::StubInterface;

  Caller(std::shared_ptr<grpc::Channel> channel, const Client::Options& options)
      : channel_(std::move(channel)),
        stub_(v1::StateService::NewStub(channel_)),
        admin_stub_(v1::AdminService::NewStub(channel_)),
        options_(options) {}

  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(
      Method method, grpc::Status (Stub::*rpc)(grpc::ClientContext*, const Request&, Response*),
      const Request& request, const CallOptions& call, bool has_request_id = false) const {
    Response response;
    absl::Status status =
        Attempt(RuleOf(method), has_request_id, call, [&](grpc::ClientContext& context) {
          response.Clear();
          return (stub_.get()->*rpc)(&context, request, &response);
        });
    if (!status.ok()) return status;
    return response;
  }

  template <typename Request, typename Response>
  absl::StatusOr<Response> CallAdmin(Method method,
                                     grpc::Status (AdminStub::*rpc)(grpc::ClientContext*,
                                                                    const Request&, Response*),
                                     const Request& request, const CallOptions& call) const {
    Response response;
    absl::Status status = Attempt(RuleOf(method), false, call, [&](grpc::ClientContext& context) {
      response.Clear();
      return (admin_stub_.get()->*rpc)(&context, request, &response);
    });
    if (!status.ok()) return status;
    return response;
  }

  // A streaming call; `run` is one whole attempt.
  absl::Status Stream(Method method, const CallOptions& call,
                      absl::FunctionRef<grpc::Status(grpc::ClientContext&, Stub&)> run) const {
    return Attempt(RuleOf(method), false, call,
                   [&](grpc::ClientContext& context) { return run(context, *stub_); });
  }

  // Says who calls; Call and Stream have done so.
  void Authenticate(grpc::ClientContext& context) const {
    const std::string& token = options_.security.token;
    if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
  }

  Stub& stub() const { return *stub_; }
  grpc::Channel& channel() const { return *channel_; }
  const Client::Options& options() const { return options_; }

 private:
  // Runs `attempt` until it succeeds, fails for good, or the time or the attempts are used up.
  absl::Status Attempt(const RetryRule& rule, bool has_request_id, const CallOptions& call,
                       absl::FunctionRef<grpc::Status(grpc::ClientContext&)> attempt) const;

  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<Stub> stub_;
  const std::unique_ptr<AdminStub> admin_stub_;
  const Client::Options options_;
};

}  // namespace ssmd::client
