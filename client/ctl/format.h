// What ssmctl prints: replies to tables of at most 100 columns, and to JSON. Pure functions.
//
// JSON: one object a command, snake_case names as in the protos. 64-bit ids are strings of 16 hex
// digits (JSON numbers lose bits), sizes and counts are numbers.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ssmd/v1/admin_service.pb.h"
#include "ssmd/v1/state_service.pb.h"

namespace ssmd::ctl {

using Json = nlohmann::ordered_json;

// Ids, as they are printed and typed: 16 hex digits, "0x" in front accepted.
std::string IdText(uint64_t id);
std::optional<uint64_t> ParseId(absl::string_view text);

// Text of somebody else's, for a terminal: what is not printable ASCII becomes '?'.
std::string Printable(std::string text);

// Digests: as they are when they are readable (graphic ASCII, no spaces), else "hex:...".
std::string DigestText(const std::string& digest);
absl::StatusOr<std::string> ParseDigest(const std::string& text);  // INVALID_ARGUMENT

struct SnapshotRow {
  uint64_t model_id = 0;
  std::string model;
  v1::SnapshotKey key;
};

std::string StatusText(const v1::GetStatusResponse& status, const std::string& server);
Json StatusJson(const v1::GetStatusResponse& status, const std::string& server);

std::string ModelsText(const v1::GetStatusResponse& status);
Json ModelsJson(const v1::GetStatusResponse& status);

// Per model: how many there are. (The API lists a session's own sequences only.)
std::string SequenceCountsText(const v1::GetStatusResponse& status);
Json SequenceCountsJson(const v1::GetStatusResponse& status);
std::string SequencesText(absl::Span<const v1::SequenceInfo> sequences);
Json SequencesJson(absl::Span<const v1::SequenceInfo> sequences);

std::string SessionsText(absl::Span<const v1::SessionInfo> sessions);
Json SessionsJson(absl::Span<const v1::SessionInfo> sessions);

std::string SnapshotsText(absl::Span<const SnapshotRow> snapshots);
Json SnapshotsJson(absl::Span<const SnapshotRow> snapshots);

std::string StepsText(const v1::GetStatusResponse& status);
Json StepsJson(const v1::GetStatusResponse& status);

std::string RegisteredText(const v1::RegisterModelResponse& model, const std::string& name);
Json RegisteredJson(const v1::RegisterModelResponse& model, const std::string& name);

}  // namespace ssmd::ctl
