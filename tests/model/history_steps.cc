// The steps of a history: begin, refused begins, verify, commit, abort and retry.
#include "tests/model/history_run.h"

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/testing/compare.h"

namespace ssmd::testing {

void History::Begin(const OpenedStep* retry) {
  StepRequest request;
  std::vector<std::pair<SequenceId, std::vector<int>>> rows;
  if (retry != nullptr) {
    for (const StoreModel::Row& row : retry->model.rows) {
      const auto found = model_->sequences.find(row.id);
      const uint64_t version = retry->request.rows[rows.size()].version;
      if (found == model_->sequences.end() || found->second.open ||
          found->second.version != version)
        return;
      rows.emplace_back(row.id, row.drafts);
    }
  } else {
    std::set<SequenceId> chosen;
    for (uint64_t i = 1 + Below(capacity_.rows_max); i > 0; --i) {
      if (const auto id = AnySequence(true)) chosen.insert(*id);
    }
    if (chosen.empty()) return;
    for (const SequenceId id : chosen) {
      std::vector<int> drafts(OneIn(10) ? 0 : 1 + Below(geometry_.draft_tokens_max));
      for (int& token : drafts) token = AnyToken();
      rows.emplace_back(id, std::move(drafts));
    }
  }
  OpenedStep step;
  for (const auto& [id, drafts] : rows) {
    request.rows.push_back({id, VersionOf(id), static_cast<uint32_t>(drafts.size())});
    step.before[id] = Fingerprint(id);
  }
  step.padding_tokens = retry != nullptr ? retry->padding_tokens : OneIn(4) ? 1 : 0;
  if (step.padding_tokens > 0 && request.rows.size() < capacity_.rows_max) {
    request.rows.push_back({.sequence = kPaddingRow, .draft_tokens = step.padding_tokens});
  } else {
    step.padding_tokens = 0;
  }
  step.request = request;
  const auto opened = store_->BeginStep(kOwner, request);
  if (absl::IsResourceExhausted(opened.status())) {
    for (const auto& [id, before] : step.before) {
      if (Fingerprint(id) != before) Fail("a refused BeginStep changed its sequence");
    }
    return Did("begin refused");
  }
  if (!Expect(opened.status(), absl::StatusCode::kOk, "begin")) return;
  step.opened = *opened;
  step.model = model_->Begin(rows);
  if (OneIn(3)) {
    const auto repeat = store_->BeginStep(kOwner, request);
    if (!repeat.ok() || repeat->id != opened->id)
      Fail("a repeated BeginStep did not return the open step");
  }
  if (retry != nullptr && retry->opened.folds == opened->folds) {
    for (const auto& [layer, bytes] : retry->outputs)
      step.outputs[layer] = bytes;  // what Verify must give again
    Did("retry");
  }
  Did(opened->folds > 0 ? "begin with fold" : "begin");
  steps_[opened->id] = std::move(step);
}

void History::RefusedBegin() {
  const auto id = AnySequence(false);
  if (!id) return;
  const uint64_t version = VersionOf(*id);
  const auto before = Fingerprint(*id);
  StepRequest request;
  switch (Below(4)) {
    case 0:
      request.rows = {{*id, version, 1}, {*id, version, 1}};
      Expect(store_->BeginStep(kOwner, request).status(), absl::StatusCode::kInvalidArgument,
             "duplicate row");
      break;
    case 1:
      request.rows = {{*id, version + 1, 1}};
      Expect(store_->BeginStep(kOwner, request).status(), absl::StatusCode::kAborted,
             "stale version");
      break;
    case 2:
      request.rows = {{*id, version, geometry_.draft_tokens_max + 1}};
      Expect(store_->BeginStep(kOwner, request).status(), absl::StatusCode::kInvalidArgument,
             "T above T_max");
      break;
    default:
      request.rows = {{*id, version, 1}};
      Expect(store_->BeginStep(OwnerId{8}, request).status(), absl::StatusCode::kPermissionDenied,
             "foreign owner");
  }
  if (Fingerprint(*id) != before) Fail("a refused BeginStep changed its sequence");
  Did("begin invalid");
}

void History::Verify() {
  if (steps_.empty()) return;
  OpenedStep& step = std::next(steps_.begin(), Below(steps_.size()))->second;
  const uint32_t layer = static_cast<uint32_t>(Below(geometry_.layers.size()));
  const LayerShape& shape = geometry_.layers[layer];
  PackedInputs packed;
  PackedRawInputs packed_raw;
  uint64_t tokens = 0;
  auto append = [&](int token) {
    const LayerInput& input = inputs_.of[token][layer];
    packed.Append(input.post_conv, geometry_.formats.activation);
    packed_raw.Append(input.raw, geometry_.formats.activation);
    ++tokens;
  };
  for (const StoreModel::Row& row : step.model.rows) {
    for (const int token : row.drafts) append(token);
  }
  for (uint32_t i = 0; i < step.padding_tokens; ++i) append(0);
  std::vector<std::byte> output(
      tokens * shape.head_count * shape.d_v * DtypeBytes(geometry_.formats.output),
      std::byte{0xff});
  const auto verified = store_->Verify(kOwner, {.step = step.opened.id,
                                                .layer = layer,
                                                .token_count = tokens,
                                                .inputs = packed.view(),
                                                .raw = packed_raw.view(),
                                                .output = output.data()});
  if (!Expect(verified.status(), absl::StatusCode::kOk, "verify")) return;
  if (const auto earlier = step.outputs.find(layer);
      earlier != step.outputs.end() && earlier->second != output) {
    Fail("a repeated Verify, or one after abort and retry, is not bit-identical");
  }
  step.outputs[layer] = output;
  Digest(output);
  CheckOutputs(step, layer, output);
  Did("verify");
}

void History::CheckOutputs(OpenedStep& step, uint32_t layer, const std::vector<std::byte>& output) {
  const LayerShape& shape = geometry_.layers[layer];
  const Dtype dtype = geometry_.formats.output;
  const std::byte* at = output.data();
  for (const StoreModel::Row& row : step.model.rows) {
    const StoreModel::Sequence& sequence = model_->sequences.at(row.id);
    for (size_t t = 0; t < row.drafts.size(); ++t) {
      std::vector<float> actual(size_t{shape.head_count} * shape.d_v);
      for (float& value : actual) value = LoadAs(dtype, std::exchange(at, at + DtypeBytes(dtype)));
      const Tolerance bound =
          MakeTolerance(layer, (*row.states[t])[layer], sequence.position() + t + 1,
                        row.drafts.size(), sequence.folds + 1);
      const auto near =
          Near(actual, row.outputs[t][layer], [&](double exact) { return bound.output(exact); });
      if (!near) Fail(absl::StrCat("output of draft ", t, ", layer ", layer, ": ", near.message()));
    }
  }
  for (; at != output.data() + output.size(); ++at) {
    if (*at != std::byte{0}) return Fail("a padding row's output is not zero");
  }
}

void History::End() {
  if (steps_.empty()) return;
  const auto at = std::next(steps_.begin(), Below(steps_.size()));
  const StepId id = at->first;
  OpenedStep& step = at->second;
  bool complete = true;
  uint64_t drafts = 0;
  for (const auto& row : step.model.rows) drafts += row.drafts.size();
  drafts += step.padding_tokens;
  for (uint32_t layer = 0; layer < geometry_.layers.size(); ++layer)
    complete &= step.outputs.count(layer) > 0;
  // Outputs carried over from an aborted attempt were not verified in this step.
  std::vector<uint32_t> accepted;
  for (const auto& row : step.model.rows) {
    const uint64_t all = row.drafts.size();
    accepted.push_back(static_cast<uint32_t>(OneIn(3) ? 0 : OneIn(2) ? all : Below(all + 1)));
  }
  if (step.padding_tokens > 0) accepted.push_back(0);
  if (OneIn(6)) {
    std::vector<uint32_t> beyond = accepted;
    beyond[Below(beyond.size())] = geometry_.draft_tokens_max + 1;
    if (store_->Commit(kOwner, id, beyond).ok()) Fail("a count beyond the drafts was accepted");
  }
  if (complete || drafts == 0) {
    auto committed = store_->Commit(kOwner, id, accepted);
    if (GetDetail(committed.status(), detail::kReason) == reason::kLayersMissing) return;
    if (!Expect(committed.status(), absl::StatusCode::kOk, "commit")) return;
    if (OneIn(2)) {
      const auto repeat = store_->Commit(kOwner, id, accepted);
      if (!repeat.ok() || repeat->versions != committed->versions)
        Fail("a repeated Commit differs");
      accepted[0] += 1;
      Expect(store_->Commit(kOwner, id, accepted).status(), absl::StatusCode::kFailedPrecondition,
             "other counts");
      accepted[0] -= 1;
    }
    std::vector<uint32_t> believed = accepted;
    if (fault_ == ModelFault::kForgetsLastAccepted && believed[0] > 0) --believed[0];
    model_->Commit(step.model, believed);
    for (const auto& row : step.model.rows) {
      if (const auto state = store_->Get(kOwner, row.id); state.ok()) model_->Observe(*state);
      CheckState(row.id);
    }
    Did("commit");
    steps_.erase(at);
  } else if (OneIn(2)) {
    if (!Expect(store_->Commit(kOwner, id, accepted).status(),
                absl::StatusCode::kFailedPrecondition, "commit with layers missing") ||
        !Expect(store_->Abort(kOwner, id), absl::StatusCode::kOk, "abort") ||
        !Expect(store_->Abort(kOwner, id), absl::StatusCode::kOk, "repeated abort") ||
        !Expect(store_->Commit(kOwner, id, accepted).status(), absl::StatusCode::kAborted,
                "commit after abort")) {
      return;
    }
    model_->Abort(step.model);
    for (const auto& [sequence, before] : step.before) {
      if (Fingerprint(sequence) != before) Fail("abort changed committed state");
    }
    aborted_.push_back(step);
    if (aborted_.size() > 4) aborted_.erase(aborted_.begin());
    Did("abort");
    steps_.erase(at);
  }
}

}  // namespace ssmd::testing
