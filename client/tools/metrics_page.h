// Reads a Prometheus text page over HTTP: as much of a scraper as our tools need.
#pragma once

#include <map>
#include <string>

#include "absl/status/statusor.h"

namespace ssmd::client {

// Samples by "name{labels}" as the page writes them.
using Samples = std::map<std::string, double>;

// GET http://<address>/metrics; address is host:port. Errors: UNAVAILABLE naming the address.
absl::StatusOr<Samples> FetchMetrics(const std::string& address);

// Parses the text format; lines that it does not understand are skipped.
Samples ParseMetrics(const std::string& page);

// Sum over the samples of a family whose labels contain `label` (such as kind="ring_read"; empty:
// all).
double SumOf(const Samples& samples, const std::string& name, const std::string& label = "");

}  // namespace ssmd::client
