#include "tests/model/history.h"

#include <xxhash.h>

#include <functional>
#include <optional>
#include <random>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/thread_pool.h"
#include "tests/model/store_model.h"
#include "tests/testing/compare.h"
#include "tests/testing/layer_inputs.h"
#include "tests/testing/raw_inputs.h"
#include "tests/testing/test_device.h"
#include "tests/testing/tolerance.h"

namespace ssmd::testing {
namespace {

constexpr int kVocabulary = 24;
constexpr OwnerId kOwner{7};

// Background work that runs when the history's timing seed says so, in any order.
class ManualQueue : public cpu::TaskQueue {
 public:
  void Post(std::function<void()> task) override { tasks_.push_back(std::move(task)); }
  void RunSome(std::mt19937_64& random) {
    for (uint64_t i = random() % (tasks_.size() + 1); i > 0; --i) {
      std::swap(tasks_[random() % tasks_.size()], tasks_.back());
      const std::function<void()> task = std::move(tasks_.back());
      tasks_.pop_back();
      task();
    }
  }

 private:
  std::vector<std::function<void()>> tasks_;
};

class History {
 public:
  History(uint64_t seed, const HistoryOptions& options)
      : random_(seed),
        timing_(options.timing_seed),
        fault_(options.fault),
        background_(options.background),
        pool_(1 + seed % 2) {}

  HistoryResult Run() {
    Setup();
    const int operations = 40 + Below(160);
    for (int i = 0; i < operations && result_.error.empty(); ++i) {
      if (background_) queue_.RunSome(timing_);
      Operate();
      CheckAll();
    }
    Drain();
    return std::move(result_);
  }

 private:
  struct OpenedStep {
    OpenStep opened;
    StoreModel::Step model;
    StepRequest request;
    uint32_t padding_tokens = 0;                          // in a padding row behind the others
    std::map<uint32_t, std::vector<std::byte>> outputs;   // by layer
    std::map<SequenceId, std::vector<std::byte>> before;  // fingerprints
  };

  uint64_t Below(uint64_t bound) { return bound == 0 ? 0 : random_() % bound; }
  bool OneIn(uint64_t n) { return Below(n) == 0; }
  void Fail(std::string why) {
    if (result_.error.empty()) result_.error = std::move(why);
  }
  void Did(const std::string& what) { ++result_.did[what]; }
  void Digest(const std::vector<std::byte>& bytes) {
    result_.digest = XXH3_64bits_withSeed(bytes.data(), bytes.size(), result_.digest);
  }

  void Setup();
  void Operate();
  void CheckAll();
  void Drain();

  void Create();
  void Begin(const OpenedStep* retry);
  void RefusedBegin();
  void Verify();
  void End();
  void Fork();
  void Rollback();
  void Import();
  void Flush();
  void Snapshot();
  void Restore();
  void Release();

  void CheckOutputs(OpenedStep& step, uint32_t layer, const std::vector<std::byte>& output);
  void CheckState(SequenceId id);
  Tolerance MakeTolerance(uint32_t layer, const LayerOracle& oracle, uint64_t records,
                          uint64_t drafts, uint64_t folds) const;
  std::vector<std::byte> Fingerprint(SequenceId id);
  std::optional<SequenceId> AnySequence(bool idle);
  int AnyToken() { return static_cast<int>(Below(kVocabulary)); }
  uint64_t VersionOf(SequenceId id) { return model_->sequences.at(id).version; }
  bool Expect(const absl::Status& status, absl::StatusCode code, const char* what) {
    if (status.code() == code) return true;
    Fail(absl::StrCat(what, ": expected ", absl::StatusCodeToString(code), ", got ",
                      status.ToString()));
    return false;
  }

