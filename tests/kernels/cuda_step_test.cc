// The stream-ordered face of the CUDA backend. Needs a GPU.
#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/check.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/model.h"
#include "tests/testing/host_control.h"
#include "tests/testing/layer_inputs.h"
#include "tests/testing/raw_inputs.h"

namespace ssmd::cuda {
namespace {

using testing::PackedInputs;
using testing::PackedRawInputs;

void Must(cudaError_t error) {
  SSMD_CHECK(error == cudaSuccess, "cuda: %s", cudaGetErrorString(error));
}

template <typename T>
std::vector<T> Download(const T* from, size_t count) {
  std::vector<T> to(count);
  Must(cudaMemcpy(to.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
  return to;
}

enum class Form { kPostConv, kRaw };

BackendSpec MakeSpec(Form form, FlushMode mode, uint64_t seed) {
  std::mt19937_64 random(seed);
  BackendSpec spec{.layers = {{Family::kMamba2, 4, 2, 64, 40},
                              {Family::kGdn, 6, 3, 128, 128},
                              {Family::kKda, 2, 2, 144, 72},
                              {Family::kMamba2, 3, 1, 128, 80}},
                   .formats = {.activation = Dtype::kBf16, .correction = Dtype::kFp16},
                   .rule = {8, 4, 2, 16},
                   .rounding_seed = seed,
                   .slot_count = 24,
                   .page_count = 80,
                   .step_count = 2,
                   .rows_max = 16,
                   .folds_max = 6,
                   .flush_mode = mode,
                   .poison_garbage = true};
  if (form == Form::kPostConv) return spec;
  for (LayerShape& shape : spec.layers) {
    shape.conv_width = 4;
    spec.raw.push_back(testing::RandomRawParameters(shape, {}, random));
    for (float& weight : spec.raw.back().conv_weight) weight *= 0.3f;
  }
  return spec;
}

struct Row {
  uint32_t slot;  // kNone: padding
  uint32_t drafts;
  uint64_t seed;  // of its inputs
  uint32_t accepted;
};

// A model, and the device memory that one step reads and writes.
class Lane {
 public:
  Lane(const BackendSpec& spec, Device* device) {
    auto made = Model::Create(spec, device);
    SSMD_CHECK(made.ok(), "%s", made.status().ToString().c_str());
    model = *std::move(made);
    auto stream = Stream::Make(Priority::kHigh);
    SSMD_CHECK(stream.ok(), "%s", stream.status().ToString().c_str());
    stream_ = *std::move(stream);
    const uint64_t tokens = model->tokens_max();
    plan_ = Allocate<DevicePlanRow>(spec.rows_max);
    row_count_ = Allocate<uint32_t>(1);
    accepted_ = Allocate<uint32_t>(spec.rows_max);
    poison_ = Allocate<uint32_t>(spec.rows_max);
    result_ = Allocate<ControlResult>(1);
    for (const LayerShape& shape : spec.layers) {
      inputs_.push_back(Allocate<std::byte>(kTensors * TensorBytes(shape, tokens)));
      outputs_.push_back(Allocate<std::byte>(OutputBytes(shape, tokens)));
    }
    for (uint32_t slot = 0; slot < spec.slot_count; ++slot) {
      Must(EnqueueSlotOp(
          model->control(),
          {.op = SlotOp::kClear, .slot = slot, .window = 6 + slot % 3, .rounding_key = 100 + slot},
          result_, stream_.get()));
    }
    Must(cudaDeviceSynchronize());
    versions.assign(spec.slot_count, 1);
  }
  ~Lane() {
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
    for (void* address : allocated_) cudaFree(address);
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Puts a step's rows and inputs where the device reads them, and garbage into the outputs.
  void Load(const std::vector<Row>& rows) {
    const BackendSpec& spec = model->spec();
    std::vector<DevicePlanRow> plan;
    std::vector<uint32_t> accepted;
    for (const Row& row : rows) {
      plan.push_back({row.slot == kNone ? 0 : versions[row.slot], row.slot, row.drafts});
      accepted.push_back(row.accepted);
    }
    Upload(plan_, plan);
    Upload(accepted_, accepted);
    Upload(row_count_, std::vector<uint32_t>{static_cast<uint32_t>(rows.size())});
    Must(cudaMemset(poison_, 0, spec.rows_max * sizeof(uint32_t)));
    for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
      const LayerShape& shape = spec.layers[layer];
      PackedInputs packed;
      PackedRawInputs raw;
      for (const Row& row : rows) {
        std::mt19937_64 random(row.seed * 31 + layer);
        for (uint32_t s = 0; s < row.drafts; ++s) {
          if (spec.raw.empty()) {
            packed.Append(testing::RandomToken(shape, spec.formats.activation, random),
                          spec.formats.activation);
          } else {
            raw.Append(testing::RandomRawToken(shape, spec.formats.activation, 1, random),
                       spec.formats.activation);
          }
        }
      }
      auto put = [&](uint32_t tensor, const auto& values) {
        Must(cudaMemcpy(Tensor(layer, tensor), values.data(), values.size() * sizeof(values[0]),
                        cudaMemcpyHostToDevice));
      };
      put(0, packed.q), put(1, packed.k), put(2, packed.v), put(3, packed.log_alpha);
      put(4, packed.beta), put(5, packed.value_scale);
      if (spec.raw.empty()) continue;
      put(0, raw.projection), put(1, raw.dt), put(2, raw.a), put(3, raw.b), put(4, raw.gate);
    }
    for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
      Must(cudaMemset(outputs_[layer], 0xab, OutputBytes(spec.layers[layer], model->tokens_max())));
    }
    Must(cudaDeviceSynchronize());
  }

  void EnqueueVerifies() {
    for (uint32_t layer = 0; layer < model->layers().size(); ++layer) {
      auto floats = [&](uint32_t tensor) {
        return reinterpret_cast<const float*>(Tensor(layer, tensor));
      };
      const bool delta_rule = model->layers()[layer].shape.is_delta_rule();
      Must(model->EnqueueVerify(
          {.step = 0,
           .layer = layer,
           .inputs = {Tensor(layer, 0), Tensor(layer, 1), Tensor(layer, 2), floats(3),
                      delta_rule ? floats(4) : nullptr, delta_rule ? nullptr : floats(5)},
           .raw = {Tensor(layer, 0), Tensor(layer, 1), Tensor(layer, 2), Tensor(layer, 3),
                   Tensor(layer, 4)},
           .output = outputs_[layer],
           .poison = poison_},
          stream_.get()));
    }
  }
  void EnqueuePlan() { Must(model->EnqueuePlan(0, plan_, row_count_, stream_.get())); }
  void EnqueueAbort() { Must(cuda::EnqueueAbort(model->control(), 0, stream_.get())); }
  void EnqueueStep() {
    EnqueuePlan();
    EnqueueVerifies();
    Must(model->EnqueueCommit(0, accepted_, stream_.get()));
    Must(model->EnqueueFlushJoin(stream_.get()));
  }
  void Finish() { Must(cudaStreamSynchronize(stream_.get())); }

  void RunStep() {
    EnqueueStep();
    Finish();
  }
  // The same as a graph, captured at the first call.
  void ReplayStep() {
    if (graph_ == nullptr) {
      cudaGraph_t graph = nullptr;
      Must(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeGlobal));
      EnqueueStep();
      Must(cudaStreamEndCapture(stream_.get(), &graph));
      Must(cudaGraphInstantiate(&graph_, graph, 0));
      Must(cudaGraphDestroy(graph));
    }
    Must(cudaGraphLaunch(graph_, stream_.get()));
    Finish();
  }

  // Bytes of one row's outputs in all layers.
  std::vector<std::byte> Outputs(uint64_t first_token, uint32_t drafts) const {
    std::vector<std::byte> bytes;
    for (size_t layer = 0; layer < outputs_.size(); ++layer) {
      const uint64_t each = OutputBytes(model->spec().layers[layer], 1);
      const auto part = Download(outputs_[layer] + first_token * each, drafts * each);
      bytes.insert(bytes.end(), part.begin(), part.end());
    }
    return bytes;
  }
  std::vector<std::byte> Page(uint32_t page) const {
    std::vector<std::byte> bytes;
    for (const Model::Layer& layer : model->layers()) {
      const auto part = Download(layer.PageAt(page), layer.page.hp_bytes);
      bytes.insert(bytes.end(), part.begin(), part.end());
    }
    return bytes;
  }
  DevicePlanReport Report() const { return Download(model->control().reports, 1)[0]; }
  ControlResult CommitResult() const { return Download(model->control().commit_results, 1)[0]; }
  std::vector<uint32_t> Poison() const { return Download(poison_, model->spec().rows_max); }
  std::vector<DeviceSlot> Slots() const {
    return Download(model->control().slots, model->spec().slot_count);
  }
  std::vector<DeviceRow> Rows(size_t count) const {
    return Download(model->control().step_rows(0), count);
  }

  const uint32_t* accepted() const { return accepted_; }

  std::unique_ptr<Model> model;
  std::vector<uint64_t> versions;

 private:
  static constexpr uint32_t kTensors = 6;
  static uint64_t TensorBytes(const LayerShape& s, uint64_t tokens) {
    return tokens * 4 * std::max<uint64_t>(s.conv_channels(), uint64_t{s.head_count} * s.d_k);
  }
  uint64_t OutputBytes(const LayerShape& s, uint64_t tokens) const {
    return tokens * s.head_count * s.d_v * DtypeBytes(model->spec().formats.output);
  }
  std::byte* Tensor(size_t layer, uint32_t tensor) const {
    return inputs_[layer] + tensor * TensorBytes(model->spec().layers[layer], model->tokens_max());
  }
  template <typename T>
  T* Allocate(uint64_t count) {
    void* address = nullptr;
    Must(cudaMalloc(&address, count * sizeof(T)));
    Must(cudaMemset(address, 0, count * sizeof(T)));
    allocated_.push_back(address);
    return static_cast<T*>(address);
  }
  template <typename T>
  static void Upload(T* to, const std::vector<T>& from) {
    Must(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }

  Stream stream_;
  std::vector<void*> allocated_;
  DevicePlanRow* plan_ = nullptr;
  uint32_t *row_count_ = nullptr, *accepted_ = nullptr, *poison_ = nullptr;
  ControlResult* result_ = nullptr;
  std::vector<std::byte*> inputs_, outputs_;
  cudaGraphExec_t graph_ = nullptr;
};

class CudaStep : public ::testing::Test {
 protected:
  void SetUp() override {
    auto device = CudaDevice::Create(uint64_t{1} << 40);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
  }
  std::vector<Row> AnyRows(const BackendSpec& spec) {
    std::vector<uint32_t> slots(spec.slot_count);
    for (uint32_t i = 0; i < spec.slot_count; ++i) slots[i] = i;
    std::shuffle(slots.begin(), slots.end(), random_);
    std::vector<Row> rows;
    for (uint64_t i = random_() % (spec.rows_max + 1); i > 0; --i) {
      Row row{random_() % 8 == 0 ? kNone : slots[i],
              static_cast<uint32_t>(random_() % (spec.rule.draft_tokens_max + 1)), random_(), 0};
      row.accepted = static_cast<uint32_t>(random_() % (row.drafts + 1));
      rows.push_back(row);
    }
    return rows;
  }
  static void Advance(Lane& lane, const std::vector<Row>& rows) {
    for (const Row& row : rows) {
      if (row.slot != kNone) ++lane.versions[row.slot];
    }
  }

  std::unique_ptr<CudaDevice> device_;
  std::mt19937_64 random_{5};
};

// One captured graph replays with any rows, T, acceptance, folds and background flushes, and gives
// the bytes of the uncaptured run.
TEST_F(CudaStep, OneGraphServesEveryStep) {
  for (const Form form : {Form::kPostConv, Form::kRaw}) {
    for (const FlushMode mode : {FlushMode::kFused, FlushMode::kBackground}) {
      const BackendSpec spec = MakeSpec(form, mode, 3);
      Lane plain(spec, device_.get()), captured(spec, device_.get());
      uint64_t folds = 0, used = 0;
      for (int step = 0; step < 120 && !HasFailure(); ++step) {
        const std::vector<Row> rows = AnyRows(spec);
        const bool stale = step % 20 == 19;  // a plan that fails: nothing happens
        for (Lane* lane : {&plain, &captured}) {
          if (stale) {
            for (uint64_t& version : lane->versions) ++version;
          }
          lane->Load(rows);
        }
        plain.RunStep();
        captured.ReplayStep();
        SCOPED_TRACE(step);
        const DevicePlanReport a = plain.Report(), b = captured.Report();
        const bool live =
            std::any_of(rows.begin(), rows.end(), [](const Row& row) { return row.slot != kNone; });
        EXPECT_EQ(a.result.code, stale && live ? ControlCode::kVersionMismatch : ControlCode::kOk);
        EXPECT_EQ(b.result.code, a.result.code);
        EXPECT_EQ(b.report.folds, a.report.folds);
        EXPECT_EQ(b.report.background_used, a.report.background_used);
        EXPECT_EQ(plain.Poison(), std::vector<uint32_t>(spec.rows_max));
        EXPECT_EQ(captured.Poison(), plain.Poison());
        folds += a.report.folds;
        used += a.report.background_used;
        uint64_t token = 0;
        for (const Row& row : rows) {
          const auto bytes = plain.Outputs(token, row.drafts);
          EXPECT_TRUE(captured.Outputs(token, row.drafts) == bytes);
          const bool wrote = a.result.code == ControlCode::kOk;
          if (row.slot == kNone || !wrote) {
            const std::byte expected = wrote ? std::byte{0} : std::byte{0xab};
            EXPECT_TRUE(std::all_of(bytes.begin(), bytes.end(),
                                    [&](std::byte x) { return x == expected; }));
          }
          token += row.drafts;
        }
        const auto slots = plain.Slots(), others = captured.Slots();
        for (uint32_t slot = 0; slot < spec.slot_count; ++slot) {
          EXPECT_EQ(slots[slot].base, others[slot].base);
          EXPECT_EQ(slots[slot].tail, others[slot].tail);
          EXPECT_EQ(slots[slot].version, others[slot].version);
          EXPECT_EQ(slots[slot].window, others[slot].window);
          EXPECT_EQ(slots[slot].in_step, 0);
        }
        if (a.result.code == ControlCode::kOk) {
          Advance(plain, rows);
          Advance(captured, rows);
        }
        if (stale) {
          for (Lane* lane : {&plain, &captured}) {
            for (uint64_t& version : lane->versions) --version;
          }
        }
      }
      const auto slots = plain.Slots(), others = captured.Slots();
      for (uint32_t slot = 0; slot < spec.slot_count; ++slot)
        EXPECT_TRUE(plain.Page(slots[slot].page) == captured.Page(others[slot].page)) << slot;
      EXPECT_GT(folds, 20u);
      if (mode == FlushMode::kBackground) {
        EXPECT_GT(used, 20u);
      }
    }
  }
}

// Launches repeat bit for bit, and a row's bytes do not depend on the rows beside it.
TEST_F(CudaStep, FiveLaunchesAndPermutedRowsAreIdentical) {
  for (const Form form : {Form::kPostConv, Form::kRaw}) {
    const BackendSpec spec = MakeSpec(form, FlushMode::kFused, 4);
    Lane lane(spec, device_.get());
    for (int step = 0; step < 40; ++step) {
      const std::vector<Row> rows = AnyRows(spec);
      lane.Load(rows);
      lane.RunStep();
      ASSERT_EQ(lane.Report().result.code, ControlCode::kOk);
      Advance(lane, rows);
    }
    std::vector<Row> rows;
    for (uint32_t i = 0; i < spec.rows_max; ++i) rows.push_back({i, 1 + i % 4, random_(), 0});
    struct Seen {
      std::vector<std::byte> output, target;
    };
    std::map<uint32_t, Seen> first;
    uint32_t folds = 0;
    for (int launch = 0; launch < 8 && !HasFailure(); ++launch) {
      lane.Load(rows);
      lane.EnqueuePlan();
      lane.EnqueueVerifies();
      if (launch % 2 == 1) lane.EnqueueVerifies();  // a Verify may be repeated
      lane.Finish();
      ASSERT_EQ(lane.Report().result.code, ControlCode::kOk);
      folds += lane.Report().report.folds;
      const std::vector<DeviceRow> planned = lane.Rows(rows.size());
      for (const DeviceRow& row : planned) {
        Seen seen{lane.Outputs(row.first_token, row.draft_tokens), {}};
        // Which rows fold depends on the others, as rows share F.
        if (row.target_page != kNone) seen.target = lane.Page(row.target_page);
        auto [at, is_new] = first.try_emplace(row.slot, seen);
        EXPECT_TRUE(at->second.output == seen.output) << "launch " << launch;
        if (at->second.target.empty()) at->second.target = seen.target;
        if (!seen.target.empty()) {
          EXPECT_TRUE(at->second.target == seen.target) << "launch " << launch;
        }
      }
      lane.EnqueueAbort();
      lane.Finish();
      if (launch >= 4) std::shuffle(rows.begin(), rows.end(), random_);
      if (launch == 6) rows.resize(5);
    }
    EXPECT_GT(folds, 0u);
  }
}

// A block of threads decides what one thread decides, for thousands of rows and pages that run out.
TEST_F(CudaStep, PlansOfThousandsOfRowsAreThoseOfOneThread) {
  for (const FlushMode mode : {FlushMode::kFused, FlushMode::kBackground}) {
    BackendSpec spec = MakeSpec(Form::kPostConv, mode, 6);
    spec.layers = {{Family::kMamba2, 1, 1, 16, 8}};
    spec.slot_count = spec.rows_max = 3000;
    spec.page_count = 3400;
    spec.folds_max = 150;
    spec.poison_garbage = false;
    auto made = Model::Create(spec, device_.get());
    ASSERT_TRUE(made.ok()) << made.status();
    const ControlState& c = (*made)->control();
    HostControl host(spec);
    OneThread team;
    std::vector<uint64_t> versions(spec.slot_count, 1);
    for (uint32_t slot = 0; slot < spec.slot_count; ++slot) {
      host.Do({.op = SlotOp::kClear, .slot = slot, .window = 6 + slot % 3, .rounding_key = slot});
    }
    host.Upload(c);
    void *plan_memory = nullptr, *words_memory = nullptr;
    Must(cudaMalloc(&plan_memory, spec.rows_max * sizeof(DevicePlanRow)));
    Must(cudaMalloc(&words_memory, (spec.rows_max + 1) * sizeof(uint32_t)));
    auto* const plan = static_cast<DevicePlanRow*>(plan_memory);
    auto* const words = static_cast<uint32_t*>(words_memory);
    uint64_t deferred = 0, refused = 0;
    for (int step = 0; step < 60 && !HasFailure(); ++step) {
      SCOPED_TRACE(step);
      std::vector<DevicePlanRow> rows;
      std::vector<uint32_t> accepted;
      for (uint32_t slot = 0; slot < spec.slot_count; ++slot) {
        if (random_() % 5 == 0) continue;
        const auto drafts = static_cast<uint32_t>(random_() % 5);
        rows.push_back({versions[slot], slot, drafts});
        accepted.push_back(drafts - static_cast<uint32_t>(random_() % (drafts + 1)) / 2);
      }
      const auto count = static_cast<uint32_t>(rows.size());
      Must(cudaMemcpy(plan, rows.data(), count * sizeof(rows[0]), cudaMemcpyHostToDevice));
      Must(cudaMemcpy(words, accepted.data(), count * sizeof(uint32_t), cudaMemcpyHostToDevice));
      Must(cudaMemcpy(words + spec.rows_max, &count, sizeof(count), cudaMemcpyHostToDevice));
      Must(EnqueuePlan(c, 0, plan, words + spec.rows_max, nullptr));
      PlanStep(team, host.state, 0, rows.data(), count);
      const DevicePlanReport a = Download(c.reports, 1)[0];
      const DevicePlanReport& b = host.reports[0];
      ASSERT_EQ(a.result.code, b.result.code);
      EXPECT_EQ(a.result.a, b.result.a);
      EXPECT_EQ(a.result.b, b.result.b);
      if (a.result.code != ControlCode::kOk) {
        ++refused;
        continue;
      }
      EXPECT_EQ(a.report.folds, b.report.folds);
      EXPECT_EQ(a.report.folds_deferred, b.report.folds_deferred);
      EXPECT_EQ(a.report.background_used, b.report.background_used);
      EXPECT_EQ(a.report.background_started, b.report.background_started);
      EXPECT_EQ(a.report.committed_records, b.report.committed_records);
      EXPECT_EQ(a.background_records, b.background_records);
      deferred += a.report.folds_deferred;
      const auto planned = Download(c.step_rows(0), count);
      for (uint32_t i = 0; i < count; ++i) {
        EXPECT_EQ(planned[i].base, host.rows[i].base);
        EXPECT_EQ(planned[i].tail, host.rows[i].tail);
        EXPECT_EQ(planned[i].first_token, host.rows[i].first_token);
        EXPECT_EQ(planned[i].target_page == kNone, host.rows[i].target_page == kNone);
        EXPECT_EQ(planned[i].installs_flush, host.rows[i].installs_flush);
      }
      HostControl downloaded(spec);
      downloaded.Download(c);
      downloaded.CheckInvariants();
      EXPECT_EQ(downloaded.counters.free, host.counters.free);
      if (step % 7 == 6) {
        Must(EnqueueAbort(c, 0, nullptr));
        AbortStep(team, host.state, 0);
      } else {
        Must(EnqueueCommit(c, 0, words, nullptr));
        CommitStep(team, host.state, 0, accepted.data());
        for (const DevicePlanRow& row : rows) ++versions[row.slot];
      }
      downloaded.Download(c);
      downloaded.CheckInvariants();
      EXPECT_EQ(downloaded.counters.free, host.counters.free);
      for (uint32_t slot = 0; slot < spec.slot_count; ++slot) {
        EXPECT_EQ(downloaded.slots[slot].base, host.slots[slot].base);
        EXPECT_EQ(downloaded.slots[slot].tail, host.slots[slot].tail);
        EXPECT_EQ(downloaded.slots[slot].version, host.slots[slot].version);
      }
    }
    EXPECT_GT(deferred, 0u);
    std::printf("  deferred %lu, refused %lu\n", static_cast<unsigned long>(deferred),
                static_cast<unsigned long>(refused));
    cudaFree(plan_memory);
    cudaFree(words_memory);
  }
}

// Counts beyond a row's drafts are refused on the device, all before any is applied.
TEST_F(CudaStep, CommitChecksEveryCountFirst) {
  const BackendSpec spec = MakeSpec(Form::kPostConv, FlushMode::kFused, 8);
  Lane lane(spec, device_.get());
  std::vector<Row> rows;
  for (uint32_t i = 0; i < spec.rows_max; ++i) rows.push_back({i, 2, i, 2});
  rows[9].accepted = 3;
  lane.Load(rows);
  lane.RunStep();
  const ControlResult result = lane.CommitResult();
  EXPECT_EQ(result.code, ControlCode::kAcceptedTooMany);
  EXPECT_EQ(result.row, 9u);
  for (const DeviceSlot& slot : lane.Slots()) EXPECT_EQ(slot.tail, 0u);
  rows[9].accepted = 1;
  lane.Load(rows);  // the step is still open
  Must(lane.model->EnqueueCommit(0, lane.accepted(), nullptr));
  Must(cudaDeviceSynchronize());
  EXPECT_EQ(lane.CommitResult().code, ControlCode::kOk);
  EXPECT_EQ(lane.Slots()[8].tail, 2u);
  EXPECT_EQ(lane.Slots()[9].tail, 1u);
}

}  // namespace
}  // namespace ssmd::cuda
