// Every item runs exactly once, for any count, from several callers at a time.
#include "kernels/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <numeric>

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

}  // namespace
}  // namespace ssmd::cpu
