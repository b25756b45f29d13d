// Field reports 68-70 and the races behind 22, 60 and 61: ends that come while something still
// runs, and many threads doing everything at once.
//
// Synchronised with std:: primitives only, so that ThreadSanitizer sees all of it.
#include <condition_variable>
#include <deque>
#include <future>
#include <mutex>
#include <thread>

#include "tests/testing/store_fixture.h"
#include "tests/testing/test_device.h"

namespace ssmd {
namespace {

using testing::Fails;
using testing::kAlice;
using testing::kBob;

class OrderingTest : public testing::StoreFixture {};

// Report 68: imports given up half-way while every page is taken; nobody else's state moves.
TEST_F(OrderingTest, CancelledImportsWithThePoolFull) {
  Make(SmallGeometry(),
       {.sequences_max = 4, .snapshots_max = 0, .spare_pages = 1, .rows_max = 4, .steps_max = 1});
  std::vector<SequenceId> ids;
  for (int i = 0; i < 4; ++i) {
    ids.push_back(Create());
    Prefill(11 + i);
  }
  std::vector<float> junk(2 * 16 * 8, 42.0f);
  for (int round = 0; round < 40 && !HasFailure(); ++round) {
    std::vector<std::string> before;
    for (const SequenceId id : ids) before.push_back(Fingerprint(id));
    {
      std::vector<std::unique_ptr<StateImport>> imports;
      for (const SequenceId id : ids) {
        auto import = store_->BeginImport(kAlice, Versioned(id));
        if (!import.ok()) {  // the pool is empty
          EXPECT_EQ(GetDetail(import.status(), detail::kReason), reason::kNoPage);
          break;
        }
        imports.push_back(*std::move(import));
        ASSERT_TRUE(imports.back()->WriteLayer(round % 3, 5, junk).ok());
        EXPECT_FALSE(store_->BeginStep(kAlice, {.rows = {{id, State(id).version, 1}}}).ok());
      }
      EXPECT_GE(imports.size(), 1u);
    }
    for (size_t i = 0; i < ids.size(); ++i) ASSERT_EQ(Fingerprint(ids[i]), before[i]);
    EXPECT_EQ(store_->usage().imports, 0u);
    Step({{ids[round % 4], 3}, {ids[(round + 1) % 4], 2}}, {2, 1});
  }
  for (const SequenceId id : ids) ExpectMatchesOracle(id);
}

// Report 69: freed right behind its step. Either the step has ended, or the free is refused; the
// next owner of the slot is clean.
TEST_F(OrderingTest, FreeRightBehindAStep) {
  Make(SmallGeometry(),
       {.sequences_max = 1, .snapshots_max = 0, .spare_pages = 1, .rows_max = 1, .steps_max = 1});
  for (int round = 0; round < 200 && !HasFailure(); ++round) {
    const SequenceId id = Create();
    Prefill(round % 13);
    Batch step = Begin({{id, 4}});
    ASSERT_TRUE(VerifyLayer(step, 0).ok());
    const std::vector<SequenceId> ids = {id};
    EXPECT_EQ(GetDetail(store_->Release(kAlice, ids), detail::kReason), reason::kStepOpen);
    if (round % 2 == 0) {
      Abort(step);
      Free(id);
    } else {
      model_->sequences.erase(id);
      EXPECT_EQ(store_->ReleaseOwner(kAlice).steps, 1u);
    }
    const SequenceId next = Create();
    Decode(3);
    ExpectMatchesOracle(next);
    Free(next);
  }
  ExpectNothingHeld();
}

// Report 70: what never became complete has no handle.
TEST_F(OrderingTest, AbortedImportLeavesNoState) {
  Make();
  const SequenceId id = Create();
  Prefill(5);
  const std::string before = Fingerprint(id);
  const std::vector<float> junk(2 * 16 * 8, 7.0f);
  auto import = store_->BeginImport(kAlice, Versioned(id));
  ASSERT_TRUE(import.ok());
  ASSERT_TRUE((*import)->WriteLayer(0, 9, junk).ok());
  Snapshot("during");  // of the old state
  EXPECT_FALSE((*import)->Finish(9, {}).ok());
  import->reset();
  EXPECT_EQ(Fingerprint(id), before);
  Restore("during", 5);
  ExpectMatchesOracle();
  On(id);
  Decode(9);
  ExpectMatchesOracle();
}

// Background work on a thread of its own.
class WorkerQueue : public cpu::TaskQueue {
 public:
  WorkerQueue() : worker_([this] { Work(); }) {}
  ~WorkerQueue() override {
    {
      std::lock_guard lock(mu_);
      stopping_ = true;
    }
    changed_.notify_all();
    worker_.join();
  }
  void Post(std::function<void()> task) override {
    {
      std::lock_guard lock(mu_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_all();
  }

 private:
  void Work() {
    std::unique_lock lock(mu_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (stopping_) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }
  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::thread worker_;
};

// Four owners and a janitor on one store, with compute threads and a flush thread below it: steps
// whose layers are verified side by side, commits, aborts, forks, rollbacks, snapshots, imports,
// ends in the middle. The store poisons and checks itself; at the end each owner's outputs are
// those of the same owner alone, bit for bit, because nothing may depend on the others.
class StressTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kLayers = 2;

  void Make(uint32_t compute_threads) {
    pool_ = std::make_unique<cpu::ThreadPool>(compute_threads);
    queue_ = std::make_unique<WorkerQueue>();
    device_ = testing::MakeTestDevice(uint64_t{1} << 32, pool_.get(), queue_.get());
    geometry_ = {.layers = {{Family::kMamba2, 2, 2, 16, 8}, {Family::kGdn, 2, 1, 16, 8}},
                 .formats = {.activation = Dtype::kBf16, .correction = Dtype::kFp16},
                 .window_records = 8,
                 .draft_tokens_max = 4,
                 .rollback_tokens_min = 4,  // one phase of the first window: no stagger
                 .flush_mode = FlushMode::kBackground};
    auto store =
        Store::Create({.geometry = geometry_,
                       .capacity = {.sequences_max = 32,
                                    .snapshots_max = 32,
                                    .spare_pages = 64,
                                    .rows_max = 4,
                                    .steps_max = 16},
                       .poison_garbage = true},
                      [&](const BackendSpec& spec) { return device_->CreateBackend(spec); });
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    std::mt19937_64 random(1);
    inputs_.assign(16, {});
    for (auto& token : inputs_) {
      for (const LayerShape& shape : geometry_.layers)
        token.push_back(testing::RandomToken(shape, Dtype::kBf16, random));
    }
  }

  // Everything one owner does. Returns the bytes of all its outputs.
  std::vector<float> Live(OwnerId owner, int rounds) {
    std::mt19937_64 random(static_cast<uint64_t>(owner));
    std::vector<float> seen;
    const auto created = store_->CreateSequences(owner, 2);
    if (!created.ok()) {
      ADD_FAILURE() << created.status();
      return seen;
    }
    std::vector<SequenceId> ids = created->ids;
    const std::string digest = absl::StrCat("owner", static_cast<uint64_t>(owner));
    for (int round = 0; round < rounds; ++round) {
      const SequenceId id = ids[random() % 2];
      const auto state = store_->Get(owner, id);
      if (!state.ok()) {
        ADD_FAILURE() << state.status();
        return seen;
      }
      const uint32_t drafts = 1 + static_cast<uint32_t>(random() % 4);
      const auto step = store_->BeginStep(owner, {.rows = {{id, state->version, drafts}}});
      if (!step.ok()) {
        ADD_FAILURE() << step.status();
        return seen;
      }
      std::vector<int> tokens(drafts);
      for (int& token : tokens) token = static_cast<int>(random() % inputs_.size());
      std::vector<float> outputs[kLayers];
      auto verify = [&](uint32_t layer) {
        testing::PackedInputs packed;
        for (const int token : tokens) packed.Append(inputs_[token][layer], Dtype::kBf16);
        outputs[layer].resize(drafts * 16);
        EXPECT_TRUE(store_
                        ->Verify(owner, {.step = step->id,
                                         .layer = layer,
                                         .token_count = drafts,
                                         .inputs = packed.view(),
                                         .output = outputs[layer].data()})
                        .ok());
      };
      if (round % 4 == 0) {
        std::thread beside([&] { verify(1); });
        verify(0);
        beside.join();
      } else {
        verify(1);
        verify(0);
      }
      for (const auto& output : outputs) seen.insert(seen.end(), output.begin(), output.end());
      const std::vector<uint32_t> accepted = {static_cast<uint32_t>(random() % (drafts + 1))};
      if (random() % 5 == 0) {
        EXPECT_TRUE(store_->Abort(owner, step->id).ok());
      } else {
        EXPECT_TRUE(store_->Commit(owner, step->id, accepted).ok());
      }
      Wander(owner, id, digest, random, seen);
    }
    return seen;
  }

  // Forks, snapshots, rollbacks, flushes and imports between steps.
  void Wander(OwnerId owner, SequenceId id, const std::string& digest, std::mt19937_64& random,
              std::vector<float>& seen) {
    const SequenceState state = *store_->Get(owner, id);
    switch (random() % 8) {
      case 0: {
        const auto child = store_->Fork(owner, {id, state.version}, 1, state.floor);
        if (!child.ok()) break;
        std::vector<float> values(2 * 16 * 8);
        EXPECT_TRUE(
            store_->ReadState(owner, child->ids[0], 1, state.floor, absl::MakeSpan(values)).ok());
        seen.insert(seen.end(), values.begin(), values.end());
        EXPECT_TRUE(store_->Release(owner, child->ids).ok());
        break;
      }
      case 1: {
        const SnapshotKey key{digest, state.position};
        if (!store_->CreateSnapshot(owner, {id, state.version}, key).ok()) break;
        const auto restored = store_->CreateFromSnapshot(owner, key, 1);
        if (restored.ok()) {
          EXPECT_TRUE(store_->Release(owner, restored->ids).ok());
        }
        EXPECT_TRUE(store_->DeleteSnapshot(key).ok());
        break;
      }
      case 2:
        EXPECT_TRUE(store_
                        ->Rollback(owner, {id, state.version},
                                   state.position - random() % (state.position - state.floor + 1))
                        .ok());
        break;
      case 3: {
        const std::vector<SequenceId> ids = {id};
        EXPECT_TRUE(store_->Flush(owner, ids).ok());
        break;
      }
      case 4: {
        auto import = store_->BeginImport(owner, {id, state.version});
        const std::vector<float> ones(2 * 16 * 8, 1.0f);
        ASSERT_TRUE(import.ok()) << import.status();
        EXPECT_TRUE((*import)->WriteLayer(0, 3, ones).ok());
        if (random() % 2 == 0) {
          EXPECT_TRUE((*import)->WriteLayer(1, 3, ones).ok());
          EXPECT_TRUE((*import)->Finish(3, {}).ok());
        }
        break;
      }
      default:
        break;
    }
  }

  // Looks at everything, and owners of its own die with steps open and a Verify running.
  void Sweep(const std::atomic<bool>& stop) {
    for (uint64_t round = 0; !stop; ++round) {
      const OwnerId owner{1000 + round};
      const auto created = store_->CreateSequences(owner, 1);
      ASSERT_TRUE(created.ok()) << created.status();
      const auto step = store_->BeginStep(
          owner, {.rows = {{created->ids[0], 1, 2}}, .deadline = absl::FromUnixSeconds(1)});
      ASSERT_TRUE(step.ok()) << step.status();
      std::thread verifier([&] {
        testing::PackedInputs packed;
        for (const int token : {3, 4}) packed.Append(inputs_[token][0], Dtype::kBf16);
        std::vector<float> output(2 * 16);
        (void)store_->Verify(owner, {.step = step->id,
                                     .layer = 0,
                                     .token_count = 2,
                                     .inputs = packed.view(),
                                     .output = output.data()});
      });
      if (round % 2 == 0) (void)store_->AbortExpired(absl::FromUnixSeconds(2));
      EXPECT_EQ(store_->ReleaseOwner(owner).sequences, 1u);
      verifier.join();
      (void)store_->counters();
      (void)store_->usage();
      (void)store_->ListSnapshots(std::nullopt, 100);
      (void)store_->GetAll(kAlice);
    }
  }

  Geometry geometry_;
  std::unique_ptr<cpu::ThreadPool> pool_;
  std::unique_ptr<WorkerQueue> queue_;
  std::unique_ptr<Device> device_;
  std::vector<std::vector<reference::Token>> inputs_;
  std::unique_ptr<Store> store_;
};

TEST_F(StressTest, ManyThreadsOnOneStore) {
  constexpr int kOwners = 4, kRounds = 150;
  std::vector<std::vector<float>> alone, together(kOwners);
  Make(1);
  for (uint64_t owner = 1; owner <= kOwners; ++owner)
    alone.push_back(Live(OwnerId{owner}, kRounds));
  store_.reset();
  Make(2);
  std::atomic<bool> stop{false};
  std::thread janitor([&] { Sweep(stop); });
  std::vector<std::thread> owners;
  for (uint64_t owner = 1; owner <= kOwners; ++owner) {
    owners.emplace_back([&, owner] { together[owner - 1] = Live(OwnerId{owner}, kRounds); });
  }
  for (std::thread& owner : owners) owner.join();
  stop = true;
  janitor.join();
  EXPECT_EQ(together, alone);
  EXPECT_GT(store_->counters().flushes_background, 20u);
  for (uint64_t owner = 1; owner <= kOwners; ++owner)
    EXPECT_EQ(store_->ReleaseOwner(OwnerId{owner}).sequences, 2u);
  EXPECT_EQ(store_->usage().sequences, 0u);
  EXPECT_EQ(store_->usage().pages.free, store_->usage().pages.total);
}

// Report 22, from another side: the same step committed, aborted and repeated from all sides at
// once. One of them wins, the rest are told.
TEST_F(StressTest, OneEndOfAStepWins) {
  Make(1);
  const SequenceId id = store_->CreateSequences(kAlice, 1)->ids[0];
  for (int round = 0; round < 200; ++round) {
    const SequenceState before = *store_->Get(kAlice, id);
    const StepId step = store_->BeginStep(kAlice, {.rows = {{id, before.version, 2}}})->id;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      testing::PackedInputs packed;
      for (const int token : {round % 16, 5}) packed.Append(inputs_[token][layer], Dtype::kBf16);
      std::vector<float> output(2 * 16);
      ASSERT_TRUE(store_
                      ->Verify(kAlice, {.step = step,
                                        .layer = layer,
                                        .token_count = 2,
                                        .inputs = packed.view(),
                                        .output = output.data()})
                      .ok());
    }
    std::atomic<int> commits{0}, aborts{0};
    std::vector<std::thread> enders;
    for (uint32_t accepted = 0; accepted <= 2; ++accepted) {
      enders.emplace_back([&, accepted] {
        const std::vector<uint32_t> counts = {accepted};
        commits += store_->Commit(kAlice, step, counts).ok();
      });
    }
    enders.emplace_back([&] { aborts += store_->Abort(kAlice, step).ok(); });
    for (std::thread& ender : enders) ender.join();
    EXPECT_EQ(commits + aborts, 1);
    EXPECT_EQ(store_->Get(kAlice, id)->version, before.version + static_cast<uint64_t>(commits));
  }
}

}  // namespace
}  // namespace ssmd
