#include "client/demo/generate.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace ssmd::demo {
namespace {

constexpr size_t kMatchMin = 2, kMatchMax = 16;
constexpr size_t kEvalChunk = 16;

absl::Span<const uint8_t> AsBytes(const std::string& text, size_t begin, size_t size) {
  return {reinterpret_cast<const uint8_t*>(text.data()) + begin, size};
}

absl::Span<const float> LogitsOf(const Matrix& logits, size_t row) {
  return {logits.data() + row * kVocabulary, kVocabulary};
}

// Position of the largest logit, the lowest of equal ones.
uint8_t ArgMax(absl::Span<const float> logits) {
  return static_cast<uint8_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void Keep(Stream& stream, const Matrix& logits, size_t first, size_t count) {
  stream.logits.insert(stream.logits.end(), logits.data() + first * kVocabulary,
                       logits.data() + (first + count) * kVocabulary);
}

// What one row of a batch tries: the last byte of its stream and the drafts behind it.
struct Attempt {
  Stream* stream = nullptr;
  std::string bytes;
};

}  // namespace

std::string DraftByLookup(const std::string& text, absl::Span<const std::string* const> others,
                          size_t count) {
  size_t best_length = kMatchMin - 1, best_end = 0;
  const std::string* best = nullptr;
  // Longest match of the end of `text` within `in`, before position `limit`.
  const auto search = [&](const std::string& in, size_t limit) {
    for (size_t end = limit; end-- > kMatchMin;) {  // of the occurrence, exclusive
      size_t length = 0;
      while (length < kMatchMax && length < end && length < text.size() &&
             in[end - 1 - length] == text[text.size() - 1 - length])
        ++length;
      if (length <= best_length) continue;
      best_length = length;
      best_end = end;
      best = &in;
    }
  };
  search(text, text.size());
  for (const std::string* other : others) search(*other, other->size());
  return best == nullptr ? std::string() : best->substr(best_end, count);
}

uint8_t PickByte(absl::Span<const float> logits, float temperature, std::mt19937_64& random) {
  if (temperature <= 0.0f) return ArgMax(logits);
  const float largest = *std::max_element(logits.begin(), logits.end());
  double total = 0.0;
  for (float logit : logits) total += std::exp(static_cast<double>(logit - largest) / temperature);
  double left = static_cast<double>(random() >> 11) * 0x1p-53 * total;
  for (size_t i = 0; i + 1 < logits.size(); ++i) {
    left -= std::exp(static_cast<double>(logits[i] - largest) / temperature);
    if (left < 0.0) return static_cast<uint8_t>(i);
  }
  return static_cast<uint8_t>(logits.size() - 1);
}

absl::Status Prefill(const HybridModel& model, SsmLayers& ssm, absl::Span<Stream* const> streams,
                     uint32_t chunk_bytes, bool keep_logits,
                     const std::function<void(uint64_t bytes)>& progress) {
  uint64_t fed = 0;
  while (true) {
    std::vector<ModelRow> rows;
    std::vector<Stream*> active;
    std::vector<uint32_t> accepted;
    for (Stream* stream : streams) {
      const size_t seen = stream->cache.position();
      const size_t size = std::min<size_t>(chunk_bytes, stream->text.size() - 1 - seen);
      if (size == 0) continue;
      rows.push_back({&stream->cache, stream->ssm, AsBytes(stream->text, seen, size)});
      active.push_back(stream);
      accepted.push_back(static_cast<uint32_t>(size));
    }
    if (rows.empty()) return ssm.Settle();
    absl::StatusOr<Matrix> logits = model.Forward(rows, ssm);
    if (!logits.ok()) return logits.status();
    if (absl::Status status = model.Commit(rows, accepted, ssm); !status.ok()) return status;
    size_t first = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (keep_logits) Keep(*active[i], *logits, first, accepted[i]);
      first += accepted[i];
    }
    fed += first;
    if (progress) progress(fed);
  }
}

