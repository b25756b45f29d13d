// The story that `ssmd-demo` tells, in six parts; each prints what it did and what it found.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/demo/compare.h"
#include "client/demo/generate.h"
#include "client/demo/remote_ssm.h"
#include "client/tools/metrics_page.h"

namespace ssmd::demo {

struct DemoOptions {
  client::Security security;
  std::string server, metrics;  // metrics: "" leaves the traffic part out
  std::string weights, text;
  uint64_t seed = 1;
  uint32_t prompts = 5, prompt_bytes = 128, new_bytes = 420;
  uint32_t resume_bytes = 200;
  float temperature = 0.8f;
  RemoteOptions remote;
  v1::FlushMode flush = v1::FLUSH_MODE_FUSED;
  uint32_t fork_bytes = 120;
};

class Demo {
 public:
  explicit Demo(DemoOptions options) : options_(std::move(options)) {}
  ~Demo();

  // Runs everything. OK also when a check fails: see passed().
  absl::Status Run();

  // Every check that the demo makes came out as it should.
  bool passed() const { return passed_; }

 private:
  absl::Status Load();              // weights and text
  absl::Status Connect();           // server, model, session; prints the header
  absl::Status GenerateRemotely();  // five prompts through the server
  absl::Status CompareWithLocal();  // the same without it
  absl::Status Fork();              // one prompt, four continuations
  absl::Status ResumeElsewhere();   // snapshot, new process
  absl::Status Finish();            // traffic, release, table
  absl::StatusOr<GenerateStats> RunAll(SsmLayers& ssm, std::vector<Stream>& streams,
                                       const std::string& label);
  std::vector<std::string> ChoosePrompts() const;
  void Check(const std::string& name, bool good);

  const DemoOptions options_;
  bool passed_ = true;
  std::vector<std::pair<std::string, bool>> checks_;

  std::unique_ptr<HybridModel> model_;
  std::string metadata_bits_, metadata_text_;
  std::string text_;

  std::unique_ptr<Client> client_;
  v1::RegisterModelResponse registered_;
  std::unique_ptr<client::Session> session_;
  std::unique_ptr<RemoteSsm> remote_;
  client::Samples metrics_before_;
  uint64_t flushes_before_ = 0;

  std::vector<Stream> remote_streams_;
  GenerateStats remote_stats_;
  std::string scratch_folder_;  // "": none
};

}  // namespace ssmd::demo
