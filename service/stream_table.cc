#include "service/stream_table.h"

#include <algorithm>
#include <utility>

namespace ssmd {

void StreamTable::Add(const std::shared_ptr<Stream>& stream) {
  bool drain = false;
  {
    MutexLock lock(&mu_);
    streams_.push_back(stream);
    drain = draining_;
  }
  if (drain) stream->Drain();
}

void StreamTable::Remove(const Stream* stream) {
  std::shared_ptr<Stream> removed;  // declared first: dies after the lock is given back
  MutexLock lock(&mu_);
  const auto found = std::find_if(streams_.begin(), streams_.end(),
                                  [stream](const auto& s) { return s.get() == stream; });
  if (found == streams_.end()) return;
  removed = std::move(*found);
  streams_.erase(found);
}

void StreamTable::StepMayHaveEnded(OwnerId owner) {
  if (held.load() == 0) return;
  for (const std::shared_ptr<Stream>& stream : All())
    if (stream->owner() == owner) stream->CheckHeld();
}

void StreamTable::CheckAllHeld() {
  if (held.load() == 0) return;
  for (const std::shared_ptr<Stream>& stream : All()) stream->CheckHeld();
}

void StreamTable::DrainAll() {
  {
    MutexLock lock(&mu_);
    draining_ = true;
  }
  for (const std::shared_ptr<Stream>& stream : All()) stream->Drain();
}

uint32_t StreamTable::size() const {
  MutexLock lock(&mu_);
  return static_cast<uint32_t>(streams_.size());
}

std::vector<std::shared_ptr<StreamTable::Stream>> StreamTable::All() const {
  MutexLock lock(&mu_);
  return streams_;
}

}  // namespace ssmd
