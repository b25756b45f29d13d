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

void FillParameters(const SsmShape& shape, const SsmParameters& small, v1::LayerGroup& group) {
  v1::LayerParameters& parameters = *group.add_parameters();
  parameters.set_conv_width(kConvWidth);
  const auto fill = [](const std::vector<float>& from, google::protobuf::RepeatedField<float>* to) {
    to->Add(from.begin(), from.end());
  };
  fill(small.conv_weight, parameters.mutable_conv_weight());
  fill(small.conv_bias, parameters.mutable_conv_bias());
  fill(small.a_log, parameters.mutable_a_log());
  fill(small.dt_bias, parameters.mutable_dt_bias());
  fill(small.d, parameters.mutable_d());
  parameters.set_qk_l2_norm(shape.family != SsmFamily::kMamba2);
  if (shape.family == SsmFamily::kKda) parameters.set_kda_gate(v1::KDA_GATE_SOFTPLUS);
}

}  // namespace

v1::ModelSpec DemoModelSpec(const std::string& name, const AllSsmParameters& parameters,
                            v1::InputForm form, v1::FlushMode flush) {
  v1::ModelSpec spec;
  spec.set_name(name);
  for (size_t layer = 0; layer < kSsmShapes.size(); ++layer) {
    const SsmShape& shape = kSsmShapes[layer];
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
    if (form == v1::INPUT_FORM_RAW) FillParameters(shape, parameters[layer], *group);
  }
  spec.set_input_form(form);
  spec.set_flush_mode(flush);
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

absl::StatusOr<std::unique_ptr<RemoteSsm>> RemoteSsm::Open(client::Session& session,
                                                           uint64_t model_id,
                                                           const AllSsmParameters& parameters,
                                                           const RemoteOptions& options) {
  std::unique_ptr<RemoteSsm> ssm(new RemoteSsm(session, model_id));
  if (options.form == v1::INPUT_FORM_POST_CONV) ssm->conv_.emplace(parameters);
  if (options.transport == Transport::kStream) {
    auto stream = client::DecodeStream::Open(session, model_id);
    if (!stream.ok()) return stream.status();
    ssm->stream_ = *std::move(stream);
  }
  return ssm;
}

template <typename Created>
std::vector<SsmLayers::Handle> RemoteSsm::Add(const Created& created) {
  std::vector<Handle> handles;
  for (uint64_t id : created.sequence_ids()) {
    handles.push_back(Handle{id});
    versions_[handles.back()] = created.version();
  }
  return handles;
}

absl::StatusOr<std::vector<SsmLayers::Handle>> RemoteSsm::Create(uint32_t count) {
  auto created = session_.CreateSequences(model_id_, count);
  if (!created.ok()) return created.status();
  std::vector<Handle> handles = Add(*created);
  if (conv_.has_value())
    for (Handle sequence : handles) conv_->Create(sequence);
  return handles;
}

absl::StatusOr<std::vector<SsmLayers::Handle>> RemoteSsm::Fork(Handle parent, uint32_t count) {
  if (absl::Status settled = Settle(); !settled.ok()) return settled;
  auto forked = session_.ForkSequences(
      model_id_, {static_cast<uint64_t>(parent), versions_.at(parent)}, count);
  if (!forked.ok()) return forked.status();
  std::vector<Handle> handles = Add(*forked);
  if (conv_.has_value())
    for (Handle sequence : handles) conv_->Fork(parent, sequence);
  return handles;
}

absl::Status RemoteSsm::Release(absl::Span<const Handle> sequences) {
  if (absl::Status settled = Settle(); !settled.ok()) return settled;
  std::vector<uint64_t> ids;
  for (Handle sequence : sequences) ids.push_back(static_cast<uint64_t>(sequence));
  auto released = session_.ReleaseSequences(model_id_, ids);
  if (!released.ok()) return released.status();
  for (Handle sequence : sequences) {
    versions_.erase(sequence);
    if (conv_.has_value()) conv_->Release(sequence);
  }
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
  auto begun = stream_ != nullptr ? stream_->Begin(step_rows, {.commit_first = unsent_})
                                  : session_.BeginStep(model_id_, step_rows);
  if (!begun.ok()) return begun.status();
  step_id_ = begun->step_id();
  if (unsent_.has_value())
    if (absl::Status committed = Committed(begun->committed()); !committed.ok())
      return EndAfter(std::move(committed));
  rows_.assign(rows.begin(), rows.end());
  if (conv_.has_value()) conv_->Begin(rows);
  flushing_rows_ += begun->flushing_rows();
  return absl::OkStatus();
}

void RemoteSsm::FillRaw(const SsmShape& shape, const SsmInputs& inputs,
                        v1::VerifyRequest& request) const {
  using client::ToTensor;
  *request.mutable_projection() =
      ToTensor(kFp32, {tokens_, ConvChannels(shape.family)}, inputs.projection);
  switch (shape.family) {
    case SsmFamily::kMamba2:
      *request.mutable_dt() = ToTensor(kFp32, {tokens_, shape.heads}, inputs.gate);
      return;
    case SsmFamily::kGdn:
      *request.mutable_a() = ToTensor(kFp32, {tokens_, shape.heads}, inputs.gate);
      break;
    case SsmFamily::kKda:
      *request.mutable_gate() = ToTensor(kFp32, {tokens_, shape.heads, shape.d_k}, inputs.gate);
      break;
  }
  *request.mutable_b() = ToTensor(kFp32, {tokens_, shape.heads}, inputs.b);
}

void RemoteSsm::FillPostConv(const SsmShape& shape, const RecurrenceInputs& inputs,
                             v1::VerifyRequest& request) const {
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
}

absl::Status RemoteSsm::Layer(size_t layer, const SsmInputs& inputs, absl::Span<float> output) {
  const SsmShape& shape = kSsmShapes[layer];
  v1::VerifyRequest request;
  request.set_model_id(model_id_);
  request.set_step_id(step_id_);
  request.set_layer_id(shape.layer_id);
  RecurrenceInputs recurrence;
  if (conv_.has_value()) {
    recurrence = conv_->Layer(layer, inputs);
    FillPostConv(shape, recurrence, request);
  } else {
    FillRaw(shape, inputs, request);
  }
  auto verified =
      stream_ != nullptr ? stream_->Verify(std::move(request)) : session_.Verify(request);
  if (!verified.ok()) return EndAfter(verified.status());
  absl::Status read = client::FromTensor(verified->output(), output);
  if (!read.ok()) return EndAfter(std::move(read));
  if (conv_.has_value()) conv_->AddSkip(layer, recurrence.v, output);
  return absl::OkStatus();
}

absl::Status RemoteSsm::Commit(absl::Span<const uint32_t> accepted) {
  client::StepCommit commit{step_id_, {accepted.begin(), accepted.end()}};
  if (stream_ == nullptr) {
    auto committed = session_.Commit(model_id_, step_id_, accepted);
    if (!committed.ok()) return EndAfter(committed.status());
    for (const Row& row : rows_) ++versions_[row.sequence];
    unsent_rows_ = rows_;
    if (absl::Status same = Committed(*committed); !same.ok()) return same;
  } else {
    // A version rises by one with every committed step, so the next begin can name it already.
    for (const Row& row : rows_) ++versions_[row.sequence];
    unsent_rows_ = rows_;
    unsent_ = std::move(commit);
  }
  if (conv_.has_value()) conv_->Commit(accepted);
  step_id_ = 0;
  return absl::OkStatus();
}

absl::Status RemoteSsm::Committed(const v1::CommitResponse& reply) {
  unsent_.reset();
  bool expected = static_cast<size_t>(reply.versions_size()) == unsent_rows_.size();
  for (size_t i = 0; expected && i < unsent_rows_.size(); ++i)
    expected = versions_[unsent_rows_[i].sequence] == reply.versions(static_cast<int>(i));
  if (!expected) return absl::InternalError("Commit: the reply has other rows or versions");
  return absl::OkStatus();
}

absl::Status RemoteSsm::Settle() {
  if (!unsent_.has_value()) return absl::OkStatus();
  auto committed = stream_->Commit(unsent_->step_id, unsent_->accepted);
  if (!committed.ok()) return committed.status();
  return Committed(*committed);
}

absl::Status RemoteSsm::Abort() {
  if (conv_.has_value()) conv_->Abort();
  if (step_id_ == 0) return absl::OkStatus();
  const uint64_t step_id = std::exchange(step_id_, 0);
  return stream_ != nullptr ? stream_->Abort(step_id).status()
                            : session_.AbortStep(model_id_, step_id).status();
}

absl::Status RemoteSsm::EndAfter(absl::Status failure) {
  Abort().IgnoreError();
  return failure;
}

absl::Status RemoteSsm::CreateSnapshot(Handle sequence, const v1::SnapshotKey& key) {
  if (absl::Status settled = Settle(); !settled.ok()) return settled;
  client::SnapshotOptions options{.overwrite = true};
  if (conv_.has_value()) options.worker_window = conv_->Save(sequence);
  return session_
      .CreateSnapshot(model_id_, {static_cast<uint64_t>(sequence), versions_.at(sequence)}, key,
                      options)
      .status();
}

absl::StatusOr<SsmLayers::Handle> RemoteSsm::CreateFromSnapshot(const v1::SnapshotKey& key) {
  auto created = session_.CreateFromSnapshot(model_id_, 1, key);
  if (!created.ok()) return created.status();
  const Handle sequence = Add(*created).at(0);
  if (conv_.has_value())
    if (absl::Status loaded = conv_->Load(sequence, created->worker_window()); !loaded.ok())
      return loaded;
  return sequence;
}

absl::Status RemoteSsm::DeleteSnapshot(const v1::SnapshotKey& key) {
  return session_.DeleteSnapshot(model_id_, key).status();
}

}  // namespace ssmd::demo
