// ssmd-demo: a worker that decodes with its recurrent states on an ssmd server.
//
// Exit codes: 0 when everything came out as it should; 1 when a check failed or something is
// missing (one line on stderr says what); 2 for a wrong command line.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "absl/strings/str_format.h"
#include "client/demo/demo.h"
#include "client/demo/local_ssm.h"
#include "client/demo/report.h"
#include "client/demo/resume.h"
#include "client/tools/security_flags.h"

namespace {

using ssmd::demo::DemoOptions;

constexpr char kWeights[] = "client/demo/weights/hybrid-kjv.safetensors";
constexpr char kText[] = "client/demo/text/heldout.txt";
constexpr size_t kEvalWindow = 1024;  // as in train/train.py

int Fail(const absl::Status& status) {
  std::fflush(stdout);
  std::fprintf(stderr, "ssmd-demo: %s\n", std::string(status.message()).c_str());
  return 1;
}

int RunDemo(const DemoOptions& options) {
  ssmd::demo::Demo demo(options);
  if (absl::Status status = demo.Run(); !status.ok()) return Fail(status);
  return demo.passed() ? 0 : 1;
}

int RunEval(const DemoOptions& options, uint64_t bytes) {
  auto weights = ssmd::demo::Safetensors::Read(options.weights);
  if (!weights.ok()) return Fail(weights.status());
  auto model = ssmd::demo::HybridModel::Load(*weights);
  if (!model.ok()) return Fail(model.status());
  std::ifstream file(options.text, std::ios::binary);
  std::ostringstream contents;
  if (!file || !(contents << file.rdbuf()))
    return Fail(absl::NotFoundError("cannot read " + options.text));
  std::string text = std::move(contents).str();
  const bool all = bytes == 0 || bytes >= text.size();
  if (!all) text.resize(bytes);
  ssmd::demo::LocalSsm<float> ssm((*model)->ssm_parameters());
  absl::StatusOr<double> bits;
  {
    ssmd::demo::Progress progress("evaluating", text.size());
    bits = ssmd::demo::BitsPerByte(**model, ssm, text, kEvalWindow,
                                   [&](uint64_t done) { progress.Update(done); });
  }
  if (!bits.ok()) return Fail(bits.status());
  absl::PrintF("%.4f bits per byte over %s%s bytes of %s, windows of %d, recurrences in FP32\n",
               *bits, all ? "all " : "the first ", ssmd::demo::WithCommas(text.size()),
               options.text, kEvalWindow);
  // The repository's text is the first 128 KiB of the held-out part, so the two differ.
  const std::string trained = weights->Metadata("heldout_bits_per_byte");
  if (!trained.empty())
    absl::PrintF("%s over the whole held-out part, measured when the weights were saved\n",
                 trained);
  return 0;
}

int RunResume(const ssmd::demo::ResumeOptions& options) {
  absl::StatusOr<std::string> text = ssmd::demo::Resume(options);
  if (!text.ok()) return Fail(text.status());
  std::fwrite(text->data(), 1, text->size(), stdout);
  return 0;
}

void AddRemoteFlags(CLI::App& app, ssmd::demo::RemoteOptions& remote) {
  using ssmd::demo::Transport;
  static const std::map<std::string, ssmd::v1::InputForm> forms = {
      {"raw", ssmd::v1::INPUT_FORM_RAW}, {"post_conv", ssmd::v1::INPUT_FORM_POST_CONV}};
  static const std::map<std::string, Transport> transports = {{"stream", Transport::kStream},
                                                              {"unary", Transport::kUnary}};
  app.add_option("--input-form", remote.form,
                 "raw: the server runs the convolutions too; post_conv: the worker does")
      ->transform(CLI::CheckedTransformer(forms).description(""))
      ->type_name("raw|post_conv")
      ->default_str("raw");
  app.add_option("--transport", remote.transport, "of the steps: one stream, or a call each")
      ->transform(CLI::CheckedTransformer(transports).description(""))
      ->type_name("stream|unary")
      ->default_str("stream");
}

int Main(int argc, char** argv) {
  DemoOptions options;
  options.server = "127.0.0.1:50051";
  options.weights = kWeights;
  options.text = kText;
  uint64_t eval_bytes = 16384;
  ssmd::demo::ResumeOptions resume_options;

  CLI::App app(
      "ssmd-demo: decodes a small hybrid language model with its recurrent states on an ssmd\n"
      "server: drafts and verification, comparison with a run without the server, forks, and a\n"
      "snapshot that a new process resumes. Takes about half a minute.",
      "ssmd-demo");
  app.add_option("--server", options.server, "ssmd-server's gRPC address")
      ->type_name("ADDR")
      ->capture_default_str();
  app.add_option("--metrics", options.metrics,
                 "its metrics address, host:port; without it the traffic is not shown")
      ->type_name("ADDR");
  app.add_option("--weights", options.weights, "the model")
      ->type_name("FILE")
      ->capture_default_str();
  app.add_option("--text", options.text, "text that the prompts are taken from")
      ->type_name("FILE")
      ->capture_default_str();
  app.add_option("--seed", options.seed, "chooses the prompts and the samples")
      ->capture_default_str();
  app.add_option("--tokens", options.new_bytes, "new bytes per prompt")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_option("--prompt-bytes", options.prompt_bytes, "length of a prompt")
      ->check(CLI::Range(2, 4096))
      ->capture_default_str();
  app.add_option("--temperature", options.temperature, "of the forks")
      ->check(CLI::Range(0.0, 10.0))
      ->capture_default_str();

  ssmd::client::AddSecurityFlags(app, options.security, "");
  AddRemoteFlags(app, options.remote);
  static const std::map<std::string, ssmd::v1::FlushMode> flushes = {
      {"fused", ssmd::v1::FLUSH_MODE_FUSED}, {"background", ssmd::v1::FLUSH_MODE_BACKGROUND}};
  app.add_option("--flush", options.flush, "when the server folds records into checkpoints")
      ->transform(CLI::CheckedTransformer(flushes).description(""))
      ->type_name("fused|background")
      ->default_str("fused");

  CLI::App* eval = app.add_subcommand(
      "eval", "bits per byte of held-out text, with the recurrences in this process");
  eval->add_option("--weights", options.weights, "the model")
      ->type_name("FILE")
      ->capture_default_str();
  eval->add_option("--text", options.text, "the text")->type_name("FILE")->capture_default_str();
  eval->add_option("--bytes", eval_bytes, "how many of its bytes; 0: all")->capture_default_str();

  CLI::App* resume = app.add_subcommand("resume", "goes on from a saved worker; the demo runs it");
  resume->add_option("--server", resume_options.server, "address")->required()->type_name("ADDR");
  ssmd::client::AddSecurityFlags(*resume, resume_options.security, "");
  resume->add_option("--weights", resume_options.weights, "the model")
      ->required()
      ->type_name("FILE");
  resume->add_option("--state", resume_options.state_file, "what the worker saved")
      ->required()
      ->type_name("FILE");
  AddRemoteFlags(*resume, resume_options.remote);
  resume->add_option("--tokens", resume_options.new_bytes, "new bytes")->required();
  app.require_subcommand(0, 1);

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "ssmd-demo: %s (--help lists the flags)\n", error.what());
    return 2;
  }
  if (eval->parsed()) return RunEval(options, eval_bytes);
  if (resume->parsed()) return RunResume(resume_options);
  return RunDemo(options);
}

}  // namespace

// Nothing of ours throws; what the libraries throw (no memory, say) still ends in one line.
int main(int argc, char** argv) try {
  return Main(argc, argv);
} catch (const std::exception& error) {
  std::fprintf(stderr, "ssmd-demo: %s\n", error.what());
  return 1;
}
