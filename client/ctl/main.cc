// ssmctl: looks at an ssmd server and moves states in and out of it.
//
// Exit codes: 0 done; 1 it failed (one line on stderr says why); 2 for a wrong command line.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "client/ctl/commands.h"
#include "client/tools/security_flags.h"

namespace {

using ssmd::ctl::Options;
using Command = absl::Status (*)(const Options&);

constexpr int kNoCommand = static_cast<int>(CLI::ExitCodes::RequiredError);

constexpr char kFooter[] =
    "Exit codes: 0 done, 1 failed (stderr says why), 2 wrong command line.\n"
    "ssmctl COMMAND --help explains a command.";

void AddModel(CLI::App& command, Options& options, bool required) {
  command.add_option("--model", options.model, "its name or id")
      ->type_name("MODEL")
      ->required(required);
}

CLI::Option* AddAdopt(CLI::App& command, Options& options) {
  command
      .add_option("--keep", options.keep_seconds,
                  "seconds that adopted sequences then wait for their next owner")
      ->type_name("SECONDS")
      ->check(CLI::Range(1, 86400))
      ->capture_default_str();
  return command
      .add_option("--adopt", options.session,
                  "take over what this session, which has ended, left for adoption; it\n"
                  "then waits under a session of ssmctl's own, whose id is printed")
      ->type_name("SESSION");
}

int Main(int argc, char** argv) {
  Options options;
  options.server = "127.0.0.1:50051";
  Command chosen = nullptr;

  CLI::App app("ssmctl: looks at an ssmd server and moves states in and out of it.", "ssmctl");
  app.footer(kFooter);
  app.get_formatter()->column_width(24);
  app.fallthrough();  // --server and --json may stand behind the command
  app.add_option("--server", options.server, "the server's gRPC address")
      ->type_name("ADDR")
      ->envname("SSMD_SERVER")
      ->capture_default_str();
  ssmd::client::AddSecurityFlags(app, options.security, "SSMCTL_");
  app.add_flag("--json", options.json, "print JSON, for programs");
  const auto add = [&](const char* name, const char* what, Command run) {
    CLI::App* command = app.add_subcommand(name, what);
    command->callback([&chosen, run] { chosen = run; });
    return command;
  };

  add("status", "version, uptime, sessions, memory, and how full every model is",
      &ssmd::ctl::Status);
  add("models", "registered models: ids, occupancy, memory", &ssmd::ctl::Models);

  CLI::App* sequences =
      add("sequences",
          "how many sequences every model has; with --adopt, those that a session left\n"
          "(a sequence is shown to its owner only)",
          &ssmd::ctl::Sequences);
  CLI::Option* adopt = AddAdopt(*sequences, options);
  AddModel(*sequences, options, false);
  sequences->get_option("--model")->needs(adopt);
  adopt->needs(sequences->get_option("--model"));

  CLI::App* snapshots =
      add("snapshots", "stored snapshots, of one model or of all", &ssmd::ctl::Snapshots);
  AddModel(*snapshots, options, false);

  add("steps", "steps, accepted tokens and flushes by reason, of every model", &ssmd::ctl::Steps);

  CLI::App* export_state =
      add("export",
          "writes a state to a file: of a snapshot (--digest, --position), or of a\n"
          "sequence that a session left (--adopt, --sequence). Complete and\n"
          "checksummed, or absent",
          &ssmd::ctl::Export);
  export_state->add_option("file", options.file, "where to")->type_name("FILE")->required();
  AddModel(*export_state, options, true);
  CLI::Option* digest = export_state
                            ->add_option("--digest", options.digest,
                                         "the snapshot's, as `ssmctl snapshots` prints it")
                            ->type_name("DIGEST");
  CLI::Option* position = export_state->add_option("--position", options.position, "the snapshot's")
                              ->type_name("TOKENS");
  adopt = AddAdopt(*export_state, options);
  CLI::Option* sequence =
      export_state->add_option("--sequence", options.sequences, "the sequence's id")
          ->type_name("SEQUENCE")
          ->expected(1);
  digest->needs(position)->excludes(adopt);
  position->needs(digest);
  adopt->needs(sequence);
  sequence->needs(adopt);
  export_state->add_flag("--force", options.force, "replace the file if it exists");
  export_state->callback([&] {
    if (digest->empty() && adopt->empty())
      throw CLI::RequiredError("--digest and --position, or --adopt and --sequence");
    chosen = &ssmd::ctl::Export;
  });

  CLI::App* import_state = add("import",
                               "makes a snapshot from a file that export wrote. Its model must be\n"
                               "registered; its digest is the file's unless --digest names another",
                               &ssmd::ctl::Import);
  import_state->add_option("file", options.file, "what export wrote")
      ->type_name("FILE")
      ->required();
  import_state->add_option("--digest", options.digest, "of the new snapshot")->type_name("DIGEST");
  import_state->add_flag("--force", options.force, "replace the snapshot if it exists");

  CLI::App* model_file =
      add("model-file", "registers a model: a text proto of ssmd.v1.RegisterModelRequest",
          &ssmd::ctl::ModelFile);
  model_file->add_option("file", options.file, "spec { ... } capacity { ... }")
      ->type_name("FILE")
      ->required();

  CLI::App* unregister =
      add("unregister",
          "gives a model's memory back; its snapshots are dropped. Refused while it\n"
          "has sequences",
          &ssmd::ctl::Unregister);
  unregister->add_option("model", options.model, "its name or id")->type_name("MODEL")->required();

  CLI::App* flush =
      add("flush",
          "folds the records of sequences that a session left into their checkpoints\n"
          "(all but those kept for rollback)",
          &ssmd::ctl::Flush);
  AddModel(*flush, options, true);
  AddAdopt(*flush, options)->required();
  flush->add_option("--sequence", options.sequences, "only these; may be repeated")
      ->type_name("SEQUENCE");

  CLI::App* drain =
      add("drain",
          "new models, sessions and sequences are refused, readiness says no; whatever\n"
          "lives goes on",
          &ssmd::ctl::Drain);
  CLI::Option* resume = drain->add_flag("--resume", options.resume, "the reverse: serve again");
  drain
      ->add_option("--wait", options.wait_seconds,
                   "wait until no sequence lives, at most so long; exit code 1 if some do")
      ->type_name("SECONDS")
      ->check(CLI::Range(1, 86400))
      ->excludes(resume);

  add("log-level", "which messages the server logs from now on", &ssmd::ctl::LogLevel)
      ->add_option("level", options.level, "trace, debug, info, warn, error or off")
      ->type_name("LEVEL")
      ->required();

  add("sessions", "open sessions, and ended ones that keep sequences for adoption",
      &ssmd::ctl::Sessions);

  CLI::App* evict =
      app.add_subcommand("evict", "ends a session now, or drops snapshots of a model");
  evict->require_subcommand(1);
  CLI::App* evict_session = evict->add_subcommand(
      "session", "aborts its steps and releases its sequences, kept ones too");
  evict_session->add_option("session", options.session, "as `ssmctl sessions` prints it")
      ->type_name("SESSION")
      ->required();
  evict_session->callback([&chosen] { chosen = &ssmd::ctl::EvictSession; });
  CLI::App* evict_snapshots =
      evict->add_subcommand("snapshots", "one (--digest, --position), or --all of a model");
  AddModel(*evict_snapshots, options, true);
  CLI::Option* all = evict_snapshots->add_flag("--all", options.all, "every snapshot of the model");
  CLI::Option* evict_digest =
      evict_snapshots->add_option("--digest", options.digest, "as `ssmctl snapshots` prints it")
          ->type_name("DIGEST")
          ->excludes(all);
  CLI::Option* evict_position =
      evict_snapshots->add_option("--position", options.position, "the snapshot's")
          ->type_name("TOKENS")
          ->needs(evict_digest);
  evict_digest->needs(evict_position);
  evict_snapshots->callback([&chosen, all, evict_digest] {
    if (all->empty() && evict_digest->empty())
      throw CLI::RequiredError("--all, or --digest and --position");
    chosen = &ssmd::ctl::EvictSnapshots;
  });

  CLI::App* top = add("top", "rates and occupancy, again and again; q leaves", &ssmd::ctl::Top);
  top->add_option("--interval", options.interval_seconds, "between two readings")
      ->type_name("SECONDS")
      ->check(CLI::Range(0.1, 3600.0))
      ->capture_default_str();
  top->add_flag("--once", options.once, "one picture after one interval, for scripts");
  app.require_subcommand(1);

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    const auto parsed = app.get_subcommands();
    std::string what = error.what();
    std::replace(what.begin(), what.end(), '\n', ' ');
    if (parsed.empty() && error.get_exit_code() == kNoCommand) {
      const std::vector<std::string> rest = app.remaining();
      what = rest.empty() ? "which command?" : "no such command: " + rest[0];
    }
    std::fprintf(stderr, "ssmctl: %s (ssmctl %s%s--help explains)\n", what.c_str(),
                 parsed.empty() ? "" : parsed[0]->get_name().c_str(), parsed.empty() ? "" : " ");
    return 2;
  }
  const absl::Status status = chosen(options);
  if (status.ok()) return 0;
  std::fflush(stdout);
  std::fprintf(stderr, "ssmctl: %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace

// Nothing of ours throws; what the libraries throw (no memory, say) still ends in one line.
int main(int argc, char** argv) try {
  return Main(argc, argv);
} catch (const std::exception& error) {
  std::fprintf(stderr, "ssmctl: %s\n", error.what());
  return 1;
}
