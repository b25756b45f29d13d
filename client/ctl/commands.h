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
  std::string level;                   // of log messages
  bool resume = false;                 // drain: serve again
  uint32_t wait_seconds = 0;           // drain: for the end of the sequences; 0: not at all
  bool all = false;                    // evict: every snapshot of the model
  double interval_seconds = 2;         // top: between readings
  bool once = false;                   // top: one picture, then leave
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
absl::Status Drain(const Options& options);
absl::Status LogLevel(const Options& options);
absl::Status EvictSession(const Options& options);
absl::Status EvictSnapshots(const Options& options);
absl::Status Sessions(const Options& options);
absl::Status Top(const Options& options);

}  // namespace ssmd::ctl
