// The control logic of the CUDA backend, run by one host thread, against the CPU's control block:
// random histories, the same decisions. (Which page carries a number is each one's own affair.)
#include <algorithm>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/control_block.h"
#include "tests/testing/host_control.h"

namespace ssmd::cuda {
namespace {

class NoRunner : public cpu::FlushRunner {
 public:
  void Start(const BackgroundFlush&) override {}
  void Finish(FlushId) override {}
  void Drop(FlushId) override {}
};

// Both control blocks, given the same operations.
class Pair {
 public:
  explicit Pair(uint64_t seed)
      : random_(seed), spec_(RandomSpec()), cpu_(spec_, &runner_), gpu_(spec_) {
    state_.resize(spec_.slot_count);
  }

  void Run(int operations) {
    for (int i = 0; i < operations && !::testing::Test::HasFailure(); ++i) {
      Operate();
      Compare();
    }
  }
  std::vector<int> did = std::vector<int>(12);

 private:
  enum class State { kFree, kIdle, kInStep, kImporting };
  struct OpenStep {
    uint32_t index;
    std::vector<PlanRow> rows;
  };

  uint64_t Below(uint64_t n) { return random_() % n; }
  BackendSpec RandomSpec() {
    BackendSpec spec;
    const uint32_t window = 4 + static_cast<uint32_t>(Below(20));
    const uint32_t drafts = 1 + static_cast<uint32_t>(Below(std::min(window, 8u)));
    spec.rule = {window, drafts, static_cast<uint32_t>(Below(window - drafts + 1)),
                 window + 2 * drafts};
    spec.slot_count = 4 + static_cast<uint32_t>(Below(20));
    spec.page_count = spec.slot_count / 2 + 4 + static_cast<uint32_t>(Below(spec.slot_count));
    spec.step_count = 3;
    spec.rows_max = spec.slot_count + 2;
    spec.folds_max = 1 + static_cast<uint32_t>(Below(6));
    spec.flush_mode = Below(2) ? FlushMode::kBackground : FlushMode::kFused;
    return spec;
  }

  std::vector<uint32_t> Slots(State state) const {
    std::vector<uint32_t> found;
    for (uint32_t i = 0; i < state_.size(); ++i) {
      if (state_[i] == state) found.push_back(i);
    }
    return found;
  }
  uint64_t Version(uint32_t slot) {  // now and then a wrong one
    const uint64_t version = cpu_.cursor(SlotIndex{slot}).version;
    return Below(20) ? version : version - 1 + 2 * Below(2);  // or one of the past or the future
  }
  uint64_t AnyPosition(uint32_t slot) {
    const SlotCursor& cursor = cpu_.cursor(SlotIndex{slot});
    const uint64_t low = cursor.base == 0 ? 0 : cursor.base - (Below(8) == 0);
    return low + Below(cursor.tail - low + 1 + (Below(8) == 0));
  }

  void Operate() {
    const uint64_t dice = Below(100);
    if (dice < 15) return Clear();
    if (dice < 40) return Plan();
    if (dice < 65) return End();
    const std::vector<uint32_t> idle = Slots(State::kIdle);
    if (idle.empty()) return;
    const uint32_t slot = idle[Below(idle.size())];
    const SlotIndex index{slot};
    if (dice < 72) {
      const uint64_t version = Version(slot), position = AnyPosition(slot);
      Same(cpu_.Rollback(index, version, position),
           gpu_.Do(
               {.op = SlotOp::kRollback, .slot = slot, .version = version, .position = position}));
      ++did[0];
    } else if (dice < 80) {
      Copy();
    } else if (dice < 85) {
      cpu_.ReleaseSlot(index);
      EXPECT_EQ(gpu_.Do({.op = SlotOp::kRelease, .slot = slot}).code, ControlCode::kOk);
      state_[slot] = State::kFree;
      ++did[1];
    } else if (dice < 90) {
      const auto flushed = cpu_.FlushSlot(index);
      const ControlResult result = gpu_.Do({.op = SlotOp::kBeginFlush, .slot = slot});
      if (flushed.ok() && !*flushed) {
        EXPECT_EQ(result.code, ControlCode::kNothing);
      } else {
        Same(flushed.status(), result);
      }
      EXPECT_EQ(gpu_.fold_count, result.code == ControlCode::kOk);
      if (result.code == ControlCode::kOk) gpu_.Do({.op = SlotOp::kEndFlush, .slot = slot});
      ++did[2];
    } else {
      const uint64_t version = Version(slot);
      const absl::Status begun = cpu_.BeginImport(index, version);
      Same(begun, gpu_.Do({.op = SlotOp::kBeginImport, .slot = slot, .version = version}));
      if (begun.ok()) state_[slot] = State::kImporting;
      ++did[3];
    }
  }

