// Cases of the store that a random single-threaded history cannot reach: failing and slow layers,
// ends that race with a running Verify, owners, deadlines, capacity to the last slot, the cost of a
// fork.
#include "state_store/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <thread>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"
#include "tests/testing/faulty_backend.h"
#include "tests/testing/layer_inputs.h"
#include "tests/testing/notification.h"

namespace ssmd {
namespace {

using testing::FaultyBackend;
using ::testing::HasSubstr;
using testing::PackedInputs;

constexpr OwnerId kAlice{1}, kBob{2};

class StoreTest : public ::testing::Test {
 protected:
  void Make(Capacity capacity = {.sequences_max = 4,
                                 .snapshots_max = 2,
                                 .spare_pages = 2,
                                 .rows_max = 4,
                                 .steps_max = 3},
            uint32_t d_k = 16) {
    geometry_ = {.layers = {{Family::kMamba2, 2, 1, d_k, 8}, {Family::kGdn, 2, 1, d_k, 8}},
                 .formats = {.activation = Dtype::kFp32, .correction = Dtype::kFp32},
                 .window_records = 8,
                 .draft_tokens_max = 4};
    auto store = Store::Create(
        {.geometry = geometry_, .capacity = capacity, .id_tag = 9, .poison_garbage = true},
        [&](const BackendSpec& spec) -> absl::StatusOr<std::unique_ptr<Backend>> {
          SSMD_ASSIGN_OR_RETURN(auto backend, device_.CreateBackend(spec));
          return std::make_unique<FaultyBackend>(
              std::move(backend), [this](const VerifyParams& params) {
                return before_verify_ ? before_verify_(params) : absl::OkStatus();
              });
        });
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }

  SequenceId Create(OwnerId owner = kAlice) { return store_->CreateSequences(owner, 1)->ids[0]; }
  uint64_t VersionOf(SequenceId id, OwnerId owner = kAlice) {
    return store_->Get(owner, id)->version;
  }
  StepRequest Request(SequenceId id, uint32_t draft_tokens, OwnerId owner = kAlice) {
    return {.rows = {{id, VersionOf(id, owner), draft_tokens}}};
  }
  StepId Begin(SequenceId id, uint32_t draft_tokens, OwnerId owner = kAlice) {
    auto step = store_->BeginStep(owner, Request(id, draft_tokens, owner));
    EXPECT_TRUE(step.ok()) << step.status();
    return step.ok() ? step->id : kNoStep;
  }
  absl::Status Verify(StepId step, uint32_t layer, uint64_t tokens, OwnerId owner = kAlice) {
    std::mt19937_64 random(layer + 1);
    PackedInputs packed;
    for (uint64_t i = 0; i < tokens; ++i) {
      packed.Append(testing::RandomToken(geometry_.layers[layer], Dtype::kFp32, random),
                    Dtype::kFp32);
    }
    if (spoil_) spoil_(packed);
    output_.assign(tokens * 2 * 8, 0);
    return store_
        ->Verify(owner, {.step = step,
                         .layer = layer,
                         .token_count = tokens,
                         .inputs = packed.view(),
                         .output = output_.data()})
        .status();
  }
  void Decode(SequenceId id, uint32_t tokens, OwnerId owner = kAlice) {
    for (uint32_t i = 0; i < tokens; ++i) {
      const StepId step = Begin(id, 1, owner);
      ASSERT_TRUE(Verify(step, 0, 1, owner).ok());
      ASSERT_TRUE(Verify(step, 1, 1, owner).ok());
      const std::vector<uint32_t> all = {1};
      ASSERT_TRUE(store_->Commit(owner, step, all).ok());
    }
  }

