// service/verify_queue.cc: bounded, in order, nothing is dropped.
#include "service/verify_queue.h"

#include <gtest/gtest.h>

#include <vector>

#include "absl/synchronization/notification.h"
#include "tests/testing/status_is.h"

namespace ssmd {
namespace {

TEST(VerifyQueue, RefusesBeyondItsDepthAndRunsTheRestInOrder) {
  VerifyQueue queue(/*worker_count=*/1, /*depth_max=*/2);
  absl::Notification started, go;
  std::vector<int> ran;
  ASSERT_TRUE(queue
                  .Push([&] {
                    started.Notify();
                    go.WaitForNotification();
                    ran.push_back(0);
                  })
                  .ok());
  started.WaitForNotification();
  EXPECT_EQ(queue.running(), 1u);
  ASSERT_TRUE(queue.Push([&] { ran.push_back(1); }).ok());
  ASSERT_TRUE(queue.Push([&] { ran.push_back(2); }).ok());
  EXPECT_EQ(queue.depth(), 2u);
  const absl::Status full = queue.Push([&] { ran.push_back(3); });
  EXPECT_TRUE(
      testing::Fails(full, absl::StatusCode::kResourceExhausted, {"verify_queue_max", "2"}));
  EXPECT_EQ(GetDetail(full, detail::kReason), reason::kLimit);
  EXPECT_NE(GetDetail(full, detail::kRetryAfterMs), "");
  go.Notify();
  queue.Stop();  // runs what is queued
  EXPECT_EQ(ran, (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(queue.depth(), 0u);
  EXPECT_EQ(queue.running(), 0u);
}

TEST(VerifyQueue, BoundsTheBytesOfWaitingTasks) {
  VerifyQueue queue(/*worker_count=*/1, /*depth_max=*/10, /*bytes_max=*/100);
  absl::Notification started, go;
  int ran = 0;
  ASSERT_TRUE(queue
                  .Push(
                      [&] {
                        started.Notify();
                        go.WaitForNotification();
                      },
                      90)
                  .ok());
  started.WaitForNotification();
  EXPECT_EQ(queue.bytes(), 0u);  // a running task's are not counted
  ASSERT_TRUE(queue.Push([&] { ++ran; }, 60).ok());
  ASSERT_TRUE(queue.Push([&] { ++ran; }, 40).ok());
  const absl::Status full = queue.Push([&] { ++ran; }, 1);
  EXPECT_TRUE(testing::Fails(full, absl::StatusCode::kResourceExhausted,
                             {"verify_queue_bytes_max", "100 of 100", "1"}));
  EXPECT_EQ(GetDetail(full, detail::kReason), reason::kLimit);
  EXPECT_FALSE(queue.Push([] {}, UINT64_MAX).ok());
  EXPECT_TRUE(queue.Push([&] { ++ran; }, 0).ok());
  go.Notify();
  queue.Stop();
  EXPECT_EQ(ran, 3);
  EXPECT_EQ(queue.bytes(), 0u);
}

// Otherwise a message of a legal size could never be served.
TEST(VerifyQueue, AnEmptyQueueTakesATaskOfAnySize) {
  VerifyQueue queue(/*worker_count=*/0, /*depth_max=*/10, /*bytes_max=*/100);
  EXPECT_TRUE(queue.Push([] {}, 101).ok());
  EXPECT_FALSE(queue.Push([] {}, 1).ok());
}

}  // namespace
}  // namespace ssmd
