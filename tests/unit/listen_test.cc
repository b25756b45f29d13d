// service/listen.cc: what may be listened on, and with whose sockets.
#include "service/listen.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "tests/testing/status_is.h"
#include "tests/testing/temp_folder.h"

namespace ssmd {
namespace {

using testing::RefusesField;

TEST(Listen, LocalAddresses) {
  for (const char* address : {"127.0.0.1:50051", "127.8.9.10:0", "localhost:1", "[::1]:1",
                              "unix:/run/ssmd/socket", "unix:socket"})
    EXPECT_TRUE(IsLocalAddress(address)) << address;
  for (const char* address : {"0.0.0.0:50051", "[::]:50051", "10.0.0.1:1", "128.0.0.1:1",
                              "127.0.0.1.example:1", "localhost.example:1", "127.0.0:1",
                              "127.0.0.256:1", "127.0.0.1.1:1", ":1", "::1:1", "*:1", "ssmd:50051"})
    EXPECT_FALSE(IsLocalAddress(address)) << address;
}

TEST(Listen, OtherAddressesNeedTlsOrTokensOrTheFlag) {
  ServerConfig config;
  EXPECT_TRUE(CheckExposure(config).ok());
  config.listen = "0.0.0.0:50051";
  EXPECT_TRUE(RefusesField(CheckExposure(config), "--listen",
                           {"0.0.0.0:50051", "--tls-cert", "--tokens", "--listen-insecure"}));
  ServerConfig other = config;
  other.listen_insecure = true;
  EXPECT_TRUE(CheckExposure(other).ok());
  other = config;
  other.tls_cert = other.tls_key = "f";
  EXPECT_TRUE(CheckExposure(other).ok());
  other = config;
  other.tokens_file = "f";
  EXPECT_TRUE(CheckExposure(other).ok());
  other = config;
  other.listen = "127.0.0.1:0";
  other.admin_listen = "[::]:0";
  EXPECT_TRUE(RefusesField(CheckExposure(other), "--admin-listen", {"[::]:0"}));
}

TEST(Listen, SocketFoldersThatOthersMayEnterAreRefused) {
  const testing::TempFolder folder;
  const std::string address = absl::StrCat("unix:", folder / "socket");
  ServerConfig config;
  for (const mode_t mode : {0700u, 0770u, 0750u}) {
    ASSERT_EQ(chmod(folder.path().c_str(), mode), 0);
    EXPECT_TRUE(CheckSocketFolder("--listen", address, config).ok()) << mode;
  }
  for (const mode_t mode : {0701u, 0755u, 0777u, 01777u}) {
    ASSERT_EQ(chmod(folder.path().c_str(), mode), 0);
    EXPECT_TRUE(RefusesField(CheckSocketFolder("--listen", address, config), "--listen",
                             {folder.path(), "0700 or 0770", "--tokens"}))
        << mode;
  }
  config.tokens_file = "f";
  EXPECT_TRUE(CheckSocketFolder("--listen", address, config).ok());
  config = ServerConfig();
  config.listen_insecure = true;
  EXPECT_TRUE(CheckSocketFolder("--listen", address, config).ok());
  config = ServerConfig();
  EXPECT_TRUE(CheckSocketFolder("--listen", "127.0.0.1:0", config).ok());
  EXPECT_TRUE(RefusesField(CheckSocketFolder("--listen", "unix:/no/such/folder/s", config),
                           "--listen", {"/no/such/folder", "No such file"}));
}

TEST(Listen, SocketsGetTheirFoldersBits) {
  const testing::TempFolder folder;
  const std::string path = folder.Write("socket", "");
  const std::string address = absl::StrCat("unix:", path);
  for (const auto& [folder_mode, socket_mode] :
       {std::pair{0700u, 0600u}, {0770u, 0660u}, {0750u, 0640u}}) {
    ASSERT_EQ(chmod(path.c_str(), 0777), 0);
    ASSERT_EQ(chmod(folder.path().c_str(), folder_mode), 0);
    ASSERT_TRUE(RestrictSocket("--listen", address, {}).ok());
    struct stat info {};
    ASSERT_EQ(stat(path.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 07777, socket_mode);
  }
}

TEST(Listen, TlsFilesAreLookedAtBeforeTheyAreUsed) {
  const testing::TempFolder folder;
  ServerConfig config;
  config.tls_cert = folder.Write("cert", "not PEM");
  config.tls_key = folder / "none";
  EXPECT_TRUE(RefusesField(MakeServerCredentials(config).status(), "--tls-cert",
                           {config.tls_cert, "CERTIFICATE"}));
  folder.Write("cert", "-----BEGIN CERTIFICATE-----\n");
  EXPECT_TRUE(RefusesField(MakeServerCredentials(config).status(), "--tls-key", {config.tls_key}));
}

}  // namespace
}  // namespace ssmd
