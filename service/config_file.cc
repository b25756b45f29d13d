#include "service/config_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/status.h"

namespace ssmd {
namespace {

// The value of a line, and nothing else after it but a comment.
absl::StatusOr<std::string> ParseValue(absl::string_view text) {
  text = absl::StripAsciiWhitespace(text);
  if (!text.empty() && (text.front() == '"' || text.front() == '\'')) {
    const size_t end = text.find(text.front(), 1);
    if (end == absl::string_view::npos)
      return absl::InvalidArgumentError(absl::StrCat("expected a closing ", text.substr(0, 1)));
    const absl::string_view rest = absl::StripAsciiWhitespace(text.substr(end + 1));
    if (!rest.empty() && rest.front() != '#' && rest.front() != ';')
      return absl::InvalidArgumentError(
          absl::StrCat("expected nothing after the closing quote, got '", rest, "'"));
    return std::string(text.substr(1, end - 1));
  }
  for (size_t i = 0; i < text.size(); ++i) {
    const bool comment = text[i] == '#' || text[i] == ';';
    if (comment && (i == 0 || absl::ascii_isspace(static_cast<unsigned char>(text[i - 1]))))
      text = text.substr(0, i);
  }
  text = absl::StripAsciiWhitespace(text);
  if (text.empty()) return absl::InvalidArgumentError("expected a value after '=' (empty: \"\")");
  return std::string(text);
}

}  // namespace

absl::StatusOr<std::vector<ConfigEntry>> ParseConfigText(absl::string_view name,
                                                         absl::string_view text) {
  std::vector<ConfigEntry> entries;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line.front() == '#' || line.front() == ';') continue;
    const size_t equals = line.find('=');
    const absl::string_view key = absl::StripAsciiWhitespace(line.substr(0, equals));
    if (equals == absl::string_view::npos || key.empty())
      return absl::InvalidArgumentError(
          absl::StrCat(name, ":", number, ": expected key = value, got '", line, "'"));
    absl::StatusOr<std::string> value = ParseValue(line.substr(equals + 1));
    if (!value.ok())
      return absl::InvalidArgumentError(
          absl::StrCat(name, ":", number, ": ", key, ": ", value.status().message()));
    entries.push_back({std::string(key), *std::move(value), number});
  }
  return entries;
}

absl::StatusOr<std::string> ReadWholeFile(const std::string& path) {
  const auto refuse = [&path] {
    return absl::NotFoundError(absl::StrCat(path, ": cannot be read: ", std::strerror(errno)));
  };
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (file == nullptr) return refuse();
  std::string text;
  char buffer[16 << 10];
  for (size_t got; (got = std::fread(buffer, 1, sizeof(buffer), file.get())) > 0;)
    text.append(buffer, got);
  if (std::ferror(file.get())) return refuse();
  return text;
}

absl::StatusOr<std::vector<ConfigEntry>> ReadConfigFile(const std::string& path) {
  SSMD_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path));
  return ParseConfigText(path, text);
}

std::string QuoteConfigValue(absl::string_view value) {
  if (!value.empty() && value.find_first_of(" \t#;'\"=") == absl::string_view::npos)
    return std::string(value);
  const char* quote = value.find('"') == absl::string_view::npos ? "\"" : "'";
  return absl::StrCat(quote, value, quote);
}

}  // namespace ssmd
