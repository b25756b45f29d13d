#include "client/ctl/commands.h"

#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/ctl/common.h"
#include "client/session.h"
#include "client/state_file.h"
#include "client/tools/terminal.h"

namespace ssmd::ctl {
namespace {

constexpr absl::Duration kTransferTimeout = absl::Hours(1);
constexpr uint32_t kSnapshotsPage = 1000;

}  // namespace

void Print(const std::string& text) { std::fwrite(text.data(), 1, text.size(), stdout); }

void Print(const Options& options, const std::string& text, const Json& json) {
  Print(options.json ? json.dump(2) + "\n" : text);
}

absl::StatusOr<std::unique_ptr<Client>> Connect(const Options& options) {
  Client::Options connect;
  connect.security = options.security;
  auto connected = Client::Connect(options.server, connect);
  if (absl::IsUnavailable(connected.status()))
    return absl::UnavailableError(
        absl::StrCat(connected.status().message(), "; is ssmd-server running there?"));
  return connected;
}

absl::StatusOr<Model> FindModel(const v1::GetStatusResponse& status, const std::string& wanted) {
  const std::optional<uint64_t> id = ParseId(wanted);
  std::vector<Model> found;
  for (const v1::ModelStatus& model : status.models())
    if (model.name() == wanted || (id.has_value() && model.model_id() == *id))
      found.push_back({model.model_id(), model.name()});
  if (found.size() == 1) return found[0];
  if (found.empty())
    return absl::NotFoundError(
        absl::StrCat("no model '", wanted, "' is registered (ssmctl models lists them)"));
  return absl::InvalidArgumentError(
      absl::StrCat(found.size(), " models are called '", wanted, "': give the id instead"));
}

namespace {

absl::StatusOr<std::vector<uint64_t>> ParseIds(const std::vector<std::string>& texts) {
  std::vector<uint64_t> ids;
  for (const std::string& text : texts) {
    const std::optional<uint64_t> id = ParseId(text);
    if (!id.has_value())
      return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not an id of 16 hex digits"));
    ids.push_back(*id);
  }
  return ids;
}

// A connection and a session of ssmctl's own.
struct Connection {
  std::unique_ptr<Client> client;
  v1::GetCapabilitiesResponse limits;
  v1::GetStatusResponse status;
  std::unique_ptr<client::Session> session;
};

absl::StatusOr<Connection> Open(const Options& options, absl::Duration adoption = {}) {
  Connection connection;
  CTL_ASSIGN_OR_RETURN(connection.client, Connect(options));
  CTL_ASSIGN_OR_RETURN(connection.limits, connection.client->GetCapabilities());
  CTL_ASSIGN_OR_RETURN(connection.status, connection.client->GetStatus());
  client::SessionOptions session{.client_name = "ssmctl", .adoption = adoption};
  // A short one, so that what is adopted is soon free for its next owner.
  if (adoption > absl::ZeroDuration())
    session.lease = absl::Milliseconds(connection.limits.lease_ms_min());
  CTL_ASSIGN_OR_RETURN(connection.session, connection.client->OpenSession(session));
  return connection;
}

// Sequences of an ended session, taken over for as long as this lives, then left for adoption
// again.
class Adopted {
 public:
  static absl::StatusOr<std::unique_ptr<Adopted>> Take(const Options& options) {
    std::unique_ptr<Adopted> adopted(new Adopted);
    CTL_ASSIGN_OR_RETURN(auto client, Connect(options));
    CTL_ASSIGN_OR_RETURN(const v1::GetCapabilitiesResponse limits, client->GetCapabilities());
    const uint64_t keep_ms = uint64_t{options.keep_seconds} * 1000;
    if (keep_ms > limits.adoption_ms_max())
      return absl::InvalidArgumentError(
          absl::StrFormat("this server keeps sequences for at most %d s: give a smaller --keep",
                          limits.adoption_ms_max() / 1000));
    const std::optional<uint64_t> session = ParseId(options.session);
    if (!session.has_value())
      return absl::InvalidArgumentError(
          absl::StrCat("'", options.session, "' is not a session id of 16 hex digits"));
    CTL_ASSIGN_OR_RETURN(const std::vector<uint64_t> ids, ParseIds(options.sequences));
    CTL_ASSIGN_OR_RETURN(adopted->connection_, Open(options, absl::Milliseconds(keep_ms)));
    CTL_ASSIGN_OR_RETURN(adopted->model_, FindModel(adopted->connection_.status, options.model));
    CTL_ASSIGN_OR_RETURN(adopted->reply_, adopted->connection_.session->AdoptSequences(
                                              adopted->model_.id, *session, ids));
    adopted->taken_ = true;
    adopted->keep_seconds_ = options.keep_seconds;
    return adopted;
  }

