// service/tenants.cc: scopes of snapshot keys, and what counts against a quota.
#include "service/tenants.h"

#include <gtest/gtest.h>

#include "tests/testing/status_is.h"

namespace ssmd {
namespace {

using testing::Fails;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;

class TenantsTest : public ::testing::Test {
 protected:
  TenantId Introduce(const std::string& name, const Quota& quota = {}) {
    return *table_.Introduce(name, quota);
  }
  absl::Status Create(TenantId tenant, uint64_t count, bool succeeds = true) {
    return table_
        .CreateSequences(tenant, kModel, count,
                         [&]() -> absl::StatusOr<NewSequences> {
                           ++made_;
                           if (!succeeds) return absl::NotFoundError("no such snapshot");
                           return NewSequences{};
                         })
        .status();
  }
  absl::StatusOr<bool> Snapshot(TenantId tenant, const std::string& digest, uint64_t bytes,
                                absl::StatusOr<bool> result = true) {
    return table_.CreateSnapshot(tenant, kModel, ScopedKey(tenant, {digest, 1}), bytes, [&] {
      ++made_;
      return result;
    });
  }

  static constexpr TenantTable::ModelTag kModel = 7;
  TenantTable table_;
  int made_ = 0;
};

TEST_F(TenantsTest, NamesKeepTheirNumbers) {
  const TenantId a = Introduce("a"), b = Introduce("b");
  EXPECT_NE(a, b);
  EXPECT_NE(a, kNoTenant);
  EXPECT_EQ(Introduce("a", {.sequences = 1}), a);
  EXPECT_EQ(table_.NameOf(b), "b");
  EXPECT_EQ(table_.NameOf(kNoTenant), "-");
  for (size_t i = 2; i < kTenantsMax; ++i) Introduce(std::to_string(i));
  EXPECT_TRUE(Fails(table_.Introduce("more", {}).status(), kExhausted, {"more", "1024"}));
  EXPECT_EQ(Introduce("b"), b);
}

TEST_F(TenantsTest, ScopesKeepEqualDigestsApart) {
  const TenantId a = Introduce("a"), b = Introduce("b");
  const SnapshotKey key{std::string(64, 'd'), 5};
  EXPECT_EQ(ScopedKey(kNoTenant, key), key);
  EXPECT_FALSE(ScopedKey(a, key) == ScopedKey(b, key));
  EXPECT_EQ(UnscopedKey(a, ScopedKey(a, key)), key);
  EXPECT_LE(ScopedKey(a, key).digest.size(), kStoredDigestBytesMax);
  EXPECT_TRUE(IsInScope(a, ScopedKey(a, key)));
  EXPECT_FALSE(IsInScope(b, ScopedKey(a, key)));
}

TEST_F(TenantsTest, SequencesCountUntilTheyAreReleased) {
  const TenantId a = Introduce("a", {.sequences = 3}), b = Introduce("b");
  EXPECT_TRUE(Create(a, 2).ok());
  EXPECT_TRUE(Fails(Create(a, 2), kExhausted, {"tenant a", "sequences=3", "2 in use", "2 more"}));
  EXPECT_EQ(GetDetail(Create(a, 2), detail::kReason), "QUOTA_EXCEEDED");
  EXPECT_EQ(made_, 1);
  EXPECT_TRUE(Create(b, 100).ok());  // another's quota is another's
  EXPECT_TRUE(Fails(Create(a, 1, false), absl::StatusCode::kNotFound, {}));
  EXPECT_EQ(table_.Of(a).sequences, 2u);  // what failed is not counted
  EXPECT_TRUE(Create(a, 1).ok());
  table_.SequencesReleased(a, kModel, 3);
  EXPECT_EQ(table_.Of(a).sequences, 0u);
  EXPECT_EQ(table_.Of(b, kModel).sequences, 100u);
  EXPECT_TRUE(Fails(Create(a, uint64_t{1} << 63), kExhausted, {}));
}

TEST_F(TenantsTest, PagesAreThoseOfSequencesAndSnapshots) {
  const TenantId a = Introduce("a", {.pages = 2});
  EXPECT_TRUE(Create(a, 1).ok());
  EXPECT_TRUE(Snapshot(a, "x", 10).ok());
  EXPECT_TRUE(Fails(Create(a, 1), kExhausted, {"pages=2"}));
  EXPECT_TRUE(Fails(Snapshot(a, "y", 10).status(), kExhausted, {"pages=2"}));
  EXPECT_TRUE(Snapshot(a, "x", 10).ok());  // the place is its own
}

TEST_F(TenantsTest, SnapshotsCountTheirBytes) {
  const TenantId a = Introduce("a", {.snapshot_bytes = 100});
  EXPECT_TRUE(*Snapshot(a, "x", 60));
  EXPECT_TRUE(
      Fails(Snapshot(a, "y", 41).status(), kExhausted, {"snapshot-bytes=100", "60 in use"}));
  EXPECT_FALSE(*Snapshot(a, "x", 60, false));  // it was there and was kept
  EXPECT_EQ(table_.Of(a).snapshot_bytes, 60u);
  EXPECT_TRUE(*Snapshot(a, "x", 100));  // replaced by a larger one
  EXPECT_EQ(table_.Of(a).snapshot_bytes, 100u);
  EXPECT_FALSE(Snapshot(a, "x", 50, absl::AbortedError("")).ok());
  EXPECT_EQ(table_.Of(a).snapshot_bytes, 100u);
  const auto drop = [&](const std::string& digest, absl::Status result) {
    return table_.DeleteSnapshot(a, kModel, ScopedKey(a, {digest, 1}), [&] { return result; });
  };
  EXPECT_TRUE(Fails(drop("x", absl::NotFoundError("")), absl::StatusCode::kNotFound, {}));
  EXPECT_EQ(table_.Of(a).snapshots, 1u);
  EXPECT_TRUE(drop("x", absl::OkStatus()).ok());
  EXPECT_EQ(table_.Of(a).snapshots, 0u);
  EXPECT_EQ(table_.Of(a).snapshot_bytes, 0u);
}

TEST_F(TenantsTest, ModelsThatGoTakeTheirSnapshotsAlong) {
  const TenantId a = Introduce("a");
  EXPECT_TRUE(*Snapshot(a, "x", 60));
  table_.ModelDropped(kModel + 1);
  EXPECT_EQ(table_.Of(a).snapshot_bytes, 60u);
  table_.ModelDropped(kModel);
  EXPECT_EQ(table_.Of(a).snapshot_bytes, 0u);
  EXPECT_EQ(table_.Of(a).pages(), 0u);
}

TEST_F(TenantsTest, WithoutTenantsNothingIsCounted) {
  EXPECT_TRUE(Create(kNoTenant, 5).ok());
  EXPECT_TRUE(*Snapshot(kNoTenant, "x", 60));
  table_.SequencesReleased(kNoTenant, kModel, 50);
  EXPECT_EQ(table_.Of(kNoTenant).pages(), 0u);
}

}  // namespace
}  // namespace ssmd
