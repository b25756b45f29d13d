#include "client/demo/report.h"

#include <cstdio>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"

namespace ssmd::demo {
namespace {

constexpr size_t kTextColumns = 84;

}  // namespace

const char* YesNo(bool value) { return value ? "yes" : "no"; }

void PrintItem(absl::string_view label, absl::string_view text) {
  absl::PrintF("  %-12s %s\n", label, text);
}

void PrintHeading(absl::string_view text) {
  absl::PrintF("\n%s\n", text);
  std::fflush(stdout);
}

void PrintText(const std::string& text, size_t prompt_bytes) {
  std::string line;
  const auto flush = [&line] {
    absl::PrintF("  | %s\n", line);
    line.clear();
  };
  for (size_t i = 0; i < text.size(); ++i) {
    if (i == prompt_bytes) line += ">>";
    if (text[i] == '\n') {
      flush();
      continue;
    }
    line.push_back(absl::ascii_isprint(static_cast<unsigned char>(text[i])) ? text[i] : '?');
    if (line.size() < kTextColumns) continue;
    // Fold at the last space, if there is one.
    const size_t space = line.rfind(' ');
    const std::string rest = space == std::string::npos ? "" : line.substr(space + 1);
    if (space != std::string::npos) line.resize(space);
    flush();
    line = rest;
  }
  if (!line.empty()) flush();
}

}  // namespace ssmd::demo
