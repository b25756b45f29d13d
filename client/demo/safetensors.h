// Reader and writer of .safetensors files: 8 bytes of header length, a JSON header, raw tensors.
//
// The reader trusts nothing: every length is checked against the file before it is used, tensors
// must cover the data exactly once without holes, and a name, type or shape that is not what the
// caller expects is an error that says so. F32, BF16, I32 and U8 are understood; tensors of other
// types may be in the file but not be read. Little-endian hosts only (tensor.h asserts it).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ssmd::demo {

class Safetensors {
 public:
  // Errors: NOT_FOUND when the file cannot be read, INVALID_ARGUMENT when it is malformed.
  static absl::StatusOr<Safetensors> Read(const std::string& path);
  static absl::StatusOr<Safetensors> Parse(std::string bytes);

  bool Has(absl::string_view name) const { return entries_.count(std::string(name)) > 0; }
  // Requires: Has(name).
  const std::vector<uint64_t>& shape(absl::string_view name) const {
    return entries_.at(std::string(name)).shape;
  }

  // F32 or BF16, widened. Errors: NOT_FOUND; INVALID_ARGUMENT for another type or shape.
  absl::StatusOr<std::vector<float>> Floats(absl::string_view name,
                                            absl::Span<const uint64_t> shape) const;
  absl::StatusOr<std::vector<int32_t>> Ints(absl::string_view name,
                                            absl::Span<const uint64_t> shape) const;  // I32
  absl::StatusOr<std::string> Bytes(absl::string_view name) const;  // U8, any shape

  // "" when the file does not say.
  std::string Metadata(absl::string_view key) const;
  uint64_t byte_size() const { return bytes_.size(); }

 private:
  struct Entry {
    std::string dtype;
    std::vector<uint64_t> shape;
    uint64_t begin = 0, end = 0;  // in bytes_
  };
  absl::Status ParseHeader();
  absl::StatusOr<const Entry*> Find(absl::string_view name) const;
  absl::StatusOr<const Entry*> Find(absl::string_view name, absl::Span<const uint64_t> shape) const;

  std::string source_;  // "path: " for messages; empty without a file
  std::string bytes_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

class SafetensorsWriter {
 public:
  // Requires: the product of `shape` is values.size(), and names differ.
  void AddFloats(const std::string& name, std::vector<uint64_t> shape,
                 absl::Span<const float> values);
  void AddInts(const std::string& name, absl::Span<const int32_t> values);
  void AddBytes(const std::string& name, absl::string_view bytes);
  void SetMetadata(const std::string& key, const std::string& value) { metadata_[key] = value; }

  std::string Serialize() const;
  absl::Status Write(const std::string& path) const;

 private:
  struct Entry {
    std::string dtype;
    std::vector<uint64_t> shape;
    std::string bytes;
  };
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace ssmd::demo
