#include "service/config.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <limits>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/status.h"

#ifndef SSMD_VERSION
#define SSMD_VERSION "unknown"
#endif

namespace ssmd {
namespace {

constexpr uint32_t kMillisMax = 86'400'000;  // a day

// Adds flags whose mistakes read "--flag: expected ..., got '...'".
class FlagSet {
 public:
  explicit FlagSet(CLI::App& app) : app_(app) {}

  void Group(std::string group) { group_ = std::move(group); }

  void Uint(const std::string& flag, uint32_t& target, uint32_t lowest, uint32_t highest,
            const std::string& unit, const std::string& help) {
    Add(flag, unit, absl::StrCat(help, " [", target, "]"), [=, &target](const std::string& text) {
      uint32_t value = 0;
      if (!absl::SimpleAtoi(text, &value) || value < lowest || value > highest)
        Refuse(flag, absl::StrCat("an integer ", lowest, "..", highest), text);
      target = value;
    });
  }

  void Bytes(const std::string& flag, uint64_t& target, uint64_t lowest, uint64_t highest,
             const std::string& help) {
    Add(flag, "BYTES", absl::StrCat(help, " [", target, "]"),
        [=, &target](const std::string& text) {
          const auto value = ParseByteSize(text);
          if (!value.ok()) throw CLI::ValidationError(flag, std::string(value.status().message()));
          if (*value < lowest || *value > highest)
            Refuse(flag, absl::StrCat(lowest, "..", highest, " bytes"), text);
          target = *value;
        });
  }

  void Text(const std::string& flag, std::string& target, const std::string& unit,
            const std::string& help) {
    Add(flag, unit, absl::StrCat(help, " [", target, "]"),
        [&target](const std::string& text) { target = text; });
  }

  void Choice(const std::string& flag, std::string& target, std::vector<std::string> choices,
              const std::string& help) {
    const std::string list = absl::StrJoin(choices, "|");
    Add(flag, list, absl::StrCat(help, " [", target, "]"),
        [flag, &target, choices, list](const std::string& text) {
          if (std::find(choices.begin(), choices.end(), text) == choices.end())
            Refuse(flag, absl::StrCat("one of ", list), text);
          target = text;
        });
  }

 private:
  [[noreturn]] static void Refuse(const std::string& flag, const std::string& expected,
                                  const std::string& actual) {
    throw CLI::ValidationError(flag, absl::StrCat("expected ", expected, ", got '", actual, "'"));
  }

  void Add(const std::string& flag, const std::string& unit, const std::string& help,
           std::function<void(const std::string&)> set) {
    app_.add_option_function<std::string>(flag, std::move(set), help)
        ->type_name(unit)
        ->group(group_)
        ->take_last();
  }

