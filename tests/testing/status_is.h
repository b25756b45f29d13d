// Assertions on an absl::Status: code, words of its message, details.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "kernels/status.h"

namespace ssmd::testing {

inline absl::Status StatusOf(const absl::Status& status) { return status; }
template <typename T>
absl::Status StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

// The code is `code` and the message contains every one of `words`.
template <typename T>
::testing::AssertionResult Fails(const T& result, absl::StatusCode code,
                                 std::initializer_list<absl::string_view> words) {
  const absl::Status status = StatusOf(result);
  if (status.code() != code)
    return ::testing::AssertionFailure()
           << "expected " << absl::StatusCodeToString(code) << ", got " << status.ToString();
  for (const absl::string_view word : words)
    if (!absl::StrContains(status.message(), word))
      return ::testing::AssertionFailure() << "expected '" << word << "' in: " << status.ToString();
  return ::testing::AssertionSuccess();
}

// INVALID_ARGUMENT whose detail names `field` and whose message contains `words`.
template <typename T>
::testing::AssertionResult RefusesField(const T& result, absl::string_view field,
                                        std::initializer_list<absl::string_view> words) {
  const std::string named = GetDetail(StatusOf(result), detail::kField);
  if (named != field)
    return ::testing::AssertionFailure() << "expected field " << field << ", got '" << named
                                         << "': " << StatusOf(result).ToString();
  return Fails(result, absl::StatusCode::kInvalidArgument, words);
}

}  // namespace ssmd::testing
