#include "client/demo/safetensors.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/tensor.h"

namespace ssmd::demo {
namespace {

using nlohmann::json;

constexpr uint64_t kHeaderBytesMax = 16 << 20;

absl::Status Malformed(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("not a valid safetensors file: ", what));
}

// 0: a type that cannot be read, whose size is not checked against its shape.
uint64_t ElementBytes(absl::string_view dtype) {
  if (dtype == "F32" || dtype == "I32") return 4;
  if (dtype == "BF16") return 2;
  return dtype == "U8" ? 1 : 0;
}

std::string ShapeText(absl::Span<const uint64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

bool IsCount(const json& value) { return value.is_number_unsigned(); }

}  // namespace

absl::StatusOr<Safetensors> Safetensors::Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream contents;
  if (!file || !(contents << file.rdbuf())) return absl::NotFoundError("cannot read " + path);
  absl::StatusOr<Safetensors> parsed = Parse(std::move(contents).str());
  if (!parsed.ok())
    return absl::Status(parsed.status().code(),
                        absl::StrCat(path, ": ", parsed.status().message()));
  parsed->source_ = path + ": ";
  return parsed;
}

absl::StatusOr<Safetensors> Safetensors::Parse(std::string bytes) {
  Safetensors result;
  result.bytes_ = std::move(bytes);
  if (absl::Status status = result.ParseHeader(); !status.ok()) return status;
  return result;
}

absl::Status Safetensors::ParseHeader() {
  uint64_t header_bytes = 0;
  if (bytes_.size() < sizeof header_bytes) return Malformed("shorter than 8 bytes");
  std::memcpy(&header_bytes, bytes_.data(), sizeof header_bytes);
  if (header_bytes > kHeaderBytesMax || header_bytes > bytes_.size() - sizeof header_bytes)
    return Malformed(
        absl::StrCat("header of ", header_bytes, " bytes in a file of ", bytes_.size()));
  const char* header_begin = bytes_.data() + sizeof header_bytes;
  const json header =
      json::parse(header_begin, header_begin + header_bytes, nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) return Malformed("the header is not a JSON object");

  const uint64_t data_begin = sizeof header_bytes + header_bytes;
  const uint64_t data_bytes = bytes_.size() - data_begin;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  for (const auto& [name, value] : header.items()) {
    if (!value.is_object()) return Malformed(absl::StrCat("'", name, "' is not an object"));
    if (name == "__metadata__") {
      for (const auto& [key, text] : value.items()) {
        if (!text.is_string()) return Malformed("metadata that is not text");
        metadata_[key] = text.get<std::string>();
      }
      continue;
    }
    const auto dtype = value.find("dtype"), shape = value.find("shape"),
               offsets = value.find("data_offsets");
    if (dtype == value.end() || !dtype->is_string() || shape == value.end() || !shape->is_array() ||
        offsets == value.end() || !offsets->is_array() || offsets->size() != 2 ||
        !std::all_of(shape->begin(), shape->end(), IsCount) ||
        !std::all_of(offsets->begin(), offsets->end(), IsCount))
      return Malformed(absl::StrCat("'", name, "' lacks a valid dtype, shape or data_offsets"));
    Entry entry;
    entry.dtype = dtype->get<std::string>();
    entry.shape = shape->get<std::vector<uint64_t>>();
    const uint64_t begin = (*offsets)[0].get<uint64_t>(), end = (*offsets)[1].get<uint64_t>();
    if (begin > end || end > data_bytes)
      return Malformed(absl::StrCat("'", name, "' lies at ", begin, "..", end, " of ", data_bytes,
                                    " data bytes"));
    uint64_t expected = ElementBytes(entry.dtype);
    bool overflow = false;
    for (uint64_t extent : entry.shape)
      overflow |= __builtin_mul_overflow(expected, extent, &expected);
    if (ElementBytes(entry.dtype) != 0 && (overflow || expected != end - begin))
      return Malformed(absl::StrCat("'", name, "' ", entry.dtype, " ", ShapeText(entry.shape),
                                    " has ", end - begin, " bytes"));
    entry.begin = data_begin + begin;
    entry.end = data_begin + end;
    ranges.emplace_back(begin, end);
    entries_[name] = std::move(entry);
  }
  std::sort(ranges.begin(), ranges.end());
  uint64_t covered = 0;
  for (const auto& [begin, end] : ranges) {
    if (begin != covered) return Malformed(absl::StrCat("hole or overlap at data byte ", covered));
    covered = end;
  }
  if (covered != data_bytes)
    return Malformed(absl::StrCat("tensors cover ", covered, " of ", data_bytes, " data bytes"));
  return absl::OkStatus();
}

