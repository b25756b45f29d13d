// Generation: prompts in, text out, by speculative decoding over the model.
//
// A step of one stream runs its last byte, which the model has not seen yet, and up to three
// drafted bytes: the draft is what followed the longest earlier occurrence of the text's end
// (prompt lookup), in it or in another stream of the batch. The bytes that the sampler agrees with
// are committed, the rest rolled back by not accepting them. All streams of a call step together as
// the rows of one batch.
//
// Sampling is exact: a byte is drawn from the model's distribution at each position as if there
// were no draft, and a draft is accepted when it equals the drawn byte.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/demo/model.h"

namespace ssmd::demo {

inline constexpr uint32_t kVerifyTokens = 4;  // T: the last byte and three drafts

// One text. The model has seen all of it but the last byte.
struct Stream {
  std::string text;
  size_t prompt_bytes = 0;
  SequenceCache cache;
  SsmLayers::Handle ssm{};
  std::vector<float> logits;  // [text.size() - 1, 256] when kept
  std::mt19937_64 random;     // of sampling
};

struct GenerateOptions {
  uint32_t new_bytes = 0;    // per stream, exactly
  float temperature = 0.0f;  // 0: greedy
  bool keep_logits = false;
  std::function<void(uint64_t bytes)> progress;  // new bytes of all streams so far; may be unset
};

struct GenerateStats {
  uint64_t steps = 0;                  // of streams: one row of one batch
  uint64_t batches = 0;                // steps of the model, all streams together
  uint64_t new_bytes = 0;              // committed
  uint64_t drafted = 0, accepted = 0;  // draft bytes
  double seconds = 0.0;
};

// Feeds all of each text but its last byte, in chunks of `chunk_bytes`. `progress`, when set, gets
// the bytes of all streams fed so far.
absl::Status Prefill(const HybridModel& model, SsmLayers& ssm, absl::Span<Stream* const> streams,
                     uint32_t chunk_bytes, bool keep_logits,
                     const std::function<void(uint64_t bytes)>& progress = nullptr);

// Requires: every text has a byte, and the stream has seen all of it but the last. After an error
// the streams hold what was committed before it.
absl::StatusOr<GenerateStats> Generate(const HybridModel& model, SsmLayers& ssm,
                                       absl::Span<Stream* const> streams,
                                       const GenerateOptions& options);

// Up to `count` bytes that followed the longest earlier occurrence of the end of `text` (2 to 16
// bytes), in itself or in one of `others`; the latest of equally long ones in `text`, else the
// latest in the first that has one. Empty when there is none.
std::string DraftByLookup(const std::string& text, absl::Span<const std::string* const> others,
                          size_t count);

// Draws a byte from logits [256]; temperature 0 takes the largest, the lowest byte of equal ones.
uint8_t PickByte(absl::Span<const float> logits, float temperature, std::mt19937_64& random);

// Mean of -log2 p(byte | bytes before it in its window), over all of `text` but its first byte;
// windows of `window_bytes`, each from an empty state. `progress` gets the bytes predicted so far.
absl::StatusOr<double> BitsPerByte(const HybridModel& model, SsmLayers& ssm,
                                   const std::string& text, size_t window_bytes,
                                   const std::function<void(uint64_t)>& progress);

}  // namespace ssmd::demo
