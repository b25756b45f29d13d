// ssmd-server: flags, logging, signals. Everything else is in service/server.h.
//
// Exit codes: 0 after SIGTERM or SIGINT, --help, --version and --print-*; 1 when the server cannot
// start; 2 for a wrong command line.
#include <pthread.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <cstdio>

#include "service/config.h"
#include "service/log.h"
#include "service/server.h"

namespace {

// Blocked in every thread, taken by sigwait in this one: no code ever runs in a signal handler.
sigset_t BlockStopSignals() {
  signal(SIGPIPE, SIG_IGN);
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGTERM);
  sigaddset(&stop, SIGINT);
  pthread_sigmask(SIG_BLOCK, &stop, nullptr);
  return stop;
}

}  // namespace

int main(int argc, char** argv) {
  const ssmd::CommandLine line = ssmd::ParseCommandLine(argc, argv, environ);
  if (!line.run) {
    std::fputs(line.text.c_str(), line.exit_code == 0 ? stdout : stderr);
    return line.exit_code;
  }
  const sigset_t stop = BlockStopSignals();  // before any thread starts
  ssmd::InitLogging(line.config.log_level, line.config.log_format);
  spdlog::info("ssmd-server {} {}", ssmd::ServerVersion(), ssmd::DescribeConfig(line.config));

  auto server = ssmd::Server::Start(line.config);
  if (!server.ok()) {
    std::fprintf(stderr, "ssmd-server: %s\n", std::string(server.status().message()).c_str());
    return 1;
  }
  // Scripts read this line to learn the ports; stdout carries nothing else.
  std::printf("ssmd-server listening on %s, metrics on %s", (*server)->address().c_str(),
              (*server)->metrics_address().empty() ? "none" : (*server)->metrics_address().c_str());
  if (!(*server)->admin_address().empty())
    std::printf(", admins on %s", (*server)->admin_address().c_str());
  std::printf("\n");
  std::fflush(stdout);

  int signal_number = 0;
  sigwait(&stop, &signal_number);
  spdlog::info("signal {}", signal_number);
  (*server)->Shutdown(absl::Milliseconds(line.config.drain_timeout_ms));
  return 0;
}
