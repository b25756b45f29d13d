#include "client/tools/terminal.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ssmd::client {
namespace {

using std::chrono::steady_clock;

constexpr double kQuietSeconds = 2.0, kRedrawSeconds = 0.1;
constexpr uint64_t kBarCells = 30;
constexpr size_t kGap = 2, kColumnMin = 6;

double Seconds(steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

void Progress::Update(uint64_t done) {
  const steady_clock::time_point now = steady_clock::now();
  const double elapsed = Seconds(now - start_);
  if (elapsed < kQuietSeconds || total_ == 0 || done == 0) return;
  done = std::min(done, total_);
  const double left = elapsed * static_cast<double>(total_ - done) / static_cast<double>(done);
  if (isatty(STDERR_FILENO) != 0) {
    if (visible_ && Seconds(now - drawn_) < kRedrawSeconds) return;
    const uint64_t cells = done * kBarCells / total_;
    absl::FPrintF(stderr, "\r  %s [%s%s] %3d%%  %.0f s left \x1b[K", label_,
                  std::string(cells, '#'), std::string(kBarCells - cells, '.'), done * 100 / total_,
                  left);
    std::fflush(stderr);
    visible_ = true;
    drawn_ = now;
  } else if (const uint64_t quarters = done * 4 / total_; quarters > quarters_ && done < total_) {
    quarters_ = quarters;
    absl::FPrintF(stderr, "%s: %d%%, %.0f s left\n", label_, done * 100 / total_, left);
  }
}

Progress::~Progress() {
  if (!visible_) return;
  std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
}

std::string WithCommas(uint64_t number) {
  std::string digits = absl::StrCat(number);
  for (size_t at = digits.size(); at > 3;) digits.insert(at -= 3, 1, ',');
  return digits;
}

std::string ByteSize(double bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  for (; bytes >= 1024 && unit < 4; ++unit) bytes /= 1024;
  return absl::StrFormat("%.*f %s", unit == 0 ? 0 : 1, bytes, kUnits[unit]);
}

std::string Duration(uint64_t milliseconds) {
  const uint64_t seconds = milliseconds / 1000, minutes = seconds / 60, hours = minutes / 60;
  if (seconds == 0) return absl::StrCat(milliseconds, " ms");
  if (minutes == 0) return absl::StrCat(seconds, " s");
  if (hours == 0) return absl::StrCat(minutes, " min ", seconds % 60, " s");
  if (hours < 24) return absl::StrCat(hours, " h ", minutes % 60, " min");
  return absl::StrCat(hours / 24, " d ", hours % 24, " h");
}

void Table::AddRow(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::ToString(size_t width_max) const {
  std::vector<size_t> widths;
  for (size_t c = 0; c < columns_.size(); ++c) {
    widths.push_back(columns_[c].title.size());
    for (const auto& row : rows_) widths[c] = std::max(widths[c], row[c].size());
  }
  const auto total = [&] {
    return std::accumulate(widths.begin(), widths.end(), kGap * (widths.size() - 1));
  };
  while (!widths.empty() && total() > width_max) {
    const auto widest = std::max_element(widths.begin(), widths.end());
    if (*widest <= kColumnMin) break;
    --*widest;
  }
  std::string text;
  const auto add = [&](const auto& cell_of) {
    std::string line;
    for (size_t c = 0; c < columns_.size(); ++c) {
      std::string cell = cell_of(c);
      if (cell.size() > widths[c]) cell = cell.substr(0, widths[c] - 3) + "...";
      const std::string pad(widths[c] - cell.size(), ' ');
      if (c > 0) line.append(kGap, ' ');
      line += columns_[c].align == Align::kRight ? pad + cell : cell + pad;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&text, line, "\n");
  };
  add([&](size_t c) { return columns_[c].title; });
  for (const auto& row : rows_) add([&](size_t c) { return row[c]; });
  return text;
}

}  // namespace ssmd::client
