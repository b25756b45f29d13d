// service/roles.cc: the table of roles against the descriptors of every service of ours.
#include "service/roles.h"

#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ssmd/v1/state_service.pb.h"

namespace ssmd {
namespace {

// "/package.Service/Method" of every .proto file of proto/ssmd/v1.
std::set<std::string> MethodsOfOurServices() {
  v1::GetStatusRequest::descriptor();  // links the file in
  const auto* const pool = google::protobuf::DescriptorPool::generated_pool();
  std::set<std::string> methods;
  for (const auto& entry : std::filesystem::directory_iterator(SSMD_PROTO_FOLDER "/ssmd/v1")) {
    if (entry.path().extension() != ".proto") continue;
    const std::string name = absl::StrCat("ssmd/v1/", entry.path().filename().string());
    const google::protobuf::FileDescriptor* const file = pool->FindFileByName(name);
    EXPECT_NE(file, nullptr) << name << " is not linked into this test: include its header";
    for (int s = 0; file != nullptr && s < file->service_count(); ++s)
      for (int m = 0; m < file->service(s)->method_count(); ++m)
        methods.insert(absl::StrCat("/", file->service(s)->full_name(), "/",
                                    file->service(s)->method(m)->name()));
  }
  return methods;
}

TEST(Roles, EveryMethodOfOursHasARowAndNoOther) {
  std::set<std::string> rows, short_names;
  for (const MethodRole& row : MethodRoles()) {
    if (!absl::StartsWith(row.method, "/ssmd.")) continue;
    EXPECT_TRUE(rows.emplace(row.method).second) << row.method << " twice";
    EXPECT_NE(row.least, Role::kNone) << row.method;
    EXPECT_TRUE(short_names.emplace(row.method.substr(row.method.rfind('/'))).second)
        << row.method << ": its short name must be its own";
  }
  EXPECT_EQ(rows, MethodsOfOurServices());
}

TEST(Roles, EveryCountedMethodFindsItsRow) {
  for (size_t i = 0; i < kMethodCount; ++i) {
    const auto method = static_cast<Method>(i);
    const MethodRole* const row = FindMethodRole(method);
    ASSERT_NE(row, nullptr) << MethodName(method);
    EXPECT_TRUE(absl::EndsWith(row->method, absl::StrCat("/", MethodName(method))));
    EXPECT_EQ(FindMethodRole(row->method), row);
  }
}

TEST(Roles, WholeServicesAndUnknownMethods) {
  EXPECT_EQ(FindMethodRole("/grpc.health.v1.Health/Watch")->least, Role::kNone);
  EXPECT_EQ(FindMethodRole("/grpc.channelz.v1.Channelz/GetServers")->least, Role::kAdmin);
  EXPECT_EQ(FindMethodRole("/ssmd.v1.StateService/Verify2"), nullptr);
  EXPECT_EQ(FindMethodRole("/ssmd.v1.StateService/"), nullptr);
  EXPECT_EQ(FindMethodRole(""), nullptr);
}

}  // namespace
}  // namespace ssmd
