#include "client/steps_core.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/errors.h"

namespace ssmd::client::internal {
namespace {

void End(StepsCall& call, absl::Status status) {
  call.status = std::move(status);
  call.done = true;
}

}  // namespace

void StepsCore::Start() {
  AddHold();
  StartRead(&incoming_);
  StartCall();
}

void StepsCore::Send(const std::shared_ptr<StepsCall>& call, v1::StepsRequest request) {
  absl::MutexLock lock(&mu_);
  const auto turn = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return done_ || calls_.size() < calls_max_;
  };
  const bool has_turn = mu_.AwaitWithDeadline(absl::Condition(&turn), call->deadline);
  if (half_closing_) {
    End(*call, absl::FailedPreconditionError("the stream is finished"));
  } else if (done_) {
    End(*call, StreamError(call->method));
  } else if (!has_turn) {
    End(*call, absl::DeadlineExceededError(
                   absl::StrCat(RuleOf(call->method).name, ": ", calls_max_,
                                " calls of the stream were unanswered until the deadline")));
  } else {
    request.set_tag(next_tag_++);
    calls_.emplace(request.tag(), call);  // if the stream is over, for OnDone to end
    writes_.push_back(std::move(request));
    Proceed();
  }
}

absl::Status StepsCore::WaitFor(const StepsCall& call) {
  absl::MutexLock lock(&mu_);
  if (!mu_.AwaitWithDeadline(absl::Condition(&call.done), call.deadline))
    return absl::DeadlineExceededError(
        absl::StrCat(RuleOf(call.method).name, ": no answer until the deadline"));
  return call.status;
}

void StepsCore::HalfClose() {
  absl::MutexLock lock(&mu_);
  half_closing_ = true;
  Proceed();
}

bool StepsCore::AwaitDone(absl::Time deadline) {
  absl::MutexLock lock(&mu_);
  return mu_.AwaitWithDeadline(absl::Condition(&done_), deadline);
}

absl::Status StepsCore::final_status() const {
  absl::MutexLock lock(&mu_);
  return FromGrpcStatus(final_, RuleOf(Method::kSteps).name);
}

uint32_t StepsCore::calls_unanswered() const {
  absl::MutexLock lock(&mu_);
  return static_cast<uint32_t>(calls_.size());
}

void StepsCore::OnWriteDone(bool ok) {
  absl::MutexLock lock(&mu_);
  writing_ = false;
  writes_.pop_front();
  if (!ok) over_ = true;
  Proceed();
}

void StepsCore::OnReadDone(bool ok) {
  if (ok) {
    Answer();
    StartRead(&incoming_);
    return;
  }
  absl::MutexLock lock(&mu_);
  over_ = true;
  Proceed();
}

void StepsCore::OnDone(const grpc::Status& status) {
  judge_(Method::kSteps, FromGrpcStatus(status, RuleOf(Method::kSteps).name));
  // The last this thread does with the core: whoever locks after it may destroy the mutex.
  absl::MutexLock lock(&mu_);
  final_ = status;
  for (const auto& [tag, call] : calls_) End(*call, StreamError(call->method));
  calls_.clear();
  done_ = true;
}

// Starts the next write, or ends writing, if it is time for it.
void StepsCore::Proceed() {
  if (over_) writes_.resize(writing_ ? 1 : 0);
  if (writing_ || writes_ended_) return;
  if (!writes_.empty()) {
    writing_ = true;
    StartWrite(&writes_.front());
  } else if (over_ || half_closing_) {
    writes_ended_ = true;
    if (!over_) StartWritesDone();
    RemoveHold();
  }
}

void StepsCore::Answer() {
  std::shared_ptr<StepsCall> call;
  {
    absl::MutexLock lock(&mu_);
    const auto found = calls_.find(incoming_.tag());
    if (found == calls_.end()) return;
    call = std::move(found->second);
    calls_.erase(found);
  }
  absl::Status status = FromRpcStatus(incoming_.status(), RuleOf(call->method).name);
  if (!status.ok()) judge_(call->method, status);
  absl::MutexLock lock(&mu_);
  call->reply = std::move(incoming_);
  End(*call, std::move(status));
}

absl::Status StepsCore::StreamError(Method method) const {
  const char* name = RuleOf(method).name;
  if (final_.ok()) return absl::UnavailableError(absl::StrCat(name, ": the stream has ended"));
  return FromGrpcStatus(final_, name);
}

}  // namespace ssmd::client::internal
