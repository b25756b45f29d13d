// Every item runs exactly once, for any count, from several callers at a time.
#include "kernels/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <memory>
#include <numeric>

#include "tests/testing/notification.h"

namespace ssmd::cpu {
namespace {

TEST(ThreadPool, RunsEveryItemOnce) {
  for (const uint32_t threads : {1u, 2u, 5u}) {
    ThreadPool pool(threads);
    for (const size_t count : {0u, 1u, 2u, 7u, 1000u}) {
      std::vector<std::atomic<int>> ran(count);
      pool.ParallelFor(count, [&](size_t i) { ++ran[i]; });
      for (size_t i = 0; i < count; ++i)
        EXPECT_EQ(ran[i], 1) << threads << " threads, item " << i << " of " << count;
    }
  }
}

TEST(ThreadPool, ServesSeveralCallers) {
  ThreadPool pool(3);
  std::atomic<uint64_t> sum{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) pool.ParallelFor(17, [&](size_t i) { sum += i; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 4u * 200 * (16 * 17 / 2));
}

TEST(BackgroundThreads, RunsWhatIsPosted) {
  for (const uint32_t threads : {1u, 3u}) {
    std::atomic<int> ran{0};
    testing::Notification all;
    BackgroundThreads background(threads);
    for (int i = 0; i < 100; ++i)
      background.Post([&] {
        if (++ran == 100) all.Notify();
      });
    all.WaitForNotification();
    EXPECT_EQ(ran, 100);
  }
}

TEST(BackgroundThreads, OneThreadKeepsTheOrder) {
  std::vector<int> order;
  testing::Notification last;
  BackgroundThreads background(1);
  for (int i = 0; i < 50; ++i) background.Post([&order, i] { order.push_back(i); });
  background.Post([&] { last.Notify(); });
  last.WaitForNotification();
  for (int i = 0; i < 50; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
}

TEST(BackgroundThreads, TheEndDropsWhatHasNotBegun) {
  std::atomic<int> ran{0};
  testing::Notification begun, go;
  {
    BackgroundThreads background(1);
    background.Post([&] {
      begun.Notify();
      go.WaitForNotification();
      ++ran;
    });
    begun.WaitForNotification();
    // Lets the running task go once the tasks behind it are dropped.
    const std::shared_ptr<void> last(nullptr, [&](void*) { go.Notify(); });
    for (int i = 0; i < 10; ++i) background.Post([&ran, last] { ++ran; });
  }
  EXPECT_EQ(ran, 1);
}

}  // namespace
}  // namespace ssmd::cpu
