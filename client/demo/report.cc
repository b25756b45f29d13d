#include "client/demo/report.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ssmd::demo {
namespace {

using std::chrono::steady_clock;

constexpr double kQuietSeconds = 2.0, kRedrawSeconds = 0.1;
constexpr size_t kTextColumns = 84;
constexpr uint64_t kBarCells = 30;

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
