// service/config.cc, config_file.cc: defaults, every kind of mistake, where values come from,
// sizes.
#include "service/config.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "service/config_file.h"
#include "tests/testing/status_is.h"

namespace ssmd {
namespace {

CommandLine Parse(std::vector<const char*> flags) {
  flags.insert(flags.begin(), "ssmd-server");
  return ParseCommandLine(static_cast<int>(flags.size()), flags.data());
}

CommandLine Parse(std::vector<const char*> flags, std::vector<const char*> environment) {
  flags.insert(flags.begin(), "ssmd-server");
  environment.push_back(nullptr);
  return ParseCommandLine(static_cast<int>(flags.size()), flags.data(), environment.data());
}

// A file of its own that is gone when the test ends.
class TempFile {
 public:
  explicit TempFile(const std::string& text) {
    path_ = absl::StrCat(::testing::TempDir(), "/ssmd_config_XXXXXX");
    const int fd = mkstemp(path_.data());
    EXPECT_GE(fd, 0);
    close(fd);
    std::ofstream(path_) << text;
  }
  ~TempFile() { std::remove(path_.c_str()); }
  const char* path() const { return path_.c_str(); }

 private:
  std::string path_;
};

void ExpectRefusal(const CommandLine& line, std::initializer_list<std::string> words) {
  EXPECT_FALSE(line.run);
  EXPECT_EQ(line.exit_code, 2);
  EXPECT_EQ(std::count(line.text.begin(), line.text.end(), '\n'), 1) << line.text;
  for (const std::string& word : words)
    EXPECT_TRUE(absl::StrContains(line.text, word)) << line.text;
}

TEST(Config, DefaultsRun) {
  const CommandLine line = Parse({});
  ASSERT_TRUE(line.run) << line.text;
  EXPECT_EQ(line.config.listen, "127.0.0.1:50051");
  EXPECT_EQ(line.config.metrics_listen, "127.0.0.1:9464");
  EXPECT_EQ(line.config.state_bytes_max, uint64_t{1} << 30);
  EXPECT_EQ(line.config.message_bytes_max, 64u << 20);
}

TEST(Config, FlagsAreTaken) {
  const CommandLine line =
      Parse({"--listen", "unix:/tmp/x", "--metrics-listen", "", "--state-memory", "3G",
             "--message-bytes-max=1M", "--lease-min-ms", "10", "--lease-default-ms", "20",
             "--lease-max-ms", "30", "--default-spare-pages", "9", "--poison-garbage",
             "--log-format", "json"});
  ASSERT_TRUE(line.run) << line.text;
  EXPECT_EQ(line.config.listen, "unix:/tmp/x");
  EXPECT_EQ(line.config.metrics_listen, "");
  EXPECT_EQ(line.config.state_bytes_max, uint64_t{3} << 30);
  EXPECT_EQ(line.config.message_bytes_max, 1u << 20);
  EXPECT_EQ(line.config.lease_ms_max, 30u);
  EXPECT_EQ(line.config.capacity.spare_pages, 9u);
  EXPECT_TRUE(line.config.poison_garbage);
  EXPECT_TRUE(absl::StrContains(DescribeConfig(line.config), "state_memory=3221225472"));
}

TEST(Config, MistakesAreOneLineNamingFlagExpectedAndActual) {
  const struct {
    std::vector<const char*> flags;
    std::vector<const char*> words;
  } cases[] = {
      {{"--sessions-max", "many"}, {"--sessions-max", "integer 1..65536", "'many'"}},
      {{"--sessions-max", "0"}, {"--sessions-max", "1..65536", "'0'"}},
      {{"--sessions-max", "-1"}, {"--sessions-max", "1..65536", "'-1'"}},
      {{"--sessions-max", "99999999999"}, {"--sessions-max", "'99999999999'"}},
      {{"--state-memory", "lots"}, {"--state-memory", "K, M, G or T", "'lots'"}},
      {{"--state-memory", "99999999T"}, {"--state-memory", "'99999999T'"}},
      {{"--message-bytes-max", "2G"}, {"--message-bytes-max", "bytes", "'2G'"}},
      {{"--log-level", "loud"}, {"--log-level", "trace|debug", "'loud'"}},
      {{"--backend", "gpu"}, {"--backend", "auto|cuda|cpu", "'gpu'"}},
      {{"--listen", ""}, {"--listen", "host:port", "''"}},
      {{"--listen", "localhost"}, {"--listen", "host:port", "'localhost'"}},
      {{"--listen", "localhost:99999"}, {"--listen", "0..65535", "'localhost:99999'"}},
      {{"--metrics-listen", "9464"}, {"--metrics-listen", "host:port", "'9464'"}},
      {{"--lease-min-ms", "700000"}, {"--lease-min-ms", "--lease-max-ms", "'700000'"}},
      {{"--lease-default-ms", "5"}, {"--lease-default-ms", "1000..600000", "'5'"}},
      {{"--stream-begins-max", "16"}, {"--stream-begins-max", "--stream-calls-max 16", "'16'"}},
      {{"--listen", "0.0.0.0:50051"}, {"--listen", "--tls-cert", "--listen-insecure"}},
      {{"--admin-listen", "[::]:50052"}, {"--admin-listen", "--tls-cert", "--listen-insecure"}},
      {{"--admin-listen", "50052"}, {"--admin-listen", "host:port", "'50052'"}},
      {{"--tls-cert", "f"}, {"--tls-cert", "--tls-key"}},
      {{"--tls-client-ca", "f"}, {"--tls-client-ca", "--tls-cert"}},
      {{"--no-such-flag"}, {"--no-such-flag"}},
      {{"stray"}, {"stray"}},
      {{"--sessions-max"}, {"--sessions-max"}},
  };
  for (const auto& c : cases) {
    const CommandLine line = Parse(c.flags);
    EXPECT_FALSE(line.run) << c.flags[0];
    EXPECT_EQ(line.exit_code, 2) << c.flags[0];
    for (const char* word : c.words) EXPECT_TRUE(absl::StrContains(line.text, word)) << line.text;
    EXPECT_EQ(std::count(line.text.begin(), line.text.end(), '\n'), 1) << line.text;
  }
}

TEST(Config, FlagWinsOverEnvironmentOverFileOverDefault) {
  const TempFile file(
      "# all three\n"
      "sessions-max = 11\n"
      "models-max=12   # as in CLI11\n"
      "\n"
      "  listen = \"unix:/tmp/a#b\"\n"
      "state-memory = 2G\n"
      "backend = cpu\n"
      "poison-garbage = true\n");
  const CommandLine line =
      Parse({"--config", file.path(), "--sessions-max", "33"},
            {"SSMD_SESSIONS_MAX=22", "SSMD_MODELS_MAX=23", "HOME=/", "SSMDX=1"});
  ASSERT_TRUE(line.run) << line.text;
  EXPECT_EQ(line.config.sessions_max, 33u);
  EXPECT_EQ(line.config.backend, "cpu");
  EXPECT_EQ(line.config.models_max, 23u);
  EXPECT_EQ(line.config.state_bytes_max, uint64_t{2} << 30);
  EXPECT_EQ(line.config.listen, "unix:/tmp/a#b");
  EXPECT_TRUE(line.config.poison_garbage);
  EXPECT_EQ(line.config.stream_calls_max, 16u);
}

TEST(Config, FileIsNamedByFlagOrEnvironment) {
  const TempFile one("sessions-max = 1\n"), two("sessions-max = 2\n");
  const std::string variable = absl::StrCat("SSMD_CONFIG=", one.path());
  EXPECT_EQ(Parse({}, {variable.c_str()}).config.sessions_max, 1u);
  EXPECT_EQ(Parse({"--config", two.path()}, {variable.c_str()}).config.sessions_max, 2u);
}

TEST(Config, ListsAreReplacedNotMixed) {
  const TempFile file("model = a\nmodel = b\n");
  using Files = std::vector<std::string>;
  EXPECT_EQ(Parse({"--config", file.path()}).config.model_files, (Files{"a", "b"}));
  EXPECT_EQ(Parse({"--config", file.path()}, {"SSMD_MODEL=c,d"}).config.model_files,
            (Files{"c", "d"}));
  EXPECT_EQ(Parse({"--model", "e", "--config", file.path(), "--model", "f"}, {"SSMD_MODEL=c"})
                .config.model_files,
            (Files{"e", "f"}));
}

TEST(Config, UnknownAndBadSettingsAreNamedWithTheirPlace) {
  const struct {
    const char* text;
    std::vector<std::string> words;
  } files[] = {
      {"\nsession-max = 3\n", {":2: ", "'session-max'", "not a setting"}},
      {"config = x\n", {":1: ", "'config'"}},
      {"[server]\n", {":1: ", "key = value", "'[server]'"}},
      {"sessions-max\n", {":1: ", "key = value"}},
      {"sessions-max = many\n", {":1: sessions-max: ", "integer 1..65536", "'many'"}},
      {"sessions-max =\n", {":1: sessions-max: ", "expected a value"}},
      {"sessions-max = 1\n\nsessions-max = 2\n", {":3: ", "line 1"}},
      {"listen = \"a:1\n", {":1: listen: ", "closing"}},
      {"listen = \"a:1\" b\n", {":1: listen: ", "'b'"}},
  };
  for (const auto& c : files) {
    const TempFile file(c.text);
    // A flag that would win does not hide the mistake.
    const CommandLine line = Parse({"--config", file.path(), "--sessions-max", "5"});
    ExpectRefusal(line, {file.path()});
    for (const std::string& word : c.words) ExpectRefusal(line, {word});
  }
  ExpectRefusal(Parse({"--config", "/nowhere/ssmd.conf"}), {"/nowhere/ssmd.conf", "No such file"});
  ExpectRefusal(Parse({"--config", "/"}), {"/: cannot be read", "directory"});
  ExpectRefusal(Parse({}, {"SSMD_SESSION_MAX=3"}), {"environment", "SSMD_SESSION_MAX"});
  ExpectRefusal(Parse({}, {"SSMD_SESSIONS_MAX=x"}), {"environment: SSMD_SESSIONS_MAX", "'x'"});
  ExpectRefusal(Parse({}, {"SSMD_SESSIONS_MAX="}), {"SSMD_SESSIONS_MAX", "''"});
  ExpectRefusal(Parse({}, {"SSMD_POISON_GARBAGE=yes"}), {"SSMD_POISON_GARBAGE", "true or false"});
}

TEST(Config, KubernetesServiceLinksAreNotSettings) {
  const CommandLine line =
      Parse({}, {"SSMD_SERVICE_HOST=10.0.0.1", "SSMD_SERVICE_PORT=50051",
                 "SSMD_SERVICE_PORT_GRPC=50051", "SSMD_PORT=tcp://10.0.0.1:50051",
                 "SSMD_PORT_50051_TCP=tcp://10.0.0.1:50051", "SSMD_PORT_50051_TCP_PROTO=tcp",
                 "SSMD_PORT_50051_TCP_ADDR=10.0.0.1", "SSMD_NODE_SERVICE_HOST=10.0.0.2"});
  EXPECT_TRUE(line.run) << line.text;
  ExpectRefusal(Parse({}, {"SSMD_METRICS_PORT=9464"}), {"SSMD_METRICS_PORT"});
}

TEST(Config, PrintedConfigReadsBackAsItself) {
  const TempFile file("models-max = 7\n");
  const CommandLine printed = Parse({"--print-config", "--config", file.path(), "--metrics-listen",
                                     "", "--model", "a b", "--model", "c", "--poison-garbage"},
                                    {"SSMD_LISTEN=unix:/tmp/x"});
  EXPECT_FALSE(printed.run);
  EXPECT_EQ(printed.exit_code, 0);
  for (const std::string& word : {absl::StrCat("models-max = 7  # ", file.path(), ":1\n"),
                                  std::string("listen = unix:/tmp/x  # environment SSMD_LISTEN\n"),
                                  std::string("metrics-listen = \"\"  # flag --metrics-listen\n"),
                                  std::string("model = \"a b\"  # flag --model\n"),
                                  std::string("poison-garbage = true  # flag --poison-garbage\n"),
                                  std::string("sessions-max = 1024  # default\n")})
    EXPECT_TRUE(absl::StrContains(printed.text, word)) << word << printed.text;

  const TempFile copy(printed.text);
  const CommandLine read = Parse({"--config", copy.path()});
  ASSERT_TRUE(read.run) << read.text;
  EXPECT_EQ(read.config.models_max, 7u);
  EXPECT_EQ(read.config.listen, "unix:/tmp/x");
  EXPECT_EQ(read.config.metrics_listen, "");
  EXPECT_EQ(read.config.model_files, (std::vector<std::string>{"a b", "c"}));
  EXPECT_TRUE(read.config.poison_garbage);
}

TEST(Config, HelpAndVersionLeaveWithZero) {
  const CommandLine help = Parse({"--help"});
  EXPECT_FALSE(help.run);
  EXPECT_EQ(help.exit_code, 0);
  for (const char* word : {"--state-memory", "Sessions", "MS", "[127.0.0.1:50051]"})
    EXPECT_TRUE(absl::StrContains(help.text, word)) << word;
  const CommandLine version = Parse({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_TRUE(absl::StrContains(version.text, ServerVersion()));
}

TEST(Config, ByteSizes) {
  EXPECT_EQ(*ParseByteSize("0"), 0u);
  EXPECT_EQ(*ParseByteSize("65536"), 65536u);
  EXPECT_EQ(*ParseByteSize("4k"), 4096u);
  EXPECT_EQ(*ParseByteSize("4KB"), 4096u);
  EXPECT_EQ(*ParseByteSize("4KiB"), 4096u);
  EXPECT_EQ(*ParseByteSize("2T"), uint64_t{2} << 40);
  EXPECT_EQ(*ParseByteSize("7B"), 7u);
  for (const char* bad :
       {"", "K", "1X", "1.5G", "-1", "1 G", "1GG", "1iB", "99999999999T", "99999999999999999999"})
    EXPECT_TRUE(testing::Fails(ParseByteSize(bad), absl::StatusCode::kInvalidArgument, {bad}))
        << bad;
}

}  // namespace
}  // namespace ssmd
