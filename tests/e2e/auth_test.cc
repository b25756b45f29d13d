// Tokens, roles and doors, of every RPC there is.
#include <sys/stat.h>

#include "service/roles.h"
#include "tests/e2e/any_call.h"
#include "tests/e2e/harness.h"
#include "tests/e2e/steps_client.h"
#include "tests/testing/fake_clock.h"
#include "tests/testing/our_methods.h"
#include "tests/testing/temp_folder.h"

namespace ssmd::e2e {
namespace {

constexpr char kReader[] = "reader-of-team-a", kWorker[] = "worker-of-team-a",
               kAdmin[] = "admin-of-operations", kOther[] = "worker-of-team-a-too";

std::string TokenLines(std::initializer_list<std::string> workers = {kWorker}) {
  std::string text =
      absl::StrCat("token ", kReader, " team-a read-only\ntoken ", kAdmin, " ops admin\n");
  for (const std::string& worker : workers)
    absl::StrAppend(&text, "token ", worker, " team-a worker\n");
  return text;
}

class AuthTest : public ::testing::Test {
 protected:
  AuthTest() {
    ServerConfig config = SmallConfig();
    config.sessions_max = 64;
    config.tokens_file = folder_.Write("tokens", TokenLines());
    config.tls_reload_ms = 1000;
    server_ = StartServer(config, {.clock = clock_.AsClock(), .start_sweeper = false});
  }
  // What the sweeper does when it is time.
  void Rewrite(const std::string& text) {
    folder_.Write("tokens", text);
    clock_.Advance(absl::Milliseconds(1000));
    server_->Sweep();
  }
  Client As(const std::string& token) {
    Client client(server_->address());
    client.token = token;
    return client;
  }