  void Clear() {
    if (const auto importing = Slots(State::kImporting); !importing.empty() && Below(2)) {
      const uint32_t slot = importing[Below(importing.size())];
      const uint64_t position = Below(1000);
      if (Below(3)) {
        cpu_.EndImport(SlotIndex{slot}, position);
        gpu_.Do({.op = SlotOp::kEndImport, .slot = slot, .position = position});
      } else {
        cpu_.AbortImport(SlotIndex{slot});
        gpu_.Do({.op = SlotOp::kAbortImport, .slot = slot});
      }
      state_[slot] = State::kIdle;
      ++did[4];
      return;
    }
    const auto free = Slots(State::kFree);
    if (free.empty()) return;
    const uint32_t slot = free[Below(free.size())];
    const uint64_t key = random_();
    const auto window =
        static_cast<uint32_t>(spec_.rule.rollback_tokens_min + spec_.rule.draft_tokens_max +
                              Below(spec_.rule.window_records - spec_.rule.rollback_tokens_min -
                                    spec_.rule.draft_tokens_max + 1));
    cpu_.ClearSlot(SlotIndex{slot}, window, key);
    gpu_.Do({.op = SlotOp::kClear, .slot = slot, .window = window, .rounding_key = key});
    state_[slot] = State::kIdle;
    ++did[5];
  }

  void Copy() {
    const auto free = Slots(State::kFree);
    if (free.empty()) return;
    uint32_t source = static_cast<uint32_t>(Below(state_.size()));
    if (state_[source] == State::kFree) return;
    const uint32_t target = free[Below(free.size())];
    const uint64_t position = AnyPosition(source), key = random_();
    const absl::Status copied = cpu_.CopySlot({.source = SlotIndex{source},
                                               .target = SlotIndex{target},
                                               .position = position,
                                               .window = spec_.rule.window_records,
                                               .rounding_key = key});
    Same(copied, gpu_.Do({.op = SlotOp::kCopy,
                          .slot = source,
                          .target = target,
                          .window = spec_.rule.window_records,
                          .position = position,
                          .rounding_key = key}));
    if (copied.ok()) state_[target] = State::kIdle;
    ++did[6];
  }

  void Plan() {
    std::vector<bool> used(spec_.step_count);
    for (const OpenStep& step : open_) used[step.index] = true;
    const auto index =
        static_cast<uint32_t>(std::find(used.begin(), used.end(), false) - used.begin());
    if (index == spec_.step_count) return;
    std::vector<uint32_t> idle = Slots(State::kIdle);
    std::shuffle(idle.begin(), idle.end(), random_);
    idle.resize(Below(idle.size() + 1));
    OpenStep step{index, {}};
    for (const uint32_t slot : idle) {
      step.rows.push_back({SlotIndex{slot},
                           Below(3) ? cpu_.cursor(SlotIndex{slot}).version : Version(slot),
                           static_cast<uint32_t>(Below(spec_.rule.draft_tokens_max + 1))});
      if (Below(10) == 0 && step.rows.size() < spec_.rows_max) step.rows.push_back({kNoSlot, 0, 1});
    }
    step.rows.resize(std::min<size_t>(step.rows.size(), spec_.rows_max));
    std::vector<DevicePlanRow> rows;
    for (const PlanRow& row : step.rows)
      rows.push_back({row.version, ToInt(row.slot), row.draft_tokens});
    const auto report = cpu_.Plan({StepIndex{index}, step.rows});
    OneThread team;
    PlanStep(team, gpu_.state, index, rows.data(), static_cast<uint32_t>(rows.size()));
    const DevicePlanReport& other = gpu_.reports[index];
    Same(report.status(), other.result);
    if (!report.ok()) {
      EXPECT_EQ(gpu_.steps[index].row_count, 0u);
      ++did[7];
      return;
    }
    const PlanReport &a = *report, &b = other.report;
    EXPECT_EQ(a.live_rows, b.live_rows);
    EXPECT_EQ(a.folds, b.folds);
    EXPECT_EQ(a.folds_deferred, b.folds_deferred);
    EXPECT_EQ(a.background_used, b.background_used);
    EXPECT_EQ(a.background_started, b.background_started);
    EXPECT_EQ(a.committed_records, b.committed_records);
    EXPECT_EQ(a.draft_tokens, b.draft_tokens);
    EXPECT_EQ(a.padding_tokens, b.padding_tokens);
    EXPECT_EQ(b.background_started, gpu_.fold_count);
    did[8] += a.folds_deferred > 0;
    did[9] += a.background_used > 0;
    did[10] += a.folds > 0;
    for (const uint32_t slot : idle) {
      if (std::any_of(step.rows.begin(), step.rows.end(),
                      [&](const PlanRow& row) { return row.slot == SlotIndex{slot}; })) {
        state_[slot] = State::kInStep;
      }
    }
    open_.push_back(std::move(step));
  }

