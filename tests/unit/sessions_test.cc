// service/sessions.cc: leases, calls in flight, exactly one release, recorded replies.
#include "service/sessions.h"

#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"
#include "tests/testing/fake_clock.h"
#include "tests/testing/status_is.h"

namespace ssmd {
namespace {

using testing::Fails;
using testing::FakeClock;
using testing::RefusesField;

constexpr auto kNotFound = absl::StatusCode::kNotFound;

class SessionsTest : public ::testing::Test {
 protected:
  OwnerId Open(uint32_t lease_ms = 1000) { return table_.Open(lease_ms, "test")->id; }
  // Releases so far of `id`.
  int Releases(OwnerId id) const { return static_cast<int>(released_.count(id)); }

  FakeClock clock_;
  std::multiset<OwnerId> released_, kept_;
  SessionTable table_{{.sessions_max = 3, .lease_ms_min = 100, .lease_ms_max = 5000},
                      clock_.AsClock(),
                      [this](OwnerId id, TenantId, SessionTable::Sequences sequences) {
                        if (sequences == SessionTable::Sequences::kKeep) {
                          kept_.insert(id);
                        } else {
                          released_.insert(id);
                        }
                        return Store::Released{.sequences = 7, .steps = 2};
                      }};
};

TEST_F(SessionsTest, IdsAreDistinctAndNotZero) {
  const OwnerId a = Open(), b = Open();
  EXPECT_NE(a, b);
  EXPECT_NE(static_cast<uint64_t>(a), 0u);
  EXPECT_TRUE(Fails(table_.Enter(OwnerId{0}), kNotFound, {"session"}));
}

TEST_F(SessionsTest, LeaseOutsideTheLimitsIsRefused) {
  EXPECT_TRUE(RefusesField(table_.Open(99, ""), "lease_ms", {"100..5000", "got 99"}));
  EXPECT_TRUE(RefusesField(table_.Open(5001, ""), "lease_ms", {"100..5000", "got 5001"}));
  EXPECT_EQ(table_.size(), 0u);
}

TEST_F(SessionsTest, TableIsBounded) {
  for (int i = 0; i < 3; ++i) Open();
  const auto refused = table_.Open(1000, "");
  EXPECT_TRUE(Fails(refused, absl::StatusCode::kResourceExhausted, {"sessions_max", "3"}));
  EXPECT_EQ(GetDetail(refused.status(), detail::kReason), reason::kLimit);
  EXPECT_NE(GetDetail(refused.status(), detail::kRetryAfterMs), "");
}

TEST_F(SessionsTest, LeaseRunsOutOnce) {
  const OwnerId id = Open(1000);
  clock_.Advance(absl::Milliseconds(999));
  EXPECT_EQ(table_.ExpireLeases(), 0u);
  clock_.Advance(absl::Milliseconds(1));
  const auto expired = table_.Enter(id);  // even before the sweep
  EXPECT_TRUE(Fails(expired, kNotFound, {"expired"}));
  EXPECT_EQ(GetDetail(expired.status(), detail::kReason), reason::kSessionExpired);
  EXPECT_EQ(table_.ExpireLeases(), 1u);
  EXPECT_EQ(table_.ExpireLeases(), 0u);
  EXPECT_EQ(Releases(id), 1);
  EXPECT_EQ(table_.expired_count(), 1u);
  EXPECT_EQ(table_.size(), 0u);
}

TEST_F(SessionsTest, AnyCallRenewsTheLease) {
  const OwnerId id = Open(1000);
  for (int i = 0; i < 5; ++i) {
    clock_.Advance(absl::Milliseconds(900));
    EXPECT_TRUE(table_.Enter(id).ok());
    EXPECT_EQ(table_.ExpireLeases(), 0u);
  }
}

TEST_F(SessionsTest, ACallInFlightHoldsTheLeaseAndRenewsItAtItsEnd) {
  const OwnerId id = Open(1000);
  auto call = table_.Enter(id);
  clock_.Advance(absl::Seconds(100));
  EXPECT_EQ(table_.ExpireLeases(), 0u);
  EXPECT_TRUE(table_.Enter(id).ok());  // a second call meanwhile
  call->End();
  clock_.Advance(absl::Milliseconds(999));
  EXPECT_EQ(table_.ExpireLeases(), 0u);
  clock_.Advance(absl::Milliseconds(1));
  EXPECT_EQ(table_.ExpireLeases(), 1u);
  EXPECT_EQ(Releases(id), 1);
}

TEST_F(SessionsTest, CloseReleasesWhenTheLastCallHasEnded) {
  const OwnerId id = Open();
  auto closer = table_.Enter(id);
  auto other = table_.Enter(id);
  int done = 0;
  ASSERT_TRUE(table_
                  .Close(*closer,
                         [&](Store::Released released) {
                           EXPECT_EQ(released.sequences, 7u);
                           EXPECT_EQ(released.steps, 2u);
                           EXPECT_EQ(Releases(id), 1);
                           ++done;
                         })
                  .ok());
  EXPECT_TRUE(other->closing());
  EXPECT_TRUE(Fails(table_.Enter(id), kNotFound, {"closed"}));
  EXPECT_TRUE(Fails(table_.Close(*other, [](Store::Released) { FAIL(); }), kNotFound, {}));
  closer->End();
  EXPECT_EQ(done, 0);
  other->End();
  other->End();  // idempotent
  EXPECT_EQ(done, 1);
  clock_.Advance(absl::Seconds(100));
  EXPECT_EQ(table_.ExpireLeases(), 0u);
  EXPECT_EQ(Releases(id), 1);
}

TEST_F(SessionsTest, MovedCallsEndOnce) {
  const OwnerId id = Open();
  SessionCall call = *table_.Enter(id);
  SessionCall moved = std::move(call);
  call = std::move(moved);
  EXPECT_EQ(call->id(), id);
  call.End();
  clock_.Advance(absl::Seconds(2));
  EXPECT_EQ(table_.ExpireLeases(), 1u);
}

TEST_F(SessionsTest, RepliesAreRecordedByRequestId) {
  const OwnerId id = Open();
  SessionCall call = *table_.Enter(id);
  uint64_t made = 0;
  const auto make = [&]() -> absl::StatusOr<NewSequences> {
    return NewSequences{.ids = {SequenceId{++made}}};
  };
  EXPECT_EQ(call->Once(5, "create 1", make)->ids[0], SequenceId{1});
  EXPECT_EQ(call->Once(5, "create 1", make)->ids[0], SequenceId{1});
  EXPECT_TRUE(RefusesField(call->Once(5, "create 2", make), "request_id", {"0x5", "other"}));
  EXPECT_EQ(call->Once(0, "create 1", make)->ids[0], SequenceId{2});  // 0: not recorded
  EXPECT_EQ(call->Once(0, "create 1", make)->ids[0], SequenceId{3});

  const auto fail = []() -> absl::StatusOr<NewSequences> { return absl::NotFoundError("x"); };
  EXPECT_FALSE(call->Once(6, "create 1", fail).ok());  // failures are not recorded
  EXPECT_TRUE(call->Once(6, "create 1", make).ok());

  for (uint64_t i = 0; i < kRecordedRepliesMax; ++i)
    ASSERT_TRUE(call->Once(100 + i, "", make).ok());
  const uint64_t before = made;
  EXPECT_EQ(call->Once(100, "", make)->ids[0], SequenceId{5});  // the oldest one left
  EXPECT_EQ(made, before);
  EXPECT_TRUE(call->Once(5, "create 1", make).ok());  // forgotten: made again
  EXPECT_EQ(made, before + 1);
}

TEST_F(SessionsTest, RecordedWindowsAreBounded) {
  SessionCall call = *table_.Enter(Open());
  int made = 0;
  const auto make = [&]() -> absl::StatusOr<NewSequences> {
    ++made;
    return NewSequences{.worker_window = std::string(kWorkerWindowBytesMax * 2 / 5, 'w')};
  };
  for (uint64_t id = 1; id <= 3; ++id) ASSERT_TRUE(call->Once(id, "", make).ok());
  ASSERT_TRUE(call->Once(3, "", make).ok());
  ASSERT_TRUE(call->Once(2, "", make).ok());
  EXPECT_EQ(made, 3);
  ASSERT_TRUE(call->Once(1, "", make).ok());  // forgotten
  EXPECT_EQ(made, 4);
}

TEST_F(SessionsTest, EqualRequestsAtOneTimeAreMadeOnce) {
  const OwnerId id = Open();
  std::atomic<int> made{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      SessionCall call = *table_.Enter(id);
      EXPECT_TRUE(call->Once(1, "x",
                             [&]() -> absl::StatusOr<NewSequences> {
                               ++made;
                               return NewSequences{};
                             })
                      .ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(made, 1);
}

// Sessions and the one store that they own sequences in.
class AdoptionTest : public ::testing::Test {
 protected:
  AdoptionTest() {
    auto store = Store::Create(
        {.geometry = {.layers = {{Family::kMamba2, 1, 1, 16, 8}},
                      .formats = {.activation = Dtype::kFp32, .correction = Dtype::kNone}},
         .capacity = {.sequences_max = 4,
                      .snapshots_max = 0,
                      .spare_pages = 2,
                      .rows_max = 4,
                      .steps_max = 2}},
        [this](const BackendSpec& spec) { return device_.CreateBackend(spec); });
    EXPECT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }
  OwnerId Open(uint32_t adoption_ms) { return table_.Open(1000, "test", adoption_ms)->id; }
  std::vector<SequenceId> Create(OwnerId owner, uint32_t count) {
    return store_->CreateSequences(owner, count)->ids;
  }
  absl::StatusOr<std::vector<SequenceState>> Adopt(OwnerId adopter, OwnerId old,
                                                   std::vector<SequenceId> ids = {}) {
    SSMD_ASSIGN_OR_RETURN(SessionCall call, table_.Enter(adopter));
    return table_.Adopt(*call, old, *store_, ids);
  }
  void Close(OwnerId id) {
    auto call = table_.Enter(id);
    ASSERT_TRUE(table_.Close(*call, [](Store::Released) {}).ok());
  }
  static std::vector<SequenceId> Ids(const std::vector<SequenceState>& states) {
    std::vector<SequenceId> ids;
    for (const SequenceState& state : states) ids.push_back(state.id);
    return ids;
  }

  FakeClock clock_;
  cpu::ThreadPool pool_{1};
  cpu::CpuDevice device_{1u << 20, &pool_};
  std::unique_ptr<Store> store_;
  SessionTable table_{
      {.sessions_max = 3, .lease_ms_min = 100, .lease_ms_max = 5000, .adoption_ms_max = 2000},
      clock_.AsClock(),
      [this](OwnerId id, TenantId, SessionTable::Sequences sequences) {
        return sequences == SessionTable::Sequences::kKeep ? store_->DetachOwner(id)
                                                           : store_->ReleaseOwner(id);
      }};
};

TEST_F(AdoptionTest, KeptUntilTheTimeIsOver) {
  const OwnerId old = Open(2000);
  Create(old, 2);
  Close(old);
  EXPECT_EQ(table_.kept_count(), 1u);
  clock_.Advance(absl::Milliseconds(1999));
  table_.ExpireLeases();
  EXPECT_EQ(store_->CountOwned(old), 2u);
  clock_.Advance(absl::Milliseconds(1));
  const OwnerId heir = Open(0);
  EXPECT_TRUE(Fails(Adopt(heir, old), kNotFound, {"old_session_id"}));
  EXPECT_EQ(store_->CountOwned(old), 0u);
  EXPECT_EQ(table_.kept_count(), 0u);
}

TEST_F(AdoptionTest, AllOrSomeAndRepeats) {
  const OwnerId old = Open(1000), heir = Open(0);
  const std::vector<SequenceId> ids = Create(old, 3);
  EXPECT_TRUE(Fails(Adopt(heir, old), absl::StatusCode::kPermissionDenied, {"lives"}));
  EXPECT_TRUE(Fails(Adopt(heir, heir), absl::StatusCode::kPermissionDenied, {"lives"}));
  Close(old);
  EXPECT_TRUE(Fails(table_.Enter(old), kNotFound, {}));
  const SequenceId own = Create(heir, 1)[0];
  // All or none: one of them is unknown.
  EXPECT_TRUE(Fails(Adopt(heir, old, {ids[0], SequenceId{99}}), kNotFound, {}));
  EXPECT_EQ(store_->CountOwned(heir), 1u);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(Ids(*Adopt(heir, old, {ids[1], own})).size(), 2u);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(Ids(*Adopt(heir, old)), ids);
  EXPECT_EQ(store_->CountOwned(heir), 4u);
  // Somebody else comes too late, with and without names.
  const OwnerId late = Open(0);
  EXPECT_TRUE(Fails(Adopt(late, old, {ids[0]}), absl::StatusCode::kPermissionDenied, {"another"}));
  EXPECT_EQ(Adopt(late, old)->size(), 0u);
  // What is the caller's is accepted even after the time.
  clock_.Advance(absl::Milliseconds(999));
  ASSERT_TRUE(table_.Enter(heir).ok());
  clock_.Advance(absl::Milliseconds(1));
  EXPECT_EQ(Ids(*Adopt(heir, old, ids)), ids);
  EXPECT_TRUE(Fails(Adopt(heir, old), kNotFound, {}));
  EXPECT_EQ(store_->CountOwned(heir), 4u);
}

TEST_F(AdoptionTest, AnExpiredLeaseNeedsNoSweep) {
  const OwnerId old = Open(1000);
  const std::vector<SequenceId> ids = Create(old, 1);
  clock_.Advance(absl::Milliseconds(1000));
  EXPECT_EQ(Ids(*Adopt(Open(0), old)), ids);
}

TEST_F(AdoptionTest, NothingIsKeptWithoutSequencesOrUnasked) {
  const OwnerId empty = Open(1000), unasked = Open(0);
  Create(unasked, 1);
  Close(empty);
  Close(unasked);
  EXPECT_EQ(table_.kept_count(), 0u);
  EXPECT_EQ(store_->usage().sequences, 0u);
  EXPECT_TRUE(Fails(Adopt(Open(0), unasked), kNotFound, {}));
}

TEST_F(AdoptionTest, AdoptionTimeHasALimit) {
  EXPECT_TRUE(RefusesField(table_.Open(1000, "", 2001), "adoption_ms", {"0..2000", "got 2001"}));
}

// As many workers as there may be die together: as many come back, and find what they left.
TEST_F(AdoptionTest, KeptSessionsTakeNoPlaceOfOpenOnes) {
  std::vector<OwnerId> old;
  std::vector<SequenceId> ids;
  for (int i = 0; i < 3; ++i) old.push_back(Open(2000));
  for (const OwnerId id : old) ids.push_back(Create(id, 1)[0]);
  EXPECT_TRUE(Fails(table_.Open(1000, ""), absl::StatusCode::kResourceExhausted,
                    {"sessions_max", "3 sessions are open"}));
  clock_.Advance(absl::Milliseconds(1000));
  EXPECT_EQ(table_.ExpireLeases(), 3u);
  EXPECT_EQ(table_.size(), 0u);
  EXPECT_EQ(table_.kept_count(), 3u);
  for (size_t i = 0; i < old.size(); ++i) {
    const OwnerId heir = Open(2000);
    EXPECT_EQ(Ids(*Adopt(heir, old[i])), std::vector<SequenceId>{ids[i]});
    EXPECT_EQ(table_.kept_count(), 2 - i);
  }
  EXPECT_EQ(table_.size(), 3u);
}

// An ended session that keeps nothing is remembered for repeats, but not without bound.
TEST_F(AdoptionTest, AdoptedOnesAreRememberedUpToALimit) {
  const OwnerId heir = Open(0);
  std::vector<OwnerId> old;
  for (int i = 0; i < 4; ++i) {  // one more than sessions_max
    old.push_back(Open(2000));
    const std::vector<SequenceId> ids = Create(old.back(), 2);
    Close(old.back());
    EXPECT_EQ(Ids(*Adopt(heir, old.back(), {ids[0]})).size(), 1u);
    EXPECT_EQ(table_.kept_count(), 1u) << "one is still kept";
    EXPECT_EQ(Ids(*Adopt(heir, old.back())), ids);
    EXPECT_EQ(table_.kept_count(), 0u);
    if (i < 3) {
      EXPECT_TRUE(store_->Release(heir, ids).ok());
    }
  }
  EXPECT_TRUE(Fails(Adopt(heir, old[0]), kNotFound, {"old_session_id"})) << "forgotten";
  EXPECT_EQ(Adopt(heir, old[1])->size(), 0u) << "remembered, though released";
  EXPECT_EQ(Adopt(heir, old[3])->size(), 2u);
  clock_.Advance(absl::Milliseconds(999));
  ASSERT_TRUE(table_.Enter(heir).ok());
  clock_.Advance(absl::Milliseconds(999));
  ASSERT_TRUE(table_.Enter(heir).ok());
  clock_.Advance(absl::Milliseconds(2));
  EXPECT_TRUE(Fails(Adopt(heir, old[3]), kNotFound, {"old_session_id"})) << "its time is over";
  EXPECT_EQ(table_.kept_count(), 0u);
  EXPECT_EQ(store_->CountOwned(heir), 2u);
}

// Calls, sweeps and a close race; whatever the order, the release comes once and last.
TEST_F(SessionsTest, ReleasesOnceUnderRaces) {
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> in_flight{0}, releases{0};
    SessionTable table({.sessions_max = 1, .lease_ms_min = 1, .lease_ms_max = 1000},
                       MonotonicClock(), [&](OwnerId, TenantId, SessionTable::Sequences) {
                         EXPECT_EQ(in_flight.load(), 0);
                         ++releases;
                         return Store::Released{};
                       });
    const OwnerId id = table.Open(1, "")->id;
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        while (true) {
          auto call = table.Enter(id);
          if (!call.ok()) return;
          ++in_flight;
          std::this_thread::yield();
          --in_flight;
        }
      });
    }
    threads.emplace_back([&] {
      auto call = table.Enter(id);
      if (call.ok()) (void)table.Close(*call, [](Store::Released) {});
    });
    threads.emplace_back([&] {
      while (releases == 0) {
        table.ExpireLeases();
        std::this_thread::yield();
      }
    });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(releases, 1);
  }
}

}  // namespace
}  // namespace ssmd
