// What one server process is told: settings, their defaults and their checks.
//
// A setting `lease-max-ms` is the flag --lease-max-ms, the environment variable SSMD_LEASE_MAX_MS
// and the key lease-max-ms of the file that --config (or SSMD_CONFIG) names. A flag wins over the
// environment, that over the file, that over the default; every value given is checked, even one
// that loses.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ssmd {

// Capacity of a model whose registration leaves a field zero.
struct CapacityDefaults {
  uint32_t sequences_max = 64;
  uint32_t snapshots_max = 64;
  uint32_t spare_pages = 0;  // 0: a quarter of sequences_max, at least 2
  uint32_t rows_max = 0;     // 0: sequences_max
  uint32_t steps_max = 64;
};

struct ServerConfig {
  std::string listen = "127.0.0.1:50051";         // host:port or unix:path; port 0: any free one
  std::string metrics_listen = "127.0.0.1:9464";  // host:port; empty: off
  uint32_t message_bytes_max = 64u << 20;         // largest request or reply

  // Files; "": off. listen.h and auth.h say what they do.
  std::string tls_cert, tls_key;  // both or none
  std::string tls_client_ca;      // clients must have a certificate of it
  std::string tokens_file;
  uint32_t tls_reload_ms = 10'000;  // how often these files are looked at
  bool listen_insecure = false;     // listen anywhere without TLS or tokens
  std::string admin_listen;         // as listen; "": admin calls are answered on that

  std::string backend = "auto";                  // auto | cuda | cpu
  uint64_t state_bytes_max = uint64_t{1} << 30;  // pools of all models together
  uint32_t models_max = 16;
  uint32_t compute_threads = 0;                  // 0: one per hardware thread
  uint32_t verify_workers = 2;                   // Verify calls that run at one time
  uint32_t verify_queue_max = 256;               // Verify calls that wait
  uint64_t verify_queue_bytes_max = 256u << 20;  // memory of their requests
  uint32_t flush_threads = 1;                    // of background flushes; 0: none
  uint32_t imports_max = 4;                      // imports that run at one time
  uint32_t stream_calls_max = 16;                // calls of one Steps stream in work
  uint32_t stream_begins_max = 4;                // of them, BeginSteps held for an open step
  uint32_t chunk_bytes_max = 1u << 20;           // of one Import or Export chunk
  CapacityDefaults capacity;
  std::vector<std::string> model_files;  // registered at start; see model_files.h

  uint32_t sessions_max = 1024;
  uint32_t lease_ms_default = 30'000;
  uint32_t lease_ms_min = 1'000;
  uint32_t lease_ms_max = 600'000;
  uint32_t adoption_ms_max = 600'000;
  uint32_t step_timeout_ms_max = 60'000;
  uint32_t sweep_interval_ms = 100;  // how often leases and step deadlines are looked at
  uint32_t drain_timeout_ms = 5'000;

  bool poison_garbage = false;
  uint32_t slow_step_ms = 1'000;  // from plan to commit: logged above it; 0: never
  std::string log_level = "info";
  std::string log_format = "text";  // text | json
};

// What the command line asked for: a configuration to run with, or text to print and leave.
struct CommandLine {
  bool run = false;
  ServerConfig config;  // when run
  int exit_code = 0;    // when not: 0 after --help, --version, --print-*; 2 after a mistake
  std::string text;     // when not: for stdout when exit_code is 0, else stderr
};

// `environment`: null, or "NAME=VALUE" strings and a null pointer, as in environ. Names that do not
// begin with SSMD_ are ignored, and so are those that Kubernetes makes of a Service's name
// (SSMD_PORT, SSMD_SERVICE_HOST, SSMD_PORT_50051_TCP_ADDR, ...).
CommandLine ParseCommandLine(int argc, const char* const* argv,
                             const char* const* environment = nullptr);

// Checks that involve more than one field, for configurations from anywhere.
absl::Status ValidateConfig(const ServerConfig& config);

// "1GiB", "512M", "65536": an integer and an optional K, M, G or T (also KiB, KB, ...), powers of
// 1024.
absl::StatusOr<uint64_t> ParseByteSize(absl::string_view text);

// One line, every setting by its flag name; printed once at startup.
std::string DescribeConfig(const ServerConfig& config);

const char* ServerVersion();

}  // namespace ssmd