  ~Adopted() {
    if (!taken_) return;
    client::Session& session = *connection_.session;
    session.Abandon();
    absl::FPrintF(stderr, "adopt them from session %s, after its lease of %s and within %s\n",
                  IdText(session.id()), absl::FormatDuration(session.lease()),
                  client::Duration(uint64_t{keep_seconds_} * 1000));
  }

  client::Session& session() { return *connection_.session; }
  const Model& model() const { return model_; }
  const v1::AdoptSequencesResponse& reply() const { return reply_; }

 private:
  Adopted() = default;

  bool taken_ = false;
  uint32_t keep_seconds_ = 0;
  Connection connection_;
  Model model_;
  v1::AdoptSequencesResponse reply_;
};

// Passes everything on and shows how far it is.
class WatchedSink final : public client::StateSink {
 public:
  explicit WatchedSink(client::StateFileWriter& file) : file_(file) {}
  absl::Status Begin(const v1::StateDescriptor& descriptor) override {
    const auto components = client::ComponentsOf(descriptor);
    if (!components.ok()) return components.status();
    progress_ = std::make_unique<client::Progress>("exporting", client::TotalBytes(*components));
    done_ = 0;
    return file_.Begin(descriptor);
  }
  absl::Status Write(const client::StateComponent& component, uint64_t offset,
                     absl::string_view data) override {
    progress_->Update(done_ += data.size());
    return file_.Write(component, offset, data);
  }

 private:
  client::StateFileWriter& file_;
  std::unique_ptr<client::Progress> progress_;
  uint64_t done_ = 0;
};

class WatchedSource final : public client::StateSource {
 public:
  explicit WatchedSource(client::StateFile& file)
      : file_(file), progress_("importing", file.bytes()) {}
  const v1::StateDescriptor& descriptor() const override { return file_.descriptor(); }
  absl::Status Read(const client::StateComponent& component, uint64_t offset,
                    absl::Span<char> to) override {
    progress_.Update(component.first + offset);
    return file_.Read(component, offset, to);
  }

