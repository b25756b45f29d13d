// Comparison of computed values with the oracle's, and a report of the worst coordinate.
//
// In order: NaN and infinities at equal positions, then |actual - exact| <= bound elementwise.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"

namespace ssmd::testing {

// bound(exact) is the largest error allowed where the oracle says `exact`.
inline ::testing::AssertionResult Near(absl::Span<const float> actual,
                                       absl::Span<const double> exact,
                                       absl::FunctionRef<double(double)> bound) {
  if (actual.size() != exact.size()) {
    return ::testing::AssertionFailure()
           << actual.size() << " values against " << exact.size() << " of the oracle";
  }
  for (size_t i = 0; i < actual.size(); ++i) {
    const double a = actual[i], e = exact[i];
    if (std::isnan(a) != std::isnan(e) || std::isinf(a) != std::isinf(e) ||
        (std::isinf(a) && a != e)) {
      return ::testing::AssertionFailure() << "at " << i << ": " << a << ", oracle " << e;
    }
  }
  size_t worst = 0, outside = 0;
  double worst_ratio = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (!std::isfinite(exact[i])) continue;
    const double ratio = std::abs(actual[i] - exact[i]) / bound(exact[i]);
    outside += ratio > 1;
    if (ratio > worst_ratio) worst_ratio = ratio, worst = i;
  }
  const auto result = outside == 0 ? ::testing::AssertionSuccess() : ::testing::AssertionFailure();
  if (actual.empty()) return result;
  return ::testing::AssertionResult(result)
         << outside << " of " << actual.size() << " outside the bound; worst at " << worst << ": "
         << actual[worst] << ", oracle " << exact[worst] << ", error " << worst_ratio
         << " of the bound";
}

inline ::testing::AssertionResult Near(absl::Span<const float> actual,
                                       absl::Span<const double> exact, double bound) {
  return Near(actual, exact, [bound](double) { return bound; });
}

}  // namespace ssmd::testing
