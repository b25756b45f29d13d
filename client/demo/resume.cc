#include "client/demo/resume.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ssmd::demo {

const char* FlagOf(v1::InputForm form) { return form == v1::INPUT_FORM_RAW ? "raw" : "post_conv"; }
const char* FlagOf(Transport transport) {
  return transport == Transport::kStream ? "stream" : "unary";
}

absl::Status SaveWorker(const Stream& stream, uint64_t model_id, const std::string& digest,
                        const std::string& path) {
  SafetensorsWriter writer;
  stream.cache.Save(writer);
  writer.AddBytes("text", stream.text);
  writer.SetMetadata("model_id", absl::StrCat(model_id));
  writer.SetMetadata("snapshot_digest", digest);
  return writer.Write(path);
}

absl::StatusOr<std::string> Resume(const ResumeOptions& options) {
  absl::StatusOr<Safetensors> file = Safetensors::Read(options.state_file);
  if (!file.ok()) return file.status();
  Stream stream;
  uint64_t model_id = 0;
  absl::StatusOr<SequenceCache> cache = SequenceCache::Load(*file);
  if (!cache.ok()) return cache.status();
  absl::StatusOr<std::string> text = file->Bytes("text");
  if (!text.ok()) return text.status();
  stream.cache = *std::move(cache);
  stream.text = *std::move(text);
  if (!absl::SimpleAtoi(file->Metadata("model_id"), &model_id) ||
      stream.text.size() != stream.cache.position() + 1)
    return absl::InvalidArgumentError(absl::StrCat(options.state_file, ": not a saved worker"));

  absl::StatusOr<Safetensors> weights = Safetensors::Read(options.weights);
  if (!weights.ok()) return weights.status();
  auto model = HybridModel::Load(*weights);
  if (!model.ok()) return model.status();
  Client::Options connect;
  connect.security = options.security;
  auto client = Client::Connect(options.server, connect);
  if (!client.ok()) return client.status();
  auto session = (*client)->OpenSession({.client_name = "ssmd-demo resume"});
  if (!session.ok()) return session.status();

  auto remote = RemoteSsm::Open(**session, model_id, (*model)->ssm_parameters(), options.remote);
  if (!remote.ok()) return remote.status();
  RemoteSsm& ssm = **remote;
  v1::SnapshotKey key;
  key.set_digest(file->Metadata("snapshot_digest"));
  key.set_position(stream.cache.position());
  auto sequence = ssm.CreateFromSnapshot(key);
  if (!sequence.ok()) return sequence.status();
  stream.ssm = *sequence;
  const size_t seen = stream.text.size();
  Stream* const streams[] = {&stream};
  auto stats = Generate(**model, ssm, streams, {.new_bytes = options.new_bytes});
  if (!stats.ok()) return stats.status();
  if (absl::Status status = ssm.Release({stream.ssm}); !status.ok()) return status;
  remote->reset();  // ends its stream
  if (auto closed = (*session)->Close(); !closed.ok()) return closed.status();
  return stream.text.substr(seen);
}

absl::StatusOr<std::string> ResumeInNewProcess(const ResumeOptions& options,
                                               const std::string& scratch_folder, int64_t& pid) {
  const std::string output = scratch_folder + "/resumed.txt";
  std::vector<std::string> arguments = {"ssmd-demo",    "resume",
                                        "--server",     options.server,
                                        "--weights",    options.weights,
                                        "--state",      options.state_file,
                                        "--tokens",     absl::StrCat(options.new_bytes),
                                        "--input-form", FlagOf(options.remote.form),
                                        "--transport",  FlagOf(options.remote.transport)};
  const std::pair<const char*, const std::string&> security[] = {
      {"--tls-ca", options.security.ca_file},
      {"--tls-cert", options.security.cert_file},
      {"--tls-key", options.security.key_file},
      {"--tls-server-name", options.security.server_name},
      {"--token-file", options.security.token_file}};
  for (const auto& [flag, value] : security)
    if (!value.empty()) arguments.insert(arguments.end(), {flag, value});
  std::vector<char*> argv;
  argv.reserve(arguments.size() + 1);
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, output.c_str(),
                                   O_WRONLY | O_CREAT | O_TRUNC, 0600);
  pid_t child = 0;
  const int error = posix_spawn(&child, "/proc/self/exe", &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return absl::InternalError("cannot start a new process");
  pid = child;
  int status = 0;
  if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
    return absl::InternalError("the new worker process failed; its message is above");
  std::ifstream file(output, std::ios::binary);
  std::ostringstream contents;
  contents << file.rdbuf();
  return std::move(contents).str();
}

}  // namespace ssmd::demo