  cpu::ThreadPool pool_{2};
  cpu::CpuDevice device_{64 << 20, &pool_};
  Geometry geometry_;
  std::function<absl::Status(const VerifyParams&)> before_verify_;
  std::function<void(PackedInputs&)> spoil_;
  std::vector<float> output_;
  std::unique_ptr<Store> store_;
};

TEST_F(StoreTest, FailedLayerAbortsTheStepAndNothingElse) {
  Make();
  const SequenceId id = Create();
  Decode(id, 3);
  const StepId step = Begin(id, 2);
  ASSERT_TRUE(Verify(step, 0, 2).ok());
  before_verify_ = [](const VerifyParams&) {
    return absl::InternalError("device fell off the bus");
  };
  const absl::Status failed = Verify(step, 1, 2);
  EXPECT_EQ(failed.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(failed.message()), HasSubstr("device fell off the bus"));
  before_verify_ = nullptr;
  const absl::Status later = Verify(step, 1, 2);
  EXPECT_EQ(GetDetail(later, detail::kReason), reason::kStepAborted);
  EXPECT_EQ(store_->Get(kAlice, id)->position, 3u);
  EXPECT_EQ(store_->Get(kAlice, id)->open_step, kNoStep);
  Decode(id, 20);  // and it goes on
}

TEST_F(StoreTest, PoisonedRowIsNamedAndOthersAreUnharmed) {
  Make();
  const SequenceId good = Create(), bad = Create();
  auto step = store_->BeginStep(kAlice, {.rows = {{good, 1, 1}, {bad, 1, 1}}});
  spoil_ = [](PackedInputs& packed) {  // NaN in the second row's first value
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(&packed.v[16 * sizeof(float)], &nan, sizeof(nan));
  };
  const absl::Status status = Verify(step->id, 0, 2);
  EXPECT_EQ(GetDetail(status, detail::kReason), reason::kStepAborted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("row 1"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("NaN or infinite"));
  spoil_ = [](PackedInputs& packed) { packed.log_alpha[0] = 0.5f; };
  EXPECT_THAT(std::string(Verify(Begin(good, 1), 0, 1).message()),
              HasSubstr("log_alpha is positive"));
  spoil_ = nullptr;
  Decode(good, 20);
  Decode(bad, 20);
  EXPECT_EQ(store_->counters().poisoned_rows, 2u);
}

// h / L at each plan: 0, 1/8, 2/8, 3/8, and 2/8 as the mean of two rows.
TEST_F(StoreTest, RingOccupancyIsSeenOnceAPlan) {
  Make();
  const SequenceId one = Create(), other = Create();
  Decode(one, 4);
  const StepRequest both = {.rows = {{one, 5, 1}, {other, 1, 1}}};
  const StepId step = store_->BeginStep(kAlice, both)->id;
  EXPECT_EQ(store_->BeginStep(kAlice, both)->id, step);  // a repeat plans nothing
  ASSERT_TRUE(store_->Abort(kAlice, step).ok());
  ASSERT_TRUE(store_->Abort(kAlice, Begin(one, 0)).ok());  // no row reads a ring
  const RingOccupancy occupancy = store_->counters().ring_occupancy;
  EXPECT_THAT(occupancy.steps, ::testing::ElementsAre(2, 2, 1, 0, 0, 0, 0, 0, 0, 0));
  EXPECT_EQ(occupancy.sum, 1.0);
}

TEST_F(StoreTest, AbortWaitsForARunningVerify) {
  Make();
  const SequenceId id = Create();
  const StepId step = Begin(id, 1);
  testing::Notification entered, go_on;
  before_verify_ = [&](const VerifyParams&) {
    entered.Notify();
    go_on.WaitForNotification();
    return absl::OkStatus();
  };
  std::thread worker([&] { EXPECT_TRUE(Verify(step, 0, 1).ok()); });
  entered.WaitForNotification();
  std::thread ender([&] { EXPECT_TRUE(store_->Abort(kAlice, step).ok()); });
  // Whether the abort has begun to wait or not, the sequence must stay in its step until the Verify
  // is out.
  EXPECT_EQ(store_->Get(kAlice, id)->open_step, step);
  EXPECT_EQ(store_->Release(kAlice, {{id}}).code(), absl::StatusCode::kFailedPrecondition);
  go_on.Notify();
  worker.join();
  ender.join();
  before_verify_ = nullptr;
  EXPECT_EQ(store_->Get(kAlice, id)->open_step, kNoStep);
  Decode(id, 10);
}

TEST_F(StoreTest, EndOfAnOwnerDuringAVerifyReclaimsEverything) {
  Make();
  const SequenceId id = Create();
  Decode(id, 3);
  const SequenceId other = Create(kBob);
  const StepId step = Begin(id, 1);
  testing::Notification entered, go_on;
  before_verify_ = [&](const VerifyParams&) {
    entered.Notify();
    go_on.WaitForNotification();
    return absl::OkStatus();
  };
  std::thread worker([&] { (void)Verify(step, 0, 1); });
  entered.WaitForNotification();
  Store::Released released;
  std::thread reaper([&] { released = store_->ReleaseOwner(kAlice); });
  go_on.Notify();
  worker.join();
  reaper.join();
  before_verify_ = nullptr;
  EXPECT_EQ(released.sequences, 1u);
  EXPECT_EQ(released.steps, 1u);
  EXPECT_EQ(store_->usage().sequences, 1u);
  EXPECT_EQ(store_->usage().pages.free, store_->usage().pages.total);
  EXPECT_EQ(store_->Get(kAlice, id).status().code(), absl::StatusCode::kNotFound);
  Decode(other, 10, kBob);
}

TEST_F(StoreTest, SameLayerTwiceAtATimeIsSerialised) {
  Make();
  const StepId step = Begin(Create(), 1);
  std::atomic<int> inside{0}, most{0}, calls{0};
  before_verify_ = [&](const VerifyParams&) {
    most = std::max<int>(most, ++inside);
    if (++calls < 100) std::this_thread::yield();
    --inside;
    return absl::OkStatus();
  };
  std::vector<std::thread> threads;
  std::mt19937_64 random(1);
  PackedInputs packed;
  packed.Append(testing::RandomToken(geometry_.layers[0], Dtype::kFp32, random), Dtype::kFp32);
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      std::vector<float> output(16);
      for (int j = 0; j < 25; ++j) {
        EXPECT_TRUE(store_
                        ->Verify(kAlice, {.step = step,
                                          .layer = 0,
                                          .token_count = 1,
                                          .inputs = packed.view(),
                                          .output = output.data()})
                        .ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(calls, 100);
  EXPECT_EQ(most, 1);
}

TEST_F(StoreTest, DeadlineAbortsTheStep) {
  Make();
  const SequenceId id = Create();
  StepRequest request = Request(id, 1);
  request.deadline = absl::FromUnixSeconds(100);
  const StepId step = store_->BeginStep(kAlice, request)->id;
  EXPECT_EQ(store_->AbortExpired(absl::FromUnixSeconds(99)), 0u);
  EXPECT_TRUE(Verify(step, 0, 1).ok());
  EXPECT_EQ(store_->AbortExpired(absl::FromUnixSeconds(100)), 1u);
  const absl::Status late = Verify(step, 1, 1);
  EXPECT_EQ(GetDetail(late, detail::kReason), reason::kStepAborted);
  EXPECT_THAT(std::string(late.message()), HasSubstr("step_timeout_ms"));
  EXPECT_EQ(store_->Get(kAlice, id)->version, 1u);
}

TEST_F(StoreTest, OwnersAreStrangersToEachOther) {
  Make();
  const SequenceId id = Create();
  const StepId step = Begin(id, 1);
  EXPECT_EQ(store_->Get(kBob, id).status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(Verify(step, 0, 1, kBob).code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(store_->Abort(kBob, step).code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(store_->Release(kBob, {{id}}).code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(store_->Fork(kBob, {id, 1}, 1).status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(store_->ReleaseOwner(kBob).sequences, 0u);
  EXPECT_TRUE(Verify(step, 0, 1).ok());
}

TEST_F(StoreTest, AutoCommitEndsWithTheLastLayer) {
  Make();
  const SequenceId id = Create();
  StepRequest request = Request(id, 3);
  request.auto_commit = true;
  const StepId step = store_->BeginStep(kAlice, request)->id;
  EXPECT_TRUE(Verify(step, 1, 3).ok());
  EXPECT_EQ(store_->Get(kAlice, id)->position, 0u);
  EXPECT_TRUE(Verify(step, 1, 3).ok());  // a repeat does not count as another layer
  EXPECT_EQ(store_->Get(kAlice, id)->position, 0u);
  EXPECT_TRUE(Verify(step, 0, 3).ok());
  EXPECT_EQ(store_->Get(kAlice, id)->position, 3u);
  EXPECT_EQ(Verify(step, 0, 3).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(StoreTest, CapacityIsReachableToTheLastSlotAndExhaustionChangesNothing) {
  Make();
  const auto all = store_->CreateSequences(kAlice, 4);
  ASSERT_TRUE(all.ok());
  const absl::Status fifth = store_->CreateSequences(kAlice, 1).status();
  EXPECT_EQ(GetDetail(fifth, detail::kReason), reason::kNoSlot);
  EXPECT_NE(GetDetail(fifth, detail::kRetryAfterMs), "");
  EXPECT_EQ(GetDetail(store_->Fork(kAlice, {all->ids[0], 1}, 1).status(), detail::kReason),
            reason::kNoSlot);
  // Snapshots have slots of their own, and every sequence and snapshot can own a page at once.
  for (const SequenceId id : all->ids) Decode(id, 20);
  for (const char* digest : {"a", "b"}) {
    EXPECT_TRUE(
        *store_->CreateSnapshot(kAlice, {all->ids[0], VersionOf(all->ids[0])}, {digest, 20}));
  }
  EXPECT_EQ(
      GetDetail(
          store_->CreateSnapshot(kAlice, {all->ids[0], VersionOf(all->ids[0])}, {"c", 20}).status(),
          detail::kReason),
      reason::kNoSnapshotSlot);
  EXPECT_FALSE(*store_->CreateSnapshot(kAlice, {all->ids[0], VersionOf(all->ids[0])}, {"a", 20}));
  for (const SequenceId id : all->ids) Decode(id, 40);
  EXPECT_EQ(store_->usage().snapshots, 2u);
  ASSERT_TRUE(store_->Release(kAlice, {{all->ids[2]}}).ok());
  EXPECT_TRUE(store_->CreateFromSnapshot(kAlice, {"a", 20}, 1).ok());
}

TEST_F(StoreTest, StaleIdsNeverNameAnotherSequence) {
  Make({.sequences_max = 1, .snapshots_max = 0, .spare_pages = 1, .rows_max = 1, .steps_max = 1});
  const SequenceId first = Create();
  const StepId step = Begin(first, 1);
  ASSERT_TRUE(store_->Abort(kAlice, step).ok());
  ASSERT_TRUE(store_->Release(kAlice, {{first}}).ok());
  const SequenceId second = Create();
  EXPECT_NE(first, second);
  EXPECT_EQ(store_->Get(kAlice, first).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->BeginStep(kAlice, {.rows = {{first, 1, 1}}}).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(Verify(step, 0, 1).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(static_cast<uint64_t>(second) >> 48, 9u);  // the tag
}

// The bytes a fork copies are its live records; the checkpoint's size does not enter, nor does a
// page get taken.
TEST_F(StoreTest, ForkCopiesRecordsOnly) {
  for (const uint32_t d_k : {16u, 256u}) {
    Make({.sequences_max = 8, .snapshots_max = 1, .spare_pages = 2, .rows_max = 1, .steps_max = 1},
         d_k);
    const SequenceId id = Create();
    Decode(id, 13);
    const SequenceState at = *store_->Get(kAlice, id);
    const uint32_t free_pages = store_->usage().pages.free;
    ASSERT_TRUE(store_->Fork(kAlice, {id, at.version}, 4, at.floor).ok());
    EXPECT_EQ(store_->counters().ring_copy_bytes, 0u);
    ASSERT_TRUE(store_->Fork(kAlice, {id, at.version}, 2).ok());
    EXPECT_EQ(store_->counters().ring_copy_bytes,
              2 * (at.position - at.floor) * geometry_.record_bytes());
    EXPECT_EQ(store_->usage().pages.free, free_pages);
  }
}

TEST_F(StoreTest, RepeatedCommitIsAnsweredFromTheRecord) {
  Make();
  const SequenceId id = Create();
  const StepId step = Begin(id, 4);
  ASSERT_TRUE(Verify(step, 0, 4).ok());
  ASSERT_TRUE(Verify(step, 1, 4).ok());
  const std::vector<uint32_t> two = {2}, three = {3}, five = {5};
  EXPECT_EQ(store_->Commit(kAlice, step, five).status().code(), absl::StatusCode::kOutOfRange);
  const auto committed = store_->Commit(kAlice, step, two);
  ASSERT_TRUE(committed.ok());
  EXPECT_EQ(store_->Commit(kAlice, step, two)->positions, committed->positions);
  EXPECT_EQ(store_->Commit(kAlice, step, three).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(store_->Get(kAlice, id)->position, 2u);
  Decode(id, 1);  // a later mutation replaces the record
  EXPECT_EQ(store_->Commit(kAlice, step, two).status().code(), absl::StatusCode::kNotFound);
}

// First windows differ, so sequences admitted together do not all flush in the same step.
TEST_F(StoreTest, FirstFlushesAreStaggered) {
  Make({.sequences_max = 4, .snapshots_max = 0, .spare_pages = 4, .rows_max = 4, .steps_max = 1});
  const auto ids = store_->CreateSequences(kAlice, 4)->ids;
  std::vector<uint32_t> folds;
  for (int token = 0; token < 9; ++token) {
    StepRequest request;
    for (const SequenceId id : ids) request.rows.push_back({id, VersionOf(id), 1});
    const auto step = store_->BeginStep(kAlice, request);
    folds.push_back(step->folds);
    ASSERT_TRUE(Verify(step->id, 0, 4).ok());
    ASSERT_TRUE(Verify(step->id, 1, 4).ok());
    const std::vector<uint32_t> all(4, 1);
    ASSERT_TRUE(store_->Commit(kAlice, step->id, all).ok());
  }
  EXPECT_LE(*std::max_element(folds.begin(), folds.end()), 1u);  // W = 8, 7, 6, 5
}

}  // namespace
}  // namespace ssmd
