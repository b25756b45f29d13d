// Logging: spdlog's default logger, set up once at startup. One line a message, to stderr.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ssmd {

const std::vector<std::string>& LogLevels();  // trace, debug, info, warn, error, off

// level: one of LogLevels(); format: "text" or "json" (one object a line: time, level, message).
void InitLogging(const std::string& level, const std::string& format);

// The least severe level that is logged from here on; returns the one before. Thread-safe. Errors:
// INVALID_ARGUMENT "expected one of ..., got ...": nothing changes.
absl::StatusOr<std::string> ChangeLogLevel(const std::string& level);

// `text` between double quotes, escaped as JSON demands; bytes that are not ASCII pass through.
std::string JsonQuoted(const std::string& text);

}  // namespace ssmd
