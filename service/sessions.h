// SessionTable: who may call, for how long, and what is released when they are gone.
//
// A session's life: Open -> { Enter ... call ends }* -> Close | lease runs out -> end, once. The
// end of a session that asked for adoption keeps its sequences, under its id, until somebody adopts
// them or the time is over; the end of any other releases them.
//
// Invariants
//   - The end function runs exactly once per session, when the session can no longer be entered
//     and no call of it is in flight; so nothing is created for an owner that was already released.
//   - A session with a call in flight never expires; the end of a call renews the lease.
//   - Session ids are random and never zero; knowing one is what makes a caller of its tenant its
//     owner. To other tenants it is unknown, living or kept.
//   - At most sessions_max open sessions. Ended ones do not count, or those who come to adopt might
//     find no place: while they keep sequences these bound them (each keeps one at least), and of
//     those whose sequences are all adopted at most sessions_max are remembered.
//   - At most kRecordedRepliesMax replies a session.
//
// Thread-safe. Lock order: Session::replay_mu_ or SessionTable::adopt_mu_, then (a store's lock);
// SessionTable::mu_ is a leaf, held for look-ups only: the end function and `done` run without it,
// on the thread that ended the last call. The table outlives its calls.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "service/clock.h"
#include "service/tenants.h"
#include "state_store/store.h"

namespace ssmd {

inline constexpr size_t kRecordedRepliesMax = 64;

class SessionTable;

class Session {
 public:
  OwnerId id() const { return id_; }
  TenantId tenant() const { return tenant_; }
  const std::string& client_name() const { return client_name_; }
  uint32_t lease_ms() const { return lease_ms_; }
  uint32_t adoption_ms() const { return adoption_ms_; }

  // Runs `make`, or returns what it returned before for this request_id. `arguments` is any string
  // that differs when the request does. Failures are not recorded: they changed nothing. The oldest
  // of kRecordedRepliesMax replies is forgotten, and older ones before that when the worker windows
  // in them pass kWorkerWindowBytesMax together; request_id 0 records nothing.
  // Errors: INVALID_ARGUMENT when request_id was used with other arguments; those of `make`.
  absl::StatusOr<NewSequences> Once(uint64_t request_id, const std::string& arguments,
                                    absl::FunctionRef<absl::StatusOr<NewSequences>()> make);

 private:
  friend class SessionCall;
  friend class SessionTable;
  struct Recorded {
    uint64_t request_id;
    std::string arguments;
    NewSequences reply;
  };

  OwnerId id_{};
  TenantId tenant_ = kNoTenant;
  std::string client_name_;
  uint32_t lease_ms_ = 0;
  uint32_t adoption_ms_ = 0;

  // Guarded by SessionTable::mu_.
  absl::Time opened_, lease_end_;
  uint32_t calls_in_flight_ = 0;
  bool closing_ = false;
  bool evicted_ = false;  // nothing is kept
  std::function<void(Store::Released)> on_ended_;

  absl::Mutex replay_mu_;
  std::deque<Recorded> recorded_ ABSL_GUARDED_BY(replay_mu_);
};

// A call in flight: keeps the session from expiring, renews its lease at the end. Move-only.
class SessionCall {
 public:
  SessionCall() = default;
  SessionCall(SessionCall&& other) noexcept;
  SessionCall& operator=(SessionCall&& other) noexcept;
  ~SessionCall() { End(); }

  Session& operator*() const { return *session_; }
  Session* operator->() const { return session_.get(); }
  explicit operator bool() const { return session_ != nullptr; }

  void End();  // idempotent
  // True once CloseSession was called: work that has not begun need not begin.
  bool closing() const;

 private:
  friend class SessionTable;
  SessionCall(SessionTable* table, std::shared_ptr<Session> session)
      : table_(table), session_(std::move(session)) {}
  SessionTable* table_ = nullptr;
  std::shared_ptr<Session> session_;
};

class SessionTable {
 public:
  struct Options {
    uint32_t sessions_max = 1024;
    uint32_t lease_ms_default = 30'000;
    uint32_t lease_ms_min = 1'000;
    uint32_t lease_ms_max = 600'000;
    uint32_t adoption_ms_max = 600'000;
  };
  // What becomes of the sequences of a session that ends.
  enum class Sequences { kRelease, kKeep };
  struct Opened {
    OwnerId id{};
    uint32_t lease_ms = 0;
  };
  // Ends whatever an owner has open in every store; returns how many sequences were released, or
  // kept.
  using EndFunction = std::function<Store::Released(OwnerId, TenantId, Sequences)>;

