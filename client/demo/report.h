// What the demo prints: stdout carries the report, stderr the progress.
#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "client/tools/terminal.h"

namespace ssmd::demo {

using client::ByteSize;
using client::Progress;
using client::WithCommas;

const char* YesNo(bool value);
// "  label      text"
void PrintItem(absl::string_view label, absl::string_view text);
void PrintHeading(absl::string_view text);
// Text of a byte model: unprintable bytes as '?', lines folded at 84 columns behind "  | ". The
// first `prompt_bytes` are set apart from the rest by a ">>" in front of what was generated.
void PrintText(const std::string& text, size_t prompt_bytes);

}  // namespace ssmd::demo
