#include "service/config.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "kernels/status.h"
#include "service/config_file.h"
#include "service/listen.h"
#include "service/log.h"
#include "service/metric_families.h"

#ifndef SSMD_VERSION
#define SSMD_VERSION "unknown"
#endif

namespace ssmd {
namespace {

constexpr uint32_t kMillisMax = 86'400'000;  // a day
constexpr absl::string_view kConfigVariable = "SSMD_CONFIG";

// One setting: where its value goes and how it reads.
struct Setting {
  std::string key;  // without dashes
  std::string group, unit, help;
  bool repeatable = false;
  bool is_switch = false;  // as a flag it takes no value
  std::function<absl::Status(const std::string&)> set;
  std::function<std::vector<std::string>()> values;  // now; one, but for a repeatable one
  std::function<void()> clear;                       // of a repeatable one
  std::string source = "default";

  std::string variable() const {
    return absl::StrCat("SSMD_", absl::AsciiStrToUpper(absl::StrReplaceAll(key, {{"-", "_"}})));
  }
};

absl::Status Refuse(absl::string_view expected, absl::string_view actual) {
  return absl::InvalidArgumentError(absl::StrCat("expected ", expected, ", got '", actual, "'"));
}

// Every setting of a ServerConfig; errors of `set` read "expected ..., got '...'".
class Settings {
 public:
  void Group(std::string group) { group_ = std::move(group); }

  template <typename Integer>
  void Uint(const std::string& key, Integer& target, uint32_t lowest, uint32_t highest,
            const std::string& unit, const std::string& help) {
    Setting& setting = Add(key, unit, absl::StrCat(help, " [", target, "]"));
    setting.set = [=, &target](const std::string& text) {
      uint32_t value = 0;
      if (!absl::SimpleAtoi(text, &value) || value < lowest || value > highest)
        return Refuse(absl::StrCat("an integer ", lowest, "..", highest), text);
      target = value;
      return absl::OkStatus();
    };
    setting.values = [&target] { return std::vector<std::string>{absl::StrCat(target)}; };
  }

  template <typename Integer>
  void Bytes(const std::string& key, Integer& target, uint64_t lowest, uint64_t highest,
             const std::string& help) {
    Setting& setting = Add(key, "BYTES", absl::StrCat(help, " [", target, "]"));
    setting.set = [=, &target](const std::string& text) -> absl::Status {
      SSMD_ASSIGN_OR_RETURN(const uint64_t value, ParseByteSize(text));
      if (value < lowest || value > highest)
        return Refuse(absl::StrCat(lowest, "..", highest, " bytes"), text);
      target = static_cast<Integer>(value);
      return absl::OkStatus();
    };
    setting.values = [&target] { return std::vector<std::string>{absl::StrCat(target)}; };
  }

  void Text(const std::string& key, std::string& target, const std::string& unit,
            const std::string& help) {
    Setting& setting = Add(key, unit, absl::StrCat(help, " [", target, "]"));
    setting.set = [&target](const std::string& text) {
      target = text;
      return absl::OkStatus();
    };
    setting.values = [&target] { return std::vector<std::string>{target}; };
  }

  void Texts(const std::string& key, std::vector<std::string>& target, const std::string& unit,
             const std::string& help) {
    Setting& setting = Add(key, unit, absl::StrCat(help, "; may be repeated"));
    setting.repeatable = true;
    setting.set = [&target](const std::string& text) {
      target.push_back(text);
      return absl::OkStatus();
    };
    setting.values = [&target] { return target; };
    setting.clear = [&target] { target.clear(); };
  }

  void Choice(const std::string& key, std::string& target, const std::vector<std::string>& choices,
              const std::string& help) {
    const std::string list = absl::StrJoin(choices, "|");
    Setting& setting = Add(key, list, absl::StrCat(help, " [", target, "]"));
    setting.set = [&target, choices, list](const std::string& text) {
      if (std::find(choices.begin(), choices.end(), text) == choices.end())
        return Refuse(absl::StrCat("one of ", list), text);
      target = text;
      return absl::OkStatus();
    };
    setting.values = [&target] { return std::vector<std::string>{target}; };
  }

  void Switch(const std::string& key, bool& target, const std::string& help) {
    Setting& setting = Add(key, "", help);
    setting.is_switch = true;
    setting.set = [&target](const std::string& text) {
      if (text != "true" && text != "false") return Refuse("true or false", text);
      target = text == "true";
      return absl::OkStatus();
    };
    setting.values = [&target] { return std::vector<std::string>{target ? "true" : "false"}; };
  }

