// service/config.cc: defaults, every kind of mistake, sizes.
#include "service/config.h"

#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "tests/testing/status_is.h"

namespace ssmd {
namespace {

CommandLine Parse(std::vector<const char*> flags) {
  flags.insert(flags.begin(), "ssmd-server");
  return ParseCommandLine(static_cast<int>(flags.size()), flags.data());
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
      {{"--listen", ""}, {"--listen", "host:port", "''"}},
      {{"--listen", "localhost"}, {"--listen", "host:port", "'localhost'"}},
      {{"--listen", "localhost:99999"}, {"--listen", "0..65535", "'localhost:99999'"}},
      {{"--metrics-listen", "9464"}, {"--metrics-listen", "host:port", "'9464'"}},
      {{"--lease-min-ms", "700000"}, {"--lease-min-ms", "--lease-max-ms", "'700000'"}},
      {{"--lease-default-ms", "5"}, {"--lease-default-ms", "1000..600000", "'5'"}},
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
