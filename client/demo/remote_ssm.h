// RemoteSsm: SSM layers whose states live on an ssmd server. This process keeps ids and versions
// only.
#pragma once

#include <map>

#include "client/client.h"
#include "client/demo/ssm.h"
#include "client/session.h"

namespace ssmd::demo {

inline constexpr uint32_t kWindowRecords = 16;  // L
inline constexpr uint32_t kStepTokensMax = 8;   // T_max: prompts are sent in chunks of it

// The model as the demo registers it: everything in FP32, so that the server and LocalSsm<float>
// differ by rounding alone.
v1::ModelSpec DemoModelSpec(const std::string& name);
v1::ModelCapacity DemoModelCapacity();

class RemoteSsm final : public SsmLayers {
 public:
  // Requires: `session` outlives this object and is used by no one else's steps.
  RemoteSsm(client::Session& session, uint64_t model_id) : session_(session), model_id_(model_id) {}

  absl::StatusOr<std::vector<Handle>> Create(uint32_t count) override;
  absl::StatusOr<std::vector<Handle>> Fork(Handle parent, uint32_t count) override;
  absl::Status Release(absl::Span<const Handle> sequences) override;
  absl::Status Begin(absl::Span<const Row> rows) override;
  absl::Status Layer(size_t layer, const SsmInputs& inputs, absl::Span<float> output) override;
  absl::Status Commit(absl::Span<const uint32_t> accepted) override;
  absl::Status Abort() override;

  // Publishes the committed state of a sequence, which is at `key.position`.
  absl::Status CreateSnapshot(Handle sequence, const v1::SnapshotKey& key);
  absl::StatusOr<Handle> CreateFromSnapshot(const v1::SnapshotKey& key);
  absl::Status DeleteSnapshot(const v1::SnapshotKey& key);

  uint64_t flushing_rows() const { return flushing_rows_; }  // of all steps so far

 private:
  absl::Status EndAfter(absl::Status failure);  // aborts the open step on the server, best effort

  client::Session& session_;
  const uint64_t model_id_;
  std::map<Handle, uint64_t> versions_;
  std::vector<Row> rows_;  // of the open step
  uint64_t step_id_ = 0;   // 0: none is open
  uint64_t tokens_ = 0;    // of the open step
  uint64_t flushing_rows_ = 0;
};

}  // namespace ssmd::demo
