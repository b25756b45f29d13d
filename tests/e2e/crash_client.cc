// A worker that dies: opens a session, creates sequences, opens a step, verifies one layer, says
// so, and then waits to be killed. Arguments: address, lease in ms.
#include <unistd.h>

#include <cstdio>

#include "tests/e2e/harness.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  ssmd::e2e::Client client(argv[1]);
  client.Start(static_cast<uint32_t>(std::atoi(argv[2])));
  const std::vector<uint64_t> ids = client.Create(2);
  const uint64_t step = client.Begin({{ids[0], 1, 2}, {ids[1], 1, 1}});
  const bool verified = client.Call(&ssmd::e2e::Stub::Verify, client.VerifyOf(step, 3, 3)).ok();
  std::printf("%s\n", verified ? "mid-step" : "failed");
  std::fflush(stdout);
  while (true) pause();
}