  CLI::App& app_;
  std::string group_;
};

void AddFlags(CLI::App& app, ServerConfig& config, uint64_t& message_bytes) {
  FlagSet flags(app);
  flags.Group("Network");
  flags.Text("--listen", config.listen, "ADDRESS",
             "gRPC address: host:port (port 0: any free one) or unix:path");
  flags.Text("--metrics-listen", config.metrics_listen, "ADDRESS",
             "Prometheus page, host:port; empty turns it off");
  flags.Bytes("--message-bytes-max", message_bytes, 64u << 10, 1u << 30,
              "Largest request or reply; K, M, G suffixes");
  flags.Group("Memory and compute");
  flags.Bytes("--state-memory", config.state_bytes_max, 1u << 20, uint64_t{1} << 50,
              "Memory for checkpoints and rings of all models; K, M, G, T suffixes");
  flags.Uint("--models-max", config.models_max, 1, 1024, "COUNT", "Registered models");
  flags.Uint("--compute-threads", config.compute_threads, 0, 1024, "COUNT",
             "Threads that run kernels; 0: one per hardware thread");
  flags.Uint("--verify-workers", config.verify_workers, 1, 64, "COUNT",
             "Verify calls that run at one time; they share the compute threads");
  flags.Uint("--verify-queue-max", config.verify_queue_max, 1, 65'536, "COUNT",
             "Verify calls that wait; above it: RESOURCE_EXHAUSTED");
  flags.Group("Capacity of models that do not ask for their own");
  flags.Uint("--default-sequences-max", config.capacity.sequences_max, 1, 1u << 20, "COUNT",
             "Live sequences");
  flags.Uint("--default-snapshots-max", config.capacity.snapshots_max, 0, 1u << 20, "COUNT",
             "Snapshots");
  flags.Uint("--default-spare-pages", config.capacity.spare_pages, 0, 1u << 20, "COUNT",
             "Checkpoint pages for flushes between plan and commit; 0: a quarter of the sequences");
  flags.Uint("--default-rows-max", config.capacity.rows_max, 0, 65'536, "COUNT",
             "Rows of one step; 0: as many as sequences");
  flags.Uint("--default-steps-max", config.capacity.steps_max, 1, 4096, "COUNT", "Open steps");
  flags.Group("Sessions");
  flags.Uint("--sessions-max", config.sessions_max, 1, 65'536, "COUNT", "Open sessions");
  flags.Uint("--lease-default-ms", config.lease_ms_default, 1, kMillisMax, "MS",
             "Lease of a session that asks for none");
  flags.Uint("--lease-min-ms", config.lease_ms_min, 1, kMillisMax, "MS", "Shortest lease granted");
  flags.Uint("--lease-max-ms", config.lease_ms_max, 1, kMillisMax, "MS", "Longest lease granted");
  flags.Uint("--step-timeout-max-ms", config.step_timeout_ms_max, 1, kMillisMax, "MS",
             "A step open for longer is aborted");
  flags.Uint("--sweep-interval-ms", config.sweep_interval_ms, 1, 60'000, "MS",
             "How often leases and step deadlines are looked at");
  flags.Uint("--drain-timeout-ms", config.drain_timeout_ms, 0, kMillisMax, "MS",
             "After SIGTERM: time for live sequences to finish");
  flags.Group("Debugging");
  app.add_flag("--poison-garbage", config.poison_garbage,
               "Fill bytes that no record owns with NaN (slow)")
      ->group("Debugging");
  flags.Choice("--log-level", config.log_level, {"trace", "debug", "info", "warn", "error", "off"},
               "Least severe message logged");
  flags.Choice("--log-format", config.log_format, {"text", "json"}, "One line a message");
}

// host:port or unix:path; the host is left to the resolver.
absl::Status CheckAddress(absl::string_view flag, absl::string_view address, bool unix_allowed) {
  if (unix_allowed && absl::StartsWith(address, "unix:") && address.size() > 5)
    return absl::OkStatus();
  const size_t colon = address.rfind(':');
  uint32_t port = 0;
  if (colon != absl::string_view::npos && colon > 0 &&
      absl::SimpleAtoi(address.substr(colon + 1), &port) && port <= 65'535) {
    return absl::OkStatus();
  }
  return InvalidField(
      flag, absl::StrCat(flag, ": expected host:port", unix_allowed ? " or unix:path" : "",
                         " with a port 0..65535, got '", address, "'"));
}

CommandLine Leave(int exit_code, std::string text) {
  CommandLine line;
  line.exit_code = exit_code;
  line.text = std::move(text);
  return line;
}

}  // namespace

const char* ServerVersion() { return SSMD_VERSION; }

CommandLine ParseCommandLine(int argc, const char* const* argv) {
  CommandLine line;
  uint64_t message_bytes = line.config.message_bytes_max;
  CLI::App app("ssmd-server: keeps the recurrent state of hybrid language models.", "ssmd-server");
  app.get_formatter()->column_width(44);
  app.set_version_flag("--version", absl::StrCat("ssmd-server ", ServerVersion()));
  AddFlags(app, line.config, message_bytes);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return Leave(0, app.help());
  } catch (const CLI::CallForVersion&) {
    return Leave(0, absl::StrCat(app.version(), "\n"));
  } catch (const CLI::ParseError& error) {
    return Leave(2, absl::StrCat("ssmd-server: ", error.what(), " (see --help)\n"));
  }
  line.config.message_bytes_max = static_cast<uint32_t>(message_bytes);
  if (const absl::Status status = ValidateConfig(line.config); !status.ok())
    return Leave(2, absl::StrCat("ssmd-server: ", status.message(), " (see --help)\n"));
  line.run = true;
  return line;
}

absl::Status ValidateConfig(const ServerConfig& config) {
  SSMD_RETURN_IF_ERROR(CheckAddress("--listen", config.listen, true));
  if (!config.metrics_listen.empty())
    SSMD_RETURN_IF_ERROR(CheckAddress("--metrics-listen", config.metrics_listen, false));
  if (config.lease_ms_min > config.lease_ms_max)
    return InvalidField("--lease-min-ms",
                        absl::StrCat("--lease-min-ms: expected at most --lease-max-ms ",
                                     config.lease_ms_max, ", got '", config.lease_ms_min, "'"));
  if (config.lease_ms_default < config.lease_ms_min ||
      config.lease_ms_default > config.lease_ms_max)
    return InvalidField(
        "--lease-default-ms",
        absl::StrCat("--lease-default-ms: expected ", config.lease_ms_min, "..",
                     config.lease_ms_max, " (--lease-min-ms..--lease-max-ms), got '",
                     config.lease_ms_default, "'"));
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ParseByteSize(absl::string_view text) {
  const auto refuse = [text] {
    return absl::InvalidArgumentError(absl::StrCat(
        "expected an integer with an optional K, M, G or T suffix (powers of 1024), got '", text,
        "'"));
  };
  const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  uint64_t value = 0;
  if (digits == 0 || !absl::SimpleAtoi(text.substr(0, digits), &value)) return refuse();
  std::string suffix = absl::AsciiStrToUpper(text.substr(digits));
  if (suffix.size() > 1 && suffix.back() == 'B') suffix.pop_back();  // KB, KIB
  if (suffix.size() == 2 && suffix.back() == 'I') suffix.pop_back();
  static constexpr absl::string_view kUnits = "KMGT";
  if (suffix.empty() || suffix == "B") return value;
  const size_t unit = kUnits.find(suffix);
  if (suffix.size() != 1 || unit == absl::string_view::npos) return refuse();
  const unsigned shift = static_cast<unsigned>(10 * (unit + 1));
  if (value > (std::numeric_limits<uint64_t>::max() >> shift)) return refuse();
  return value << shift;
}

std::string DescribeConfig(const ServerConfig& config) {
  const CapacityDefaults& capacity = config.capacity;
  return absl::StrCat(
      "listen=", config.listen, " metrics_listen=", config.metrics_listen,
      " message_bytes_max=", config.message_bytes_max, " state_memory=", config.state_bytes_max,
      " models_max=", config.models_max, " compute_threads=", config.compute_threads,
      " verify_workers=", config.verify_workers, " verify_queue_max=", config.verify_queue_max,
      " default_sequences_max=", capacity.sequences_max,
      " default_snapshots_max=", capacity.snapshots_max,
      " default_spare_pages=", capacity.spare_pages, " default_rows_max=", capacity.rows_max,
      " default_steps_max=", capacity.steps_max, " sessions_max=", config.sessions_max,
      " lease_default_ms=", config.lease_ms_default, " lease_min_ms=", config.lease_ms_min,
      " lease_max_ms=", config.lease_ms_max, " step_timeout_max_ms=", config.step_timeout_ms_max,
      " sweep_interval_ms=", config.sweep_interval_ms,
      " drain_timeout_ms=", config.drain_timeout_ms,
      " poison_garbage=", config.poison_garbage ? "true" : "false", " log_level=", config.log_level,
      " log_format=", config.log_format);
}

}  // namespace ssmd