  void End() {
    if (open_.empty()) return;
    const size_t which = Below(open_.size());
    const OpenStep& step = open_[which];
    OneThread team;
    if (Below(5) == 0) {
      cpu_.Abort(StepIndex{step.index});
      AbortStep(team, gpu_.state, step.index);
    } else {
      std::vector<uint32_t> accepted;
      for (const PlanRow& row : step.rows)
        accepted.push_back(static_cast<uint32_t>(Below(row.draft_tokens + 1)));
      if (Below(10) == 0 && !accepted.empty()) accepted[Below(accepted.size())] = 99;
      const absl::Status committed = cpu_.Commit({StepIndex{step.index}, accepted});
      CommitStep(team, gpu_.state, step.index, accepted.data());
      Same(committed, gpu_.commits[step.index]);
      if (!committed.ok()) return;
    }
    for (const PlanRow& row : step.rows) {
      if (row.slot != kNoSlot) state_[ToInt(row.slot)] = State::kIdle;
    }
    open_.erase(open_.begin() + static_cast<ptrdiff_t>(which));
    ++did[11];
  }

  static void Same(const absl::Status& status, const ControlResult& result) {
    auto expected = ControlCode::kOk;
    if (GetDetail(status, detail::kReason) == reason::kVersionMismatch) {
      expected = ControlCode::kVersionMismatch;
    } else if (GetDetail(status, detail::kReason) == reason::kNoPage) {
      expected = ControlCode::kNoPage;
    } else if (GetDetail(status, detail::kReason) == reason::kRollbackFloor) {
      expected = ControlCode::kOutsideWindow;
      EXPECT_EQ(GetDetail(status, detail::kFloor), std::to_string(result.a));
      EXPECT_EQ(GetDetail(status, detail::kTail), std::to_string(result.b));
    } else if (!status.ok()) {
      expected = ControlCode::kAcceptedTooMany;
    }
    EXPECT_EQ(static_cast<int>(expected), static_cast<int>(result.code)) << status;
  }

  void Compare() {
    cpu_.CheckInvariants();
    gpu_.CheckInvariants();
    EXPECT_EQ(cpu_.page_counts().free, gpu_.counters.free);
    EXPECT_EQ(cpu_.page_counts().step_targets, gpu_.counters.step_targets);
    for (uint32_t i = 0; i < spec_.slot_count; ++i) {
      if (state_[i] == State::kFree) continue;
      const SlotCursor& a = cpu_.cursor(SlotIndex{i});
      const DeviceSlot& b = gpu_.slots[i];
      EXPECT_EQ(a.base, b.base);
      EXPECT_EQ(a.tail, b.tail);
      EXPECT_EQ(a.high_water, b.high_water);
      EXPECT_EQ(a.version, b.version);
      EXPECT_EQ(a.rounding_key, b.rounding_key);
      EXPECT_EQ(a.window, b.window);
    }
    for (const OpenStep& step : open_) {
      const auto& rows = cpu_.rows(StepIndex{step.index});
      ASSERT_EQ(gpu_.steps[step.index].row_count, rows.size());
      uint32_t token = 0;
      for (size_t i = 0; i < rows.size(); ++i) {
        const StepRow& a = rows[i];
        const DeviceRow& b = gpu_.state.step_rows(step.index)[i];
        EXPECT_EQ(ToInt(a.slot), b.slot);
        EXPECT_EQ(a.draft_tokens, b.draft_tokens);
        EXPECT_EQ(token, b.first_token);
        EXPECT_EQ(a.base, b.base);
        EXPECT_EQ(a.tail, b.tail);
        EXPECT_EQ(a.rounding_key, b.rounding_key);
        EXPECT_EQ(a.source_page == kNoPage, b.source_page == kNone);
        EXPECT_EQ(a.target_page == kNoPage, b.target_page == kNone);
        EXPECT_EQ(a.installs_flush, b.installs_flush != 0);
        if (a.target_page != kNoPage) {
          EXPECT_EQ(a.fold_to, b.fold_to);
        }
        token += a.draft_tokens;
      }
      EXPECT_EQ(gpu_.steps[step.index].token_count, token);
    }
  }

  std::mt19937_64 random_;
  const BackendSpec spec_;
  NoRunner runner_;
  cpu::ControlBlock cpu_;
  HostControl gpu_;
  std::vector<State> state_;
  std::vector<OpenStep> open_;
};

TEST(CudaControl, DecidesAsTheCpuDoes) {
  std::vector<int> did(12);
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE(seed);
    Pair pair(seed);
    pair.Run(150);
    if (HasFailure()) return;
    for (size_t i = 0; i < did.size(); ++i) did[i] += pair.did[i];
  }
  for (size_t i = 0; i < did.size(); ++i) EXPECT_GT(did[i], 200) << i;
}

}  // namespace
}  // namespace ssmd::cuda
