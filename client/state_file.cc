#include "client/state_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ssmd::client {
namespace {

constexpr absl::string_view kMagic = "SSMDSTA1";
constexpr uint64_t kHeaderBytesMax = 64 << 20;
constexpr size_t kReadBytes = 1 << 20;

std::string Integer(uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(value >> (8 * i)));
  return bytes;
}

uint64_t IntegerAt(absl::string_view bytes) {
  uint64_t value = 0;
  for (int i = 0; i < 8; ++i)
    value |= uint64_t{static_cast<unsigned char>(bytes[static_cast<size_t>(i)])} << (8 * i);
  return value;
}

absl::Status FileError(absl::string_view what, const std::string& path) {
  return absl::ErrnoToStatus(errno, absl::StrCat(what, " ", path));
}

// Takes the next length-prefixed message off `bytes`.
template <typename Message>
bool TakeMessage(absl::string_view& bytes, Message& message) {
  if (bytes.size() < 8) return false;
  const uint64_t size = IntegerAt(bytes);
  bytes.remove_prefix(8);
  if (size > bytes.size()) return false;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(size))) return false;
  bytes.remove_prefix(size);
  return true;
}

}  // namespace

StateFileWriter::StateFileWriter(std::string path, v1::SnapshotKey key)
    : path_(std::move(path)), part_path_(path_ + ".part"), key_(std::move(key)) {}

StateFileWriter::~StateFileWriter() {
  if (file_ != nullptr) unlink(part_path_.c_str());
}

absl::Status StateFileWriter::Put(absl::string_view bytes) {
  if (std::fwrite(bytes.data(), 1, bytes.size(), file_.get()) != bytes.size())
    return FileError("cannot write", part_path_);
  return absl::OkStatus();
}

absl::Status StateFileWriter::Begin(const v1::StateDescriptor& descriptor) {
  file_.reset(std::fopen(part_path_.c_str(), "wb"));
  if (file_ == nullptr) return FileError("cannot write", part_path_);
  checksum_ = std::make_unique<Checksum>();
  const std::string key = key_.SerializeAsString(), state = descriptor.SerializeAsString();
  const std::string header = absl::StrCat(Integer(key.size()), key, Integer(state.size()), state);
  Checksum header_checksum;
  header_checksum.Add(header);
  return Put(
      absl::StrCat(kMagic, Integer(header.size()), header, Integer(header_checksum.value())));
}

absl::Status StateFileWriter::Write(const StateComponent&, uint64_t, absl::string_view data) {
  checksum_->Add(data);
  return Put(data);
}

absl::Status StateFileWriter::Finish() {
  if (file_ == nullptr) return absl::FailedPreconditionError("nothing was exported");
  if (absl::Status put = Put(Integer(checksum_->value())); !put.ok()) return put;
  if (std::fflush(file_.get()) != 0 || fsync(fileno(file_.get())) != 0)
    return FileError("cannot write", part_path_);
  if (std::rename(part_path_.c_str(), path_.c_str()) != 0) return FileError("cannot write", path_);
  file_.reset();
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<StateFile>> StateFile::Open(const std::string& path) {
  std::unique_ptr<StateFile> state(new StateFile);
  state->path_ = path;
  state->file_.reset(std::fopen(path.c_str(), "rb"));
  if (state->file_ == nullptr) return FileError("cannot read", path);
  if (absl::Status loaded = state->Load(); !loaded.ok()) return loaded;
  return state;
}

absl::Status StateFile::ReadAt(uint64_t offset, absl::Span<char> to) {
  if (fseeko(file_.get(), static_cast<off_t>(offset), SEEK_SET) != 0 ||
      std::fread(to.data(), 1, to.size(), file_.get()) != to.size())
    return absl::DataLossError(absl::StrCat(path_, ": ends before byte ", offset + to.size()));
  return absl::OkStatus();
}

absl::Status StateFile::Load() {
  const auto damaged = [this](absl::string_view what) {
    return absl::DataLossError(absl::StrCat(path_, ": ", what));
  };
  std::string start(16, '\0');
  if (!ReadAt(0, {start.data(), start.size()}).ok() || start.substr(0, 8) != kMagic)
    return damaged("not a state file");
  const uint64_t header_bytes = IntegerAt(absl::string_view(start).substr(8));
  if (header_bytes > kHeaderBytesMax) return damaged("the header is damaged");
  std::string header(header_bytes + 8, '\0');
  if (absl::Status read = ReadAt(16, {header.data(), header.size()}); !read.ok()) return read;
  const uint64_t expected = IntegerAt(absl::string_view(header).substr(header_bytes));
  header.resize(header_bytes);
  Checksum header_checksum;
  header_checksum.Add(header);
  absl::string_view left = header;
  if (header_checksum.value() != expected || !TakeMessage(left, key_) ||
      !TakeMessage(left, descriptor_) || !left.empty())
    return damaged("the header is damaged");

  const auto components = ComponentsOf(descriptor_);
  if (!components.ok()) return damaged(components.status().message());
  payload_ = 24 + header_bytes;
  bytes_ = TotalBytes(*components);
  Checksum checksum;
  std::string buffer;
  for (uint64_t at = 0; at < bytes_; at += buffer.size()) {
    buffer.resize(std::min<uint64_t>(kReadBytes, bytes_ - at));
    absl::Status read = ReadAt(payload_ + at, {buffer.data(), buffer.size()});
    if (!read.ok()) return read;
    checksum.Add(buffer);
  }
  std::string end(8, '\0');
  if (absl::Status read = ReadAt(payload_ + bytes_, {end.data(), end.size()}); !read.ok())
    return read;
  checksum_ = IntegerAt(end);
  if (checksum_ != checksum.value()) return damaged("its bytes do not match its checksum");
  return absl::OkStatus();
}

absl::Status StateFile::Read(const StateComponent& component, uint64_t offset_bytes,
                             absl::Span<char> to) {
  return ReadAt(payload_ + component.first + offset_bytes, to);
}

}  // namespace ssmd::client
