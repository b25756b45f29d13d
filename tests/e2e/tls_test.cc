// TLS, mutual TLS and rotated files, with our client library at the other end.
#include "client/client.h"
#include "client/decode_stream.h"
#include "client/session.h"
#include "tests/e2e/certificates.h"
#include "tests/e2e/harness.h"
#include "tests/testing/temp_folder.h"

namespace ssmd::e2e {
namespace {

constexpr char kName[] = "ssmd.test";
constexpr absl::Duration kWait = absl::Seconds(30);

class TlsTest : public ::testing::Test {
 protected:
  TlsTest() : authority_("authority"), clients_("authority of clients") {
    ca_file_ = folder_.Write("ca.crt", authority_.certificate());
    const Identity client = clients_.Issue("worker");
    client_cert_ = folder_.Write("client.crt", client.certificate);
    client_key_ = folder_.Write("client.key", client.key);
    config_ = SmallConfig();
    config_.tls_reload_ms = 1000;
    Install(authority_.Issue("first", absl::StrCat("DNS:", kName)));
  }
  // As Kubernetes does it: a new folder, then the link that stands for it, in one move.
  void Install(const Identity& identity) {
    const std::string generation = absl::StrCat("generation", ++generation_);
    std::filesystem::create_directory(folder_ / generation);
    folder_.Write(generation + "/tls.crt", identity.certificate);
    folder_.Write(generation + "/tls.key", identity.key);
    folder_.Write(generation + "/ca.crt", clients_.certificate());
    std::filesystem::create_symlink(generation, folder_ / "tls.new");
    std::filesystem::rename(folder_ / "tls.new", folder_ / "tls");
    config_.tls_cert = folder_ / "tls/tls.crt";
    config_.tls_key = folder_ / "tls/tls.key";
  }
  void RequireClientCertificates() { config_.tls_client_ca = folder_ / "tls/ca.crt"; }

  client::Security Trusting() const {
    client::Security security;
    security.ca_file = ca_file_;
    security.server_name = kName;
    return security;
  }
  client::Security WithCertificate() const {
    client::Security security = Trusting();
    security.cert_file = client_cert_;
    security.key_file = client_key_;
    return security;
  }
  // `patient`: the connection should succeed.
  static absl::Status Connect(const Server& server, const client::Security& security,
                              bool patient) {
    client::Client::Options options;
    options.connect_timeout = patient ? kWait : absl::Seconds(1);
    options.security = security;
    return client::Client::Connect(server.address(), options).status();
  }

  const testing::TempFolder folder_;
  const Authority authority_, clients_;
  std::string ca_file_, client_cert_, client_key_;
  ServerConfig config_;
  int generation_ = 0;
};

TEST_F(TlsTest, ServesThoseWhoSpeakIt) {
  const auto server = StartServer(config_);
  EXPECT_TRUE(Connect(*server, Trusting(), true).ok());
  EXPECT_FALSE(Connect(*server, {}, false).ok()) << "plaintext";
  client::Security other = Trusting();
  other.server_name = "other.test";
  EXPECT_FALSE(Connect(*server, other, false).ok()) << "another's certificate";
  other = Trusting();
  other.ca_file = folder_.Write("stranger.crt", Authority("stranger").certificate());
  EXPECT_FALSE(Connect(*server, other, false).ok()) << "signed by nobody whom it believes";
}

TEST_F(TlsTest, MutualTlsNeedsACertificateOfTheAuthority) {
  RequireClientCertificates();
  const auto server = StartServer(config_);
  EXPECT_TRUE(Connect(*server, WithCertificate(), true).ok());
  EXPECT_FALSE(Connect(*server, Trusting(), false).ok()) << "no certificate";
  const Identity stranger = Authority("stranger").Issue("worker");
  client::Security other = WithCertificate();
  other.cert_file = folder_.Write("stranger.crt", stranger.certificate);
  other.key_file = folder_.Write("stranger.key", stranger.key);
  EXPECT_FALSE(Connect(*server, other, false).ok()) << "of another authority";
}

TEST_F(TlsTest, RotatedFilesAreTakenUp) {
  const auto server = StartServer(config_);
  const auto connected = [&](const std::string& ca) {
    client::Security security = Trusting();
    security.ca_file = folder_.Write("believed.crt", ca);
    client::Client::Options options;
    options.connect_timeout = absl::Seconds(1);  // of one attempt of many
    options.security = security;
    return client::Client::Connect(server->address(), options).ok();
  };
  client::Client::Options options;
  options.connect_timeout = kWait;
  options.security = Trusting();
  const auto early = client::Client::Connect(server->address(), options);
  ASSERT_TRUE(early.ok()) << early.status();
  const Authority next("next authority");
  EXPECT_FALSE(connected(next.certificate()));
  Install(next.Issue("second", absl::StrCat("DNS:", kName)));
  EXPECT_TRUE(Poll(kWait, [&] { return connected(next.certificate()); }));
  EXPECT_TRUE((*early)->GetStatus().ok()) << "a connection lives on with what it began with";
}

TEST_F(TlsTest, TokensOverTls) {
  config_.tokens_file = folder_.Write("tokens", "token 0123456789abcdef team worker\n");
  const auto server = StartServer(config_);
  EXPECT_TRUE(absl::IsUnauthenticated(Connect(*server, Trusting(), true)));
  client::Client::Options options;
  options.connect_timeout = kWait;
  options.security = Trusting();
  options.security.token_file = folder_.Write("token", "0123456789abcdef\n");
  auto client = client::Client::Connect(server->address(), options);
  ASSERT_TRUE(client.ok()) << client.status();
  const auto model = (*client)->RegisterModel(testing::SmallSpec(), SmallCapacity());
  ASSERT_TRUE(model.ok()) << model.status();
  auto session = (*client)->OpenSession();
  ASSERT_TRUE(session.ok()) << session.status();
  const auto created = (*session)->CreateSequences(model->model_id(), 1);
  ASSERT_TRUE(created.ok()) << created.status();
  auto stream = client::DecodeStream::Open(**session, model->model_id());
  ASSERT_TRUE(stream.ok()) << stream.status();
  const std::vector<client::StepRow> rows = {{{created->sequence_ids(0), created->version()}, 1}};
  EXPECT_TRUE((*stream)->Begin(rows, {}).ok());
}

TEST_F(TlsTest, TheClientNamesTheFileThatIsMissing) {
  const auto server = StartServer(config_);
  client::Security security = Trusting();
  security.ca_file = folder_ / "none";
  EXPECT_TRUE(absl::StrContains(Connect(*server, security, true).message(), security.ca_file));
  security = Trusting();
  security.token_file = folder_.Write("empty", " \n");
  EXPECT_TRUE(absl::StrContains(Connect(*server, security, true).message(), "no token"));
  security = Trusting();
  security.cert_file = client_cert_;
  EXPECT_EQ(Connect(*server, security, true).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ssmd::e2e
