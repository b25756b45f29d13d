// Logging: spdlog's default logger, set up once at startup. One line a message, to stderr.
#pragma once

#include <string>

namespace ssmd {

// level: a name spdlog knows; format: "text" or "json" (one object a line: time, level, message).
void InitLogging(const std::string& level, const std::string& format);

// `text` between double quotes, escaped as JSON demands; bytes that are not ASCII pass through.
std::string JsonQuoted(const std::string& text);

}  // namespace ssmd