  const testing::TempFolder folder_;
  testing::FakeClock clock_;
  std::unique_ptr<Server> server_;
};

TEST_F(AuthTest, EveryMethodNeedsAToken) {
  Client client(server_->address());
  for (const auto* method : testing::OurMethods()) {
    const std::string path = testing::PathOf(*method);
    const std::string needed =
        absl::StrCat(method->name(), " needs one of role ", RoleName(FindMethodRole(path)->least));
    for (const std::string& authorization :
         {std::string(), Bearer("not-one-of-the-file"), Bearer(""), absl::StrCat("Basic ", kAdmin),
          std::string(kAdmin), Bearer(std::string(kAdmin) + "x")}) {
      const AnyReply reply = CallAny(client.channel, path, {""}, authorization);
      EXPECT_EQ(reply.status.error_code(), grpc::UNAUTHENTICATED) << path;
      EXPECT_TRUE(absl::StrContains(reply.status.error_message(), needed))
          << path << ": " << reply.status.error_message();
      EXPECT_TRUE(reply.messages.empty()) << path;
    }
  }
  EXPECT_EQ(As(kAdmin).Status().sessions(), 0u);
}

TEST_F(AuthTest, EveryMethodNeedsItsRole) {
  Client client(server_->address());
  const std::pair<Role, std::string> callers[] = {
      {Role::kReadOnly, kReader}, {Role::kWorker, kWorker}, {Role::kAdmin, kAdmin}};
  for (const auto* method : testing::OurMethods()) {
    const std::string path = testing::PathOf(*method);
    const Role least = FindMethodRole(path)->least;
    for (const auto& [role, token] : callers) {
      const AnyReply reply = CallAny(client.channel, path, {""}, Bearer(token));
      if (role < least) {
        EXPECT_EQ(reply.status.error_code(), grpc::PERMISSION_DENIED) << path;
        EXPECT_EQ(reply.status.error_message(),
                  absl::StrCat(method->name(), " needs role ", RoleName(least), ", this token has ",
                               RoleName(role)));
      } else {  // whatever comes of an empty request
        EXPECT_NE(reply.status.error_code(), grpc::PERMISSION_DENIED) << path;
        EXPECT_NE(reply.status.error_code(), grpc::UNAUTHENTICATED) << path;
      }
    }
  }
}

TEST_F(AuthTest, HealthIsOpenAndGrpcsOtherServicesAreNot) {
  Client client(server_->address());
  EXPECT_EQ(Health(client.channel, ""), 1);
  const auto code = [&](const std::string& path, const std::string& authorization) {
    return CallAny(client.channel, path, {""}, authorization).status.error_code();
  };
  const std::string channelz = "/grpc.channelz.v1.Channelz/GetServers";
  EXPECT_EQ(code(channelz, ""), grpc::CANCELLED);
  EXPECT_EQ(code(channelz, Bearer(kWorker)), grpc::CANCELLED);
  EXPECT_EQ(code(channelz, Bearer(kAdmin)), grpc::OK);
  const std::string reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
  EXPECT_EQ(code(reflection, ""), grpc::CANCELLED);
  EXPECT_EQ(code(reflection, Bearer(kReader)), grpc::OK);
}

TEST_F(AuthTest, TheFileIsReadAgain) {
  Client old_token = As(kWorker), new_token = As(kOther);
  old_token.Start();
  const v1::KeepAliveRequest keep_alive = old_token.Make<v1::KeepAliveRequest>();
  EXPECT_TRUE(Fails(new_token.Call(&Stub::KeepAlive, keep_alive), grpc::UNAUTHENTICATED, "", {}));
  Rewrite(TokenLines({kWorker, kOther}));  // both, while workers are rotated
  EXPECT_TRUE(old_token.Call(&Stub::KeepAlive, keep_alive).ok());
  EXPECT_TRUE(new_token.Call(&Stub::KeepAlive, keep_alive).ok()) << "the tenant's session";
  Rewrite(TokenLines({kOther}));
  EXPECT_TRUE(Fails(old_token.Call(&Stub::KeepAlive, keep_alive), grpc::UNAUTHENTICATED, "",
                    {"does not know"}));
  EXPECT_TRUE(new_token.Call(&Stub::KeepAlive, keep_alive).ok());
  for (const char* broken : {"token", "", "token short x worker\n"}) {
    Rewrite(broken);  // what was read before stays in force
    EXPECT_TRUE(new_token.Call(&Stub::KeepAlive, keep_alive).ok());
  }
  std::remove((folder_ / "tokens").c_str());
  clock_.Advance(absl::Milliseconds(1000));
  server_->Sweep();
  EXPECT_TRUE(new_token.Call(&Stub::KeepAlive, keep_alive).ok());
  EXPECT_FALSE(old_token.Call(&Stub::KeepAlive, keep_alive).ok());
  Rewrite(TokenLines({kWorker}));
  EXPECT_TRUE(old_token.Call(&Stub::KeepAlive, keep_alive).ok());
  EXPECT_FALSE(new_token.Call(&Stub::KeepAlive, keep_alive).ok());
}

TEST_F(AuthTest, NotBeforeItIsTime) {
  Client client = As(kOther);
  folder_.Write("tokens", TokenLines({kOther}));
  server_->Sweep();  // the first look
  EXPECT_TRUE(client.Call(&Stub::GetStatus, v1::GetStatusRequest()).ok());
  folder_.Write("tokens", TokenLines());
  clock_.Advance(absl::Milliseconds(999));
  server_->Sweep();
  EXPECT_TRUE(client.Call(&Stub::GetStatus, v1::GetStatusRequest()).ok());
  clock_.Advance(absl::Milliseconds(1));
  server_->Sweep();
  EXPECT_FALSE(client.Call(&Stub::GetStatus, v1::GetStatusRequest()).ok());
}

TEST_F(AuthTest, AStreamEndsWithItsToken) {
  Client client = As(kWorker);
  client.Start();
  const std::vector<uint64_t> ids = client.Create(2);
  StepsClient steps(client);
  const uint64_t first = steps.Send(client.StepOf({{ids[0], 1, 1}}));
  EXPECT_EQ(steps.Await(first).status.error_code(), grpc::OK);
  Rewrite(TokenLines({kOther}));
  const uint64_t second = steps.Send(client.StepOf({{ids[1], 1, 1}}));
  EXPECT_EQ(steps.Await(second).status.error_code(), grpc::UNAUTHENTICATED);
  Rewrite(TokenLines({kOther, kWorker}));
  const uint64_t third = steps.Send(client.StepOf({{ids[1], 1, 1}}));
  EXPECT_EQ(steps.Await(third).status.error_code(), grpc::OK);
}

TEST_F(AuthTest, ATokenThatChangesItsTenantLeavesTheStreamBehind) {
  Client client = As(kWorker);
  client.Start();
  const std::vector<uint64_t> ids = client.Create(1);
  StepsClient steps(client);
  EXPECT_EQ(steps.Await(steps.Send(client.StepOf({{ids[0], 1, 1}}))).status.error_code(), grpc::OK);
  Rewrite(absl::StrCat(TokenLines({}), "token ", kWorker, " team-b worker\n"));
  EXPECT_EQ(steps.Await(steps.Send(client.StepOf({{ids[0], 1, 1}}))).status.error_code(),
            grpc::UNAUTHENTICATED);
  EXPECT_TRUE(Fails(client.Call(&Stub::GetSequences, client.Make<v1::GetSequencesRequest>()),
                    grpc::NOT_FOUND, "SESSION_EXPIRED", {}));
}

TEST(AuthStart, ABrokenTokensFileStopsIt) {
  const testing::TempFolder folder;
  ServerConfig config = SmallConfig();
  config.tokens_file = folder / "none";
  EXPECT_TRUE(absl::StrContains(Server::Start(config).status().message(), "--tokens: "));
  config.tokens_file = folder.Write("tokens", "\ntoken x y z\n");
  const absl::Status status = Server::Start(config).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(status.message(), "tokens:2: ")) << status;
}

TEST(AuthStart, WithoutTokensEverybodyMayDoEverything) {
  const auto server = StartServer();
  Client client(server->address());
  client.token = "whatever";  // a client may have one for another server
  client.Start();
  client.Create(1);
  EXPECT_EQ(client.Status().sessions(), 1u);
}

TEST(AuthStart, UnixSocketsAreTheOwners) {
  const testing::TempFolder folder;
  ServerConfig config = SmallConfig();
  config.listen = absl::StrCat("unix:", folder / "socket");
  {
    const auto server = StartServer(config);
    struct stat info {};
    ASSERT_EQ(stat((folder / "socket").c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u);
    Client client(server->address());
    client.Start();
  }
  ASSERT_EQ(chmod(folder.path().c_str(), 0755), 0);
  const absl::Status status = Server::Start(config).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(status.message(), "mode 0755")) << status;
}

TEST(AdminDoor, AdminsMethodsAreAnsweredThereAlone) {
  ServerConfig config = SmallConfig();
  config.admin_listen = "127.0.0.1:0";
  const auto server = StartServer(config);
  ASSERT_NE(server->admin_address(), server->address());
  Client client(server->address()), admin(server->admin_address());
  client.Start();
  for (const auto* method : testing::OurMethods()) {
    const std::string path = testing::PathOf(*method);
    const AnyReply reply = CallAny(client.channel, path, {""}, "");
    if (FindMethodRole(path)->least == Role::kAdmin) {
      EXPECT_EQ(reply.status.error_code(), grpc::PERMISSION_DENIED) << path;
      EXPECT_TRUE(absl::StrContains(reply.status.error_message(), "--admin-listen")) << path;
    } else {
      EXPECT_NE(reply.status.error_code(), grpc::PERMISSION_DENIED) << path;
    }
  }
  EXPECT_EQ(Health(client.channel, ""), 1);
  EXPECT_EQ(Health(admin.channel, ""), 1);
  const std::string channelz = "/grpc.channelz.v1.Channelz/GetServers";
  EXPECT_EQ(CallAny(client.channel, channelz, {""}, "").status.error_code(), grpc::CANCELLED);
  EXPECT_EQ(CallAny(admin.channel, channelz, {""}, "").status.error_code(), grpc::OK);
  // One server behind both: the session of one door is good at the other.
  EXPECT_TRUE(admin.Call(&Stub::UnregisterModel, client.Make<v1::UnregisterModelRequest>()).ok());
  EXPECT_EQ(client.Status().models_size(), 0);
  server->BeginDrain();
  EXPECT_EQ(Health(client.channel, ""), 2);
  EXPECT_EQ(Health(admin.channel, ""), 2);
}

TEST(AdminDoor, ItsAddressIsNamedWhenItIsTaken) {
  const auto server = StartServer();
  ServerConfig config = SmallConfig();
  config.admin_listen = server->address();
  const absl::Status status = Server::Start(config).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(absl::StrContains(status.message(), "--admin-listen")) << status;
}

}  // namespace
}  // namespace ssmd::e2e
