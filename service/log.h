// Logging: spdlog's default logger, set up once at startup. One line a message, to stderr.
#pragma once

#include <spdlog/spdlog.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace ssmd {

const std::vector<std::string>& LogLevels();  // trace, debug, info, warn, error, off

// level: one of LogLevels(); format: "text" or "json" (one object a line: time, level, message,
// ids).
void InitLogging(const std::string& level, const std::string& format);

// The least severe level that is logged from here on; returns the one before. Thread-safe. Errors:
// INVALID_ARGUMENT "expected one of ..., got ...": nothing changes.
absl::StatusOr<std::string> ChangeLogLevel(const std::string& level);

// What a message is about: names and values, such as {"session", "0x..."}. In JSON they are members
// of the object beside the message, in text they follow it as name=value.
using LogIds = std::vector<std::pair<std::string, std::string>>;
std::string LogId(uint64_t id);  // 0x and 16 hex digits
void LogWithIds(spdlog::level::level_enum level, const LogIds& ids, const std::string& message);

// The line of a message in one of the two formats; InitLogging uses it.
std::unique_ptr<spdlog::formatter> MakeLogFormatter(const std::string& format);

// `text` between double quotes, escaped as JSON demands; bytes that are not ASCII pass through.
std::string JsonQuoted(const std::string& text);

}  // namespace ssmd