  SessionTable(const Options& options, Clock clock, EndFunction end)
      : options_(options), clock_(std::move(clock)), end_(std::move(end)) {}
  SessionTable(const SessionTable&) = delete;
  SessionTable& operator=(const SessionTable&) = delete;

  // lease_ms 0: the default. adoption_ms 0: nothing is kept. Errors: INVALID_ARGUMENT outside the
  // limits; RESOURCE_EXHAUSTED + LIMIT_REACHED.
  absl::StatusOr<Opened> Open(uint32_t lease_ms, absl::string_view client_name,
                              uint32_t adoption_ms = 0, TenantId tenant = kNoTenant);

  // Errors: NOT_FOUND + SESSION_EXPIRED for a session that is unknown, closed or expired (even if
  // not swept yet).
  absl::StatusOr<SessionCall> Enter(OwnerId id, TenantId tenant = kNoTenant);

  // No further Enter succeeds; when the last call in flight (this one included) has ended, the
  // session is ended and then `done` runs, with nothing released if it is kept. Errors: NOT_FOUND
  // when it is closing already; `done` then never runs.
  absl::Status Close(const SessionCall& call, std::function<void(Store::Released)> done);

  // Gives the caller sequences that an ended session left; `ids` empty: all of them in this store,
  // those that the caller adopted before included, for as long as the old session is remembered.
  // Ids that are the caller's already are accepted at any time. All or none. Errors:
  // PERMISSION_DENIED while the old session lives or is ending; NOT_FOUND when nothing of it is
  // kept; those of Store::ChangeOwner.
  absl::StatusOr<std::vector<SequenceState>> Adopt(const Session& adopter, OwnerId old,
                                                   Store& store, absl::Span<const SequenceId> ids);

  // Ends a session whatever its lease says, and keeps nothing for adoption; of one that has ended,
  // releases what it left. `done` runs as in Close. Errors: NOT_FOUND for a session that is unknown
  // or ending, or of which nothing is kept; `done` then never runs.
  absl::Status Evict(OwnerId id, std::function<void(Store::Released)> done);

  struct View {
    OwnerId id{};
    std::string client_name;
    bool kept = false;  // ended; its sequences wait for adoption
    absl::Duration age, remaining;
    uint32_t lease_ms = 0, adoption_ms = 0, calls_in_flight = 0;
  };
  // Up to `count` sessions that are open or keep sequences, ascending by id, with ids above
  // `after`.
  std::vector<View> List(OwnerId after, uint32_t count) const;

  // Ends every session whose lease has run out, and releases what nobody adopted in time; returns
  // how many leases ran out.
  uint32_t ExpireLeases();

  uint32_t size() const;
  uint32_t CountOf(TenantId tenant) const;
  uint32_t kept_count() const;  // ended sessions whose sequences wait for adoption
  uint64_t opened_count() const;
  uint64_t expired_count() const;
  uint64_t evicted_count() const;

 private:
  friend class SessionCall;
  // An ended session whose sequences are, or were, kept.
  struct Kept {
    std::string client_name;
    uint32_t lease_ms = 0, adoption_ms = 0;
    absl::Time opened, until;
    TenantId tenant = kNoTenant;
    uint32_t sequences = 0;                               // still kept
    std::vector<std::pair<OwnerId, SequenceId>> adopted;  // by whom
  };

  void Leave(const std::shared_ptr<Session>& session);
  // Requires: the session cannot be entered, no call of it is in flight, and its id is in ending_.
  Store::Released End(const std::shared_ptr<Session>& session);
  absl::Status CheckKept(OwnerId old, TenantId tenant) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RecordAdopted(OwnerId old, OwnerId adopter, absl::Span<const SequenceState> moved)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReleaseOverdue();
  void Renew(Session& session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  const Clock clock_;
  const EndFunction end_;

  absl::Mutex adopt_mu_
      ABSL_ACQUIRED_BEFORE(mu_);  // held while kept sequences move or are released
  mutable absl::Mutex mu_;
  absl::flat_hash_map<OwnerId, std::shared_ptr<Session>> sessions_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<OwnerId, TenantId> ending_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<OwnerId, Kept> kept_ ABSL_GUARDED_BY(mu_);
  // Of kept_, those that keep nothing any more: there for repeats of AdoptSequences. Oldest first.
  std::deque<OwnerId> adopted_out_ ABSL_GUARDED_BY(mu_);
  uint64_t opened_count_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t expired_count_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t evicted_count_ ABSL_GUARDED_BY(mu_) = 0;
};

// From the kernel's generator; never zero.
uint64_t RandomId();

}  // namespace ssmd
