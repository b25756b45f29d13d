#include "tests/e2e/harness.h"

#include <google/rpc/status.pb.h>
#include <grpcpp/generic/generic_stub.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/check.h"
#include "service/validate.h"
#include "tests/testing/layer_inputs.h"

extern char** environ;

namespace ssmd::e2e {

ServerConfig SmallConfig() {
  ServerConfig config;
  config.listen = "127.0.0.1:0";
  config.metrics_listen = "";
  config.backend = "cpu";
  config.state_bytes_max = 16u << 20;
  config.compute_threads = 2;
  config.models_max = 2;
  config.sessions_max = 4;
  config.lease_ms_min = 100;
  config.sweep_interval_ms = 20;
  config.message_bytes_max = 1u << 20;
  config.poison_garbage = true;
  return config;
}

v1::ModelCapacity SmallCapacity() {
  v1::ModelCapacity capacity;
  capacity.set_sequences_max(6);
  capacity.set_snapshots_max(2);
  capacity.set_spare_pages(3);
  capacity.set_rows_max(4);
  capacity.set_steps_max(3);
  return capacity;
}

std::unique_ptr<Server> StartServer(const ServerConfig& config, ServerOptions options) {
  auto server = Server::Start(config, std::move(options));
  SSMD_CHECK(server.ok(), "%s", server.status().ToString().c_str());
  return *std::move(server);
}

void DecodeDetails(const grpc::Status& status, google::rpc::ErrorInfo& info,
                   google::rpc::BadRequest& bad_request, google::rpc::RetryInfo& retry) {
  google::rpc::Status details;
  details.ParseFromString(status.error_details());
  for (const auto& any : details.details()) {
    any.UnpackTo(&info);
    any.UnpackTo(&bad_request);
    any.UnpackTo(&retry);
  }
}

Client::Client(const std::string& address,
               const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
  arguments.SetMaxReceiveMessageSize(-1);
  channel = grpc::CreateCustomChannel(address, credentials, arguments);
  stub = v1::StateService::NewStub(channel);
}

void Client::Start(uint32_t lease_ms, const v1::ModelSpec& spec) {
  v1::RegisterModelRequest model;
  *model.mutable_spec() = spec;
  *model.mutable_capacity() = SmallCapacity();
  const auto registered = Call(&Stub::RegisterModel, model);
  ASSERT_TRUE(registered.ok()) << registered.status.error_message();
  model_id = registered.body.model_id();
  v1::OpenSessionRequest open;
  open.set_lease_ms(lease_ms);
  open.set_client_name("e2e");
  const auto opened = Call(&Stub::OpenSession, open);
  ASSERT_TRUE(opened.ok()) << opened.status.error_message();
  epoch = opened.body.server_epoch();
  session_id = opened.body.session_id();
}

v1::BeginStepRequest Client::StepOf(const std::vector<Row>& rows) const {
  auto request = Make<v1::BeginStepRequest>();
  for (const Row& row : rows) {
    request.add_sequence_ids(row.sequence);
    request.add_versions(row.version);
    request.add_draft_tokens(row.draft_tokens);
  }
  return request;
}

v1::CommitRequest Client::CommitOf(uint64_t step, const std::vector<uint32_t>& accepted) const {
  auto request = Make<v1::CommitRequest>();
  request.set_step_id(step);
  for (const uint32_t count : accepted) request.add_accepted(count);
  return request;
}

v1::VerifyRequest Client::VerifyOf(uint64_t step, uint32_t layer_id,
                                   const std::vector<reference::Token>& tokens) const {
  v1::VerifyRequest request = PackTensors(layer_id, tokens);
  FillContext(*request.mutable_context());
  request.set_model_id(model_id);
  request.set_step_id(step);
  return request;
}

v1::VerifyRequest Client::VerifyOf(uint64_t step, uint32_t layer_id, uint32_t token_count) {
  std::vector<reference::Token> tokens;
  for (uint32_t i = 0; i < token_count; ++i)
    tokens.push_back(testing::RandomToken(ShapeOf(layer_id), Dtype::kFp32, random));
  return VerifyOf(step, layer_id, tokens);
}

std::vector<uint64_t> Client::Create(uint32_t count) {
  auto request = Make<v1::CreateSequencesRequest>();
  request.set_count(count);
  const auto created = Call(&Stub::CreateSequences, request);
  EXPECT_TRUE(created.ok()) << created.status.error_message();
  return {created.body.sequence_ids().begin(), created.body.sequence_ids().end()};
}

uint64_t Client::Begin(const std::vector<Row>& rows, bool auto_commit) {
  v1::BeginStepRequest request = StepOf(rows);
  request.set_auto_commit(auto_commit);
  const auto begun = Call(&Stub::BeginStep, request);
  EXPECT_TRUE(begun.ok()) << begun.status.error_message();
  return begun.body.step_id();
}

void Client::VerifyAll(uint64_t step, uint32_t token_count) {
  for (const uint32_t layer_id : kSmallLayers) {
    const auto verified = Call(&Stub::Verify, VerifyOf(step, layer_id, token_count));
    EXPECT_TRUE(verified.ok()) << verified.status.error_message();
  }
}

v1::CommitResponse Client::Commit(uint64_t step, const std::vector<uint32_t>& accepted) {
  const auto committed = Call(&Stub::Commit, CommitOf(step, accepted));
  EXPECT_TRUE(committed.ok()) << committed.status.error_message();
  return committed.body;
}

std::map<uint64_t, v1::SequenceInfo> Client::Sequences() {
  const auto listed = Call(&Stub::GetSequences, Make<v1::GetSequencesRequest>());
  EXPECT_TRUE(listed.ok()) << listed.status.error_message();
  std::map<uint64_t, v1::SequenceInfo> by_id;
  for (const v1::SequenceInfo& info : listed.body.sequences()) by_id[info.sequence_id()] = info;
  return by_id;
}

v1::GetStatusResponse Client::Status() {
  const auto status = Call(&Stub::GetStatus, v1::GetStatusRequest());
  EXPECT_TRUE(status.ok()) << status.status.error_message();
  return status.body;
}

LayerShape ShapeOf(uint32_t layer_id) {
  return layer_id == 9 ? LayerShape{Family::kGdn, 2, 1, 16, 8}
                       : LayerShape{Family::kMamba2, 4, 2, 16, 8};
}

v1::VerifyRequest PackTensors(uint32_t layer_id, const std::vector<reference::Token>& tokens) {
  const LayerShape shape = ShapeOf(layer_id);
  testing::PackedInputs packed;
  for (const reference::Token& token : tokens) packed.Append(token, Dtype::kFp32);
  const auto fill = [](v1::Tensor& tensor, std::initializer_list<uint64_t> extents,
                       const auto& data) {
    tensor.set_dtype(v1::DATA_TYPE_FP32);
    for (const uint64_t extent : extents) tensor.add_shape(extent);
    tensor.set_data(reinterpret_cast<const char*>(data.data()), data.size() * sizeof(data[0]));
  };
  const uint64_t n = tokens.size(), heads = shape.head_count, groups = shape.key_group_count;
  v1::VerifyRequest request;
  request.set_layer_id(layer_id);
  fill(*request.mutable_q(), {n, groups, shape.d_k}, packed.q);
  fill(*request.mutable_k(), {n, groups, shape.d_k}, packed.k);
  fill(*request.mutable_v(), {n, heads, shape.d_v}, packed.v);
  fill(*request.mutable_log_alpha(), {n, heads}, packed.log_alpha);
  if (shape.is_delta_rule()) {
    fill(*request.mutable_beta(), {n, heads}, packed.beta);
  } else {
    fill(*request.mutable_value_scale(), {n, heads}, packed.value_scale);
  }
  return request;
}

int Health(const std::shared_ptr<grpc::Channel>& channel, const std::string& service) {
  // HealthCheckRequest { string service = 1 }, HealthCheckResponse { enum status = 1 }.
  const std::string wire =
      service.empty()
          ? ""
          : absl::StrCat("\n", std::string(1, static_cast<char>(service.size())), service);
  grpc::Slice slice(wire);
  grpc::ByteBuffer request(&slice, 1), response;
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  grpc::CompletionQueue queue;
  auto call = stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", request, &queue);
  call->StartCall();
  grpc::Status status;
  call->Finish(&response, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (status.ok() && response.Dump(&slices).ok())
    for (const grpc::Slice& part : slices)
      bytes.append(reinterpret_cast<const char*>(part.begin()), part.size());
  return bytes.size() == 2 && bytes[0] == 8 ? bytes[1] : 0;
}

std::string HttpGet(const std::string& address, const std::string& path) {
  const size_t colon = address.rfind(':');
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(address.substr(0, colon).c_str(), address.substr(colon + 1).c_str(), &hints,
                  &found) != 0)
    return "";
  const int fd = socket(found->ai_family, SOCK_STREAM, 0);
  std::string reply;
  if (connect(fd, found->ai_addr, found->ai_addrlen) == 0) {
    const std::string request =
        absl::StrCat("GET ", path, " HTTP/1.0\r\nHost: ", address, "\r\nConnection: close\r\n\r\n");
    if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) ==
        static_cast<ssize_t>(request.size())) {
      char buffer[4096];
      for (ssize_t got; (got = recv(fd, buffer, sizeof(buffer), 0)) > 0;)
        reply.append(buffer, static_cast<size_t>(got));
    }
  }
  close(fd);
  freeaddrinfo(found);
  const size_t body = reply.find("\r\n\r\n");
  return body == std::string::npos ? "" : reply.substr(body + 4);
}

