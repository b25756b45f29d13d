// The configuration file: lines of `key = value`, the part of CLI11's format that has no sections.
//
//   # a comment, also after a value; and `;`
//   listen = "0.0.0.0:50051"
//   state-memory = 8G
//   model = /etc/ssmd/a.txtpb      repeated keys add to a list
//   model = /etc/ssmd/b.txtpb
//
// Quotes (" or ') keep blanks, # and ; in a value; there are no escapes. Pure functions.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ssmd {

struct ConfigEntry {
  std::string key;
  std::string value;
  int line = 0;  // from 1
};

// Errors: INVALID_ARGUMENT "NAME:LINE: ...".
absl::StatusOr<std::vector<ConfigEntry>> ParseConfigText(absl::string_view name,
                                                         absl::string_view text);

// Errors: NOT_FOUND naming the file; those of ParseConfigText.
absl::StatusOr<std::vector<ConfigEntry>> ReadConfigFile(const std::string& path);

// `value` as it stands in a file: bare when it may be, else quoted.
std::string QuoteConfigValue(absl::string_view value);

// The whole file. Errors: NOT_FOUND naming it and the cause.
absl::StatusOr<std::string> ReadWholeFile(const std::string& path);

}  // namespace ssmd
