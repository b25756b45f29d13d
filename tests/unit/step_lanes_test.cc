// service/step_lanes.cc: one call of a step at a time, in order of arrival; steps overlap.
#include "service/step_lanes.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace ssmd {
namespace {

TEST(StepLanes, CallsOfOneStepFollowEachOtherInOrder) {
  StepLanes lanes;
  const auto first = std::make_shared<StepsCall>(), second = std::make_shared<StepsCall>(),
             third = std::make_shared<StepsCall>();
  EXPECT_TRUE(lanes.Enter(7, first));
  EXPECT_FALSE(lanes.Enter(7, second));
  EXPECT_FALSE(lanes.Enter(7, third));
  EXPECT_EQ(lanes.Next(7), second);
  EXPECT_EQ(lanes.Next(7), third);
  EXPECT_EQ(lanes.Next(7), nullptr);
  EXPECT_TRUE(lanes.Enter(7, first)) << "the lane is free again";
}

TEST(StepLanes, StepsDoNotWaitForEachOther) {
  StepLanes lanes;
  const auto call = std::make_shared<StepsCall>();
  EXPECT_TRUE(lanes.Enter(1, call));
  EXPECT_TRUE(lanes.Enter(2, call));
  EXPECT_EQ(lanes.Next(1), nullptr);
  EXPECT_FALSE(lanes.Enter(2, call));
}

// Whoever comes, nobody is alone in the lane twice and no call is left behind.
TEST(StepLanes, ThreadsTakeTurns) {
  constexpr int kThreads = 4, kCalls = 2'000;
  StepLanes lanes;
  std::atomic<int> inside{0}, ran{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < kCalls; ++j) {
        StepsCallRef call = std::make_shared<StepsCall>();
        if (!lanes.Enter(3, call)) continue;
        for (; call != nullptr; call = lanes.Next(3)) {
          EXPECT_EQ(++inside, 1);
          ++ran;
          --inside;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ran, kThreads * kCalls);
}

}  // namespace
}  // namespace ssmd
