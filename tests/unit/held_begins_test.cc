// service/held_begins.cc: bounded, counted, let go once.
#include "service/held_begins.h"

#include <gtest/gtest.h>

#include "tests/testing/status_is.h"

namespace ssmd {
namespace {

using testing::Fails;

class HeldBeginsTest : public ::testing::Test {
 protected:
  std::atomic<uint32_t> total_{0};
  HeldBegins held_{/*begins_max=*/2, &total_};
  const StepsCallRef one_ = std::make_shared<StepsCall>(), two_ = std::make_shared<StepsCall>(),
                     three_ = std::make_shared<StepsCall>();
};

TEST_F(HeldBeginsTest, HoldsAsManyAsItMayInOrder) {
  EXPECT_TRUE(held_.Hold(one_).ok());
  EXPECT_TRUE(held_.Hold(two_).ok());
  const absl::Status full = held_.Hold(three_);
  EXPECT_TRUE(Fails(full, absl::StatusCode::kResourceExhausted, {"stream_begins_max", "2"}));
  EXPECT_EQ(GetDetail(full, detail::kReason), reason::kLimit);
  EXPECT_NE(GetDetail(full, detail::kRetryAfterMs), "");
  EXPECT_EQ(held_.All(), (std::vector<StepsCallRef>{one_, two_}));
  EXPECT_EQ(total_, 2u);
}

TEST_F(HeldBeginsTest, LetsGoOfACallOnce) {
  ASSERT_TRUE(held_.Hold(one_).ok());
  ASSERT_TRUE(held_.Hold(two_).ok());
  EXPECT_TRUE(held_.Take(one_));
  EXPECT_FALSE(held_.Take(one_));
  EXPECT_FALSE(held_.Take(three_));
  EXPECT_EQ(total_, 1u);
  EXPECT_EQ(held_.Close(absl::CancelledError("gone")), (std::deque<StepsCallRef>{two_}));
  EXPECT_FALSE(held_.Take(two_));
  EXPECT_EQ(total_, 0u);
}

TEST_F(HeldBeginsTest, ClosedItHoldsNothingAndSaysWhy) {
  ASSERT_TRUE(held_.Hold(one_).ok());
  held_.Close(absl::UnavailableError("draining"));
  EXPECT_TRUE(Fails(held_.Hold(two_), absl::StatusCode::kUnavailable, {"draining"}));
  EXPECT_TRUE(held_.Close(absl::CancelledError("gone")).empty());
  EXPECT_TRUE(Fails(held_.Hold(two_), absl::StatusCode::kCancelled, {"gone"}));
  EXPECT_EQ(total_, 0u);
}

}  // namespace
}  // namespace ssmd
