// The tokens file: who may call, as whom, and how much of the server a tenant may hold.
//
//   # secret                   tenant   role: worker, admin or read-only
//   token  Zq1x...             team-a   worker
//   token  sha256:9f86d0...    ops      admin          # the hash of a secret in place of it
//   quota  team-a  sequences=32 pages=48 snapshot-bytes=2G
//
// A secret is 16..512 printable characters without blanks, the first not '#'; a tenant's name 1..63
// of a-z, 0-9, '-',
// '_', '.'. Several tokens may be of one tenant, so that they can be rotated. At most kTokensMax
// tokens and kTenantsMax tenants. Secrets are kept as SHA-256 and never appear in messages.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "service/roles.h"

namespace ssmd {

inline constexpr size_t kTokensMax = 1024;
inline constexpr size_t kTenantsMax = 1024;

using TokenHash = std::array<uint8_t, 32>;
TokenHash HashToken(absl::string_view secret);

// What a tenant may hold at one time, over all models.
struct Quota {
  static constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();
  uint64_t sequences = kUnlimited;       // live, and kept for adoption
  uint64_t pages = kUnlimited;           // one for each sequence and snapshot, shared or not
  uint64_t snapshot_bytes = kUnlimited;  // a page, a ring and the worker's window for each
};

struct TokensFile {
  struct Token {
    TokenHash hash;
    std::string tenant;
    Role role = Role::kNone;
  };
  std::vector<Token> tokens;
  absl::flat_hash_map<std::string, Quota> quotas;  // by tenant; those without have none
};

// Errors: INVALID_ARGUMENT "NAME:LINE: ...".
absl::StatusOr<TokensFile> ParseTokens(absl::string_view name, absl::string_view text);

// The token with this hash, or null. Takes the same time whichever it is.
const TokensFile::Token* FindToken(const TokensFile& file, const TokenHash& hash);

}  // namespace ssmd
