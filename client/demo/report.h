// What the demo prints: stdout carries the report, stderr the progress.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace ssmd::demo {

// Progress of something that may take more than two seconds; nothing is shown before that. A bar
// that redraws itself when stderr is a terminal, else a line at each quarter.
class Progress {
 public:
  Progress(std::string label, uint64_t total) : label_(std::move(label)), total_(total) {}
  ~Progress();  // removes the bar

  void Update(uint64_t done);

 private:
  const std::string label_;
  const uint64_t total_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point drawn_{};
  uint64_t quarters_ = 0;  // reported
  bool visible_ = false;
};

std::string WithCommas(uint64_t number);  // 12,345
std::string ByteSize(double bytes);       // "1.5 MiB"
const char* YesNo(bool value);
// "  label      text"
void PrintItem(absl::string_view label, absl::string_view text);
void PrintHeading(absl::string_view text);
// Text of a byte model: unprintable bytes as '?', lines folded at 84 columns behind "  | ". The
// first `prompt_bytes` are set apart from the rest by a ">>" in front of what was generated.
void PrintText(const std::string& text, size_t prompt_bytes);

}  // namespace ssmd::demo