 private:
  client::StateFile& file_;
  client::Progress progress_;
};

absl::StatusOr<v1::GetStatusResponse> GetStatus(const Options& options) {
  CTL_ASSIGN_OR_RETURN(auto client, Connect(options));
  return client->GetStatus();
}

absl::StatusOr<client::ExportSummary> ExportTo(const Options& options, client::Session& session,
                                               uint64_t model_id,
                                               const client::ExportSource& source) {
  v1::SnapshotKey key;
  if (const auto* snapshot = std::get_if<v1::SnapshotKey>(&source)) key = *snapshot;
  client::StateFileWriter file(options.file, key);
  WatchedSink sink(file);
  CTL_ASSIGN_OR_RETURN(client::ExportSummary summary,
                       session.ExportState(model_id, source, sink, {.timeout = kTransferTimeout}));
  CTL_RETURN_IF_ERROR(file.Finish());
  return summary;
}

}  // namespace

absl::Status Status(const Options& options) {
  CTL_ASSIGN_OR_RETURN(const v1::GetStatusResponse status, GetStatus(options));
  Print(options, StatusText(status, options.server), StatusJson(status, options.server));
  return absl::OkStatus();
}

absl::Status Models(const Options& options) {
  CTL_ASSIGN_OR_RETURN(const v1::GetStatusResponse status, GetStatus(options));
  Print(options, ModelsText(status), ModelsJson(status));
  return absl::OkStatus();
}

absl::Status Sequences(const Options& options) {
  if (options.session.empty()) {
    CTL_ASSIGN_OR_RETURN(const v1::GetStatusResponse status, GetStatus(options));
    Print(options,
          SequenceCountsText(status) +
              "\nThe server lists sequences to the session that owns them only: these are counts.\n"
              "--adopt SESSION lists those that an ended session left for adoption.\n",
          SequenceCountsJson(status));
    return absl::OkStatus();
  }
  CTL_ASSIGN_OR_RETURN(const auto adopted, Adopted::Take(options));
  const auto& found = adopted->reply().sequences();
  const std::vector<v1::SequenceInfo> sequences(found.begin(), found.end());
  Json json = SequencesJson(sequences);
  json["session_id"] = IdText(adopted->session().id());
  Print(options, SequencesText(sequences), json);
  return absl::OkStatus();
}

absl::Status Snapshots(const Options& options) {
  CTL_ASSIGN_OR_RETURN(Connection connection, Open(options));
  std::vector<Model> models;
  if (options.model.empty()) {
    for (const v1::ModelStatus& model : connection.status.models())
      models.push_back({model.model_id(), model.name()});
  } else {
    CTL_ASSIGN_OR_RETURN(Model model, FindModel(connection.status, options.model));
    models.push_back(std::move(model));
  }
  std::vector<SnapshotRow> rows;
  for (const Model& model : models) {
    std::string token;
    do {
      CTL_ASSIGN_OR_RETURN(const v1::ListSnapshotsResponse page,
                           connection.session->ListSnapshots(model.id, token, kSnapshotsPage));
      for (const v1::SnapshotKey& key : page.keys()) rows.push_back({model.id, model.name, key});
      token = page.next_page_token();
    } while (!token.empty());
  }
  Print(options, SnapshotsText(rows), SnapshotsJson(rows));
  return absl::OkStatus();
}

absl::Status Steps(const Options& options) {
  CTL_ASSIGN_OR_RETURN(const v1::GetStatusResponse status, GetStatus(options));
  Print(options, StepsText(status) + "\nCounted since the model was registered.\n",
        StepsJson(status));
  return absl::OkStatus();
}

absl::Status Export(const Options& options) {
  if (!options.force && access(options.file.c_str(), F_OK) == 0)
    return absl::AlreadyExistsError(absl::StrCat(options.file, " exists: --force replaces it"));
  client::ExportSummary summary;
  Model model;
  if (options.session.empty()) {
    v1::SnapshotKey key;
    CTL_ASSIGN_OR_RETURN(*key.mutable_digest(), ParseDigest(options.digest));
    key.set_position(options.position);
    CTL_ASSIGN_OR_RETURN(Connection connection, Open(options));
    CTL_ASSIGN_OR_RETURN(model, FindModel(connection.status, options.model));
    CTL_ASSIGN_OR_RETURN(summary, ExportTo(options, *connection.session, model.id, key));
  } else {
    CTL_ASSIGN_OR_RETURN(const auto adopted, Adopted::Take(options));
    model = adopted->model();
    if (adopted->reply().sequences_size() != 1)
      return absl::InternalError("AdoptSequences answered with another number of sequences");
    const v1::SequenceInfo& sequence = adopted->reply().sequences(0);
    const client::SequenceRef source{sequence.sequence_id(), sequence.version()};
    CTL_ASSIGN_OR_RETURN(summary, ExportTo(options, adopted->session(), model.id, source));
  }
  Print(options,
        absl::StrFormat("%s: %s of %s at position %d, checksum %s\n", options.file,
                        client::ByteSize(static_cast<double>(summary.bytes)), model.name,
                        summary.descriptor.position(), IdText(summary.checksum)),
        {{"file", options.file},
         {"model_id", IdText(model.id)},
         {"position", summary.descriptor.position()},
         {"bytes", summary.bytes},
         {"checksum", IdText(summary.checksum)}});
  return absl::OkStatus();
}

absl::Status Import(const Options& options) {
  CTL_ASSIGN_OR_RETURN(const auto file, client::StateFile::Open(options.file));
  const uint64_t model_id = file->descriptor().model_id();
  v1::SnapshotKey key = file->key();
  if (!options.digest.empty()) {
    CTL_ASSIGN_OR_RETURN(*key.mutable_digest(), ParseDigest(options.digest));
  }
  if (key.digest().empty())
    return absl::InvalidArgumentError(
        "the file is of a sequence, not of a snapshot: name the new snapshot with --digest");
  key.set_position(file->descriptor().position());
  CTL_ASSIGN_OR_RETURN(Connection connection, Open(options));
  CTL_ASSIGN_OR_RETURN(const Model model, FindModel(connection.status, IdText(model_id)));

  client::Session& session = *connection.session;
  CTL_ASSIGN_OR_RETURN(const v1::CreateSequencesResponse created,
                       session.CreateSequences(model.id, 1));
  WatchedSource source(*file);
  CTL_ASSIGN_OR_RETURN(const v1::ImportStateResponse imported,
                       session.ImportState(model.id, {created.sequence_ids(0), created.version()},
                                           source, {.timeout = kTransferTimeout}));
  CTL_ASSIGN_OR_RETURN(
      const v1::CreateSnapshotResponse snapshot,
      session.CreateSnapshot(
          model.id, {created.sequence_ids(0), imported.version()}, key,
          {.overwrite = options.force, .worker_window = file->descriptor().worker_window()}));
  if (!snapshot.created())
    return absl::AlreadyExistsError(absl::StrFormat("snapshot %s at %d exists: --force replaces it",
                                                    DigestText(key.digest()), key.position()));
  Print(options,
        absl::StrFormat("snapshot %s at position %d of %s: %s, checksum %s\n",
                        DigestText(key.digest()), key.position(), model.name,
                        client::ByteSize(static_cast<double>(file->bytes())),
                        IdText(file->checksum())),
        {{"model_id", IdText(model.id)},
         {"digest", DigestText(key.digest())},
         {"position", key.position()},
         {"bytes", file->bytes()},
         {"checksum", IdText(file->checksum())}});
  return absl::OkStatus();
}

namespace {

// The first error of a text proto, with its place.
class FirstError final : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, google::protobuf::io::ColumnNumber column,
                const std::string& message) override {
    if (text.empty()) text = absl::StrCat(line + 1, ":", column + 1, ": ", message);
  }
  std::string text;
};

}  // namespace