std::map<std::string, double> ParseMetrics(const std::string& page) {
  std::map<std::string, double> values;
  for (const absl::string_view line : absl::StrSplit(page, '\n')) {
    const size_t space = line.rfind(' ');
    double value = 0;
    if (line.empty() || line[0] == '#' || space == absl::string_view::npos ||
        !absl::SimpleAtod(line.substr(space + 1), &value))
      continue;
    values[std::string(line.substr(0, space))] = value;
  }
  return values;
}

bool Poll(absl::Duration deadline, const std::function<bool()>& done) {
  const absl::Time end = absl::Now() + deadline;
  while (!done()) {
    if (absl::Now() > end) return false;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return true;
}

ChildProcess::ChildProcess(const std::vector<std::string>& arguments) {
  error_path_ = absl::StrCat(::testing::TempDir(), "/ssmd_child_XXXXXX");
  const int error_fd = mkstemp(error_path_.data());
  int pipe_fds[2];
  SSMD_CHECK(error_fd >= 0 && pipe(pipe_fds) == 0, "no pipe for a child process");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pipe_fds[1], 1);
  posix_spawn_file_actions_adddup2(&actions, error_fd, 2);
  posix_spawn_file_actions_addclose(&actions, pipe_fds[0]);
  posix_spawn_file_actions_addclose(&actions, pipe_fds[1]);
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  // Without seeds of tests: a server refuses SSMD_ variables that are not settings.
  std::vector<char*> child_environment;
  for (char** variable = environ; *variable != nullptr; ++variable)
    if (!absl::StartsWith(*variable, "SSMD_")) child_environment.push_back(*variable);
  child_environment.push_back(nullptr);
  const int failed =
      posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), child_environment.data());
  SSMD_CHECK(failed == 0, "cannot start %s", argv[0]);
  posix_spawn_file_actions_destroy(&actions);
  close(pipe_fds[1]);
  close(error_fd);
  out_ = pipe_fds[0];
}

ChildProcess::~ChildProcess() {
  if (!reaped_) {
    Signal(SIGKILL);
    Wait();
  }
  close(out_);
  unlink(error_path_.c_str());
}

std::string ChildProcess::ReadLine() {
  std::string line;
  while (true) {
    pollfd waiting{out_, POLLIN, 0};
    char c = 0;
    if (poll(&waiting, 1, 60'000) <= 0 || read(out_, &c, 1) <= 0 || c == '\n') return line;
    line.push_back(c);
  }
}

void ChildProcess::Signal(int number) {
  SSMD_CHECK(!reaped_ && pid_ > 0, "no child to signal");
  kill(pid_, number);
}

int ChildProcess::Wait() {
  int status = 0;
  SSMD_CHECK(waitpid(pid_, &status, 0) == pid_, "waitpid failed");
  reaped_ = true;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

std::string ChildProcess::ErrorOutput() {
  std::stringstream text;
  text << std::ifstream(error_path_).rdbuf();
  return text.str();
}

}  // namespace ssmd::e2e
