#include "client/ctl/top.h"

#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "client/ctl/common.h"
#include "client/tools/terminal.h"

namespace ssmd::ctl {
namespace {

using client::ByteSize;
using client::Table;

constexpr Table::Align kRight = Table::Align::kRight;
constexpr absl::string_view kNone = "-";
constexpr size_t kWidth = 80, kHeight = 24;  // of what is no terminal

struct Rates {
  double tokens = 0, steps = 0, flushes = 0, moved = 0, baseline = 0;
};

// Of a model, a second.
std::optional<Rates> RatesOf(const v1::GetStatusResponse& before, const v1::GetStatusResponse& now,
                             const v1::ModelStatus& model) {
  if (before.server_epoch() != now.server_epoch() || before.uptime_ms() >= now.uptime_ms())
    return std::nullopt;
  for (const v1::ModelStatus& old : before.models()) {
    if (old.model_id() != model.model_id() || old.steps_committed() > model.steps_committed())
      continue;
    const double seconds = static_cast<double>(now.uptime_ms() - before.uptime_ms()) / 1000;
    const auto rate = [&](uint64_t later, uint64_t earlier) {
      return static_cast<double>(later - earlier) / seconds;
    };
    return Rates{.tokens = rate(model.tokens_accepted(), old.tokens_accepted()),
                 .steps = rate(model.steps_committed(), old.steps_committed()),
                 .flushes = rate(model.flushes(), old.flushes()),
                 .moved = rate(model.state_bytes_read() + model.state_bytes_written(),
                               old.state_bytes_read() + old.state_bytes_written()),
                 .baseline = rate(model.write_every_step_bytes(), old.write_every_step_bytes())};
  }
  return std::nullopt;
}

std::string Number(double value) { return absl::StrFormat(value >= 100 ? "%.0f" : "%.1f", value); }
std::string PerSecond(double bytes) { return absl::StrCat(ByteSize(bytes), "/s"); }
std::string Of(uint64_t used, uint64_t total) { return absl::StrCat(used, "/", total); }
std::string Percent(uint64_t part, uint64_t whole) {
  if (whole == 0) return std::string(kNone);
  return absl::StrFormat("%.1f%%", 100 * static_cast<double>(part) / static_cast<double>(whole));
}

}  // namespace

std::string TopText(const v1::GetStatusResponse& before, const v1::GetStatusResponse& now,
                    const std::string& server, size_t width, size_t height) {
  Rates all;
  bool known = false;
  Table occupancy({{"MODEL"},
                   {"SEQUENCES", kRight},
                   {"SNAPSHOTS", kRight},
                   {"PAGES USED", kRight},
                   {"OPEN STEPS", kRight}});
  Table rates({{"MODEL"},
               {"TOKENS/S", kRight},
               {"STEPS/S", kRight},
               {"ACCEPTED", kRight},
               {"FLUSHES/S", kRight},
               {"STATE", kRight},
               {"BASELINE", kRight}});
  for (const v1::ModelStatus& model : now.models()) {
    const std::string name = Printable(model.name());
    occupancy.AddRow({name, Of(model.sequences(), model.capacity().sequences_max()),
                      Of(model.snapshots(), model.capacity().snapshots_max()),
                      Of(model.pages_total() - model.pages_free(), model.pages_total()),
                      Of(model.open_steps(), model.capacity().steps_max())});
    const std::optional<Rates> rate = RatesOf(before, now, model);
    const std::string accepted = Percent(model.tokens_accepted(), model.tokens_drafted());
    if (!rate.has_value()) {
      const std::string none(kNone);
      rates.AddRow({name, none, none, accepted, none, none, none});
      continue;
    }
    known = true;
    all.tokens += rate->tokens;
    all.flushes += rate->flushes;
    all.moved += rate->moved;
    all.baseline += rate->baseline;
    rates.AddRow({name, Number(rate->tokens), Number(rate->steps), accepted, Number(rate->flushes),
                  PerSecond(rate->moved), PerSecond(rate->baseline)});
  }
  std::vector<std::string> lines = {
      absl::StrCat("ssmd ", server, "  ", now.server_version(), "  ", now.backend(), "  up ",
                   client::Duration(now.uptime_ms()), now.draining() ? "  DRAINING" : ""),
      absl::StrFormat("sessions %d/%d, %d kept   queue %d/%d, %d running   memory %s of %s",
                      now.sessions(), now.sessions_max(), now.sessions_kept(),
                      now.verify_queue_depth(), now.verify_queue_max(), now.verify_running(),
                      ByteSize(static_cast<double>(now.state_bytes_used())),
                      ByteSize(static_cast<double>(now.state_bytes_max())))};
  std::string sum = "tokens/s -   flushes/s -   state -";
  if (known) {
    sum = absl::StrCat("tokens/s ", Number(all.tokens), "   flushes/s ", Number(all.flushes),
                       "   state ", PerSecond(all.moved));
    if (all.moved > 0)
      absl::StrAppend(&sum, "   baseline ", PerSecond(all.baseline), " (",
                      absl::StrFormat("%.1f", all.baseline / all.moved), "x)");
  }
  lines.push_back(sum);
  if (now.models().empty()) {
    lines.insert(lines.end(), {"", "no models"});
  } else {
    for (const Table* table : {&rates, &occupancy}) {
      lines.emplace_back();
      for (absl::string_view line : absl::StrSplit(table->ToString(width), '\n', absl::SkipEmpty()))
        lines.emplace_back(line);
    }
  }
  if (lines.size() > height) {
    lines.resize(height);
    lines.back() = "... (a taller window shows more)";
  }
  std::string text;
  for (const std::string& line : lines) absl::StrAppend(&text, line.substr(0, width), "\n");
  return text;
}

namespace {

// Set by SIGINT and SIGTERM; the loop looks at it after every wait.
volatile sig_atomic_t stop = 0;
void OnStop(int) { stop = 1; }

// The terminal while top has it: another screen, no cursor, keys as they are typed. Put back in the
// end, however that comes.
class Screen {
 public:
  Screen() {
    struct sigaction action = {};
    action.sa_handler = OnStop;  // no SA_RESTART: poll ends
    sigaction(SIGINT, &action, nullptr);
    sigaction(SIGTERM, &action, nullptr);
    if (tcgetattr(STDIN_FILENO, &saved_) == 0) {
      termios raw = saved_;
      raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
      has_keys_ = tcsetattr(STDIN_FILENO, TCSANOW, &raw) == 0;
    }
    Print("\x1b[?1049h\x1b[?25l");
    std::fflush(stdout);
  }
  ~Screen() {
    Print("\x1b[?25h\x1b[?1049l");
    std::fflush(stdout);
    if (has_keys_) tcsetattr(STDIN_FILENO, TCSANOW, &saved_);
  }
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  static void Show(const std::string& text) {
    std::string out = "\x1b[H";
    for (absl::string_view line : absl::StrSplit(text, '\n'))
      absl::StrAppend(&out, line, "\x1b[K\r\n");
    out.resize(out.size() - 2);  // the last line end would scroll
    Print(out + "\x1b[J");
    std::fflush(stdout);
  }