absl::StatusOr<const Safetensors::Entry*> Safetensors::Find(absl::string_view name) const {
  const auto found = entries_.find(std::string(name));
  if (found == entries_.end())
    return absl::NotFoundError(absl::StrCat(source_, "no tensor '", name, "'"));
  return &found->second;
}

absl::StatusOr<const Safetensors::Entry*> Safetensors::Find(
    absl::string_view name, absl::Span<const uint64_t> shape) const {
  absl::StatusOr<const Entry*> entry = Find(name);
  if (entry.ok() && absl::MakeConstSpan((*entry)->shape) != shape)
    return absl::InvalidArgumentError(absl::StrCat(source_, "tensor '", name, "': expected shape ",
                                                   ShapeText(shape), ", the file has ",
                                                   ShapeText((*entry)->shape)));
  return entry;
}

absl::StatusOr<std::vector<float>> Safetensors::Floats(absl::string_view name,
                                                       absl::Span<const uint64_t> shape) const {
  absl::StatusOr<const Entry*> entry = Find(name, shape);
  if (!entry.ok()) return entry.status();
  const char* data = bytes_.data() + (*entry)->begin;
  const uint64_t size = (*entry)->end - (*entry)->begin;
  std::vector<float> values;
  if ((*entry)->dtype == "F32") {
    values.resize(size / 4);
    if (size > 0) std::memcpy(values.data(), data, size);
  } else if ((*entry)->dtype == "BF16") {
    values.resize(size / 2);
    for (size_t i = 0; i < values.size(); ++i) {
      uint16_t bits;
      std::memcpy(&bits, data + 2 * i, 2);
      values[i] = client::FloatFromBf16(bits);
    }
  } else {
    return absl::InvalidArgumentError(absl::StrCat(
        source_, "tensor '", name, "': expected F32 or BF16, the file has ", (*entry)->dtype));
  }
  return values;
}

absl::StatusOr<std::vector<int32_t>> Safetensors::Ints(absl::string_view name,
                                                       absl::Span<const uint64_t> shape) const {
  absl::StatusOr<const Entry*> entry = Find(name, shape);
  if (!entry.ok()) return entry.status();
  if ((*entry)->dtype != "I32")
    return absl::InvalidArgumentError(
        absl::StrCat(source_, "tensor '", name, "': expected I32, the file has ", (*entry)->dtype));
  std::vector<int32_t> values(((*entry)->end - (*entry)->begin) / 4);
  if (!values.empty())
    std::memcpy(values.data(), bytes_.data() + (*entry)->begin, values.size() * 4);
  return values;
}

absl::StatusOr<std::string> Safetensors::Bytes(absl::string_view name) const {
  absl::StatusOr<const Entry*> entry = Find(name);
  if (!entry.ok()) return entry.status();
  if ((*entry)->dtype != "U8")
    return absl::InvalidArgumentError(
        absl::StrCat(source_, "tensor '", name, "': expected U8, the file has ", (*entry)->dtype));
  return bytes_.substr((*entry)->begin, (*entry)->end - (*entry)->begin);
}

std::string Safetensors::Metadata(absl::string_view key) const {
  const auto found = metadata_.find(std::string(key));
  return found == metadata_.end() ? std::string() : found->second;
}

void SafetensorsWriter::AddFloats(const std::string& name, std::vector<uint64_t> shape,
                                  absl::Span<const float> values) {
  entries_[name] = {"F32", std::move(shape),
                    std::string(reinterpret_cast<const char*>(values.data()), 4 * values.size())};
}

void SafetensorsWriter::AddInts(const std::string& name, absl::Span<const int32_t> values) {
  entries_[name] = {"I32",
                    {values.size()},
                    std::string(reinterpret_cast<const char*>(values.data()), 4 * values.size())};
}

void SafetensorsWriter::AddBytes(const std::string& name, absl::string_view bytes) {
  entries_[name] = {"U8", {bytes.size()}, std::string(bytes)};
}

std::string SafetensorsWriter::Serialize() const {
  json header = json::object();
  std::string data;
  for (const auto& [name, entry] : entries_) {
    header[name] = {{"dtype", entry.dtype},
                    {"shape", entry.shape},
                    {"data_offsets", {data.size(), data.size() + entry.bytes.size()}}};
    data += entry.bytes;
  }
  if (!metadata_.empty()) header["__metadata__"] = metadata_;
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // tensors stay 8-byte aligned
  const uint64_t header_bytes = text.size();
  std::string result(reinterpret_cast<const char*>(&header_bytes), sizeof header_bytes);
  return result + text + data;
}

absl::Status SafetensorsWriter::Write(const std::string& path) const {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  const std::string bytes = Serialize();
  if (!file.write(bytes.data(), static_cast<std::streamsize>(bytes.size())) || !file.flush())
    return absl::UnavailableError("cannot write " + path);
  return absl::OkStatus();
}

}  // namespace ssmd::demo
