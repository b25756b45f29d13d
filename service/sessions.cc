#include "service/sessions.h"

#include <sys/random.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/check.h"

namespace ssmd {
namespace {

constexpr uint32_t kRetryAfterMs = 1000;

absl::Status UnknownSession(OwnerId id, absl::string_view field = "context.session_id") {
  return ErrorWithReason(absl::StatusCode::kNotFound, reason::kSessionExpired,
                         absl::StrFormat("%s: session 0x%016x is unknown, closed or expired", field,
                                         static_cast<uint64_t>(id)));
}

}  // namespace

uint64_t RandomId() {
  uint64_t id = 0;
  while (id == 0) {
    const ssize_t got = getrandom(&id, sizeof(id), 0);
    SSMD_CHECK(got == sizeof(id), "getrandom returned %zd", got);
  }
  return id;
}

absl::StatusOr<NewSequences> Session::Once(uint64_t request_id, const std::string& arguments,
                                           absl::FunctionRef<absl::StatusOr<NewSequences>()> make) {
  if (request_id == 0) return make();
  absl::MutexLock lock(&replay_mu_);  // held over make(): of two equal calls at a time, one waits
  for (const Recorded& recorded : recorded_) {
    if (recorded.request_id != request_id) continue;
    if (recorded.arguments == arguments) return recorded.reply;
    return InvalidField("request_id",
                        absl::StrFormat("request_id: expected a new number for a new request, got "
                                        "0x%x, which was used with other arguments",
                                        request_id));
  }
  absl::StatusOr<NewSequences> made = make();
  if (!made.ok()) return made;
  if (recorded_.size() == kRecordedRepliesMax) recorded_.pop_front();
  recorded_.push_back({request_id, arguments, *made});
  size_t window_bytes = 0;
  for (const Recorded& recorded : recorded_) window_bytes += recorded.reply.worker_window.size();
  for (; window_bytes > kWorkerWindowBytesMax && recorded_.size() > 1; recorded_.pop_front())
    window_bytes -= recorded_.front().reply.worker_window.size();
  return made;
}

SessionCall::SessionCall(SessionCall&& other) noexcept
    : table_(std::exchange(other.table_, nullptr)), session_(std::move(other.session_)) {}

SessionCall& SessionCall::operator=(SessionCall&& other) noexcept {
  if (this == &other) return *this;
  End();
  table_ = std::exchange(other.table_, nullptr);
  session_ = std::move(other.session_);
  return *this;
}

void SessionCall::End() {
  if (session_ == nullptr) return;
  const std::shared_ptr<Session> session = std::move(session_);
  session_ = nullptr;
  table_->Leave(session);
}

bool SessionCall::closing() const {
  absl::MutexLock lock(&table_->mu_);
  return session_->closing_;
}

void SessionTable::Renew(Session& session) {
  session.lease_end_ = clock_() + absl::Milliseconds(session.lease_ms_);
}

absl::StatusOr<SessionTable::Opened> SessionTable::Open(uint32_t lease_ms,
                                                        absl::string_view client_name,
                                                        uint32_t adoption_ms, TenantId tenant) {
  if (lease_ms == 0) lease_ms = options_.lease_ms_default;
  if (lease_ms < options_.lease_ms_min || lease_ms > options_.lease_ms_max) {
    return InvalidField("lease_ms", absl::StrCat("lease_ms: expected 0 or ", options_.lease_ms_min,
                                                 "..", options_.lease_ms_max, ", got ", lease_ms));
  }
  if (adoption_ms > options_.adoption_ms_max) {
    return InvalidField(
        "adoption_ms",
        absl::StrCat("adoption_ms: expected 0..", options_.adoption_ms_max, ", got ", adoption_ms));
  }
  absl::MutexLock lock(&mu_);
  if (sessions_.size() >= options_.sessions_max) {
    return Exhausted(reason::kLimit,
                     absl::StrCat("sessions_max: ", options_.sessions_max, " sessions are open"),
                     kRetryAfterMs);
  }
  auto session = std::make_shared<Session>();
  do {
    session->id_ = OwnerId{RandomId()};
  } while (sessions_.contains(session->id_) || kept_.contains(session->id_));
  session->tenant_ = tenant;
  session->client_name_ = std::string(client_name);
  session->lease_ms_ = lease_ms;
  session->adoption_ms_ = adoption_ms;
  session->opened_ = clock_();
  Renew(*session);
  sessions_.emplace(session->id_, session);
  ++opened_count_;
  return Opened{session->id_, lease_ms};
}

absl::StatusOr<SessionCall> SessionTable::Enter(OwnerId id, TenantId tenant) {
  absl::MutexLock lock(&mu_);
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || found->second->tenant_ != tenant) return UnknownSession(id);
  Session& session = *found->second;
  if (session.calls_in_flight_ == 0 && session.lease_end_ <= clock_()) return UnknownSession(id);
  ++session.calls_in_flight_;
  return SessionCall(this, found->second);
}

