// What the commands of ssmctl share.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/ctl/commands.h"
#include "client/ctl/format.h"

#define CTL_RETURN_IF_ERROR(expression)                                  \
  do {                                                                   \
    if (absl::Status status = (expression); !status.ok()) return status; \
  } while (0)
#define CTL_CONCAT_INNER(a, b) a##b
#define CTL_CONCAT(a, b) CTL_CONCAT_INNER(a, b)
#define CTL_ASSIGN_OR_RETURN(target, expression) \
  CTL_ASSIGN_OR_RETURN_INNER(CTL_CONCAT(result_, __LINE__), target, expression)
#define CTL_ASSIGN_OR_RETURN_INNER(result, target, expression) \
  auto result = (expression);                                  \
  if (!result.ok()) return result.status();                    \
  target = *std::move(result)

namespace ssmd::ctl {

void Print(const std::string& text);
void Print(const Options& options, const std::string& text, const Json& json);

absl::StatusOr<std::unique_ptr<Client>> Connect(const Options& options);

struct Model {
  uint64_t id = 0;
  std::string name;
};
// By id, or by a name that only one model has.
absl::StatusOr<Model> FindModel(const v1::GetStatusResponse& status, const std::string& wanted);

}  // namespace ssmd::ctl
