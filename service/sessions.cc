#include "service/sessions.h"

#include <sys/random.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/check.h"

namespace ssmd {
namespace {

constexpr uint32_t kRetryAfterMs = 1000;

absl::Status UnknownSession(OwnerId id) {
  return absl::NotFoundError(
      absl::StrFormat("context.session_id: session 0x%016x is unknown, closed or expired",
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
                                                        absl::string_view client_name) {
  if (lease_ms == 0) lease_ms = options_.lease_ms_default;
  if (lease_ms < options_.lease_ms_min || lease_ms > options_.lease_ms_max) {
    return InvalidField("lease_ms", absl::StrCat("lease_ms: expected 0 or ", options_.lease_ms_min,
                                                 "..", options_.lease_ms_max, ", got ", lease_ms));
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
  } while (sessions_.contains(session->id_));
  session->client_name_ = std::string(client_name);
  session->lease_ms_ = lease_ms;
  Renew(*session);
  sessions_.emplace(session->id_, session);
  ++opened_count_;
  return Opened{session->id_, lease_ms};
}

absl::StatusOr<SessionCall> SessionTable::Enter(OwnerId id) {
  absl::MutexLock lock(&mu_);
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return UnknownSession(id);
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
    done = std::move(session->on_released_);
  }
  const Store::Released released = release_(session->id_);
  done(released);
}

absl::Status SessionTable::Close(const SessionCall& call,
                                 std::function<void(Store::Released)> done) {
  absl::MutexLock lock(&mu_);
  Session& session = *call.session_;
  if (session.closing_) return UnknownSession(session.id_);
  session.closing_ = true;
  session.on_released_ = std::move(done);
  sessions_.erase(session.id_);
  return absl::OkStatus();
}

uint32_t SessionTable::ExpireLeases() {
  std::vector<OwnerId> expired;
  {
    absl::MutexLock lock(&mu_);
    const absl::Time now = clock_();
    for (const auto& [id, session] : sessions_)
      if (session->calls_in_flight_ == 0 && session->lease_end_ <= now) expired.push_back(id);
    for (const OwnerId id : expired) sessions_.erase(id);
    expired_count_ += expired.size();
  }
  for (const OwnerId id : expired) release_(id);
  return static_cast<uint32_t>(expired.size());
}

uint32_t SessionTable::size() const {
  absl::MutexLock lock(&mu_);
  return static_cast<uint32_t>(sessions_.size());
}

uint64_t SessionTable::opened_count() const {
  absl::MutexLock lock(&mu_);
  return opened_count_;
}

uint64_t SessionTable::expired_count() const {
  absl::MutexLock lock(&mu_);
  return expired_count_;
}

}  // namespace ssmd
