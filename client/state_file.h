// A state in a file: what Session::ExportState wrote and Session::ImportState reads.
//
//   offset            bytes
//   0                 8   "SSMDSTA1"
//   8                 8   H, size of the header
//   16                H   header: a SnapshotKey and a StateDescriptor, each a length (8 bytes) and
//                         that many bytes of protobuf; the key is empty for a sequence's state
//   16 + H            8   XXH3-64 of the header
//   24 + H            N   the components' bytes in the order of transfer.h; N follows from the
//                         descriptor
//   24 + H + N        8   XXH3-64 of those
// Integers are little-endian. A file is complete or absent: it gets its name when it is.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/checksum.h"
#include "client/transfer.h"

namespace ssmd::client {

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using FilePointer = std::unique_ptr<std::FILE, CloseFile>;

// Writes "<path>.part" until Finish renames it. Thread-compatible.
class StateFileWriter final : public StateSink {
 public:
  // `key`: of the snapshot that is exported; empty for a sequence.
  StateFileWriter(std::string path, v1::SnapshotKey key);
  ~StateFileWriter() override;  // without Finish: removes what it wrote

  absl::Status Begin(const v1::StateDescriptor& descriptor) override;
  absl::Status Write(const StateComponent& component, uint64_t offset_bytes,
                     absl::string_view data) override;
  // After the export: everything is on disk under its name. Replaces a file that is there.
  absl::Status Finish();

 private:
  absl::Status Put(absl::string_view bytes);

  const std::string path_, part_path_;
  const v1::SnapshotKey key_;
  FilePointer file_;
  std::unique_ptr<Checksum> checksum_;
};

// Thread-compatible.
class StateFile final : public StateSource {
 public:
  // Reads the header and checks all of the file. Errors: NOT_FOUND, and DATA_LOSS when it is no
  // such file, is cut short, or does not match a checksum.
  static absl::StatusOr<std::unique_ptr<StateFile>> Open(const std::string& path);

  const v1::StateDescriptor& descriptor() const override { return descriptor_; }
  absl::Status Read(const StateComponent& component, uint64_t offset_bytes,
                    absl::Span<char> to) override;

  const v1::SnapshotKey& key() const { return key_; }  // empty digest: a sequence's state
  uint64_t bytes() const { return bytes_; }            // of the components
  uint64_t checksum() const { return checksum_; }

 private:
  StateFile() = default;
  absl::Status Load();
  absl::Status ReadAt(uint64_t offset, absl::Span<char> to);

  std::string path_;
  FilePointer file_;
  v1::SnapshotKey key_;
  v1::StateDescriptor descriptor_;
  uint64_t payload_ = 0;  // offset of the components
  uint64_t bytes_ = 0, checksum_ = 0;
};

}  // namespace ssmd::client
