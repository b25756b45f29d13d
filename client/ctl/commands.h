// The commands of ssmctl. Each prints its result on stdout and returns an error, of one line, for
// stderr.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/security.h"

namespace ssmd::ctl {

struct Options {
  std::string server;
  client::Security security;
  bool json = false;
  // Of a command, those that it has:
  std::string model;  // name or id; "": all, or the file's
  std::string file;
  std::string digest;  // as printed
  uint64_t position = 0;
  std::string session;                 // an ended one, to adopt from
  std::vector<std::string> sequences;  // ids
  uint32_t keep_seconds = 600;         // adopted sequences wait for the next owner so long
  bool force = false;                  // replace a file, a snapshot
};

absl::Status Status(const Options& options);
absl::Status Models(const Options& options);
absl::Status Sequences(const Options& options);
absl::Status Snapshots(const Options& options);
absl::Status Steps(const Options& options);
absl::Status Export(const Options& options);
absl::Status Import(const Options& options);
absl::Status ModelFile(const Options& options);
absl::Status Unregister(const Options& options);
absl::Status Flush(const Options& options);

}  // namespace ssmd::ctl
