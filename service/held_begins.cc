#include "service/held_begins.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ssmd {

absl::Status HeldBegins::Hold(const StepsCallRef& call) {
  MutexLock lock(&mu_);
  if (!closed_.ok()) return closed_;
  if (calls_.size() >= begins_max_) {
    return Exhausted(
        reason::kLimit,
        absl::StrCat("stream_begins_max: ", calls_.size(), " BeginStep calls wait for open steps"),
        1);
  }
  calls_.push_back(call);
  ++*total_;
  return absl::OkStatus();
}

std::vector<StepsCallRef> HeldBegins::All() const {
  MutexLock lock(&mu_);
  return {calls_.begin(), calls_.end()};
}

bool HeldBegins::Take(const StepsCallRef& call) {
  MutexLock lock(&mu_);
  const auto place = std::find(calls_.begin(), calls_.end(), call);
  if (place == calls_.end()) return false;
  calls_.erase(place);
  --*total_;
  return true;
}

std::deque<StepsCallRef> HeldBegins::Close(const absl::Status& reason) {
  MutexLock lock(&mu_);
  closed_ = reason;
  *total_ -= static_cast<uint32_t>(calls_.size());
  return std::exchange(calls_, {});
}

}  // namespace ssmd
