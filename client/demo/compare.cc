#include "client/demo/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_format.h"
#include "client/demo/local_ssm.h"

namespace ssmd::demo {
namespace {

constexpr double kUnitRoundoff = 0x1p-24, kNoise = 0x1p-14;
constexpr double kFactor = 36.0;
constexpr size_t kChunk = 16;

double Difference(absl::Span<const float> a, absl::Span<const float> b) {
  double largest = 0.0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double difference = std::abs(double{a[i]} - double{b[i]});
    if (!(difference <= largest)) largest = difference;
    if (std::isnan(largest)) return std::numeric_limits<double>::infinity();
  }
  return largest;
}

}  // namespace

Comparison Compare(absl::Span<const Stream> streams, absl::Span<const Stream> others) {
  Comparison result;
  for (size_t i = 0; i < streams.size(); ++i) {
    const Stream &a = streams[i], &b = others[i];
    // After the first different token the two are on different texts, and logits say nothing.
    const size_t common = static_cast<size_t>(
        std::mismatch(a.text.begin(), a.text.end(), b.text.begin(), b.text.end()).first -
        a.text.begin());
    if (a.text != b.text) {
      result.tokens_equal = false;
      if (result.first_difference.empty())
        result.first_difference = absl::StrFormat("prompt %d, byte %d after the prompt", i + 1,
                                                  common - std::min(common, a.prompt_bytes) + 1);
    }
    const size_t positions =
        std::min({common, a.logits.size() / kVocabulary, b.logits.size() / kVocabulary});
    result.positions += positions;
    result.logit_difference =
        std::max(result.logit_difference, Difference({a.logits.data(), positions * kVocabulary},
                                                     {b.logits.data(), positions * kVocabulary}));
  }
  return result;
}

absl::StatusOr<Tolerance> MeasureTolerance(const HybridModel& model, const Stream& stream,
                                           const std::function<void(uint64_t bytes)>& progress) {
  LocalSsm<float> noisy(model.ssm_parameters(), kNoise);
  absl::StatusOr<std::vector<SsmLayers::Handle>> sequence = noisy.Create(1);
  if (!sequence.ok()) return sequence.status();
  SequenceCache cache;
  const size_t seen = stream.text.size() - 1;
  double largest = 0.0;
  for (size_t at = 0; at < seen; at += kChunk) {
    const size_t size = std::min(kChunk, seen - at);
    const ModelRow row{&cache,
                       sequence->front(),
                       {reinterpret_cast<const uint8_t*>(stream.text.data()) + at, size}};
    absl::StatusOr<Matrix> logits = model.Forward({&row, 1}, noisy);
    if (!logits.ok()) return logits.status();
    absl::Status status = model.Commit({&row, 1}, {static_cast<uint32_t>(size)}, noisy);
    if (!status.ok()) return status;
    largest = std::max(largest, Difference({logits->data(), size * kVocabulary},
                                           {&stream.logits[at * kVocabulary], size * kVocabulary}));
    if (progress) progress(at + size);
  }
  Tolerance tolerance;
  tolerance.amplified = largest * kUnitRoundoff / kNoise;
  tolerance.logit = kFactor * tolerance.amplified;
  return tolerance;
}

}  // namespace ssmd::demo
