// service/tokens.cc: the tokens file, its mistakes, and the look-up by hash.
#include "service/tokens.h"

#include <gtest/gtest.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "tests/testing/status_is.h"

namespace ssmd {
namespace {

using testing::Fails;

constexpr absl::string_view kSecret = "0123456789abcdef";

std::string Hex(const TokenHash& hash) {
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(hash.data()), hash.size()));
}

TEST(Tokens, HashIsSha256) {
  // FIPS 180-2, example B.1.
  EXPECT_EQ(Hex(HashToken("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Tokens, LinesBecomeTokensAndQuotas) {
  const std::string text = absl::StrCat(
      "# rotated monthly\n\n", "token ", kSecret, " team-a worker # until June\r\n",
      "  token\tsha256:", Hex(HashToken("another-secret-of-ops")), " ops admin\n",
      "token 0123456789abcdeF team-a read-only\n", "quota team-a sequences=3 snapshot-bytes=2K\n");
  const auto file = ParseTokens("f", text);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(file->tokens.size(), 3u);
  const TokensFile::Token* const worker = FindToken(*file, HashToken(kSecret));
  ASSERT_NE(worker, nullptr);
  EXPECT_EQ(worker->tenant, "team-a");
  EXPECT_EQ(worker->role, Role::kWorker);
  EXPECT_EQ(FindToken(*file, HashToken("another-secret-of-ops"))->role, Role::kAdmin);
  EXPECT_EQ(FindToken(*file, HashToken("0123456789abcdeF"))->role, Role::kReadOnly);
  EXPECT_EQ(FindToken(*file, HashToken("0123456789abcde")), nullptr);
  EXPECT_EQ(FindToken(*file, TokenHash{}), nullptr);
  const Quota& quota = file->quotas.at("team-a");
  EXPECT_EQ(quota.sequences, 3u);
  EXPECT_EQ(quota.snapshot_bytes, 2048u);
  EXPECT_EQ(quota.pages, Quota::kUnlimited);
}

TEST(Tokens, MistakesNameTheLineAndNeverTheSecret) {
  const std::string good = absl::StrCat("token ", kSecret, " a worker\n");
  const std::pair<std::string, std::string> cases[] = {
      {"", "expected a token"},
      {"tokens x y worker\n", "f:1: expected a line that begins with token or quota"},
      {"token short a worker\n", "f:1: expected a secret of 16..512"},
      {absl::StrCat("token ", std::string(513, 'x'), " a worker\n"), "got 513"},
      {"token sha256:12 a worker\n", "64 hex digits"},
      {absl::StrCat("token sha256:", std::string(64, 'g'), " a worker\n"), "64 hex digits"},
      {absl::StrCat("token ", kSecret, " A worker\n"), "tenant's name"},
      {absl::StrCat("token ", kSecret, " ", std::string(64, 'a'), " worker\n"), "tenant's name"},
      {absl::StrCat("token ", kSecret, " a root\n"), "worker, admin or read-only"},
      {absl::StrCat("token ", kSecret, " a none\n"), "worker, admin or read-only"},
      {absl::StrCat("token ", kSecret, " a\n"), "token SECRET TENANT ROLE"},
      {absl::StrCat(good, good), "f:2: expected another secret"},
      {absl::StrCat(good, "quota a\n"), "f:2: expected quota TENANT"},
      {absl::StrCat(good, "quota a pages=many\n"), "f:2: expected an integer"},
      {absl::StrCat(good, "quota a bytes=1\n"), "sequences=, pages= or snapshot-bytes="},
      {absl::StrCat(good, "quota a pages=1 pages=2\n"), "twice"},
      {absl::StrCat(good, "quota a pages=1\nquota a pages=1\n"), "f:3: expected one quota"},
      {absl::StrCat(good, "quota b pages=1\n"), "tenant b, who has no token"},
  };
  for (const auto& [text, words] : cases) {
    const absl::Status status = ParseTokens("f", text).status();
    EXPECT_TRUE(Fails(status, absl::StatusCode::kInvalidArgument, {words})) << status;
    EXPECT_EQ(status.message().find(kSecret), absl::string_view::npos) << status;
  }
}

TEST(Tokens, BoundedInNumber) {
  std::string text;
  for (size_t i = 0; i < kTokensMax; ++i)
    absl::StrAppend(&text, "token 0123456789abcdef", i, " t", i, " worker\n");
  EXPECT_TRUE(ParseTokens("f", text).ok());
  absl::StrAppend(&text, "token 0123456789abcdef-more t0 worker\n");
  EXPECT_TRUE(Fails(ParseTokens("f", text).status(), absl::StatusCode::kInvalidArgument,
                    {"f:1025: expected at most 1024 tokens"}));
}

}  // namespace
}  // namespace ssmd
