#include "service/tokens.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/status.h"
#include "service/config.h"

namespace ssmd {
namespace {

constexpr size_t kSecretBytesMin = 16, kSecretBytesMax = 512, kTenantBytesMax = 63;

using Words = std::vector<absl::string_view>;

absl::Status Expected(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("expected ", what));
}

absl::StatusOr<TokenHash> ParseSecret(absl::string_view text) {
  if (absl::ConsumePrefix(&text, "sha256:")) {
    TokenHash hash{};
    const bool hex =
        text.size() == 2 * hash.size() && std::all_of(text.begin(), text.end(), [](char c) {
          return absl::ascii_isxdigit(static_cast<unsigned char>(c));
        });
    if (!hex) return Expected("64 hex digits after sha256:");
    const std::string bytes = absl::HexStringToBytes(text);
    std::copy(bytes.begin(), bytes.end(), hash.begin());
    return hash;
  }
  const bool printable = std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_isgraph(static_cast<unsigned char>(c));
  });
  if (!printable || text.size() < kSecretBytesMin || text.size() > kSecretBytesMax)
    return Expected(absl::StrCat("a secret of ", kSecretBytesMin, "..", kSecretBytesMax,
                                 " printable characters, got ", text.size()));
  return HashToken(text);
}

absl::StatusOr<std::string> ParseTenant(absl::string_view text) {
  const bool allowed = std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_islower(static_cast<unsigned char>(c)) ||
           absl::ascii_isdigit(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.';
  });
  if (!allowed || text.empty() || text.size() > kTenantBytesMax)
    return Expected("a tenant's name of 1..63 of a-z, 0-9, '-', '_', '.'");
  return std::string(text);
}

absl::StatusOr<Role> ParseRole(absl::string_view text) {
  for (const Role role : {Role::kReadOnly, Role::kWorker, Role::kAdmin})
    if (text == RoleName(role)) return role;
  return Expected("a role: worker, admin or read-only");
}

absl::Status AddToken(const Words& words, TokensFile& file) {
  if (words.size() != 4) return Expected("token SECRET TENANT ROLE");
  TokensFile::Token token;
  SSMD_ASSIGN_OR_RETURN(token.hash, ParseSecret(words[1]));
  SSMD_ASSIGN_OR_RETURN(token.tenant, ParseTenant(words[2]));
  SSMD_ASSIGN_OR_RETURN(token.role, ParseRole(words[3]));
  for (const TokensFile::Token& other : file.tokens)
    if (other.hash == token.hash)
      return Expected("another secret: this one is in the file already");
  if (file.tokens.size() == kTokensMax)
    return Expected(absl::StrCat("at most ", kTokensMax, " tokens"));
  file.tokens.push_back(std::move(token));
  return absl::OkStatus();
}

absl::Status AddQuota(const Words& words, TokensFile& file) {
  if (words.size() < 3) return Expected("quota TENANT LIMIT=NUMBER...");
  SSMD_ASSIGN_OR_RETURN(const std::string tenant, ParseTenant(words[1]));
  Quota quota;
  for (size_t i = 2; i < words.size(); ++i) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(words[i], absl::MaxSplits('=', 1));
    uint64_t* const limit = parts.first == "sequences"        ? &quota.sequences
                            : parts.first == "pages"          ? &quota.pages
                            : parts.first == "snapshot-bytes" ? &quota.snapshot_bytes
                                                              : nullptr;
    if (limit == nullptr) return Expected("sequences=, pages= or snapshot-bytes=");
    if (*limit != Quota::kUnlimited)
      return Expected(absl::StrCat(parts.first, "= once, got it twice"));
    SSMD_ASSIGN_OR_RETURN(*limit, ParseByteSize(parts.second));
  }
  if (!file.quotas.emplace(tenant, quota).second)
    return Expected(absl::StrCat("one quota of tenant ", tenant, ", got a second one"));
  return absl::OkStatus();
}

}  // namespace

TokenHash HashToken(absl::string_view secret) {
  TokenHash hash;
  SHA256(reinterpret_cast<const unsigned char*>(secret.data()), secret.size(), hash.data());
  return hash;
}

absl::StatusOr<TokensFile> ParseTokens(absl::string_view name, absl::string_view text) {
  TokensFile file;
  absl::flat_hash_set<std::string> tenants;
  size_t number = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    Words words = absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    words.erase(std::find_if(words.begin(), words.end(),
                             [](absl::string_view word) { return word[0] == '#'; }),
                words.end());
    if (words.empty()) continue;
    absl::Status status = words[0] == "token" ? AddToken(words, file)
                          : words[0] == "quota"
                              ? AddQuota(words, file)
                              : Expected("a line that begins with token or quota");
    if (status.ok() && words[0] == "token") tenants.insert(file.tokens.back().tenant);
    if (tenants.size() > kTenantsMax)
      status = Expected(absl::StrCat("at most ", kTenantsMax, " tenants"));
    if (!status.ok())
      return absl::InvalidArgumentError(absl::StrCat(name, ":", number, ": ", status.message()));
  }
  for (const auto& [tenant, quota] : file.quotas)
    if (!tenants.contains(tenant))
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": quota of tenant ", tenant, ", who has no token"));
  if (file.tokens.empty())
    return absl::InvalidArgumentError(absl::StrCat(name, ": expected a token, found none"));
  return file;
}

const TokensFile::Token* FindToken(const TokensFile& file, const TokenHash& hash) {
  const TokensFile::Token* found = nullptr;
  for (const TokensFile::Token& token : file.tokens)
    if (CRYPTO_memcmp(token.hash.data(), hash.data(), hash.size()) == 0) found = &token;
  return found;
}

}  // namespace ssmd