  Setting* Find(absl::string_view key) {
    for (Setting& setting : settings_)
      if (setting.key == key) return &setting;
    return nullptr;
  }
  std::deque<Setting>& all() { return settings_; }

 private:
  Setting& Add(const std::string& key, const std::string& unit, const std::string& help) {
    Setting& setting = settings_.emplace_back();
    setting.key = key;
    setting.group = group_;
    setting.unit = unit;
    setting.help = help;
    return setting;
  }

  std::deque<Setting> settings_;  // references stay valid
  std::string group_;
};

void AddSettings(Settings& settings, ServerConfig& config) {
  settings.Group("Network");
  settings.Text("listen", config.listen, "ADDRESS",
                "gRPC address: host:port (port 0: any free one) or unix:path");
  settings.Text("metrics-listen", config.metrics_listen, "ADDRESS",
                "Prometheus page, host:port; empty turns it off");
  settings.Bytes("message-bytes-max", config.message_bytes_max, 64u << 10, 1u << 30,
                 "Largest request or reply; K, M, G suffixes");
  settings.Group("Security");
  settings.Text("tls-cert", config.tls_cert, "FILE",
                "Serves TLS with this certificate chain (PEM); with --tls-key");
  settings.Text("tls-key", config.tls_key, "FILE", "Its private key (PEM)");
  settings.Text("tls-client-ca", config.tls_client_ca, "FILE",
                "Mutual TLS: clients must show a certificate of these authorities (PEM)");
  settings.Uint("tls-reload-ms", config.tls_reload_ms, 100, 3'600'000, "MS",
                "How often the files of TLS and --tokens are looked at for changes");
  settings.Text("tokens", config.tokens_file, "FILE",
                "Bearer tokens with tenant, role and quotas; without it every caller is an admin");
  settings.Text("admin-listen", config.admin_listen, "ADDRESS",
                "A second gRPC address, and the only one that answers calls of admins; empty: "
                "--listen does");
  settings.Switch("listen-insecure", config.listen_insecure,
                  "Listen on any address, and in any folder, without TLS or tokens");
  settings.Group("Memory and compute");
  settings.Choice("backend", config.backend, {"auto", "cuda", "cpu"},
                  "Where states live; auto: on a GPU when there is one");
  settings.Bytes("state-memory", config.state_bytes_max, 1u << 20, uint64_t{1} << 50,
                 "Memory for checkpoints and rings of all models; K, M, G, T suffixes");
  settings.Uint("models-max", config.models_max, 1, 1024, "COUNT", "Registered models");
  settings.Uint("compute-threads", config.compute_threads, 0, 1024, "COUNT",
                "Threads that run kernels; 0: one per hardware thread");
  settings.Uint("verify-workers", config.verify_workers, 1, 64, "COUNT",
                "Verify calls that run at one time; they share the compute threads");
  settings.Uint("verify-queue-max", config.verify_queue_max, 1, 65'536, "COUNT",
                "Verify calls that wait; above it: RESOURCE_EXHAUSTED");
  settings.Bytes("verify-queue-bytes-max", config.verify_queue_bytes_max, 1u << 20,
                 uint64_t{1} << 40,
                 "Memory of the requests of waiting Verify calls; K, M, G suffixes");
  settings.Uint("flush-threads", config.flush_threads, 0, 64, "COUNT",
                "Threads that fold ahead of time (FLUSH_MODE_BACKGROUND); 0: none, folds run when "
                "they are due");
  settings.Uint("imports-max", config.imports_max, 1, 1024, "COUNT",
                "ImportState calls that run at one time");
  settings.Uint("stream-calls-max", config.stream_calls_max, 2, 4096, "COUNT",
                "Calls of one Steps stream in work; above it the server reads no further");
  settings.Uint("stream-begins-max", config.stream_begins_max, 1, 4095, "COUNT",
                "Of them, BeginSteps held until an open step ends; above it: RESOURCE_EXHAUSTED");
  settings.Bytes("chunk-bytes-max", config.chunk_bytes_max, 4u << 10, 64u << 20,
                 "Largest chunk of an Import or Export; K, M suffixes");
  settings.Group("Models");
  settings.Texts("model", config.model_files, "FILE",
                 "Registers a model at start: a RegisterModelRequest as text proto");
  settings.Group("Capacity of models that do not ask for their own");
  settings.Uint("default-sequences-max", config.capacity.sequences_max, 1, 1u << 20, "COUNT",
                "Live sequences");
  settings.Uint("default-snapshots-max", config.capacity.snapshots_max, 0, 1u << 20, "COUNT",
                "Snapshots");
  settings.Uint(
      "default-spare-pages", config.capacity.spare_pages, 0, 1u << 20, "COUNT",
      "Checkpoint pages for flushes between plan and commit; 0: a quarter of the sequences");
  settings.Uint("default-rows-max", config.capacity.rows_max, 0, 65'536, "COUNT",
                "Rows of one step; 0: as many as sequences");
  settings.Uint("default-steps-max", config.capacity.steps_max, 1, 4096, "COUNT", "Open steps");
  settings.Group("Sessions");
  settings.Uint("sessions-max", config.sessions_max, 1, 65'536, "COUNT",
                "Open sessions; ended ones whose sequences wait for adoption do not count, but "
                "their sequences take places of sequences");
  settings.Uint("lease-default-ms", config.lease_ms_default, 1, kMillisMax, "MS",
                "Lease of a session that asks for none");
  settings.Uint("lease-min-ms", config.lease_ms_min, 1, kMillisMax, "MS", "Shortest lease granted");
  settings.Uint("lease-max-ms", config.lease_ms_max, 1, kMillisMax, "MS", "Longest lease granted");
  settings.Uint("adoption-max-ms", config.adoption_ms_max, 0, kMillisMax, "MS",
                "Longest time that sequences of an ended session are kept for adoption");
  settings.Uint("step-timeout-max-ms", config.step_timeout_ms_max, 1, kMillisMax, "MS",
                "A step open for longer is aborted");
  settings.Uint("sweep-interval-ms", config.sweep_interval_ms, 1, 60'000, "MS",
                "How often leases and step deadlines are looked at");
  settings.Uint("drain-timeout-ms", config.drain_timeout_ms, 0, kMillisMax, "MS",
                "After SIGTERM: time for live sequences to finish");
  settings.Group("Debugging");
  settings.Switch("poison-garbage", config.poison_garbage,
                  "Fill bytes that no record owns with NaN (slow)");
  settings.Uint("slow-step-ms", config.slow_step_ms, 0, kMillisMax, "MS",
                "A step that takes longer from BeginStep to its commit is logged; 0: none");
  settings.Choice("log-level", config.log_level, LogLevels(), "Least severe message logged");
  settings.Choice("log-format", config.log_format, {"text", "json"}, "One line a message");
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

// What Kubernetes puts into the environment of pods for a Service named ssmd or ssmd-...
bool IsServiceLink(absl::string_view variable, absl::string_view value) {
  if (absl::StrContains(variable, "_SERVICE_HOST") || absl::StrContains(variable, "_SERVICE_PORT"))
    return true;
  if (absl::EndsWith(variable, "_PORT") && absl::StrContains(value, "://")) return true;
  const size_t port = variable.find("_PORT_");  // and its number
  return port != absl::string_view::npos && port + 6 < variable.size() &&
         absl::ascii_isdigit(static_cast<unsigned char>(variable[port + 6]));
}

// Sets `setting` to `values`; `where` begins the message.
absl::Status Apply(Setting& setting, const std::vector<std::string>& values,
                   absl::string_view where, std::string source) {
  if (setting.repeatable) setting.clear();
  for (const std::string& value : values)
    if (const absl::Status status = setting.set(value); !status.ok())
      return absl::InvalidArgumentError(absl::StrCat(where, ": ", status.message()));
  setting.source = std::move(source);
  return absl::OkStatus();
}

absl::Status ApplyFile(Settings& settings, const std::string& path) {
  SSMD_ASSIGN_OR_RETURN(const std::vector<ConfigEntry> entries, ReadConfigFile(path));
  absl::flat_hash_map<std::string, int> first_line;
  std::map<std::string, std::vector<std::string>> lists;
  for (const ConfigEntry& entry : entries) {
    const std::string where = absl::StrCat(path, ":", entry.line);
    Setting* const setting = settings.Find(entry.key);
    if (setting == nullptr)
      return absl::InvalidArgumentError(
          absl::StrCat(where, ": '", entry.key, "' is not a setting"));
    const auto [first, is_new] = first_line.emplace(entry.key, entry.line);
    if (!is_new && !setting->repeatable)
      return absl::InvalidArgumentError(
          absl::StrCat(where, ": ", entry.key, " is set in line ", first->second, " already"));
    std::vector<std::string>& values = lists[entry.key];
    if (!setting->repeatable) values.clear();
    values.push_back(entry.value);
    SSMD_RETURN_IF_ERROR(Apply(*setting, values, absl::StrCat(where, ": ", entry.key),
                               absl::StrCat(path, ":", first->second)));
  }
  return absl::OkStatus();
}

using Environment = std::vector<std::pair<std::string, std::string>>;

// The variables that may be ours.
Environment ReadEnvironment(const char* const* environment) {
  Environment variables;
  for (; environment != nullptr && *environment != nullptr; ++environment) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(*environment, absl::MaxSplits('=', 1));
    if (absl::StartsWith(parts.first, "SSMD_") && !IsServiceLink(parts.first, parts.second))
      variables.emplace_back(parts.first, parts.second);
  }
  std::sort(variables.begin(), variables.end());
  return variables;
}

absl::Status ApplyEnvironment(Settings& settings, const Environment& variables) {
  for (const auto& [name, value] : variables) {
    if (name == kConfigVariable) continue;
    Setting* setting = nullptr;
    for (Setting& candidate : settings.all())
      if (candidate.variable() == name) setting = &candidate;
    if (setting == nullptr)
      return absl::InvalidArgumentError(
          absl::StrCat("environment: ", name, " is not a setting (unset it)"));
    std::vector<std::string> values = {value};
    if (setting->repeatable) values = absl::StrSplit(value, ',', absl::SkipEmpty());
    SSMD_RETURN_IF_ERROR(Apply(*setting, values, absl::StrCat("environment: ", name),
                               absl::StrCat("environment ", name)));
  }
  return absl::OkStatus();
}

// In the syntax of a file: what --config would have to say to get the same.
std::string PrintSettings(Settings& settings) {
  std::string text = absl::StrCat("# ssmd-server ", ServerVersion(), "\n");
  std::string group;
  for (const Setting& setting : settings.all()) {
    if (setting.group != group) absl::StrAppend(&text, "\n# ", group = setting.group, "\n");
    const std::vector<std::string> values = setting.values();
    if (values.empty()) absl::StrAppend(&text, "# ", setting.key, " is not set\n");
    for (const std::string& value : values)
      absl::StrAppend(&text, setting.key, " = ", QuoteConfigValue(value), "  # ", setting.source,
                      "\n");
  }
  return text;
}

CommandLine Leave(int exit_code, std::string text) {
  CommandLine line;
  line.exit_code = exit_code;
  line.text = std::move(text);
  return line;
}

CommandLine Refused(absl::string_view message) {
  return Leave(2, absl::StrCat("ssmd-server: ", message, " (see --help)\n"));
}

}  // namespace

const char* ServerVersion() { return SSMD_VERSION; }

CommandLine ParseCommandLine(int argc, const char* const* argv, const char* const* environment) {
  CommandLine line;
  Settings settings;
  AddSettings(settings, line.config);

  CLI::App app("ssmd-server: keeps the recurrent state of hybrid language models.", "ssmd-server");
  app.get_formatter()->column_width(44);
  app.set_version_flag("--version", absl::StrCat("ssmd-server ", ServerVersion()));
  app.footer(
      "Every setting --some-flag is also the environment variable SSMD_SOME_FLAG (lists: with "
      "commas)\nand the line `some-flag = value` of the file that --config names.\n"
      "A flag wins over the environment, the environment over the file, the file over the "
      "default.");
  std::string config_path;
  bool print_config = false, print_metrics = false;
  CLI::Option* const config_option =
      app.add_option("--config", config_path, "Reads settings from a file (or SSMD_CONFIG)")
          ->type_name("FILE")
          ->take_last();
  app.add_flag("--print-config", print_config,
               "Prints every setting and where it comes from, as a config file, and leaves");
  app.add_flag("--print-metrics", print_metrics,
               "Prints every metric with its meaning, as Markdown, and leaves");
  std::map<std::string, std::vector<std::string>> given;  // by flags
  for (const Setting& setting : settings.all()) {
    std::vector<std::string>& values = given[setting.key];
    const std::string flag = absl::StrCat("--", setting.key);
    if (setting.is_switch) {
      app.add_flag_function(
             flag, [&values](int64_t count) { values = {count > 0 ? "true" : "false"}; },
             setting.help)
          ->group(setting.group);
      continue;
    }
    CLI::Option* const option =
        app.add_option(flag, values, setting.help)->type_name(setting.unit)->group(setting.group);
    option->expected(1);
    if (setting.repeatable) {
      option->take_all()->allow_extra_args(false);
    } else {
      option->take_last();
    }
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return Leave(0, app.help());
  } catch (const CLI::CallForVersion&) {
    return Leave(0, absl::StrCat(app.version(), "\n"));
  } catch (const CLI::ParseError& error) {
    return Refused(error.what());
  }
  if (print_metrics) return Leave(0, DescribeMetrics());

  const absl::Status status = [&]() -> absl::Status {
    const Environment variables = ReadEnvironment(environment);
    for (const auto& [name, value] : variables)
      if (name == kConfigVariable && config_option->empty()) config_path = value;
    if (!config_path.empty()) SSMD_RETURN_IF_ERROR(ApplyFile(settings, config_path));
    SSMD_RETURN_IF_ERROR(ApplyEnvironment(settings, variables));
    for (Setting& setting : settings.all()) {
      const std::string flag = absl::StrCat("--", setting.key);
      if (!given[setting.key].empty())
        SSMD_RETURN_IF_ERROR(Apply(setting, given[setting.key], flag, absl::StrCat("flag ", flag)));
    }
    return ValidateConfig(line.config);
  }();
  if (!status.ok()) return Refused(status.message());
  if (print_config) return Leave(0, PrintSettings(settings));
  line.run = true;
  return line;
}

absl::Status ValidateConfig(const ServerConfig& config) {
  SSMD_RETURN_IF_ERROR(CheckAddress("--listen", config.listen, true));
  if (!config.metrics_listen.empty())
    SSMD_RETURN_IF_ERROR(CheckAddress("--metrics-listen", config.metrics_listen, false));
  if (!config.admin_listen.empty())
    SSMD_RETURN_IF_ERROR(CheckAddress("--admin-listen", config.admin_listen, true));
  if (config.tls_cert.empty() != config.tls_key.empty())
    return InvalidField("--tls-cert", "--tls-cert: expected --tls-key as well, got one of the two");
  if (!config.tls_client_ca.empty() && config.tls_cert.empty())
    return InvalidField("--tls-client-ca",
                        "--tls-client-ca: expected --tls-cert and --tls-key as well, got neither");
  SSMD_RETURN_IF_ERROR(CheckExposure(config));
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
  // A commit that would end the wait of a held BeginStep must always find room.
  if (config.stream_begins_max >= config.stream_calls_max)
    return InvalidField(
        "--stream-begins-max",
        absl::StrCat("--stream-begins-max: expected less than --stream-calls-max ",
                     config.stream_calls_max, ", got '", config.stream_begins_max, "'"));
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
      " tls_cert=", config.tls_cert, " tls_key=", config.tls_key,
      " tls_client_ca=", config.tls_client_ca, " tls_reload_ms=", config.tls_reload_ms,
      " tokens=", config.tokens_file, " admin_listen=", config.admin_listen,
      " listen_insecure=", config.listen_insecure ? "true" : "false",
      " message_bytes_max=", config.message_bytes_max, " backend=", config.backend,
      " state_memory=", config.state_bytes_max, " models_max=", config.models_max,
      " compute_threads=", config.compute_threads, " verify_workers=", config.verify_workers,
      " verify_queue_max=", config.verify_queue_max,
      " verify_queue_bytes_max=", config.verify_queue_bytes_max,
      " flush_threads=", config.flush_threads, " imports_max=", config.imports_max,
      " stream_calls_max=", config.stream_calls_max,
      " stream_begins_max=", config.stream_begins_max, " chunk_bytes_max=", config.chunk_bytes_max,
      " models=", absl::StrJoin(config.model_files, ","),
      " default_sequences_max=", capacity.sequences_max,
      " default_snapshots_max=", capacity.snapshots_max,
      " default_spare_pages=", capacity.spare_pages, " default_rows_max=", capacity.rows_max,
      " default_steps_max=", capacity.steps_max, " sessions_max=", config.sessions_max,
      " lease_default_ms=", config.lease_ms_default, " lease_min_ms=", config.lease_ms_min,
      " lease_max_ms=", config.lease_ms_max, " adoption_max_ms=", config.adoption_ms_max,
      " step_timeout_max_ms=", config.step_timeout_ms_max,
      " sweep_interval_ms=", config.sweep_interval_ms,
      " drain_timeout_ms=", config.drain_timeout_ms,
      " poison_garbage=", config.poison_garbage ? "true" : "false",
      " slow_step_ms=", config.slow_step_ms, " log_level=", config.log_level,
      " log_format=", config.log_format);
}

}  // namespace ssmd
