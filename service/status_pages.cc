#include "service/status_pages.h"

#include <prometheus/text_serializer.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "service/handlers.h"
#include "service/status_page_html.h"

namespace ssmd {
namespace {

using Json = nlohmann::ordered_json;

std::string MetricsText(const ServiceCore& core) {
  std::vector<prometheus::MetricFamily> families = core.metrics.registry()->Collect();
  std::vector<prometheus::MetricFamily> collected = core.collector.Collect();
  std::move(collected.begin(), collected.end(), std::back_inserter(families));
  return prometheus::TextSerializer().Serialize(families);
}

HttpReply Probe(bool good, const char* otherwise) {
  return good ? HttpReply{.body = "ok\n"} : HttpReply{.status = 503, .body = otherwise};
}

Json ModelJson(const v1::ModelStatus& model, const std::vector<uint64_t>& accepted_at) {
  return {{"id", absl::StrFormat("%016x", model.model_id())},
          {"name", model.name()},
          {"sequences", model.sequences()},
          {"sequences_max", model.capacity().sequences_max()},
          {"open_steps", model.open_steps()},
          {"steps_max", model.capacity().steps_max()},
          {"pages_total", model.pages_total()},
          {"pages_free", model.pages_free()},
          {"checkpoint_bytes", model.footprint().checkpoint_bytes()},
          {"reserved_bytes", model.footprint().reserved_bytes()},
          {"window_records", model.footprint().ring_records()},
          // One tier so far: snapshots share the pages of sequences.
          {"snapshots",
           {{{"tier", "pages"},
             {"count", model.snapshots()},
             {"max", model.capacity().snapshots_max()}}}},
          {"steps_committed", model.steps_committed()},
          {"steps_aborted", model.steps_aborted()},
          {"tokens_drafted", model.tokens_drafted()},
          {"tokens_accepted", model.tokens_accepted()},
          {"tokens_accepted_by_position", accepted_at},
          {"flushes",
           {{"fused", model.flushes_fused()},
            {"background", model.flushes_background()},
            {"requested", model.flushes_requested()},
            {"deferred", model.flushes_deferred()}}},
          {"state_bytes_read", model.state_bytes_read()},
          {"state_bytes_written", model.state_bytes_written()},
          {"write_every_step_bytes", model.write_every_step_bytes()}};
}

std::vector<uint64_t> AcceptedByPosition(const ServiceCore& core, uint64_t model_id) {
  const absl::StatusOr<ModelRef> model = core.models.Find(model_id);
  if (!model.ok()) return {};  // unregistered since
  const StoreCounters counters = (*model)->store->counters();
  const auto* first = counters.tokens_accepted_at.data();
  return {first, first + (*model)->description.draft_tokens_max};
}

}  // namespace

std::string StatusJson(ServiceCore& core) {
  v1::GetStatusResponse status;
  if (const absl::Status got = handlers::GetStatus(core, Principal{}, {}, status); !got.ok())
    return "{}";
  Json json = {{"version", status.server_version()},
               {"backend", status.backend()},
               {"epoch", absl::StrFormat("%016x", core.epoch)},
               {"uptime_ms", status.uptime_ms()},
               {"state", !core.serving.load() ? "starting"
                         : status.draining()  ? "draining"
                                              : "serving"},
               {"state_bytes_used", status.state_bytes_used()},
               {"state_bytes_max", status.state_bytes_max()},
               {"verify_queue_depth", status.verify_queue_depth()},
               {"verify_queue_max", status.verify_queue_max()},
               {"verify_running", status.verify_running()}};
  json["sessions"] = {{"open", status.sessions()},
                      {"max", status.sessions_max()},
                      {"kept", status.sessions_kept()},
                      {"opened", core.sessions.opened_count()},
                      {"expired", core.sessions.expired_count()},
                      {"evicted", core.sessions.evicted_count()}};
  Json& list = json["sessions"]["list"] = Json::array();
  for (const SessionTable::View& session : core.sessions.List(OwnerId{}, kStatusSessionsMax))
    list.push_back({{"client", session.client_name},
                    {"kept", session.kept},
                    {"sequences", core.CountSequences(session.id)},
                    {"calls", session.calls_in_flight},
                    {"age_ms", absl::ToInt64Milliseconds(session.age)},
                    {"remaining_ms", absl::ToInt64Milliseconds(session.remaining)}});
  Json& models = json["models"] = Json::array();
  for (const v1::ModelStatus& model : status.models())
    models.push_back(ModelJson(model, AcceptedByPosition(core, model.model_id())));
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

HttpServer::Pages StatusPages(ServiceCore* core) {
  return {{"/",
           [] {
             return HttpReply{200, "text/html; charset=utf-8", kStatusPageHtml};
           }},
          {"/status.json",
           [core] {
             return HttpReply{200, "application/json", StatusJson(*core)};
           }},
          {"/metrics",
           [core] {
             return HttpReply{200, "text/plain; version=0.0.4; charset=utf-8", MetricsText(*core)};
           }},
          {"/healthz", [] { return HttpReply{.body = "ok\n"}; }},
          {"/startupz", [core] { return Probe(core->serving.load(), "starting\n"); }},
          {"/readyz", [core] {
             if (!core->serving.load()) return Probe(false, "starting\n");
             return Probe(!core->draining.load(), "draining\n");
           }}};
}

}  // namespace ssmd
