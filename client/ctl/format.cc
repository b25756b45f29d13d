#include "client/ctl/format.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/tools/terminal.h"

namespace ssmd::ctl {
namespace {

using client::ByteSize;
using client::Table;
using client::WithCommas;

constexpr Table::Align kRight = Table::Align::kRight;
constexpr absl::string_view kHex = "hex:";

std::string Bytes(uint64_t bytes) { return ByteSize(static_cast<double>(bytes)); }
std::string Of(uint64_t used, uint64_t total) { return absl::StrCat(used, "/", total); }

std::string Line(absl::string_view label, absl::string_view text) {
  return absl::StrFormat("%-10s %s\n", label, text);
}

std::string TokensPerStep(const v1::ModelStatus& model) {
  if (model.steps_committed() == 0) return "-";
  return absl::StrFormat("%.2f", static_cast<double>(model.tokens_accepted()) /
                                     static_cast<double>(model.steps_committed()));
}

std::string Acceptance(const v1::ModelStatus& model) {
  if (model.tokens_drafted() == 0) return "-";
  return absl::StrFormat("%.1f%%", 100 * static_cast<double>(model.tokens_accepted()) /
                                       static_cast<double>(model.tokens_drafted()));
}

Json CapacityJson(const v1::ModelCapacity& capacity) {
  return {{"sequences_max", capacity.sequences_max()},
          {"snapshots_max", capacity.snapshots_max()},
          {"spare_pages", capacity.spare_pages()},
          {"rows_max", capacity.rows_max()},
          {"steps_max", capacity.steps_max()}};
}

Json FootprintJson(const v1::ModelFootprint& footprint) {
  return {{"checkpoint_bytes", footprint.checkpoint_bytes()},
          {"ring_bytes", footprint.ring_bytes()},
          {"record_bytes", footprint.record_bytes()},
          {"reserved_bytes", footprint.reserved_bytes()},
          {"ring_records", footprint.ring_records()},
          {"conv_bytes", footprint.conv_bytes()}};
}

}  // namespace

std::string Printable(std::string text) {
  for (char& c : text)
    if (!absl::ascii_isprint(static_cast<unsigned char>(c))) c = '?';
  return text;
}

std::string IdText(uint64_t id) { return absl::StrFormat("%016x", id); }

std::optional<uint64_t> ParseId(absl::string_view text) {
  if (absl::StartsWith(text, "0x")) text.remove_prefix(2);
  uint64_t id = 0;
  if (text.empty() || text.size() > 16 || !absl::SimpleHexAtoi(text, &id)) return std::nullopt;
  return id;
}

std::string DigestText(const std::string& digest) {
  const bool readable = !digest.empty() && !absl::StartsWith(digest, kHex) &&
                        std::all_of(digest.begin(), digest.end(), [](char c) {
                          return absl::ascii_isgraph(static_cast<unsigned char>(c));
                        });
  return readable ? digest : absl::StrCat(kHex, absl::BytesToHexString(digest));
}

absl::StatusOr<std::string> ParseDigest(const std::string& text) {
  std::string digest = text;
  if (absl::StartsWith(text, kHex)) {
    const std::string digits = text.substr(kHex.size());
    if (digits.size() % 2 != 0 || !std::all_of(digits.begin(), digits.end(), [](char c) {
          return absl::ascii_isxdigit(static_cast<unsigned char>(c));
        }))
      return absl::InvalidArgumentError(
          absl::StrCat("'", text, "' is not hex: and pairs of digits"));
    digest = absl::HexStringToBytes(digits);
  }
  if (digest.empty() || digest.size() > 64)
    return absl::InvalidArgumentError(
        absl::StrCat("a digest has 1 to 64 bytes, this one ", digest.size()));
  return digest;
}

std::string StatusText(const v1::GetStatusResponse& status, const std::string& server) {
  std::string text;
  absl::StrAppend(&text, Line("server", absl::StrCat(server, ", version ", status.server_version(),
                                                     ", backend ", status.backend())));
  absl::StrAppend(&text, Line("epoch", absl::StrCat(IdText(status.server_epoch()), ", up ",
                                                    client::Duration(status.uptime_ms()))));
  absl::StrAppend(&text,
                  Line("state", status.draining() ? "draining: accepts nothing new" : "serving"));
  absl::StrAppend(&text, Line("sessions", absl::StrCat(status.sessions())));
  absl::StrAppend(
      &text, Line("memory", absl::StrCat(Bytes(status.state_bytes_used()), " of ",
                                         Bytes(status.state_bytes_max()), " reserved for pools")));
  if (status.models().empty()) return text + Line("models", "none");
  return absl::StrCat(text, "\n", ModelsText(status));
}

Json StatusJson(const v1::GetStatusResponse& status, const std::string& server) {
  Json json = {{"server", server},
               {"server_version", status.server_version()},
               {"backend", status.backend()},
               {"server_epoch", IdText(status.server_epoch())},
               {"uptime_ms", status.uptime_ms()},
               {"draining", status.draining()},
               {"sessions", status.sessions()},
               {"state_bytes_used", status.state_bytes_used()},
               {"state_bytes_max", status.state_bytes_max()}};
  json["models"] = ModelsJson(status)["models"];
  return json;
}

std::string ModelsText(const v1::GetStatusResponse& status) {
  if (status.models().empty()) return "no models\n";
  Table table({{"MODEL"},
               {"NAME"},
               {"SEQUENCES", kRight},
               {"SNAPSHOTS", kRight},
               {"STEPS", kRight},
               {"PAGES FREE", kRight},
               {"RESERVED", kRight}});
  for (const v1::ModelStatus& model : status.models())
    table.AddRow({IdText(model.model_id()), model.name(),
                  Of(model.sequences(), model.capacity().sequences_max()),
                  Of(model.snapshots(), model.capacity().snapshots_max()),
                  Of(model.open_steps(), model.capacity().steps_max()),
                  Of(model.pages_free(), model.pages_total()),
                  Bytes(model.footprint().reserved_bytes())});
  return table.ToString();
}

Json ModelsJson(const v1::GetStatusResponse& status) {
  Json models = Json::array();
  for (const v1::ModelStatus& model : status.models())
    models.push_back({{"model_id", IdText(model.model_id())},
                      {"name", model.name()},
                      {"sequences", model.sequences()},
                      {"snapshots", model.snapshots()},
                      {"open_steps", model.open_steps()},
                      {"pages_total", model.pages_total()},
                      {"pages_free", model.pages_free()},
                      {"capacity", CapacityJson(model.capacity())},
                      {"footprint", FootprintJson(model.footprint())}});
  return {{"models", models}};
}

std::string SequenceCountsText(const v1::GetStatusResponse& status) {
  if (status.models().empty()) return "no models\n";
  Table table({{"MODEL"}, {"NAME"}, {"SEQUENCES", kRight}, {"MAX", kRight}});
  for (const v1::ModelStatus& model : status.models())
    table.AddRow({IdText(model.model_id()), model.name(), WithCommas(model.sequences()),
                  WithCommas(model.capacity().sequences_max())});
  return table.ToString();
}

Json SequenceCountsJson(const v1::GetStatusResponse& status) {
  Json models = Json::array();
  for (const v1::ModelStatus& model : status.models())
    models.push_back({{"model_id", IdText(model.model_id())},
                      {"name", model.name()},
                      {"sequences", model.sequences()},
                      {"sequences_max", model.capacity().sequences_max()}});
  return {{"models", models}};
}

std::string SequencesText(absl::Span<const v1::SequenceInfo> sequences) {
  if (sequences.empty()) return "no sequences\n";
  Table table({{"SEQUENCE"},
               {"VERSION", kRight},
               {"POSITION", kRight},
               {"FLOOR", kRight},
               {"RECORDS", kRight},
               {"OPEN STEP"}});
  for (const v1::SequenceInfo& sequence : sequences)
    table.AddRow({IdText(sequence.sequence_id()), WithCommas(sequence.version()),
                  WithCommas(sequence.position()), WithCommas(sequence.floor()),
                  WithCommas(sequence.committed_records()),
                  sequence.open_step_id() == 0 ? "-" : IdText(sequence.open_step_id())});
  return table.ToString();
}

Json SequencesJson(absl::Span<const v1::SequenceInfo> sequences) {
  Json list = Json::array();
  for (const v1::SequenceInfo& sequence : sequences)
    list.push_back({{"sequence_id", IdText(sequence.sequence_id())},
                    {"version", sequence.version()},
                    {"position", sequence.position()},
                    {"floor", sequence.floor()},
                    {"committed_records", sequence.committed_records()},
                    {"open_step_id", IdText(sequence.open_step_id())}});
  return {{"sequences", list}};
}

std::string SessionsText(absl::Span<const v1::SessionInfo> sessions) {
  if (sessions.empty()) return "no sessions\n";
  Table table({{"SESSION"},
               {"CLIENT"},
               {"STATE"},
               {"SEQUENCES", kRight},
               {"CALLS", kRight},
               {"AGE", kRight},
               {"LEFT", kRight}});
  for (const v1::SessionInfo& session : sessions)
    table.AddRow({IdText(session.session_id()), Printable(session.client_name()),
                  session.kept() ? "kept" : "open", WithCommas(session.sequences()),
                  WithCommas(session.calls_in_flight()), client::Duration(session.age_ms()),
                  client::Duration(session.remaining_ms())});
  return table.ToString();
}

Json SessionsJson(absl::Span<const v1::SessionInfo> sessions) {
  Json list = Json::array();
  for (const v1::SessionInfo& session : sessions)
    list.push_back({{"session_id", IdText(session.session_id())},
                    {"client_name", session.client_name()},
                    {"kept", session.kept()},
                    {"sequences", session.sequences()},
                    {"calls_in_flight", session.calls_in_flight()},
                    {"age_ms", session.age_ms()},
                    {"remaining_ms", session.remaining_ms()},
                    {"lease_ms", session.lease_ms()},
                    {"adoption_ms", session.adoption_ms()}});
  return {{"sessions", list}};
}

std::string SnapshotsText(absl::Span<const SnapshotRow> snapshots) {
  if (snapshots.empty()) return "no snapshots\n";
  Table table({{"MODEL"}, {"NAME"}, {"POSITION", kRight}, {"DIGEST"}});
  for (const SnapshotRow& snapshot : snapshots)
    table.AddRow({IdText(snapshot.model_id), snapshot.model, WithCommas(snapshot.key.position()),
                  DigestText(snapshot.key.digest())});
  return table.ToString();
}

Json SnapshotsJson(absl::Span<const SnapshotRow> snapshots) {
  Json list = Json::array();
  for (const SnapshotRow& snapshot : snapshots)
    list.push_back({{"model_id", IdText(snapshot.model_id)},
                    {"name", snapshot.model},
                    {"position", snapshot.key.position()},
                    {"digest", DigestText(snapshot.key.digest())}});
  return {{"snapshots", list}};
}

std::string StepsText(const v1::GetStatusResponse& status) {
  if (status.models().empty()) return "no models\n";
  // Two tables, so that large counts are not cut.
  Table steps({{"NAME"},
               {"COMMITTED", kRight},
               {"ABORTED", kRight},
               {"TOKENS", kRight},
               {"PER STEP", kRight},
               {"ACCEPTED", kRight}});
  Table flushes({{"NAME"},
                 {"FLUSHES", kRight},
                 {"FUSED", kRight},
                 {"BACKGROUND", kRight},
                 {"REQUESTED", kRight},
                 {"DEFERRED", kRight}});
  for (const v1::ModelStatus& model : status.models()) {
    steps.AddRow({model.name(), WithCommas(model.steps_committed()),
                  WithCommas(model.steps_aborted()), WithCommas(model.tokens_accepted()),
                  TokensPerStep(model), Acceptance(model)});
    flushes.AddRow({model.name(), WithCommas(model.flushes()), WithCommas(model.flushes_fused()),
                    WithCommas(model.flushes_background()), WithCommas(model.flushes_requested()),
                    WithCommas(model.flushes_deferred())});
  }
  return absl::StrCat(steps.ToString(), "\n", flushes.ToString());
}

Json StepsJson(const v1::GetStatusResponse& status) {
  Json models = Json::array();
  for (const v1::ModelStatus& model : status.models())
    models.push_back({{"model_id", IdText(model.model_id())},
                      {"name", model.name()},
                      {"steps_committed", model.steps_committed()},
                      {"steps_aborted", model.steps_aborted()},
                      {"tokens_drafted", model.tokens_drafted()},
                      {"tokens_accepted", model.tokens_accepted()},
                      {"flushes", model.flushes()},
                      {"flushes_by_reason",
                       {{"fused", model.flushes_fused()},
                        {"background", model.flushes_background()},
                        {"requested", model.flushes_requested()}}},
                      {"flushes_deferred", model.flushes_deferred()}});
  return {{"models", models}};
}

std::string RegisteredText(const v1::RegisterModelResponse& model, const std::string& name) {
  const v1::ModelFootprint& footprint = model.footprint();
  return absl::StrCat(
      Line("model", absl::StrCat(IdText(model.model_id()), "  ", name,
                                 model.created() ? "" : "  (was there already)")),
      Line("capacity",
           absl::StrFormat("%d sequences, %d snapshots, %d spare pages, %d rows a step",
                           model.capacity().sequences_max(), model.capacity().snapshots_max(),
                           model.capacity().spare_pages(), model.capacity().rows_max())),
      Line("memory",
           absl::StrFormat("%s reserved: %s a checkpoint, %s a slot of %d records",
                           Bytes(footprint.reserved_bytes()), Bytes(footprint.checkpoint_bytes()),
                           Bytes(footprint.ring_bytes()), footprint.ring_records())));
}

Json RegisteredJson(const v1::RegisterModelResponse& model, const std::string& name) {
  return {{"model_id", IdText(model.model_id())},
          {"name", name},
          {"created", model.created()},
          {"capacity", CapacityJson(model.capacity())},
          {"footprint", FootprintJson(model.footprint())}};
}

}  // namespace ssmd::ctl
