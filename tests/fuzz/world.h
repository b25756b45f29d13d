// One small server without sockets, in which a request from bytes is run by its handler.
//
// The property: nothing crashes, no answer is INTERNAL or UNKNOWN, and whatever was accepted
// leaves a store that holds its invariants (it poisons and checks itself), whose states are finite
// and from which everything comes back in the end. A violation aborts the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ssmd::fuzz {

// Every request type that can be run, as RPC names ("BeginStep").
std::vector<std::string_view> Types();

// Parses `data` as `type`Request and runs it in a fresh world: sequence 1 holds 5 tokens at
// version 4, sequence 2 none, sequence 3 has step 1 open with two tokens and one layer verified;
// step 2 is committed; snapshot "s" at 4. Numbers 1..15 in id fields name these; larger ones stay.
// Of ImportState and Steps `data` is one stream: varint-delimited messages. What Steps begins are
// steps 3, 4 and so on; an import's checksum 1 is the right one.
// Returns whether the request, or all of the stream, was accepted.
bool Run(std::string_view type, const uint8_t* data, size_t size);

// Valid requests to start from: name and bytes.
std::vector<std::pair<std::string, std::string>> Seeds(std::string_view type);

}  // namespace ssmd::fuzz