void SessionTable::Leave(const std::shared_ptr<Session>& session) {
  std::function<void(Store::Released)> done;
  {
    absl::MutexLock lock(&mu_);
    Renew(*session);
    if (--session->calls_in_flight_ > 0 || !session->closing_) return;
    done = std::move(session->on_ended_);
  }
  done(End(session));
}

Store::Released SessionTable::End(const std::shared_ptr<Session>& session) {
  const OwnerId id = session->id_;
  bool keep = session->adoption_ms_ > 0;
  {
    absl::MutexLock lock(&mu_);
    keep = keep && !session->evicted_;
  }
  Store::Released ended = end_(id, session->tenant_, keep ? Sequences::kKeep : Sequences::kRelease);
  absl::MutexLock lock(&mu_);
  ending_.erase(id);
  if (!keep || ended.sequences == 0) return ended;
  kept_[id] = {.client_name = session->client_name_,
               .lease_ms = session->lease_ms_,
               .adoption_ms = session->adoption_ms_,
               .opened = session->opened_,
               .until = clock_() + absl::Milliseconds(session->adoption_ms_),
               .tenant = session->tenant_,
               .sequences = ended.sequences};
  ended.sequences = 0;
  return ended;
}

absl::Status SessionTable::Close(const SessionCall& call,
                                 std::function<void(Store::Released)> done) {
  absl::MutexLock lock(&mu_);
  Session& session = *call.session_;
  if (session.closing_) return UnknownSession(session.id_);
  session.closing_ = true;
  session.on_ended_ = std::move(done);
  ending_.emplace(session.id_, session.tenant_);
  sessions_.erase(session.id_);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<SequenceState>> SessionTable::Adopt(const Session& adopter, OwnerId old,
                                                               Store& store,
                                                               absl::Span<const SequenceId> ids) {
  ExpireLeases();  // a lease that ran out counts before the sweeper has seen it
  absl::MutexLock adopt_lock(&adopt_mu_);
  std::vector<SequenceId> owned, wanted;
  for (const SequenceId id : ids) (store.Get(adopter.id(), id).ok() ? owned : wanted).push_back(id);
  if (ids.empty() || !wanted.empty()) {
    {
      absl::MutexLock lock(&mu_);
      SSMD_RETURN_IF_ERROR(CheckKept(old, adopter.tenant()));
      if (ids.empty())
        for (const auto& [owner, id] : kept_.at(old).adopted)
          if (owner == adopter.id()) owned.push_back(id);
    }
    SSMD_ASSIGN_OR_RETURN(const std::vector<SequenceState> moved,
                          store.ChangeOwner(old, adopter.id(), wanted));
    absl::MutexLock lock(&mu_);
    RecordAdopted(old, adopter.id(), moved);
    for (const SequenceState& state : moved) owned.push_back(state.id);
  }
  std::sort(owned.begin(), owned.end());
  std::vector<SequenceState> states;
  for (const SequenceId id : owned)  // what was adopted before may be gone, or of another model
    if (const auto state = store.Get(adopter.id(), id); state.ok()) states.push_back(*state);
  return states;
}

void SessionTable::RecordAdopted(OwnerId old, OwnerId adopter,
                                 absl::Span<const SequenceState> moved) {
  if (moved.empty()) return;
  Kept& kept = kept_.at(old);
  for (const SequenceState& state : moved) kept.adopted.emplace_back(adopter, state.id);
  kept.sequences -= static_cast<uint32_t>(moved.size());
  if (kept.sequences > 0) return;
  adopted_out_.push_back(old);
  if (adopted_out_.size() <= options_.sessions_max) return;
  kept_.erase(adopted_out_.front());
  adopted_out_.pop_front();
}

absl::Status SessionTable::CheckKept(OwnerId old, TenantId tenant) const {
  const auto kept = kept_.find(old);
  if (kept != kept_.end() && kept->second.until > clock_() && kept->second.tenant == tenant)
    return absl::OkStatus();
  const auto living = sessions_.find(old);
  const auto ending = ending_.find(old);
  if ((living != sessions_.end() && living->second->tenant_ == tenant) ||
      (ending != ending_.end() && ending->second == tenant)) {
    return WithDetail(absl::PermissionDeniedError(absl::StrFormat(
                          "old_session_id: session 0x%016x lives; its sequences are its own",
                          static_cast<uint64_t>(old))),
                      detail::kRetryAfterMs, absl::StrCat(kRetryAfterMs));
  }
  return absl::NotFoundError(absl::StrFormat(
      "old_session_id: nothing of session 0x%016x is kept (unknown, asked for no adoption, left no "
      "sequences, or adoption_ms has passed)",
      static_cast<uint64_t>(old)));
}

void SessionTable::ReleaseOverdue() {
  absl::MutexLock adopt_lock(&adopt_mu_);
  std::vector<std::pair<OwnerId, TenantId>> overdue;
  {
    absl::MutexLock lock(&mu_);
    const absl::Time now = clock_();
    for (const auto& [id, kept] : kept_)
      if (kept.until <= now) overdue.emplace_back(id, kept.tenant);
  }
  for (const auto& [id, tenant] : overdue) {
    end_(id, tenant, Sequences::kRelease);
    absl::MutexLock lock(&mu_);
    kept_.erase(id);
    std::erase(adopted_out_, id);
  }
}

absl::Status SessionTable::Evict(OwnerId id, std::function<void(Store::Released)> done) {
  std::shared_ptr<Session> session;
  {
    absl::MutexLock lock(&mu_);
    if (const auto found = sessions_.find(id); found != sessions_.end()) {
      session = found->second;
      session->closing_ = session->evicted_ = true;
      ending_.emplace(id, session->tenant_);
      sessions_.erase(found);
      ++evicted_count_;
      if (session->calls_in_flight_ > 0) {
        session->on_ended_ = std::move(done);
        return absl::OkStatus();
      }
    }
  }
  if (session != nullptr) {
    done(End(session));
    return absl::OkStatus();
  }
  Store::Released released;
  {
    TenantId tenant = kNoTenant;
    absl::MutexLock adopt_lock(&adopt_mu_);
    {
      absl::MutexLock lock(&mu_);
      const auto kept = kept_.find(id);
      if (kept == kept_.end() || kept->second.sequences == 0)
        return UnknownSession(id, "session_id");
      tenant = kept->second.tenant;
    }
    released = end_(id, tenant, Sequences::kRelease);
    absl::MutexLock lock(&mu_);
    kept_.erase(id);
    ++evicted_count_;
  }
  done(released);
  return absl::OkStatus();
}

std::vector<SessionTable::View> SessionTable::List(OwnerId after, uint32_t count) const {
  absl::MutexLock lock(&mu_);
  std::vector<OwnerId> ids;
  for (const auto& [id, session] : sessions_)
    if (id > after) ids.push_back(id);
  for (const auto& [id, kept] : kept_)
    if (id > after && kept.sequences > 0) ids.push_back(id);
  const auto end = ids.begin() + std::min<ptrdiff_t>(count, std::ssize(ids));
  std::partial_sort(ids.begin(), end, ids.end());
  ids.erase(end, ids.end());
  const absl::Time now = clock_();
  std::vector<View> views;
  for (const OwnerId id : ids) {
    const auto view = [&](const auto& name, absl::Time opened, absl::Time until) -> View& {
      views.push_back({.id = id,
                       .client_name = name,
                       .age = now - opened,
                       .remaining = std::max(until - now, absl::ZeroDuration())});
      return views.back();
    };
    if (const auto open = sessions_.find(id); open != sessions_.end()) {
      const Session& session = *open->second;
      View& added = view(session.client_name_, session.opened_, session.lease_end_);
      added.lease_ms = session.lease_ms_;
      added.adoption_ms = session.adoption_ms_;
      added.calls_in_flight = session.calls_in_flight_;
    } else {
      const Kept& kept = kept_.at(id);
      View& added = view(kept.client_name, kept.opened, kept.until);
      added.lease_ms = kept.lease_ms;
      added.adoption_ms = kept.adoption_ms;
      added.kept = true;
    }
  }
  return views;
}

uint32_t SessionTable::ExpireLeases() {
  std::vector<std::shared_ptr<Session>> expired;
  {
    absl::MutexLock lock(&mu_);
    const absl::Time now = clock_();
    for (const auto& [id, session] : sessions_)
      if (session->calls_in_flight_ == 0 && session->lease_end_ <= now) expired.push_back(session);
    for (const std::shared_ptr<Session>& session : expired) {
      ending_.emplace(session->id_, session->tenant_);
      sessions_.erase(session->id_);
    }
    expired_count_ += expired.size();
  }
  for (const std::shared_ptr<Session>& session : expired) End(session);
  ReleaseOverdue();
  return static_cast<uint32_t>(expired.size());
}

uint32_t SessionTable::size() const {
  absl::MutexLock lock(&mu_);
  return static_cast<uint32_t>(sessions_.size());
}

uint32_t SessionTable::CountOf(TenantId tenant) const {
  absl::MutexLock lock(&mu_);
  uint32_t count = 0;
  for (const auto& [id, session] : sessions_) count += session->tenant_ == tenant;
  return count;
}

uint32_t SessionTable::kept_count() const {
  absl::MutexLock lock(&mu_);
  return static_cast<uint32_t>(kept_.size() - adopted_out_.size());
}

uint64_t SessionTable::opened_count() const {
  absl::MutexLock lock(&mu_);
  return opened_count_;
}

uint64_t SessionTable::evicted_count() const {
  absl::MutexLock lock(&mu_);
  return evicted_count_;
}

uint64_t SessionTable::expired_count() const {
  absl::MutexLock lock(&mu_);
  return expired_count_;
}

}  // namespace ssmd
