// RemoteSsm: SSM layers whose states live on an ssmd server.
//
// In raw form this process keeps ids and versions only. In post-conv form it evaluates convolutions
// and gates itself (ShortConv) and keeps their windows; they travel with snapshots.
//
// Steps go over one Steps stream, where a commit rides on the next step's begin, or as unary calls.
#pragma once

#include <map>
#include <memory>
#include <optional>

#include "client/client.h"
#include "client/decode_stream.h"
#include "client/demo/short_conv.h"
#include "client/demo/ssm.h"
#include "client/session.h"

namespace ssmd::demo {

inline constexpr uint32_t kWindowRecords = 16;  // L
inline constexpr uint32_t kStepTokensMax = 8;   // T_max: prompts are sent in chunks of it

enum class Transport : uint8_t { kStream, kUnary };

struct RemoteOptions {
  v1::InputForm form = v1::INPUT_FORM_RAW;
  Transport transport = Transport::kStream;
};

// The model as the demo registers it: everything in FP32, so that the server and LocalSsm<float>
// differ by rounding alone.
v1::ModelSpec DemoModelSpec(const std::string& name, const AllSsmParameters& parameters,
                            v1::InputForm form, v1::FlushMode flush);
v1::ModelCapacity DemoModelCapacity();

class RemoteSsm final : public SsmLayers {
 public:
  // Requires: `session` and `parameters` outlive this object; the session's steps are its own.
  static absl::StatusOr<std::unique_ptr<RemoteSsm>> Open(client::Session& session,
                                                         uint64_t model_id,
                                                         const AllSsmParameters& parameters,
                                                         const RemoteOptions& options);

  absl::StatusOr<std::vector<Handle>> Create(uint32_t count) override;
  absl::StatusOr<std::vector<Handle>> Fork(Handle parent, uint32_t count) override;
  absl::Status Release(absl::Span<const Handle> sequences) override;
  absl::Status Begin(absl::Span<const Row> rows) override;
  absl::Status Layer(size_t layer, const SsmInputs& inputs, absl::Span<float> output) override;
  absl::Status Commit(absl::Span<const uint32_t> accepted) override;
  absl::Status Abort() override;
  absl::Status Settle() override;

  // Publishes the committed state of a sequence, which is at `key.position`.
  absl::Status CreateSnapshot(Handle sequence, const v1::SnapshotKey& key);
  absl::StatusOr<Handle> CreateFromSnapshot(const v1::SnapshotKey& key);
  absl::Status DeleteSnapshot(const v1::SnapshotKey& key);

  uint64_t flushing_rows() const { return flushing_rows_; }  // of all steps so far

 private:
  RemoteSsm(client::Session& session, uint64_t model_id) : session_(session), model_id_(model_id) {}

  absl::Status EndAfter(absl::Status failure);  // aborts the open step on the server, best effort
  template <typename Created>
  std::vector<Handle> Add(const Created& created);
  void FillRaw(const SsmShape& shape, const SsmInputs& inputs, v1::VerifyRequest& request) const;
  void FillPostConv(const SsmShape& shape, const RecurrenceInputs& inputs,
                    v1::VerifyRequest& request) const;
  // Takes the new versions from the server's answer to the last commit.
  absl::Status Committed(const v1::CommitResponse& reply);

  client::Session& session_;
  const uint64_t model_id_;
  std::optional<ShortConv> conv_;                 // post-conv form
  std::unique_ptr<client::DecodeStream> stream_;  // or unary calls
  std::map<Handle, uint64_t> versions_;
  std::vector<Row> rows_;  // of the open step
  uint64_t step_id_ = 0;   // 0: none is open
  uint64_t tokens_ = 0;    // of the open step
  uint64_t flushing_rows_ = 0;
  // The commit that the next Begin takes along, and its rows. Their versions_ are the ones after
  // it.
  std::optional<client::StepCommit> unsent_;
  std::vector<Row> unsent_rows_;
};

}  // namespace ssmd::demo