absl::StatusOr<GenerateStats> Generate(const HybridModel& model, SsmLayers& ssm,
                                       absl::Span<Stream* const> streams,
                                       const GenerateOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  GenerateStats stats;
  std::vector<size_t> targets;
  for (Stream* stream : streams) targets.push_back(stream->text.size() + options.new_bytes);
  while (true) {
    std::vector<Attempt> attempts;
    std::vector<const std::string*> texts;
    for (const Stream* stream : streams) texts.push_back(&stream->text);
    for (size_t i = 0; i < streams.size(); ++i) {
      const size_t left = targets[i] - streams[i]->text.size();
      if (left == 0) continue;
      const size_t drafts = std::min<size_t>(kVerifyTokens, left) - 1;
      attempts.push_back(
          {streams[i], streams[i]->text.back() + DraftByLookup(streams[i]->text, texts, drafts)});
    }
    if (attempts.empty()) break;
    std::vector<ModelRow> rows;
    rows.reserve(attempts.size());
    for (const Attempt& attempt : attempts)
      rows.push_back({&attempt.stream->cache, attempt.stream->ssm,
                      AsBytes(attempt.bytes, 0, attempt.bytes.size())});
    absl::StatusOr<Matrix> logits = model.Forward(rows, ssm);
    if (!logits.ok()) return logits.status();

    // The byte after token t is drawn; while it equals the draft, token t + 1 counts as well.
    std::vector<uint32_t> accepted;
    std::vector<std::string> drawn;
    size_t first = 0;
    for (const Attempt& attempt : attempts) {
      std::string bytes;
      uint32_t count = 0;
      do {
        bytes.push_back(static_cast<char>(PickByte(LogitsOf(*logits, first + count),
                                                   options.temperature, attempt.stream->random)));
        ++count;
      } while (count < attempt.bytes.size() && bytes.back() == attempt.bytes[count]);
      accepted.push_back(count);
      drawn.push_back(std::move(bytes));
      first += attempt.bytes.size();
    }
    if (absl::Status status = model.Commit(rows, accepted, ssm); !status.ok()) return status;
    first = 0;
    for (size_t i = 0; i < attempts.size(); ++i) {
      if (options.keep_logits) Keep(*attempts[i].stream, *logits, first, accepted[i]);
      first += attempts[i].bytes.size();
      attempts[i].stream->text += drawn[i];
      stats.steps += 1;
      stats.new_bytes += drawn[i].size();
      stats.drafted += attempts[i].bytes.size() - 1;
      stats.accepted += accepted[i] - 1;
    }
    stats.batches += 1;
    if (options.progress) options.progress(stats.new_bytes);
  }
  if (absl::Status settled = ssm.Settle(); !settled.ok()) return settled;
  stats.seconds = SecondsSince(start);
  return stats;
}

absl::StatusOr<double> BitsPerByte(const HybridModel& model, SsmLayers& ssm,
                                   const std::string& text, size_t window_bytes,
                                   const std::function<void(uint64_t)>& progress) {
  if (text.size() < 2) return absl::InvalidArgumentError("the text has less than two bytes");
  double bits = 0.0;
  for (size_t begin = 0; begin + 1 < text.size(); begin += window_bytes) {
    const size_t end = std::min(begin + window_bytes, text.size() - 1);
    absl::StatusOr<std::vector<SsmLayers::Handle>> sequence = ssm.Create(1);
    if (!sequence.ok()) return sequence.status();
    SequenceCache cache;
    for (size_t at = begin; at < end;) {
      const size_t size = std::min(kEvalChunk, end - at);
      const ModelRow row{&cache, sequence->front(), AsBytes(text, at, size)};
      absl::StatusOr<Matrix> logits = model.Forward({&row, 1}, ssm);
      if (!logits.ok()) return logits.status();
      absl::Status status = model.Commit({&row, 1}, {static_cast<uint32_t>(size)}, ssm);
      if (!status.ok()) return status;
      for (size_t t = 0; t < size; ++t) {
        const absl::Span<const float> row_logits = LogitsOf(*logits, t);
        const double largest = row_logits[ArgMax(row_logits)];
        double total = 0.0;
        for (float logit : row_logits) total += std::exp(logit - largest);
        bits += (std::log(total) + largest - row_logits[static_cast<uint8_t>(text[at + t + 1])]) /
                std::log(2.0);
      }
      at += size;
      if (progress) progress(at);
    }
    if (absl::Status status = ssm.Release(*sequence); !status.ok()) return status;
  }
  return bits / static_cast<double>(text.size() - 1);
}

}  // namespace ssmd::demo
