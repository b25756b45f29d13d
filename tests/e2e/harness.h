// What the end-to-end tests speak: a server in this process, clients with real stubs, child
// processes.
//
// The vocabulary keeps test bodies readable: client.Create(2); client.Begin({...});
// client.Verify(...).
#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"
#include "service/server.h"
#include "ssmd/v1/state_service.grpc.pb.h"
#include "tests/reference/token.h"
#include "tests/testing/model_specs.h"

namespace ssmd::e2e {

// Small limits, port 0, no metrics page.
ServerConfig SmallConfig();
v1::ModelCapacity SmallCapacity();  // 6 sequences, 2 snapshots, 3 spare pages, 4 rows, 3 steps
std::unique_ptr<Server> StartServer(const ServerConfig& config = SmallConfig(),
                                    ServerOptions options = {});

// A reply or an error with its decoded details.
template <typename Response>
struct Reply {
  grpc::Status status;
  Response body;
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest bad_request;
  google::rpc::RetryInfo retry;
  bool ok() const { return status.ok(); }
};
void DecodeDetails(const grpc::Status& status, google::rpc::ErrorInfo& info,
                   google::rpc::BadRequest& bad_request, google::rpc::RetryInfo& retry);

// The code, the reason ("": the code's own name), and words that the message must contain.
template <typename Response>
::testing::AssertionResult Fails(const Reply<Response>& reply, grpc::StatusCode code,
                                 absl::string_view reason,
                                 std::initializer_list<absl::string_view> words) {
  const std::string got = absl::StrCat("code ", reply.status.error_code(), ", reason ",
                                       reply.info.reason(), ": ", reply.status.error_message());
  if (reply.status.error_code() != code)
    return ::testing::AssertionFailure() << "expected code " << code << ", got " << got;
  if (!reason.empty() && reply.info.reason() != reason)
    return ::testing::AssertionFailure() << "expected reason " << reason << ", got " << got;
  if (reply.info.domain() != "ssmd")
    return ::testing::AssertionFailure() << "no ErrorInfo of ours: " << got;
  for (const absl::string_view word : words)
    if (!absl::StrContains(reply.status.error_message(), word))
      return ::testing::AssertionFailure() << "expected '" << word << "' in " << got;
  return ::testing::AssertionSuccess();
}

// INVALID_ARGUMENT whose BadRequest names `field`.
template <typename Response>
::testing::AssertionResult RefusesField(const Reply<Response>& reply, absl::string_view field,
                                        std::initializer_list<absl::string_view> words) {
  const auto result = Fails(reply, grpc::INVALID_ARGUMENT, "", words);
  if (!result) return result;
  if (reply.bad_request.field_violations_size() != 1 ||
      reply.bad_request.field_violations(0).field() != field)
    return ::testing::AssertionFailure()
           << "expected field " << field << ", got " << reply.bad_request.ShortDebugString();
  return ::testing::AssertionSuccess();
}

using Stub = v1::StateService::Stub;

class Client {
 public:
  // Every call has this deadline: a test that hangs fails instead.
  static constexpr std::chrono::seconds kDeadline{60};

  explicit Client(const std::string& address,
                  const std::shared_ptr<grpc::ChannelCredentials>& credentials =
                      grpc::InsecureChannelCredentials());

  // Registers the small model and opens a session.
  void Start(uint32_t lease_ms = 0, const v1::ModelSpec& spec = testing::SmallSpec());

  template <typename Request, typename Response>
  Reply<Response> Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                    Response*),
                       const Request& request, std::chrono::milliseconds deadline = kDeadline) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + deadline);
    AddToken(context);
    Reply<Response> reply;
    reply.status = ((*stub).*method)(&context, request, &reply.body);
    DecodeDetails(reply.status, reply.info, reply.bad_request, reply.retry);
    return reply;
  }

  void AddToken(grpc::ClientContext& context) const {
    if (!token.empty()) context.AddMetadata("authorization", absl::StrCat("Bearer ", token));
  }

  // Requests with context and model filled in.
  template <typename Request>
  Request Make() const {
    Request request;
    FillContext(*request.mutable_context());
    if constexpr (requires { request.set_model_id(0); }) request.set_model_id(model_id);
    return request;
  }
  void FillContext(v1::CallContext& context) const {
    context.set_server_epoch(epoch);
    context.set_session_id(session_id);
  }

  struct Row {
    uint64_t sequence;
    uint64_t version;
    uint32_t draft_tokens;
  };
  v1::BeginStepRequest StepOf(const std::vector<Row>& rows) const;
  v1::CommitRequest CommitOf(uint64_t step, const std::vector<uint32_t>& accepted) const;
  // Tensors of `tokens` for a layer; `layer_id` is one of SmallSpec's.
  v1::VerifyRequest VerifyOf(uint64_t step, uint32_t layer_id,
                             const std::vector<reference::Token>& tokens) const;
  v1::VerifyRequest VerifyOf(uint64_t step, uint32_t layer_id, uint32_t token_count);  // random

  // Verbs that must succeed.
  std::vector<uint64_t> Create(uint32_t count);
  uint64_t Begin(const std::vector<Row>& rows, bool auto_commit = false);
  void VerifyAll(uint64_t step, uint32_t token_count);  // every layer, random tokens
  v1::CommitResponse Commit(uint64_t step, const std::vector<uint32_t>& accepted);
  std::map<uint64_t, v1::SequenceInfo> Sequences();  // all of the session's, by id
  v1::GetStatusResponse Status();

  std::unique_ptr<Stub> stub;
  std::shared_ptr<grpc::Channel> channel;
  std::string token;  // "": none is sent
  uint64_t epoch = 0, session_id = 0, model_id = 0;
  std::mt19937_64 random{20261130};
};

inline constexpr uint32_t kSmallLayers[] = {3, 5, 9};
LayerShape ShapeOf(uint32_t layer_id);  // of SmallSpec
v1::VerifyRequest PackTensors(uint32_t layer_id, const std::vector<reference::Token>& tokens);

// grpc.health.v1 of `service` ("": the server): 1 SERVING, 2 NOT_SERVING, 0 no answer.
int Health(const std::shared_ptr<grpc::Channel>& channel, const std::string& service);

// Body of GET http://address/path.
std::string HttpGet(const std::string& address, const std::string& path);
// "name{labels}" -> value of a Prometheus page.
std::map<std::string, double> ParseMetrics(const std::string& page);

// Asks until `done` says yes or the deadline passes; true: it did.
bool Poll(absl::Duration deadline, const std::function<bool()>& done);

// A program of ours, started without a shell; killed, if need be, when it goes out of scope.
class ChildProcess {
 public:
  explicit ChildProcess(const std::vector<std::string>& arguments);
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  std::string ReadLine();  // of stdout; "" at its end. Waits at most a minute.
  void Signal(int number);
  int Wait();                 // exit status, or 128 + signal
  std::string ErrorOutput();  // of stderr so far

 private:
  pid_t pid_ = -1;
  int out_ = -1;
  std::string error_path_;
  bool reaped_ = false;
};

}  // namespace ssmd::e2e
