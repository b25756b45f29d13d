// Every method of every service in proto/ssmd/v1, by its descriptors.
#pragma once

#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "ssmd/v1/admin_service.pb.h"
#include "ssmd/v1/state_service.pb.h"

namespace ssmd::testing {

inline std::vector<const google::protobuf::MethodDescriptor*> OurMethods() {
  v1::GetStatusRequest::descriptor();  // links the files in
  v1::DrainRequest::descriptor();
  std::vector<const google::protobuf::MethodDescriptor*> methods;
  for (const auto& entry : std::filesystem::directory_iterator(SSMD_PROTO_FOLDER "/ssmd/v1")) {
    if (entry.path().extension() != ".proto") continue;
    const std::string name = "ssmd/v1/" + entry.path().filename().string();
    const auto* const file =
        google::protobuf::DescriptorPool::generated_pool()->FindFileByName(name);
    EXPECT_NE(file, nullptr) << name << " is not linked into this test: include its header";
    for (int s = 0; file != nullptr && s < file->service_count(); ++s)
      for (int m = 0; m < file->service(s)->method_count(); ++m)
        methods.push_back(file->service(s)->method(m));
  }
  std::sort(methods.begin(), methods.end(),
            [](const auto* a, const auto* b) { return a->full_name() < b->full_name(); });
  return methods;
}

// "/ssmd.v1.StateService/Verify"
inline std::string PathOf(const google::protobuf::MethodDescriptor& method) {
  return "/" + method.service()->full_name() + "/" + method.name();
}

}  // namespace ssmd::testing
