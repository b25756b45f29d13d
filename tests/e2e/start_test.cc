// What a server offers from its first moment: channelz, and the models of its model files.
#include <grpcpp/generic/generic_stub.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "tests/e2e/harness.h"

namespace ssmd::e2e {
namespace {

TEST(Start, ChannelzAnswers) {
  const auto server = StartServer();
  Client client(server->address());
  const grpc::Slice empty("");
  grpc::ByteBuffer request(&empty, 1), response;
  grpc::GenericStub stub(client.channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + Client::kDeadline);
  grpc::CompletionQueue queue;
  const auto call =
      stub.PrepareUnaryCall(&context, "/grpc.channelz.v1.Channelz/GetServers", request, &queue);
  call->StartCall();
  grpc::Status status;
  call->Finish(&response, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_GT(response.Length(), 0u) << "this server at least";
}

class ModelFile {
 public:
  explicit ModelFile(const std::string& text) {
    path = absl::StrCat(::testing::TempDir(), "/ssmd_model_XXXXXX");
    const int fd = mkstemp(path.data());
    EXPECT_GE(fd, 0);
    close(fd);
    std::ofstream(path) << text;
  }
  ~ModelFile() { std::remove(path.c_str()); }
  std::string path;
};

TEST(Start, ModelFilesAreRegistered) {
  v1::RegisterModelRequest request;
  *request.mutable_spec() = testing::SmallSpec();
  *request.mutable_capacity() = SmallCapacity();
  const ModelFile file(request.DebugString());  // the text format
  ServerConfig config = SmallConfig();
  config.model_files = {file.path, file.path};  // twice is as good as once
  const auto server = StartServer(config);
  Client client(server->address());
  const v1::GetStatusResponse status = client.Status();
  ASSERT_EQ(status.models_size(), 1);
  EXPECT_EQ(status.models(0).name(), "small");
  EXPECT_EQ(status.models(0).capacity().sequences_max(), 6u);
  const auto again = client.Call(&Stub::RegisterModel, request);
  EXPECT_FALSE(again.body.created());
  EXPECT_EQ(again.body.model_id(), status.models(0).model_id());
}

TEST(Start, BadModelFileStopsTheStartAndIsNamed) {
  const ModelFile file("spec { name: \"x\" }");
  ServerConfig config = SmallConfig();
  config.model_files = {file.path};
  const auto server = Server::Start(config);
  ASSERT_FALSE(server.ok());
  EXPECT_TRUE(absl::StrContains(server.status().message(), file.path)) << server.status();
  EXPECT_TRUE(absl::StrContains(server.status().message(), "input_form")) << server.status();
}

// A server that was told to use a GPU never falls back; one that may choose always starts.
TEST(Start, BackendIsTheOneAskedFor) {
  ServerConfig config = SmallConfig();
  config.backend = "cuda";
  const auto cuda = Server::Start(config);
  if (cuda.ok()) {
    EXPECT_EQ(Client((*cuda)->address()).Status().backend(), "cuda");
  } else {
    EXPECT_EQ(cuda.status().code(), absl::StatusCode::kUnavailable);
    EXPECT_TRUE(absl::StrContains(cuda.status().message(), "--backend=cuda: cuda: "))
        << cuda.status();
  }
  config.backend = "auto";
  const auto any = StartServer(config);
  EXPECT_EQ(Client(any->address()).Status().backend(), cuda.ok() ? "cuda" : "cpu");
}

}  // namespace
}  // namespace ssmd::e2e
