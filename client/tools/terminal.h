// What ssmctl and the demo print with: progress on stderr, tables and sizes for stdout.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace ssmd::client {

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
std::string Duration(
    uint64_t milliseconds);  // "850 ms", "12 s", "3 min 5 s", "2 h 4 min", "5 d 3 h"

// Columns with a line of titles; numbers to the right. Cells that would make a row wider than
// `width_max` are cut, the widest column first, and end in "...".
class Table {
 public:
  enum class Align : uint8_t { kLeft, kRight };
  struct Column {
    std::string title;
    Align align = Align::kLeft;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // Requires: one cell per column.
  void AddRow(std::vector<std::string> cells);
  bool empty() const { return rows_.empty(); }
  std::string ToString(size_t width_max = 100) const;

 private:
  const std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace ssmd::client