  // True: leave.
  bool Wait(absl::Duration interval) const {
    const absl::Time end = absl::Now() + interval;
    while (stop == 0) {
      const absl::Duration left = end - absl::Now();
      if (left <= absl::ZeroDuration()) return false;
      pollfd keys{.fd = has_keys_ ? STDIN_FILENO : -1, .events = POLLIN, .revents = 0};
      if (poll(&keys, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1) <= 0) continue;
      char key = 0;
      if (read(STDIN_FILENO, &key, 1) <= 0 || key == 'q' || key == 'Q') return true;
    }
    return true;
  }

 private:
  termios saved_{};
  bool has_keys_ = false;
};

}  // namespace

absl::Status Top(const Options& options) {
  const absl::Duration interval = absl::Seconds(options.interval_seconds);
  CTL_ASSIGN_OR_RETURN(auto client, Connect(options));
  CTL_ASSIGN_OR_RETURN(v1::GetStatusResponse before, client->GetStatus());
  if (options.once) {
    absl::SleepFor(interval);
    CTL_ASSIGN_OR_RETURN(const v1::GetStatusResponse now, client->GetStatus());
    Print(TopText(before, now, options.server, kWidth, kHeight));
    return absl::OkStatus();
  }
  if (isatty(STDOUT_FILENO) == 0)
    return absl::FailedPreconditionError("top needs a terminal (--once prints one picture)");
  const Screen screen;
  v1::GetStatusResponse now = before;
  while (true) {
    winsize size{};
    const bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    const size_t width = known ? size.ws_col : kWidth, height = known ? size.ws_row : kHeight;
    Screen::Show(TopText(before, now, options.server, width, std::max<size_t>(height, 4) - 2) +
                 "\nq leaves");
    if (screen.Wait(interval)) return absl::OkStatus();
    before = std::move(now);
    CTL_ASSIGN_OR_RETURN(now, client->GetStatus());
  }
}

}  // namespace ssmd::ctl
