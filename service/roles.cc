#include "service/roles.h"

#include <array>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ssmd {
namespace {

constexpr MethodRole kRoles[] = {
    {"/ssmd.v1.StateService/RegisterModel", Role::kWorker},
    {"/ssmd.v1.StateService/UnregisterModel", Role::kAdmin},  // of all tenants
    {"/ssmd.v1.StateService/GetCapabilities", Role::kReadOnly},
    {"/ssmd.v1.StateService/OpenSession", Role::kReadOnly},
    {"/ssmd.v1.StateService/KeepAlive", Role::kReadOnly},
    {"/ssmd.v1.StateService/CloseSession", Role::kReadOnly},
    {"/ssmd.v1.StateService/CreateSequences", Role::kWorker},
    {"/ssmd.v1.StateService/ForkSequences", Role::kWorker},
    {"/ssmd.v1.StateService/ReleaseSequences", Role::kWorker},
    {"/ssmd.v1.StateService/AdoptSequences", Role::kWorker},
    {"/ssmd.v1.StateService/FlushSequences", Role::kWorker},
    {"/ssmd.v1.StateService/GetSequences", Role::kReadOnly},
    {"/ssmd.v1.StateService/BeginStep", Role::kWorker},
    {"/ssmd.v1.StateService/Verify", Role::kWorker},
    {"/ssmd.v1.StateService/Commit", Role::kWorker},
    {"/ssmd.v1.StateService/AbortStep", Role::kWorker},
    {"/ssmd.v1.StateService/Rollback", Role::kWorker},
    {"/ssmd.v1.StateService/CreateSnapshot", Role::kWorker},
    {"/ssmd.v1.StateService/DeleteSnapshot", Role::kWorker},
    {"/ssmd.v1.StateService/LookupPrefix", Role::kReadOnly},
    {"/ssmd.v1.StateService/ListSnapshots", Role::kReadOnly},
    {"/ssmd.v1.StateService/ImportState", Role::kWorker},
    {"/ssmd.v1.StateService/ExportState", Role::kReadOnly},
    {"/ssmd.v1.StateService/Steps", Role::kWorker},
    {"/ssmd.v1.StateService/GetStatus", Role::kReadOnly},
    {"/ssmd.v1.AdminService/Drain", Role::kAdmin},
    {"/ssmd.v1.AdminService/SetLogLevel", Role::kAdmin},
    {"/ssmd.v1.AdminService/ListSessions", Role::kAdmin},
    {"/ssmd.v1.AdminService/EvictSession", Role::kAdmin},
    {"/ssmd.v1.AdminService/EvictSnapshots", Role::kAdmin},
    // gRPC's own.
    {"/grpc.health.v1.Health/", Role::kNone},  // probes carry no token
    {"/grpc.reflection.v1alpha.ServerReflection/", Role::kReadOnly},
    {"/grpc.channelz.v1.Channelz/", Role::kAdmin},  // shows the peers of all tenants
};

}  // namespace

const char* RoleName(Role role) {
  constexpr const char* kNames[] = {"none", "read-only", "worker", "admin"};
  return kNames[static_cast<size_t>(role)];
}

absl::Span<const MethodRole> MethodRoles() { return kRoles; }

const MethodRole* FindMethodRole(absl::string_view full_name) {
  for (const MethodRole& row : kRoles) {
    const bool whole_service = absl::EndsWith(row.method, "/");
    if (whole_service ? absl::StartsWith(full_name, row.method) : full_name == row.method)
      return &row;
  }
  return nullptr;
}

const MethodRole* FindMethodRole(Method method) {
  static const std::array<const MethodRole*, kMethodCount> rows = [] {
    std::array<const MethodRole*, kMethodCount> found{};
    for (size_t i = 0; i < kMethodCount; ++i)
      for (const MethodRole& row : kRoles)
        if (absl::EndsWith(row.method, absl::StrCat("/", MethodName(static_cast<Method>(i)))))
          found[i] = &row;
    return found;
  }();
  return rows[static_cast<size_t>(method)];
}

}  // namespace ssmd
