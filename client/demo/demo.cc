#include "client/demo/demo.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/demo/local_ssm.h"
#include "client/demo/report.h"
#include "client/demo/resume.h"

namespace ssmd::demo {
namespace {

constexpr char kModelName[] = "hybrid-kjv";
constexpr uint32_t kForks = 4;

#define DEMO_RETURN_IF_ERROR(expression)                                 \
  do {                                                                   \
    if (absl::Status status = (expression); !status.ok()) return status; \
  } while (0)

std::vector<Stream*> Pointers(std::vector<Stream>& streams) {
  std::vector<Stream*> pointers;
  pointers.reserve(streams.size());
  for (Stream& stream : streams) pointers.push_back(&stream);
  return pointers;
}

// Of the demo's model; zero when the server does not list it.
v1::ModelStatus StatusOfModel(const absl::StatusOr<v1::GetStatusResponse>& status,
                              uint64_t model_id) {
  if (status.ok())
    for (const v1::ModelStatus& model : status->models())
      if (model.model_id() == model_id) return model;
  return {};
}

void PrintStats(const GenerateStats& stats) {
  PrintItem("tokens",
            absl::StrFormat(
                "%s new ones in %s steps of a sequence (%s batches): %.2f "
                "per step",
                WithCommas(stats.new_bytes), WithCommas(stats.steps), WithCommas(stats.batches),
                static_cast<double>(stats.new_bytes) / static_cast<double>(stats.steps)));
  PrintItem("drafts", absl::StrFormat("%s verified, %s accepted, the others rolled back",
                                      WithCommas(stats.drafted), WithCommas(stats.accepted)));
  PrintItem("speed",
            absl::StrFormat("%.0f tokens/s (%.1f s)",
                            static_cast<double>(stats.new_bytes) / stats.seconds, stats.seconds));
}

}  // namespace

Demo::~Demo() {
  std::error_code ignored;
  if (!scratch_folder_.empty()) std::filesystem::remove_all(scratch_folder_, ignored);
}

void Demo::Check(const std::string& name, bool good) {
  checks_.emplace_back(name, good);
  passed_ = passed_ && good;
}

absl::Status Demo::Run() {
  DEMO_RETURN_IF_ERROR(Load());
  DEMO_RETURN_IF_ERROR(Connect());
  DEMO_RETURN_IF_ERROR(GenerateRemotely());
  DEMO_RETURN_IF_ERROR(CompareWithLocal());
  DEMO_RETURN_IF_ERROR(Fork());
  DEMO_RETURN_IF_ERROR(ResumeElsewhere());
  return Finish();
}

absl::Status Demo::Load() {
  absl::StatusOr<Safetensors> weights = Safetensors::Read(options_.weights);
  if (!weights.ok()) return weights.status();
  auto model = HybridModel::Load(*weights);
  if (!model.ok()) return model.status();
  model_ = *std::move(model);
  metadata_bits_ = weights->Metadata("heldout_bits_per_byte");
  metadata_text_ = weights->Metadata("text");

  std::ifstream file(options_.text, std::ios::binary);
  std::ostringstream contents;
  if (!file || !(contents << file.rdbuf()))
    return absl::NotFoundError("cannot read " + options_.text);
  text_ = std::move(contents).str();
  if (text_.size() < 2 * options_.prompt_bytes)
    return absl::InvalidArgumentError(absl::StrCat(options_.text, ": too short for prompts of ",
                                                   options_.prompt_bytes, " bytes"));
  return absl::OkStatus();
}

absl::Status Demo::Connect() {
  Client::Options connect;
  connect.security = options_.security;
  auto client = Client::Connect(options_.server, connect);
  if (!client.ok())
    return absl::Status(
        client.status().code(),
        absl::StrCat(client.status().message(), "; start ssmd-server, or name one with --server"));
  client_ = *std::move(client);
  auto capabilities = client_->GetCapabilities();
  if (!capabilities.ok()) return capabilities.status();
  auto registered = client_->RegisterModel(
      DemoModelSpec(kModelName, model_->ssm_parameters(), options_.remote.form, options_.flush),
      DemoModelCapacity());
  if (!registered.ok()) return registered.status();
  registered_ = *registered;
  auto session = client_->OpenSession({.client_name = "ssmd-demo"});
  if (!session.ok()) return session.status();
  session_ = *std::move(session);
  auto remote =
      RemoteSsm::Open(*session_, registered_.model_id(), model_->ssm_parameters(), options_.remote);
  if (!remote.ok()) return remote.status();
  remote_ = *std::move(remote);
  flushes_before_ = StatusOfModel(client_->GetStatus(), registered_.model_id()).flushes();
  if (!options_.metrics.empty()) {
    absl::StatusOr<client::Samples> samples = client::FetchMetrics(options_.metrics);
    if (!samples.ok()) return samples.status();
    metrics_before_ = *std::move(samples);
  }

  absl::PrintF("ssmd demo: a hybrid language model whose recurrent state lives on a server\n\n");
  const v1::ModelFootprint& footprint = registered_.footprint();
  PrintItem("model", absl::StrFormat("%s, %s parameters, bytes in and out", kModelName,
                                     WithCommas(model_->parameter_count())));
  PrintItem("", "8 blocks: mamba2 gdn kda attn, twice; recurrent state in 6 of them");
  PrintItem("weights", options_.weights);
  PrintItem("text", options_.text);
  if (!metadata_bits_.empty())
    PrintItem("quality", absl::StrCat(metadata_bits_, " bits per byte, held out (as trained)"));
  PrintItem("server", absl::StrFormat("%s, version %s, backend %s, epoch %016x", options_.server,
                                      capabilities->server_version(), capabilities->backend(),
                                      session_->server_epoch()));
  PrintItem("state", absl::StrFormat("%s a checkpoint, %s a slot of %d records, %s reserved",
                                     ByteSize(static_cast<double>(footprint.checkpoint_bytes())),
                                     ByteSize(static_cast<double>(footprint.ring_bytes())),
                                     footprint.ring_records(),
                                     ByteSize(static_cast<double>(footprint.reserved_bytes()))));
  const bool raw = options_.remote.form == v1::INPUT_FORM_RAW;
  if (footprint.conv_bytes() > 0)
    PrintItem("", absl::StrFormat("of a slot, %s convolution windows",
                                  ByteSize(static_cast<double>(footprint.conv_bytes()))));
  PrintItem("", absl::StrFormat("flushes: %s", options_.flush == v1::FLUSH_MODE_BACKGROUND
                                                   ? "in the background, ahead of time"
                                                   : "fused, inside the verify that needs one"));
  PrintItem("worker", raw ? "this process: projections, attention, MLPs, sampling; it holds no"
                          : "this process: all but the recurrences; it holds no recurrent state,");
  PrintItem("", raw ? "recurrent state and no convolution window (raw input form)"
                    : "but the convolutions' windows (post_conv input form)");
  PrintItem("transport", options_.remote.transport == Transport::kStream
                             ? "one Steps stream, commits ride on the next step's begin"
                             : "a unary call each");
  return absl::OkStatus();
}

// Starts of lines, drawn without replacement.
std::vector<std::string> Demo::ChoosePrompts() const {
  std::vector<size_t> starts;
  for (size_t at = 0; at + options_.prompt_bytes < text_.size(); ++at)
    if (at == 0 || text_[at - 1] == '\n') starts.push_back(at);
  std::mt19937_64 random(options_.seed);
  std::vector<std::string> prompts;
  while (prompts.size() < options_.prompts && !starts.empty()) {
    const size_t chosen = random() % starts.size();
    prompts.push_back(text_.substr(starts[chosen], options_.prompt_bytes));
    starts.erase(starts.begin() + static_cast<std::ptrdiff_t>(chosen));
  }
  return prompts;
}

absl::StatusOr<GenerateStats> Demo::RunAll(SsmLayers& ssm, std::vector<Stream>& streams,
                                           const std::string& label) {
  for (const std::string& prompt : ChoosePrompts()) {
    streams.emplace_back();
    streams.back().text = prompt;
    streams.back().prompt_bytes = prompt.size();
  }
  auto sequences = ssm.Create(static_cast<uint32_t>(streams.size()));
  if (!sequences.ok()) return sequences.status();
  for (size_t i = 0; i < streams.size(); ++i) streams[i].ssm = (*sequences)[i];
  const std::vector<Stream*> pointers = Pointers(streams);
  {
    Progress progress(label + ", prompts", uint64_t{options_.prompt_bytes} * streams.size());
    DEMO_RETURN_IF_ERROR(Prefill(*model_, ssm, pointers, kStepTokensMax, /*keep_logits=*/true,
                                 [&](uint64_t bytes) { progress.Update(bytes); }));
  }
  Progress progress(label, uint64_t{options_.new_bytes} * streams.size());
  return Generate(*model_, ssm, pointers,
                  {.new_bytes = options_.new_bytes,
                   .keep_logits = true,
                   .progress = [&](uint64_t bytes) { progress.Update(bytes); }});
}

absl::Status Demo::GenerateRemotely() {
  PrintHeading(
      absl::StrFormat("1. %d prompts of %d bytes (seed %d), greedy, %d new bytes each, "
                      "through the server",
                      options_.prompts, options_.prompt_bytes, options_.seed, options_.new_bytes));
  absl::StatusOr<GenerateStats> stats = RunAll(*remote_, remote_streams_, "through the server");
  if (!stats.ok()) return stats.status();
  remote_stats_ = *stats;
  PrintText(remote_streams_[0].text, remote_streams_[0].prompt_bytes);
  PrintStats(*stats);
  return absl::OkStatus();
}

absl::Status Demo::CompareWithLocal() {
  PrintHeading("2. The same with the recurrences in this process, without the server");
  LocalSsm<float> local(model_->ssm_parameters());
  std::vector<Stream> streams;
  absl::StatusOr<GenerateStats> stats = RunAll(local, streams, "in this process");
  if (!stats.ok()) return stats.status();
  PrintItem("speed", absl::StrFormat("%.0f tokens/s (%.1f s)",
                                     static_cast<double>(stats->new_bytes) / stats->seconds,
                                     stats->seconds));
  absl::StatusOr<Tolerance> tolerance;
  {
    Progress progress("measuring the tolerance", streams[0].text.size());
    tolerance =
        MeasureTolerance(*model_, streams[0], [&](uint64_t bytes) { progress.Update(bytes); });
  }
  if (!tolerance.ok()) return tolerance.status();
  const Comparison comparison = Compare(remote_streams_, streams);
  const bool within = comparison.logit_difference <= tolerance->logit;
  PrintItem("logits",
            absl::StrFormat("largest difference %.2e over %s positions of 256",
                            comparison.logit_difference, WithCommas(comparison.positions)));
  PrintItem("tolerance", absl::StrFormat("%.2e = 36 times %.2e, one FP32 rounding per place",
                                         tolerance->logit, tolerance->amplified));
  if (!comparison.tokens_equal)
    PrintItem("tokens", absl::StrCat("first difference: ", comparison.first_difference));
  const bool equal = comparison.tokens_equal && within;
  absl::PrintF("  remote == local: %s\n", YesNo(equal));
  Check(absl::StrFormat("remote == local, %s tokens", WithCommas(stats->new_bytes)), equal);
  return absl::OkStatus();
}

absl::Status Demo::Fork() {
  PrintHeading(absl::StrFormat("3. One prompt forked into %d continuations, temperature %.1f",
                               kForks, options_.temperature));
  std::vector<Stream> parent(1);
  parent[0].text = ChoosePrompts().back();
  parent[0].prompt_bytes = parent[0].text.size();
  auto created = remote_->Create(1);
  if (!created.ok()) return created.status();
  parent[0].ssm = created->front();
  DEMO_RETURN_IF_ERROR(Prefill(*model_, *remote_, Pointers(parent), kStepTokensMax, false));

  auto children = remote_->Fork(parent[0].ssm, kForks);
  if (!children.ok()) return children.status();
  std::vector<Stream> forks(kForks, parent[0]);
  for (uint32_t i = 0; i < kForks; ++i) {
    forks[i].ssm = (*children)[i];
    forks[i].random.seed(options_.seed + i);
  }
  absl::StatusOr<GenerateStats> stats;
  {
    Progress progress("forks", uint64_t{options_.fork_bytes} * kForks);
    stats = Generate(*model_, *remote_, Pointers(forks),
                     {.new_bytes = options_.fork_bytes,
                      .temperature = options_.temperature,
                      .progress = [&](uint64_t bytes) { progress.Update(bytes); }});
  }
  if (!stats.ok()) return stats.status();
  absl::PrintF("  prompt\n");
  PrintText(parent[0].text, parent[0].text.size());
  for (uint32_t i = 0; i < kForks; ++i) {
    absl::PrintF("  fork %d\n", i + 1);
    PrintText(forks[i].text.substr(forks[i].prompt_bytes), std::string::npos);
  }
  std::vector<SsmLayers::Handle> all = *children;
  all.push_back(parent[0].ssm);
  return remote_->Release(all);
}

absl::Status Demo::ResumeElsewhere() {
  PrintHeading("4. Snapshot in mid-generation, resumed by a new worker process");
  char folder[] = "/tmp/ssmd-demo-XXXXXX";
  if (mkdtemp(folder) == nullptr) return absl::UnavailableError("cannot make a folder in /tmp");
  scratch_folder_ = folder;
  Stream& stream = remote_streams_[0];
  v1::SnapshotKey key;  // of this run alone: demos may share a server
  key.set_digest(absl::StrCat("ssmd-demo/", absl::Hex(session_->id(), absl::kZeroPad16)));
  key.set_position(stream.cache.position());
  DEMO_RETURN_IF_ERROR(remote_->CreateSnapshot(stream.ssm, key));
  const std::string state_file = scratch_folder_ + "/worker.safetensors";
  DEMO_RETURN_IF_ERROR(SaveWorker(stream, registered_.model_id(), key.digest(), state_file));

  // This process goes on too: what it writes is what the new one must write.
  const size_t seen = stream.text.size();
  Stream* const streams[] = {&stream};
  int64_t pid = 0;
  absl::StatusOr<std::string> resumed;
  {
    Progress progress("going on here, then in a new process", 2 * uint64_t{options_.resume_bytes});
    auto stats = Generate(*model_, *remote_, streams,
                          {.new_bytes = options_.resume_bytes,
                           .progress = [&](uint64_t bytes) { progress.Update(bytes); }});
    if (!stats.ok()) return stats.status();
    resumed = ResumeInNewProcess({.server = options_.server,
                                  .security = options_.security,
                                  .weights = options_.weights,
                                  .remote = options_.remote,
                                  .state_file = state_file,
                                  .new_bytes = options_.resume_bytes},
                                 scratch_folder_, pid);
  }
  if (!resumed.ok()) return resumed.status();
  DEMO_RETURN_IF_ERROR(remote_->DeleteSnapshot(key));
  const bool identical = stream.text.substr(seen) == *resumed;
  PrintItem("snapshot",
            absl::StrFormat("position %d; worker's file (KV cache, text): %s", key.position(),
                            ByteSize(static_cast<double>(std::filesystem::file_size(state_file)))));
  PrintItem("process", absl::StrFormat("%d, from this one's snapshot and file", pid));
  absl::PrintF("  resumed in a new process: identical for %d tokens: %s\n", options_.resume_bytes,
               YesNo(identical));
  Check(absl::StrFormat("resumed in a new process, %d tokens", options_.resume_bytes), identical);
  return absl::OkStatus();
}

absl::Status Demo::Finish() {
  PrintHeading("5. What the server moved");
  const uint64_t flushes =
      StatusOfModel(client_->GetStatus(), registered_.model_id()).flushes() - flushes_before_;
  PrintItem("flushes", absl::StrFormat("%s checkpoints written", WithCommas(flushes)));
  if (!options_.metrics.empty()) {
    absl::StatusOr<client::Samples> after = client::FetchMetrics(options_.metrics);
    if (!after.ok()) return after.status();
    const auto moved = [&](const std::string& name, const std::string& label = "") {
      return client::SumOf(*after, name, label) - client::SumOf(metrics_before_, name, label);
    };
    const char bytes[] = "ssmd_state_bytes_total";
    const double total = moved(bytes), baseline = moved("ssmd_write_every_step_bytes_total");
    const double fused = moved("ssmd_flushes_total", "reason=\"fused\""),
                 background = moved("ssmd_flushes_total", "reason=\"background\"");
    PrintItem("", absl::StrFormat("%.0f fused, %.0f in the background", fused, background));
    PrintItem("state bytes",
              absl::StrFormat("%s: checkpoints %s read, %s written; records %s", ByteSize(total),
                              ByteSize(moved(bytes, "kind=\"checkpoint_hp_read")),
                              ByteSize(moved(bytes, "kind=\"checkpoint_hp_write")),
                              ByteSize(moved(bytes, "kind=\"ring_"))));
    PrintItem("baseline", absl::StrFormat("%s by writing the state after every token: %.1f times "
                                          "as much",
                                          ByteSize(baseline), total > 0 ? baseline / total : 0.0));
    Check("less state moved than by writing every step", total > 0 && total < baseline);
  } else {
    PrintItem("state bytes", "not shown: --metrics names no page");
  }

  std::vector<SsmLayers::Handle> sequences;
  for (const Stream& stream : remote_streams_) sequences.push_back(stream.ssm);
  DEMO_RETURN_IF_ERROR(remote_->Release(sequences));
  auto left = session_->GetSequences(registered_.model_id());
  if (!left.ok()) return left.status();
  auto closed = session_->Close();
  if (!closed.ok()) return closed.status();
  Check("everything released", left->sequences_size() == 0 && closed->sequences_released() == 0);

  PrintHeading("Summary");
  absl::PrintF("  %-48s %s\n", "new tokens through the server",
               WithCommas(remote_stats_.new_bytes));
  absl::PrintF(
      "  %-48s %.2f\n", "tokens committed per step",
      static_cast<double>(remote_stats_.new_bytes) / static_cast<double>(remote_stats_.steps));
  absl::PrintF("  %-48s %.0f\n",
               options_.remote.transport == Transport::kStream ? "tokens/s, over one stream"
                                                               : "tokens/s, over unary calls",
               static_cast<double>(remote_stats_.new_bytes) / remote_stats_.seconds);
  for (const auto& [name, good] : checks_) absl::PrintF("  %-48s %s\n", name, YesNo(good));
  return absl::OkStatus();
}

}  // namespace ssmd::demo
