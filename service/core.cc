#include "service/core.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/cpu_backend.h"

namespace ssmd {
namespace {

uint32_t ThreadCount(uint32_t configured) {
  return configured != 0 ? configured : std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

ServiceCore::ServiceCore(const ServerConfig& server_config, Clock injected_clock,
                         std::unique_ptr<Device> gpu)
    : config(server_config),
      clock(std::move(injected_clock)),
      epoch(RandomId()),
      started(clock()),
      log(clock),
      step_times(absl::Milliseconds(server_config.slow_step_ms)),
      executor_(ThreadCount(config.compute_threads)),
      flush_threads_(config.flush_threads),
      device(gpu != nullptr ? std::move(gpu)
                            : std::make_unique<cpu::CpuDevice>(
                                  config.state_bytes_max, &executor_,
                                  config.flush_threads > 0 ? &flush_threads_ : nullptr)),
      auth(config.tokens_file, &tenants),
      models({.models_max = config.models_max,
              .defaults = config.capacity,
              .server_epoch = epoch,
              .poison_garbage = config.poison_garbage,
              .foreign_is_unknown = !config.tokens_file.empty()},
             [this](const BackendSpec& spec) { return device->CreateBackend(spec); }),
      transfers(config.imports_max),
      sessions({.sessions_max = config.sessions_max,
                .lease_ms_default = config.lease_ms_default,
                .lease_ms_min = config.lease_ms_min,
                .lease_ms_max = config.lease_ms_max,
                .adoption_ms_max = config.adoption_ms_max},
               clock,
               [this](OwnerId owner, TenantId tenant, SessionTable::Sequences sequences) {
                 return EndOwner(owner, tenant, sequences);
               }),
      metrics(device->name()),
      collector(&models, [this] { return ReadGauges(); }),
      verify_queue(config.verify_workers, config.verify_queue_max, config.verify_queue_bytes_max) {}

Store::Released ServiceCore::EndOwner(OwnerId owner, TenantId tenant,
                                      SessionTable::Sequences sequences) {
  transfers.EndOwner(owner);
  const bool keep = sequences == SessionTable::Sequences::kKeep;
  Store::Released total;
  for (const ModelRef& model : models.All()) {
    const Store::Released released =
        keep ? model->store->DetachOwner(owner) : model->store->ReleaseOwner(owner);
    if (!keep) tenants.SequencesReleased(tenant, model->id_tag, released.sequences);
    total.sequences += released.sequences;
    total.steps += released.steps;
  }
  if (log.Admits(LogKind::kSession, spdlog::level::info))
    EventLog::Write(
        LogKind::kSession, spdlog::level::info, {{"session", LogId(static_cast<uint64_t>(owner))}},
        absl::StrCat("session ended: ", total.sequences, " sequences ",
                     keep ? "kept for adoption" : "released", ", ", total.steps, " steps aborted"));
  streams.StepMayHaveEnded(owner);
  return total;
}

void ServiceCore::Sweep() {
  const absl::Time now = clock();
  auth.LoadIfDue(now, absl::Milliseconds(config.tls_reload_ms));
  for (const ModelRef& model : models.All()) {
    const uint32_t expired = model->store->AbortExpired(now);
    if (expired > 0 && log.Admits(LogKind::kExpired, spdlog::level::warn))
      EventLog::Write(LogKind::kExpired, spdlog::level::warn, {{"model", LogId(model->id)}},
                      absl::StrCat(expired, " steps passed their timeout"));
  }
  const uint32_t sessions_expired = sessions.ExpireLeases();
  if (sessions_expired > 0 && log.Admits(LogKind::kExpired, spdlog::level::warn))
    EventLog::Write(LogKind::kExpired, spdlog::level::warn, {},
                    absl::StrCat(sessions_expired, " leases ran out"));
  streams.CheckAllHeld();
  step_times.ForgetBefore(now - absl::Milliseconds(config.step_timeout_ms_max));
  log.ReportSuppressed();
}

void ServiceCore::CountVerify(uint64_t step, absl::Duration queued, absl::Duration computed,
                              bool committed) {
  metrics.CountVerifyPhases(queued, computed);
  step_times.AddVerify(step, queued, computed);
  if (committed) CountCommit(step);
}

void ServiceCore::CountCommit(uint64_t step) {
  const absl::Time now = clock();
  const std::optional<StepTime> slow = step_times.End(step, now);
  if (!slow.has_value() || !log.Admits(LogKind::kSlowStep, spdlog::level::warn)) return;
  std::string sequences;
  for (const uint64_t id : slow->sequences)
    absl::StrAppend(&sequences, sequences.empty() ? "" : ",", LogId(id));
  if (slow->sequences.size() < slow->rows) sequences += ",...";
  const auto ms = [](absl::Duration d) { return absl::ToInt64Milliseconds(d); };
  EventLog::Write(
      LogKind::kSlowStep, spdlog::level::warn,
      {{"session", LogId(slow->session)},
       {"model", LogId(slow->model)},
       {"step", LogId(step)},
       {"sequences", sequences}},
      absl::StrCat("slow step: ", ms(now - slow->begun), " ms from plan to commit, ", slow->rows,
                   " rows, ", slow->tokens, " tokens; its ", slow->verifies, " verifies waited ",
                   ms(slow->queued), " ms and computed ", ms(slow->computed), " ms"));
}

void ServiceCore::LogAnswer(Method method, absl::string_view request, uint64_t session,
                            const absl::Status& status) {
  if (status.ok()) return;
  const bool failed = absl::IsInternal(status);
  const LogKind kind = failed ? LogKind::kFailed : LogKind::kRefused;
  const auto level = failed ? spdlog::level::err : spdlog::level::debug;
  if (!log.Admits(kind, level)) return;
  LogIds ids = {{"method", MethodName(method)}, {"request", std::string(request)}};
  if (session != 0) ids.emplace_back("session", LogId(session));
  EventLog::Write(kind, level, std::move(ids), status.ToString());
}

uint32_t ServiceCore::LiveSequences() const {
  uint32_t sequences = 0;
  for (const ModelRef& model : models.All()) sequences += model->store->usage().sequences;
  return sequences;
}

uint32_t ServiceCore::CountSequences(OwnerId owner) const {
  uint32_t sequences = 0;
  for (const ModelRef& model : models.All()) sequences += model->store->CountOwned(owner);
  return sequences;
}

ServerGauges ServiceCore::ReadGauges() const {
  return {.sessions = sessions.size(),
          .sessions_max = config.sessions_max,
          .sessions_kept = sessions.kept_count(),
          .sessions_opened = sessions.opened_count(),
          .lease_expirations = sessions.expired_count(),
          .sessions_evicted = sessions.evicted_count(),
          .verify_queue_depth = verify_queue.depth(),
          .verify_queue_depth_max = config.verify_queue_max,
          .verify_queue_bytes = verify_queue.bytes(),
          .verify_running = verify_queue.running(),
          .steps_streams = streams.size(),
          .held_begins = streams.held.load(),
          .state_bytes_reserved = device->bytes_used(),
          .state_bytes_max = device->bytes_max(),
          .draining = draining.load(),
          .log_suppressed = log.suppressed()};
}

void ServiceCore::SetDraining(bool value) {
  if (draining.exchange(value) == value) return;
  if (report_health_) report_health_(!value);
  spdlog::info("{}: {} sequences live, {} sessions open", value ? "draining" : "serving again",
               LiveSequences(), sessions.size());
}

void ServiceCore::ReportHealthTo(std::function<void(bool serving)> report) {
  absl::MutexLock lock(&drain_mu_);
  report_health_ = std::move(report);
  report_health_(!draining.load());
}

void ServiceCore::Drain() {
  absl::MutexLock lock(&drain_mu_);
  SetDraining(true);
}

absl::Status ServiceCore::Resume() {
  absl::MutexLock lock(&drain_mu_);
  if (stopping_)
    return ErrorWithReason(absl::StatusCode::kFailedPrecondition, reason::kStopping,
                           "resume: the server was told to stop and will end");
  SetDraining(false);
  return absl::OkStatus();
}

void ServiceCore::Stop() {
  absl::MutexLock lock(&drain_mu_);
  stopping_ = true;
  SetDraining(true);
}

absl::Status ServiceCore::CheckServing() const {
  if (!draining.load()) return absl::OkStatus();
  return WithDetail(ErrorWithReason(absl::StatusCode::kUnavailable, reason::kDraining,
                                    "the server is draining: nothing new is accepted"),
                    detail::kRetryAfterMs, std::to_string(config.drain_timeout_ms));
}

}  // namespace ssmd