  std::mt19937_64 random_;
  std::mt19937_64 timing_;  // when background work runs: must change nothing
  const ModelFault fault_;
  const bool background_;
  ManualQueue queue_;
  cpu::ThreadPool pool_;
  HistoryResult result_;
  Geometry geometry_;
  Capacity capacity_;
  TokenInputs inputs_;
  std::vector<Magnitudes> magnitudes_;  // [layer]
  std::unique_ptr<Device> device_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<StoreModel> model_;
  std::map<StepId, OpenedStep> steps_;
  std::vector<OpenedStep> aborted_;
  std::vector<SnapshotKey> keys_;
  int next_key_ = 0;
};

void History::Setup() {
  auto pick = [&](auto... values) {
    const std::array options = {values...};
    return options[Below(options.size())];
  };
  LayerStates empty;
  const bool raw = OneIn(3);
  const size_t layer_count = 1 + Below(3);
  bool has_delta_rule = false;
  for (size_t i = 0; i < layer_count; ++i) {
    LayerShape shape{.family = pick(Family::kMamba2, Family::kGdn, Family::kKda)};
    shape.key_group_count = pick(1u, 2u);
    shape.head_count = shape.key_group_count * pick(1u, 2u);
    shape.d_k = pick(16u, 32u);
    shape.d_v = pick(8u, 24u);
    has_delta_rule |= shape.is_delta_rule();
    if (raw) shape.conv_width = pick(2u, 3u, 4u);
    geometry_.layers.push_back(shape);
  }
  geometry_.formats.activation = pick(Dtype::kFp32, Dtype::kBf16, Dtype::kFp16);
  geometry_.formats.correction = has_delta_rule ? pick(Dtype::kFp16, Dtype::kFp32) : Dtype::kNone;
  geometry_.window_records = pick(4u, 5u, 6u, 16u, 20u);
  geometry_.draft_tokens_max =
      1 + static_cast<uint32_t>(Below(std::min(geometry_.window_records, 16u)));
  const uint32_t slack = geometry_.window_records - geometry_.draft_tokens_max;
  geometry_.rollback_tokens_min = OneIn(2) ? 0 : static_cast<uint32_t>(Below(slack + 1));
  if (background_) geometry_.flush_mode = FlushMode::kBackground;
  capacity_ = {.sequences_max = 3 + static_cast<uint32_t>(Below(5)),
               .snapshots_max = static_cast<uint32_t>(Below(4)),
               .spare_pages = 1 + static_cast<uint32_t>(Below(3)),
               .rows_max = 4,
               .steps_max = 2};

  if (OneIn(3)) geometry_.formats.checkpoint_lp = Dtype::kFp16;
  if (OneIn(4)) geometry_.formats.checkpoint_hp = Dtype::kFp16;
  geometry_.rounding_seed = random_();
  for (const LayerShape& shape : geometry_.layers) {
    if (!raw) {
      empty.push_back(
          {reference::Recurrence(FamilyName(shape.family),
                                 {shape.head_count, shape.key_group_count, shape.d_k, shape.d_v})});
      continue;
    }
    RawParameters parameters = RandomRawParameters(
        shape, {.conv_bias = OneIn(2), .dt_bias = OneIn(2), .d = OneIn(2), .lower_bound = OneIn(2)},
        random_);
    if (!parameters.qk_l2_norm) {  // keys near norm 1 all the same
      for (float& weight : parameters.conv_weight) weight *= 0.3f;
    }
    geometry_.raw.push_back(parameters);
    empty.push_back({RawOracle(shape, parameters, geometry_.formats.activation)});
  }

  inputs_.of.resize(kVocabulary);
  magnitudes_.resize(layer_count, {.alpha = 0});
  for (int token = 0; token < kVocabulary; ++token) {
    for (size_t layer = 0; layer < layer_count; ++layer) {
      const LayerShape& shape = geometry_.layers[layer];
      LayerInput& made_input = inputs_.of[token].emplace_back();
      if (raw) {
        made_input.raw = RandomRawToken(shape, geometry_.formats.activation, 1.0f, random_);
        continue;
      }
      made_input.post_conv = RandomToken(shape, geometry_.formats.activation, random_);
      Cover(magnitudes_[layer], made_input.post_conv, shape.d_k);
    }
  }

  device_ = MakeTestDevice(uint64_t{1} << 30, &pool_, &queue_);
  auto store = Store::Create({.geometry = geometry_, .capacity = capacity_, .poison_garbage = true},
                             [&](const BackendSpec& spec) { return device_->CreateBackend(spec); });
  if (!store.ok()) return Fail(store.status().ToString());
  store_ = *std::move(store);
  model_ = std::make_unique<StoreModel>(inputs_, std::move(empty), geometry_.rollback_tokens_min);
}

void History::Operate() {
  const uint64_t dice = Below(100);
  if (model_->sequences.empty() || dice < 4) return Create();
  if (dice < 24) return Begin(nullptr);
  if (dice < 27) return RefusedBegin();
  if (dice < 64) return Verify();
  if (dice < 82) return End();
  if (dice < 85 && !aborted_.empty()) {
    const OpenedStep retry = aborted_[Below(aborted_.size())];
    return Begin(&retry);
  }
  if (dice < 87) return Rollback();
  if (dice < 88) return OneIn(2) ? Import() : Flush();
  if (dice < 91) return Fork();
  if (dice < 94) return Snapshot();
  if (dice < 97) return Restore();
  return Release();
}

std::optional<SequenceId> History::AnySequence(bool idle) {
  std::vector<SequenceId> candidates;
  for (const auto& [id, sequence] : model_->sequences) {
    if (!idle || !sequence.open) candidates.push_back(id);
  }
  if (candidates.empty()) return std::nullopt;
  return candidates[Below(candidates.size())];
}

// Everything about a sequence that a client could ever see, bit for bit.
std::vector<std::byte> History::Fingerprint(SequenceId id) {
  std::vector<std::byte> bytes;
  auto append = [&](const void* from, size_t size) {
    const auto* begin = static_cast<const std::byte*>(from);
    bytes.insert(bytes.end(), begin, begin + size);
  };
  const auto state = store_->Get(kOwner, id);
  if (!state.ok()) {
    Fail(state.status().ToString());
    return bytes;
  }
  append(&state->version, sizeof(state->version));
  append(&state->position, sizeof(state->position));
  append(&state->floor, sizeof(state->floor));
  for (uint32_t layer = 0; layer < geometry_.layers.size(); ++layer) {
    std::vector<float> values(geometry_.layers[layer].state_elements());
    for (const uint64_t position : {state->floor, state->position}) {
      if (!Expect(store_->ReadState(kOwner, id, layer, position, absl::MakeSpan(values)),
                  absl::StatusCode::kOk, "ReadState")) {
        return bytes;
      }
      append(values.data(), values.size() * sizeof(float));
    }
  }
  Digest(bytes);
  return bytes;
}

// `oracle` is the layer at the end of what is compared.
Tolerance History::MakeTolerance(uint32_t layer, const LayerOracle& oracle, uint64_t records,
                                 uint64_t drafts, uint64_t folds) const {
  const bool two_precision = geometry_.formats.two_precision();
  const auto* raw = std::get_if<RawOracle>(&oracle.any);
  Magnitudes m = raw != nullptr ? raw->magnitudes : magnitudes_[layer];
  if (raw == nullptr) {
    const double n = m.alpha < 1 ? std::min(static_cast<double>(records), 1 / (1 - m.alpha))
                                 : static_cast<double>(records);
    m.u_mass = n * model_->u_max[layer];
  }
  return Tolerance({.is_delta_rule = geometry_.layers[layer].is_delta_rule(),
                    .d_k = geometry_.layers[layer].d_k,
                    .records = records,
                    .draft_tokens = drafts + (two_precision ? geometry_.ring_records() : 0),
                    .folds = folds,
                    .ring_records = geometry_.ring_records(),
                    .raw = raw != nullptr,
                    .correction = geometry_.formats.correction,
                    .output = geometry_.formats.output,
                    .checkpoint_hp = geometry_.formats.checkpoint_hp,
                    .checkpoint_lp = geometry_.formats.checkpoint_lp,
                    .magnitudes = m});
}

void History::Create() {
  const uint32_t count = 1 + static_cast<uint32_t>(Below(2));
  const bool fits = model_->sequences.size() + count <= capacity_.sequences_max;
  const auto created = store_->CreateSequences(kOwner, count);
  if (!Expect(created.status(), fits ? absl::StatusCode::kOk : absl::StatusCode::kResourceExhausted,
              "create"))
    return;
  if (!fits) return Did("create refused");
  for (const SequenceId id : created->ids) model_->Create(id);
  Did("create");
}

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

// The checkpoint and the state at the tail against the oracle.
void History::CheckState(SequenceId id) {
  const auto state = store_->Get(kOwner, id);
  if (!state.ok()) return Fail(state.status().ToString());
  const StoreModel::Sequence& sequence = model_->sequences.at(id);
  for (uint32_t layer = 0; layer < geometry_.layers.size(); ++layer) {
    std::vector<float> values(geometry_.layers[layer].state_elements());
    for (const uint64_t position : {state->floor, state->position}) {
      if (!Expect(store_->ReadState(kOwner, id, layer, position, absl::MakeSpan(values)),
                  absl::StatusCode::kOk, "ReadState")) {
        return;
      }
      if (position >= sequence.states.size())
        return Fail("the model has not reached this position");
      LayerStates oracle = *sequence.states[position];
      const Tolerance bound = MakeTolerance(layer, oracle[layer], std::max<uint64_t>(position, 1),
                                            0, sequence.folds + 1);
      const auto near = Near(values, oracle[layer].recurrence().state(), bound.state());
      if (!near) Fail(absl::StrCat("state at ", position, ", layer ", layer, ": ", near.message()));
    }
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

void History::Fork() {
  const auto parent = AnySequence(false);
  if (!parent) return;
  const auto state = store_->Get(kOwner, *parent);
  if (!state.ok()) return Fail(state.status().ToString());
  const uint64_t position = state->floor + Below(state->position - state->floor + 1);
  const auto forked = store_->Fork(kOwner, {*parent, state->version}, 1, position);
  if (model_->sequences.size() == capacity_.sequences_max) {
    Expect(forked.status(), absl::StatusCode::kResourceExhausted, "fork beyond capacity");
    return Did("fork refused");
  }
  if (!Expect(forked.status(), absl::StatusCode::kOk, "fork")) return;
  model_->Fork(*parent, forked->ids[0], position);
  StoreModel::Sequence& child = model_->sequences.at(forked->ids[0]);
  if (fault_ == ModelFault::kForkSeesDrafts && state->open_step != kNoStep &&
      steps_.count(state->open_step) > 0) {
    for (const auto& row : steps_.at(state->open_step).model.rows) {
      if (row.id != *parent || row.drafts.empty()) continue;
      child.tokens.push_back(row.drafts[0]);
      child.states.push_back(row.states[0]);
    }
  }
  CheckState(forked->ids[0]);
  Did(state->open_step == kNoStep ? "fork" : "fork in step");
}

void History::Rollback() {
  const auto id = AnySequence(true);
  if (!id) return;
  const auto state = store_->Get(kOwner, *id);
  if (!state.ok()) return Fail(state.status().ToString());
  const SequenceVersion at{*id, state->version};
  if (OneIn(4)) {
    const uint64_t outside = state->floor > 0 ? state->floor - 1 : state->position + 1;
    Expect(store_->Rollback(kOwner, at, outside).status(), absl::StatusCode::kOutOfRange,
           "rollback outside");
    return Did("rollback refused");
  }
  const uint64_t position = state->floor + Below(state->position - state->floor + 1);
  if (!Expect(store_->Rollback(kOwner, at, position).status(), absl::StatusCode::kOk, "rollback") ||
      !Expect(store_->Rollback(kOwner, at, position).status(), absl::StatusCode::kOk,
              "repeated rollback")) {
    return;
  }
  if (fault_ != ModelFault::kSkipsRollback) model_->Rollback(*id, position);
  CheckState(*id);
  Did("rollback");
}

// A sequence takes over the exact state of another; a third of the imports stop half way.
void History::Import() {
  const auto target = AnySequence(true), source = AnySequence(false);
  if (!target || !source) return;
  const auto before = Fingerprint(*target);
  auto import = store_->BeginImport(kOwner, {*target, VersionOf(*target)});
  if (absl::IsResourceExhausted(import.status())) return Did("import refused");
  if (!Expect(import.status(), absl::StatusCode::kOk, "import")) return;
  StepRequest request;
  request.rows = {{*target, VersionOf(*target), 1}};
  Expect(store_->BeginStep(kOwner, request).status(), absl::StatusCode::kFailedPrecondition,
         "step during an import");
  const StoreModel::Sequence& from = model_->sequences.at(*source);
  LayerStates oracle = *from.states.back();
  const size_t stop = OneIn(3) ? Below(oracle.size()) : oracle.size();
  std::vector<std::vector<std::byte>> windows;
  for (uint32_t layer = 0; layer < stop; ++layer) {
    const std::vector<double>& state = oracle[layer].recurrence().state();
    const std::vector<float> values(state.begin(), state.end());
    Expect((*import)->WriteLayer(layer, from.position(), values), absl::StatusCode::kOk,
           "import layer");
  }
  for (uint32_t layer = 0; layer < geometry_.raw.size(); ++layer) {
    const auto& window = std::get<RawOracle>(oracle[layer].any).form.window;
    const uint32_t rows = geometry_.layers[layer].conv_width - 1;
    std::vector<std::byte>& bytes = windows.emplace_back();
    for (uint32_t row = 0; row < rows; ++row) {
      const bool exists = row + window.size() >= rows;
      for (uint32_t channel = 0; channel < geometry_.layers[layer].conv_channels(); ++channel) {
        const double value = exists ? window[row + window.size() - rows][channel] : 0;
        AppendAs(geometry_.formats.activation, static_cast<float>(value), bytes);
      }
    }
  }
  if (stop < oracle.size()) {
    Expect((*import)->Finish(from.position(), windows).status(),
           absl::StatusCode::kFailedPrecondition, "import with layers missing");
    import->reset();
    if (Fingerprint(*target) != before) Fail("an unfinished import changed its sequence");
    return Did("import dropped");
  }
  if (!Expect((*import)->Finish(from.position(), windows).status(), absl::StatusCode::kOk,
              "import finish"))
    return;
  const uint64_t folds = model_->sequences.at(*source).folds + 1;
  model_->Import(*source, *target);
  model_->sequences.at(*target).floor = model_->sequences.at(*target).position();
  model_->sequences.at(*target).folds = folds;
  CheckState(*target);
  Did("import");
}

void History::Flush() {
  const auto id = AnySequence(true);
  if (!id) return;
  const auto before = store_->Get(kOwner, *id);
  const std::vector<SequenceId> ids = {*id};
  const auto flushed = store_->Flush(kOwner, ids);
  if (absl::IsResourceExhausted(flushed.status())) return Did("flush refused");
  if (!Expect(flushed.status(), absl::StatusCode::kOk, "flush")) return;
  const auto after = store_->Get(kOwner, *id);
  if (!before.ok() || !after.ok()) return Fail("a sequence vanished in a flush");
  const uint64_t kept = geometry_.rollback_tokens_min;
  const bool had_records = before->position - before->floor > kept;
  if (*flushed != had_records) Fail("flushed count");
  if (after->floor != (had_records ? before->position - kept : before->floor))
    Fail("floor after a flush");
  // A flush that a caller asks for moves the checkpoint without a new version: a step aborted
  // before it may round differently when it is retried after it.
  std::erase_if(aborted_, [&](const OpenedStep& step) { return step.before.count(*id) > 0; });
  model_->Observe(*after);
  CheckState(*id);
  Did(had_records ? "flush" : "flush of nothing");
}

void History::Snapshot() {
  const auto id = AnySequence(false);
  if (!id) return;
  const auto state = store_->Get(kOwner, *id);
  if (!state.ok()) return Fail(state.status().ToString());
  const SnapshotKey key{absl::StrCat("key", next_key_++),
                        state->floor + Below(state->position - state->floor + 1)};
  const auto created = store_->CreateSnapshot(kOwner, {*id, state->version}, key);
  if (keys_.size() == capacity_.snapshots_max) {
    Expect(created.status(), absl::StatusCode::kResourceExhausted, "snapshot beyond capacity");
    if (keys_.empty()) return;
    const size_t victim = Below(keys_.size());
    Expect(store_->DeleteSnapshot(keys_[victim]), absl::StatusCode::kOk, "delete snapshot");
    Expect(store_->DeleteSnapshot(keys_[victim]), absl::StatusCode::kNotFound, "repeated delete");
    keys_.erase(keys_.begin() + static_cast<ptrdiff_t>(victim));
    return Did("delete snapshot");
  }
  if (!Expect(created.status(), absl::StatusCode::kOk, "snapshot")) return;
  model_->Snapshot(*id, key);
  keys_.push_back(key);
  Did("snapshot");
}

void History::Restore() {
  if (keys_.empty() || model_->sequences.size() == capacity_.sequences_max) return;
  const SnapshotKey& key = keys_[Below(keys_.size())];
  const auto restored = store_->CreateFromSnapshot(kOwner, key, 1);
  if (!Expect(restored.status(), absl::StatusCode::kOk, "restore")) return;
  if (restored->position != key.position) Fail("restored at another position");
  model_->Restore(key, restored->ids[0]);
  CheckState(restored->ids[0]);
  Did("restore");
}

void History::Release() {
  const auto id = AnySequence(false);
  if (!id || model_->sequences.size() < 2) return;
  const std::vector<SequenceId> ids = {*id};
  if (model_->sequences.at(*id).open) {
    Expect(store_->Release(kOwner, ids), absl::StatusCode::kFailedPrecondition,
           "release with an open step");
    return Did("release refused");
  }
  Expect(store_->Release(kOwner, ids), absl::StatusCode::kOk, "release");
  Expect(store_->Release(kOwner, ids), absl::StatusCode::kNotFound, "repeated release");
  model_->sequences.erase(*id);
  Did("release");
}

void History::CheckAll() {
  const StoreUsage usage = store_ == nullptr ? StoreUsage() : store_->usage();
  if (usage.sequences != model_->sequences.size()) Fail("sequence count");
  if (usage.snapshots != keys_.size()) Fail("snapshot count");
  if (usage.open_steps != steps_.size()) Fail("open step count");
  for (const SequenceState& state : store_->GetAll(kOwner)) {
    if (model_->sequences.count(state.id) == 0) return Fail("a sequence that should not exist");
    const std::string what = model_->Disagrees(state);
    if (!what.empty()) Fail(absl::StrCat("the store and the model disagree on ", what));
  }
}

// Whatever happened, everything comes back.
void History::Drain() {
  if (store_ == nullptr) return;
  for (const SnapshotKey& key : keys_)
    Expect(store_->DeleteSnapshot(key), absl::StatusCode::kOk, "final delete");
  store_->ReleaseOwner(kOwner);
  if (store_->counters().flushes_background > 0) Did("background flush used");
  const StoreUsage usage = store_->usage();
  if (usage.sequences + usage.snapshots + usage.open_steps > 0)
    Fail("something is left after release");
  if (usage.pages.free != usage.pages.total) Fail("pages leaked");
}

}  // namespace

HistoryResult RunHistory(uint64_t seed, const HistoryOptions& options) {
  return History(seed, options).Run();
}

}  // namespace ssmd::testing
