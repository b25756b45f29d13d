#include "client/demo/remote_ssm.h"

#include <utility>

#include "client/tensor.h"

namespace ssmd::demo {
namespace {

constexpr v1::DataType kFp32 = v1::DATA_TYPE_FP32;

v1::Family WireFamily(SsmFamily family) {
  switch (family) {
    case SsmFamily::kMamba2:
      return v1::FAMILY_MAMBA2;
    case SsmFamily::kGdn:
      return v1::FAMILY_GDN;
    case SsmFamily::kKda:
      return v1::FAMILY_KDA;
  }
  return v1::FAMILY_UNSPECIFIED;
}

template <typename Created>
std::vector<SsmLayers::Handle> Adopt(const Created& created,
                                     std::map<SsmLayers::Handle, uint64_t>& versions) {
  std::vector<SsmLayers::Handle> handles;
  for (uint64_t id : created.sequence_ids()) {
    handles.push_back(SsmLayers::Handle{id});
    versions[handles.back()] = created.version();
  }
  return handles;
}

}  // namespace

v1::ModelSpec DemoModelSpec(const std::string& name) {
  v1::ModelSpec spec;
  spec.set_name(name);
  for (const SsmShape& shape : kSsmShapes) {
    v1::LayerGroup* group = nullptr;
    for (v1::LayerGroup& known : *spec.mutable_layer_groups())
      if (known.family() == WireFamily(shape.family)) group = &known;
    if (group == nullptr) group = spec.add_layer_groups();
    group->set_family(WireFamily(shape.family));
    group->add_layer_ids(shape.layer_id);
    group->set_head_count(shape.heads);
    group->set_key_group_count(shape.groups);
    group->set_d_k(shape.d_k);
    group->set_d_v(shape.d_v);
  }
  spec.set_input_form(v1::INPUT_FORM_POST_CONV);
  spec.set_activation_dtype(kFp32);
  spec.set_correction_dtype(kFp32);
  spec.set_output_dtype(kFp32);
  spec.set_checkpoint_dtype(kFp32);
  spec.set_window_records(kWindowRecords);
  spec.set_draft_tokens_max(kStepTokensMax);
  spec.set_tp_size(1);
  spec.set_pp_size(1);
  return spec;
}

v1::ModelCapacity DemoModelCapacity() {
  v1::ModelCapacity capacity;
  capacity.set_sequences_max(16);
  capacity.set_snapshots_max(4);
  capacity.set_spare_pages(16);
  capacity.set_rows_max(16);
  capacity.set_steps_max(4);
  return capacity;
}

absl::StatusOr<std::vector<SsmLayers::Handle>> RemoteSsm::Create(uint32_t count) {
  auto created = session_.CreateSequences(model_id_, count);
  if (!created.ok()) return created.status();
  return Adopt(*created, versions_);
}

absl::StatusOr<std::vector<SsmLayers::Handle>> RemoteSsm::Fork(Handle parent, uint32_t count) {
  auto forked = session_.ForkSequences(
      model_id_, {static_cast<uint64_t>(parent), versions_.at(parent)}, count);
  if (!forked.ok()) return forked.status();
  return Adopt(*forked, versions_);
}

absl::Status RemoteSsm::Release(absl::Span<const Handle> sequences) {
  std::vector<uint64_t> ids;
  for (Handle sequence : sequences) ids.push_back(static_cast<uint64_t>(sequence));
  auto released = session_.ReleaseSequences(model_id_, ids);
  if (!released.ok()) return released.status();
  for (Handle sequence : sequences) versions_.erase(sequence);
  return absl::OkStatus();
}

absl::Status RemoteSsm::Begin(absl::Span<const Row> rows) {
  std::vector<client::StepRow> step_rows;
  tokens_ = 0;
  for (const Row& row : rows) {
    step_rows.push_back(
        {{static_cast<uint64_t>(row.sequence), versions_.at(row.sequence)}, row.tokens});
    tokens_ += row.tokens;
  }
  auto begun = session_.BeginStep(model_id_, step_rows);
  if (!begun.ok()) return begun.status();
  rows_.assign(rows.begin(), rows.end());
  step_id_ = begun->step_id();
  flushing_rows_ += begun->flushing_rows();
  return absl::OkStatus();
}

absl::Status RemoteSsm::Layer(size_t layer, const SsmInputs& inputs, absl::Span<float> output) {
  const SsmShape& shape = kSsmShapes[layer];
  v1::VerifyRequest request;
  request.set_model_id(model_id_);
  request.set_step_id(step_id_);
  request.set_layer_id(shape.layer_id);
  using client::ToTensor;
  *request.mutable_q() = ToTensor(kFp32, {tokens_, shape.groups, shape.d_k}, inputs.q);
  *request.mutable_k() = ToTensor(kFp32, {tokens_, shape.groups, shape.d_k}, inputs.k);
  *request.mutable_v() = ToTensor(kFp32, {tokens_, shape.heads, shape.d_v}, inputs.v);
  *request.mutable_log_alpha() =
      shape.family == SsmFamily::kKda
          ? ToTensor(kFp32, {tokens_, shape.heads, shape.d_k}, inputs.log_alpha)
          : ToTensor(kFp32, {tokens_, shape.heads}, inputs.log_alpha);
  if (!inputs.beta.empty())
    *request.mutable_beta() = ToTensor(kFp32, {tokens_, shape.heads}, inputs.beta);
  if (!inputs.value_scale.empty())
    *request.mutable_value_scale() = ToTensor(kFp32, {tokens_, shape.heads}, inputs.value_scale);
  auto verified = session_.Verify(request);
  if (!verified.ok()) return EndAfter(verified.status());
  absl::Status read = client::FromTensor(verified->output(), output);
  return read.ok() ? read : EndAfter(std::move(read));
}

absl::Status RemoteSsm::Commit(absl::Span<const uint32_t> accepted) {
  auto committed = session_.Commit(model_id_, step_id_, accepted);
  if (!committed.ok()) return EndAfter(committed.status());
  if (static_cast<size_t>(committed->versions_size()) != rows_.size())
    return absl::InternalError("Commit: the reply has another number of rows");
  for (size_t i = 0; i < rows_.size(); ++i)
    versions_[rows_[i].sequence] = committed->versions(static_cast<int>(i));
  step_id_ = 0;
  return absl::OkStatus();
}

absl::Status RemoteSsm::Abort() {
  if (step_id_ == 0) return absl::OkStatus();
  return session_.AbortStep(model_id_, std::exchange(step_id_, 0)).status();
}

absl::Status RemoteSsm::EndAfter(absl::Status failure) {
  Abort().IgnoreError();
  return failure;
}

absl::Status RemoteSsm::CreateSnapshot(Handle sequence, const v1::SnapshotKey& key) {
  return session_
      .CreateSnapshot(model_id_, {static_cast<uint64_t>(sequence), versions_.at(sequence)}, key,
                      /*overwrite=*/true)
      .status();
}

absl::StatusOr<SsmLayers::Handle> RemoteSsm::CreateFromSnapshot(const v1::SnapshotKey& key) {
  auto created = session_.CreateFromSnapshot(model_id_, 1, key);
  if (!created.ok()) return created.status();
  return Adopt(*created, versions_).at(0);
}

absl::Status RemoteSsm::DeleteSnapshot(const v1::SnapshotKey& key) {
  return session_.DeleteSnapshot(model_id_, key).status();
}

}  // namespace ssmd::demo
