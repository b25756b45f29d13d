// Who calls, and whether the call's role suffices. The one place that decides it.
//
// Without a tokens file every caller is an admin of no tenant. With one, each call carries
// `authorization: Bearer SECRET`; the token says the caller's tenant and role. The calls of a
// stream that has begun are checked again when the file has changed, so a token that is taken out
// of it ends with it.
//
// Two doors. With --admin-listen, methods that need an admin are answered on that address alone.
//
// Thread-safe.
#pragma once

#include <grpcpp/server_context.h>

#include <atomic>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "service/tenants.h"
#include "service/tokens.h"

namespace ssmd {

struct Principal {
  TenantId tenant = kNoTenant;
  Role role = Role::kAdmin;
  // Of its token; meaningless without a tokens file.
  TokenHash hash{};
  uint64_t generation = 0;  // of the file that said so
};

// Which address a call came in by.
enum class Door : uint8_t {
  kOnly,    // there is no other
  kPublic,  // admins have their own
  kAdmin,
};

class Authorizer {
 public:
  // `path` "": no tokens. `tenants` outlives this.
  Authorizer(std::string path, TenantTable* tenants) : path_(std::move(path)), tenants_(*tenants) {}

  bool enabled() const { return !path_.empty(); }

  // Reads the file. Errors: those of ReadWholeFile and ParseTokens; what was read before stays.
  absl::Status Load();
  // Reads it when `interval` has passed since the last look, and logs what came of it.
  void LoadIfDue(absl::Time now, absl::Duration interval);

  // Errors: UNAUTHENTICATED without a token of the file; PERMISSION_DENIED when the method needs a
  // higher role, another door, or is of no table.
  absl::StatusOr<Principal> Authorize(Door door, Method method,
                                      const grpc::ServerContextBase& context) const;
  absl::StatusOr<Principal> Authorize(Door door, absl::string_view full_name,
                                      const grpc::ServerContextBase& context) const;

  // A later call of a stream that was authorized for a method: is its token still good for it?
  // Errors: as Authorize.
  absl::Status Recheck(const Principal& principal, Method method) const;

 private:
  struct Tokens {
    TokensFile file;
    absl::flat_hash_map<std::string, TenantId> tenants;  // by name
    TokenHash content{};                                 // of the file
    uint64_t generation = 0;
  };
  absl::StatusOr<Principal> Identify(const Tokens& tokens, const TokenHash& hash,
                                     const MethodRole& needed) const;
  std::shared_ptr<const Tokens> Current() const;

  const std::string path_;
  TenantTable& tenants_;
  absl::Mutex load_mu_;  // one load at a time
  absl::Time looked_ ABSL_GUARDED_BY(load_mu_) = absl::InfinitePast();
  bool broken_ ABSL_GUARDED_BY(load_mu_) = false;  // the last load failed, and was logged
  std::atomic<uint64_t> generation_{0};
  mutable absl::Mutex mu_;
  std::shared_ptr<const Tokens> tokens_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ssmd
