// Any of the three recurrences, for tests that sweep over families.
#pragma once

#include <string_view>
#include <variant>

#include "tests/reference/gdn.h"
#include "tests/reference/kda.h"
#include "tests/reference/mamba2.h"

namespace ssmd::reference {

class Recurrence {
 public:
  // `family`: "mamba2", "gdn" or "kda".
  Recurrence(std::string_view family, const Shape& shape) : any_(Make(family, shape)) {}

  // Returns o [head][d_v].
  std::vector<double> Step(const Token& token) {
    return std::visit([&](auto& recurrence) { return recurrence.Step(token); }, any_);
  }
  // [head][d_v][d_k]; may be set to start from.
  std::vector<double>& state() {
    return std::visit([](auto& recurrence) -> std::vector<double>& { return recurrence.state; },
                      any_);
  }
  // What the last token wrote along its key, [head][d_v].
  const std::vector<double>& u() {
    return std::visit([](auto& recurrence) -> std::vector<double>& { return recurrence.u; }, any_);
  }

 private:
  using Any = std::variant<Mamba2, Gdn, Kda>;
  static Any Make(std::string_view family, const Shape& shape) {
    if (family == "mamba2") return Mamba2(shape);
    if (family == "gdn") return Gdn(shape);
    return Kda(shape);
  }
  Any any_;
};

}  // namespace ssmd::reference
