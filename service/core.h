// ServiceCore: everything the handlers of one server share, in the order in which it is torn down.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/device.h"
#include "service/auth.h"
#include "service/clock.h"
#include "service/config.h"
#include "service/event_log.h"
#include "service/metrics.h"
#include "service/models.h"
#include "service/sessions.h"
#include "service/step_times.h"
#include "service/store_collector.h"
#include "service/stream_table.h"
#include "service/tenants.h"
#include "service/transfer_table.h"
#include "service/verify_queue.h"

namespace ssmd {

// Thread-safe: every member is, or is immutable. Destroyed after the gRPC server, whose calls use
// it.
class ServiceCore {
 public:
  // `gpu`: where states live; null: in the memory of this machine, on threads of this core.
  ServiceCore(const ServerConfig& server_config, Clock injected_clock,
              std::unique_ptr<Device> gpu = nullptr);

  // Ends what an owner has open in every model: transfers, steps, imports, and its sequences unless
  // they are kept for adoption.
  Store::Released EndOwner(OwnerId owner, TenantId tenant, SessionTable::Sequences sequences);
  // Ends sessions and steps whose time is over.
  void Sweep();
  uint32_t LiveSequences() const;
  uint32_t CountSequences(OwnerId owner) const;  // of all models
  ServerGauges ReadGauges() const;
  // A Verify of a step has run; `committed`: it ended the step.
  void CountVerify(uint64_t step, absl::Duration queued, absl::Duration computed, bool committed);
  // A step was committed: logged if it was slow.
  void CountCommit(uint64_t step);
  // Logs what a call came to, unless it was OK; `request`: what tells it from others.
  void LogAnswer(Method method, absl::string_view request, uint64_t session,
                 const absl::Status& status);
  // UNAVAILABLE + DRAINING while nothing new is accepted.
  absl::Status CheckServing() const;

  // Turns new models, sessions and sequences away; whatever lives goes on. Idempotent.
  void Drain();
  // Accepts them again. Errors: FAILED_PRECONDITION + STOPPING after Stop.
  absl::Status Resume();
  // Drains for good.
  void Stop();
  // Tells `report` now and whenever it changes whether the server takes new work.
  void ReportHealthTo(std::function<void(bool serving)> report);

  const ServerConfig config;
  const Clock clock;
  const uint64_t epoch;  // random: names this life of the server
  const absl::Time started;
  EventLog log;
  StepTimes step_times;
  std::atomic<bool> serving{false};   // the start is over
  std::atomic<bool> draining{false};  // nothing new is accepted

 private:
  void SetDraining(bool value) ABSL_EXCLUSIVE_LOCKS_REQUIRED(drain_mu_);

  absl::Mutex drain_mu_;  // held while health is told: the last word is the newest
  std::function<void(bool)> report_health_ ABSL_GUARDED_BY(drain_mu_);
  bool stopping_ ABSL_GUARDED_BY(drain_mu_) = false;

  cpu::ThreadPool executor_;
  cpu::BackgroundThreads flush_threads_;

 public:
  const std::unique_ptr<Device> device;
  TenantTable tenants;
  Authorizer auth;
  ModelTable models;
  TransferTable transfers;
  SessionTable sessions;
  StreamTable streams;
  Metrics metrics;
  StoreCollector collector;
  VerifyQueue verify_queue;  // last: its tasks use all of the above
};

}  // namespace ssmd
