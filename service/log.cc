#include "service/log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace ssmd {
namespace {

// Of the message that this thread is writing: spdlog formats it before the call returns.
thread_local const LogIds* current_ids = nullptr;

// The message and its ids; spdlog's own %v does not escape.
class MessageWithIds : public spdlog::custom_flag_formatter {
 public:
  explicit MessageWithIds(bool json) : json_(json) {}
  void format(const spdlog::details::log_msg& message, const std::tm&,
              spdlog::memory_buf_t& out) override {
    std::string text(message.payload.data(), message.payload.size());
    if (json_) text = JsonQuoted(text);
    if (current_ids != nullptr) {
      for (const auto& [name, value] : *current_ids) {
        if (json_) {
          absl::StrAppend(&text, ",", JsonQuoted(name), ":", JsonQuoted(value));
        } else {
          absl::StrAppend(&text, " ", name, "=", value);
        }
      }
    }
    out.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<custom_flag_formatter> clone() const override {
    return std::make_unique<MessageWithIds>(json_);
  }

 private:
  const bool json_;
};

}  // namespace

std::string JsonQuoted(const std::string& text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (byte < 0x20) {
      out += "\\u00";
      out += {kHex[byte >> 4], kHex[byte & 15]};
    } else {
      out.push_back(c);
    }
  }
  return out + '"';
}

const std::vector<std::string>& LogLevels() {
  static const auto& levels =
      *new std::vector<std::string>{"trace", "debug", "info", "warn", "error", "off"};
  return levels;
}

absl::StatusOr<std::string> ChangeLogLevel(const std::string& level) {
  const std::vector<std::string>& levels = LogLevels();
  if (std::find(levels.begin(), levels.end(), level) == levels.end())
    return absl::InvalidArgumentError(
        absl::StrCat("expected one of ", absl::StrJoin(levels, ", "), ", got '", level, "'"));
  const auto before = spdlog::get_level();
  spdlog::set_level(spdlog::level::from_str(level));
  spdlog::info("log level {}", level);
  for (const std::string& name : levels)
    if (spdlog::level::from_str(name) == before) return name;
  return std::string("off");
}

std::string LogId(uint64_t id) { return absl::StrFormat("0x%016x", id); }

void LogWithIds(spdlog::level::level_enum level, const LogIds& ids, const std::string& message) {
  current_ids = &ids;
  spdlog::log(level, spdlog::string_view_t(message));
  current_ids = nullptr;
}

std::unique_ptr<spdlog::formatter> MakeLogFormatter(const std::string& format) {
  auto formatter = std::make_unique<spdlog::pattern_formatter>(spdlog::pattern_time_type::utc);
  const bool json = format == "json";
  formatter->add_flag<MessageWithIds>('*', json).set_pattern(
      json ? R"({"time":"%Y-%m-%dT%H:%M:%S.%eZ","level":"%l","message":%*})"
           : "%Y-%m-%dT%H:%M:%S.%eZ %l %*");
  return formatter;
}

void InitLogging(const std::string& level, const std::string& format) {
  auto logger =
      std::make_shared<spdlog::logger>("ssmd", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_formatter(MakeLogFormatter(format));
  logger->set_level(spdlog::level::from_str(level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace ssmd
