// Field report 110: a tensor message may be larger than gRPC's default of 4 MiB, up to the limit
// that the server reports, and not beyond.
#include "tests/e2e/harness.h"

namespace ssmd::e2e {
namespace {

TEST(TransportTest, MessagesBeyondTheDefaultLimitPass) {
  ServerConfig config = SmallConfig();
  config.message_bytes_max = 8u << 20;
  const auto server = StartServer(config);
  Client client(server->address());
  client.Start();
  v1::VerifyRequest request = client.VerifyOf(1, 3, 1);
  const size_t overhead = request.ByteSizeLong() + 64;
  // 4.1 MiB and just under the limit reach us: the answer is ours, about the step.
  for (const size_t bytes : {size_t{4300000}, config.message_bytes_max - overhead}) {
    request.mutable_q()->mutable_data()->resize(bytes);
    const auto reply = client.Call(&Stub::Verify, request);
    EXPECT_EQ(reply.info.domain(), "ssmd") << reply.status.error_message();
    EXPECT_NE(reply.status.error_code(), grpc::RESOURCE_EXHAUSTED);
  }
  request.mutable_q()->mutable_data()->resize(config.message_bytes_max + 1);
  EXPECT_EQ(client.Call(&Stub::Verify, request).status.error_code(), grpc::RESOURCE_EXHAUSTED);
}

}  // namespace
}  // namespace ssmd::e2e
