// service/roles.cc: the table of roles against the descriptors of every service of ours.
#include "service/roles.h"

#include <gtest/gtest.h>

#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/testing/our_methods.h"

namespace ssmd {
namespace {

TEST(Roles, EveryMethodOfOursHasARowAndNoOther) {
  std::set<std::string> rows, short_names;
  for (const MethodRole& row : MethodRoles()) {
    if (!absl::StartsWith(row.method, "/ssmd.")) continue;
    EXPECT_TRUE(rows.emplace(row.method).second) << row.method << " twice";
    EXPECT_NE(row.least, Role::kNone) << row.method;
    EXPECT_TRUE(short_names.emplace(row.method.substr(row.method.rfind('/'))).second)
        << row.method << ": its short name must be its own";
  }
  std::set<std::string> methods;
  for (const auto* method : testing::OurMethods()) methods.insert(testing::PathOf(*method));
  EXPECT_EQ(rows, methods);
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
