// TransferTable: the ImportState and ExportState streams that run, so that the end of a session can
// end its own.
//
// A stream holds no call of its session between two messages: a peer that stalls would hold the
// lease for ever. So it registers here, and the end of the session tells it. Thread-safe; the mutex
// is a leaf, released before a stream is told.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/status.h"
#include "state_store/store.h"

namespace ssmd {

class Transfer {
 public:
  virtual ~Transfer() = default;
  // Its session has ended: give back what the store lent and end the stream. Any thread.
  virtual void SessionEnded() = 0;
};

class TransferTable {
 public:
  explicit TransferTable(uint32_t imports_max) : imports_max_(imports_max) {}

  // Errors, imports only: RESOURCE_EXHAUSTED + LIMIT_REACHED.
  absl::Status Add(OwnerId owner, const std::shared_ptr<Transfer>& transfer, bool is_import) {
    constexpr uint32_t kRetryAfterMs = 100;
    absl::MutexLock lock(&mu_);
    if (is_import && imports_ >= imports_max_) {
      return Exhausted(reason::kLimit,
                       absl::StrCat("imports_max: ", imports_max_, " imports are running"),
                       kRetryAfterMs);
    }
    imports_ += is_import;
    transfers_.emplace(transfer.get(), Entry{owner, transfer, is_import});
    return absl::OkStatus();
  }

  // No effect on a transfer that is not in it.
  void Remove(const Transfer* transfer) {
    absl::MutexLock lock(&mu_);
    const auto found = transfers_.find(transfer);
    if (found == transfers_.end()) return;
    imports_ -= found->second.is_import;
    transfers_.erase(found);
  }

  void EndOwner(OwnerId owner) {
    std::vector<std::shared_ptr<Transfer>> ended;
    {
      absl::MutexLock lock(&mu_);
      for (const auto& [transfer, entry] : transfers_)
        if (entry.owner == owner) ended.push_back(entry.transfer);
    }
    for (const std::shared_ptr<Transfer>& transfer : ended) transfer->SessionEnded();
  }

 private:
  struct Entry {
    OwnerId owner;
    std::shared_ptr<Transfer> transfer;
    bool is_import;
  };
  const uint32_t imports_max_;
  absl::Mutex mu_;
  absl::flat_hash_map<const Transfer*, Entry> transfers_ ABSL_GUARDED_BY(mu_);
  uint32_t imports_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace ssmd
