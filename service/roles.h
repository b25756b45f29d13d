// Which role each RPC needs: the one table. Every method of every service of ours has a row
// (tests/unit/roles_test.cc compares it with the descriptors); a method without one is refused to
// everybody.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "service/metrics.h"

namespace ssmd {

// Each role may do what those before it may.
enum class Role : uint8_t {
  kNone,      // callers without a token
  kReadOnly,  // looks: limits, status, its tenant's snapshots and their bytes
  kWorker,    // what a worker does for its tenant
  kAdmin,     // what changes the server for all tenants, or shows what they do
};
const char* RoleName(Role role);  // as in the tokens file

struct MethodRole {
  absl::string_view method;  // "/package.Service/Method", or "/package.Service/" for all of it
  Role least;
};
absl::Span<const MethodRole> MethodRoles();

// Null: no row.
const MethodRole* FindMethodRole(absl::string_view full_name);

// The row of a method that handlers count: the only one whose name ends so.
const MethodRole* FindMethodRole(Method method);

}  // namespace ssmd