absl::Status ModelFile(const Options& options) {
  std::ifstream file(options.file, std::ios::binary);
  std::ostringstream contents;
  if (!file || !(contents << file.rdbuf()))
    return absl::NotFoundError(absl::StrCat("cannot read ", options.file));
  v1::RegisterModelRequest request;
  google::protobuf::TextFormat::Parser parser;
  FirstError error;
  parser.RecordErrorsTo(&error);
  if (!parser.ParseFromString(contents.str(), &request))
    return absl::InvalidArgumentError(absl::StrCat(options.file, ":", error.text));
  CTL_ASSIGN_OR_RETURN(auto client, Connect(options));
  CTL_ASSIGN_OR_RETURN(const v1::RegisterModelResponse registered,
                       client->RegisterModel(request.spec(), request.capacity()));
  Print(options, RegisteredText(registered, request.spec().name()),
        RegisteredJson(registered, request.spec().name()));
  return absl::OkStatus();
}

absl::Status Unregister(const Options& options) {
  CTL_ASSIGN_OR_RETURN(Connection connection, Open(options));
  CTL_ASSIGN_OR_RETURN(const Model model, FindModel(connection.status, options.model));
  CTL_ASSIGN_OR_RETURN(const v1::UnregisterModelResponse reply,
                       connection.session->UnregisterModel(model.id));
  Print(options,
        absl::StrFormat("unregistered %s (%s), %d snapshots dropped\n", model.name,
                        IdText(model.id), reply.snapshots_dropped()),
        {{"model_id", IdText(model.id)}, {"snapshots_dropped", reply.snapshots_dropped()}});
  return absl::OkStatus();
}

absl::Status Flush(const Options& options) {
  CTL_ASSIGN_OR_RETURN(const auto adopted, Adopted::Take(options));
  std::vector<uint64_t> ids;
  for (const v1::SequenceInfo& sequence : adopted->reply().sequences())
    ids.push_back(sequence.sequence_id());
  uint32_t flushed = 0;
  if (!ids.empty()) {
    CTL_ASSIGN_OR_RETURN(const v1::FlushSequencesResponse reply,
                         adopted->session().FlushSequences(adopted->model().id, ids));
    flushed = reply.flushed();
  }
  Print(options, absl::StrFormat("%d of %d sequences had records to fold\n", flushed, ids.size()),
        {{"sequences", ids.size()},
         {"flushed", flushed},
         {"session_id", IdText(adopted->session().id())}});
  return absl::OkStatus();
}

}  // namespace ssmd::ctl
