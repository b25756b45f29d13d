// XXH3-64 over bytes that come in pieces. Private to client/.
#pragma once

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstdint>
#include <memory>

#include "absl/strings/string_view.h"

namespace ssmd::client {

class Checksum {
 public:
  Checksum() : state_(XXH3_createState()) { XXH3_64bits_reset(state_.get()); }
  void Add(absl::string_view data) { XXH3_64bits_update(state_.get(), data.data(), data.size()); }
  uint64_t value() const { return XXH3_64bits_digest(state_.get()); }

 private:
  struct Free {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Free> state_;
};

}  // namespace ssmd::client
