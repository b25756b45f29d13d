#include "service/auth.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "service/config_file.h"

namespace ssmd {
namespace {

constexpr size_t kFileBytesMax = 1u << 20;

absl::string_view ShortName(absl::string_view full_name) {
  return full_name.substr(full_name.rfind('/') + 1);
}

absl::Status Unauthenticated(absl::string_view what, absl::string_view method, Role least) {
  return absl::UnauthenticatedError(absl::StrCat("authorization: expected 'Bearer' and a token, ",
                                                 what, " (", ShortName(method),
                                                 " needs one of role ", RoleName(least), ")"));
}

absl::Status CheckRole(Role role, const MethodRole& needed) {
  if (role >= needed.least) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat(ShortName(needed.method), " needs role ",
                                                  RoleName(needed.least), ", this token has ",
                                                  RoleName(role)));
}

// The secret of the call, or "" when there is none.
absl::string_view BearerOf(const grpc::ServerContextBase& context) {
  const auto found = context.client_metadata().find("authorization");
  if (found == context.client_metadata().end()) return "";
  absl::string_view value(found->second.data(), found->second.size());
  if (!absl::ConsumePrefix(&value, "Bearer ") && !absl::ConsumePrefix(&value, "bearer ")) return "";
  return value;
}

}  // namespace

absl::Status Authorizer::Load() {
  SSMD_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path_));
  if (text.size() > kFileBytesMax)
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": expected at most ", kFileBytesMax, " bytes, got ", text.size()));
  const std::shared_ptr<const Tokens> current = Current();
  const TokenHash content = HashToken(text);
  if (current != nullptr && current->content == content) return absl::OkStatus();
  auto tokens = std::make_shared<Tokens>();
  SSMD_ASSIGN_OR_RETURN(tokens->file, ParseTokens(path_, text));
  for (const TokensFile::Token& token : tokens->file.tokens) {
    if (tokens->tenants.contains(token.tenant)) continue;
    const auto quota = tokens->file.quotas.find(token.tenant);
    SSMD_ASSIGN_OR_RETURN(
        tokens->tenants[token.tenant],
        tenants_.Introduce(token.tenant,
                           quota == tokens->file.quotas.end() ? Quota() : quota->second));
  }
  tokens->content = content;
  tokens->generation = current == nullptr ? 1 : current->generation + 1;
  spdlog::info("tokens: {} of {} tenants from {}", tokens->file.tokens.size(),
               tokens->tenants.size(), path_);
  const uint64_t generation = tokens->generation;
  {
    absl::MutexLock lock(&mu_);
    tokens_ = std::move(tokens);
  }
  generation_.store(generation, std::memory_order_release);
  return absl::OkStatus();
}

void Authorizer::LoadIfDue(absl::Time now, absl::Duration interval) {
  if (!enabled()) return;
  absl::MutexLock lock(&load_mu_);
  if (now - looked_ < interval) return;
  looked_ = now;
  const absl::Status status = Load();
  if (!status.ok() && !broken_)
    spdlog::error("tokens: {}; those read before stay in force", std::string(status.message()));
  broken_ = !status.ok();
}

std::shared_ptr<const Authorizer::Tokens> Authorizer::Current() const {
  absl::ReaderMutexLock lock(&mu_);
  return tokens_;
}

absl::StatusOr<Principal> Authorizer::Authorize(Door door, Method method,
                                                const grpc::ServerContextBase& context) const {
  const MethodRole* const needed = FindMethodRole(method);
  return Authorize(door, needed == nullptr ? MethodName(method) : needed->method, context);
}

absl::StatusOr<Principal> Authorizer::Authorize(Door door, absl::string_view full_name,
                                                const grpc::ServerContextBase& context) const {
  const MethodRole* const needed = FindMethodRole(full_name);
  if (needed == nullptr)
    return absl::PermissionDeniedError(absl::StrCat(full_name, " is not served to anybody"));
  if (needed->least == Role::kAdmin && door == Door::kPublic)
    return absl::PermissionDeniedError(
        absl::StrCat(ShortName(full_name), " is answered on the address of --admin-listen"));
  if (!enabled()) return Principal{};
  if (needed->least == Role::kNone) return Principal{.role = Role::kNone};
  const absl::string_view secret = BearerOf(context);
  if (secret.empty()) return Unauthenticated("got none", full_name, needed->least);
  return Identify(*Current(), HashToken(secret), *needed);
}

absl::StatusOr<Principal> Authorizer::Identify(const Tokens& tokens, const TokenHash& hash,
                                               const MethodRole& needed) const {
  const TokensFile::Token* const token = FindToken(tokens.file, hash);
  if (token == nullptr)
    return Unauthenticated("got one that the server does not know", needed.method, needed.least);
  SSMD_RETURN_IF_ERROR(CheckRole(token->role, needed));
  return Principal{.tenant = tokens.tenants.at(token->tenant),
                   .role = token->role,
                   .hash = hash,
                   .generation = tokens.generation};
}

absl::Status Authorizer::Recheck(const Principal& principal, Method method) const {
  if (!enabled() || principal.generation == generation_.load(std::memory_order_acquire))
    return absl::OkStatus();
  SSMD_ASSIGN_OR_RETURN(const Principal now,
                        Identify(*Current(), principal.hash, *FindMethodRole(method)));
  if (now.tenant == principal.tenant) return absl::OkStatus();
  return absl::UnauthenticatedError("authorization: the token is another tenant's now");
}

}  // namespace ssmd
