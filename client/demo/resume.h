// Moving a running generation to a new worker process.
//
// The recurrent state moves as a snapshot on the server, with the convolution windows; what the
// worker itself keeps (attention keys and values, the text with its last, unseen byte) moves in a
// small file.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/demo/generate.h"
#include "client/demo/remote_ssm.h"

namespace ssmd::demo {

// `digest` names the snapshot, which stands for the same position as the stream.
absl::Status SaveWorker(const Stream& stream, uint64_t model_id, const std::string& digest,
                        const std::string& path);

// The flags --input-form and --transport.
const char* FlagOf(v1::InputForm form);
const char* FlagOf(Transport transport);

struct ResumeOptions {
  std::string server;
  client::Security security;
  std::string weights;
  RemoteOptions remote;
  std::string state_file;
  uint32_t new_bytes = 0;
};

// In the new process: creates a sequence from the snapshot, goes on, and returns the new bytes.
absl::StatusOr<std::string> Resume(const ResumeOptions& options);

// In the old process: runs this program again with `resume` and returns what it printed. Sets
// `pid`.
absl::StatusOr<std::string> ResumeInNewProcess(const ResumeOptions& options,
                                               const std::string& scratch_folder, int64_t& pid);

}  // namespace ssmd::demo
