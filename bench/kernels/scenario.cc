#include "bench/kernels/scenario.h"

#include <algorithm>
#include <random>

namespace ssmd::bench {
namespace {

constexpr double kColdBytes = 340e6;
constexpr int kLaunchesMin = 8;

// Committed records before each step of one window: the last of them folds.
std::vector<uint32_t> Window(uint32_t tokens, uint32_t accepted) {
  std::vector<uint32_t> committed = {accepted};
  while (committed.back() + tokens <= kWindow) committed.push_back(committed.back() + accepted);
  return committed;
}

// The rows of each step of the scenario, in order.
std::vector<RowSet> MakeSteps(World& world, Steps steps) {
  const uint32_t batch = world.batch(), tokens = world.tokens();
  std::vector<RowSet> sets;
  if (steps == Steps::kStaggered || steps == Steps::kInPhase || steps == Steps::kAllAccepted) {
    const std::vector<uint32_t> window = Window(tokens, steps == Steps::kAllAccepted ? tokens : 1);
    for (uint32_t step = 0; step < window.size(); ++step) {
      std::vector<uint32_t> committed(batch);
      std::vector<bool> folds(batch);
      for (uint32_t i = 0; i < batch; ++i) {
        const uint32_t phase = steps == Steps::kInPhase ? 0 : i * 7;
        committed[i] = window[(step + phase) % window.size()];
        folds[i] = committed[i] + tokens > kWindow;
      }
      sets.push_back(world.MakeRows(committed, folds));
    }
    return sets;
  }
  const uint32_t full = tokens == 1 ? 14 : kWindow - tokens;
  const uint32_t h = steps == Steps::kFull ? full : steps == Steps::kFlush ? kWindow : 0;
  sets.push_back(world.MakeRows(std::vector<uint32_t>(batch, h),
                                std::vector<bool>(batch, steps == Steps::kFlush)));
  return sets;
}

}  // namespace

const char* StepsName(Steps steps) {
  switch (steps) {
    case Steps::kEmpty:
      return "empty";
    case Steps::kFull:
      return "full";
    case Steps::kFlush:
      return "flush";
    case Steps::kStaggered:
      return "staggered";
    case Steps::kInPhase:
      return "in_phase";
    case Steps::kAllAccepted:
      return "all_accepted";
    case Steps::kConventional:
      return "conventional";
  }
  return "?";
}

uint32_t ColdLayers(const LayerShape& shape, uint32_t batch) {
  const double bytes = 4.0 * static_cast<double>(shape.state_elements()) * batch;
  return static_cast<uint32_t>(kColdBytes / bytes) + 1;
}

Measurement Measure(World& world, const LayerShape& shape, Dtype output, Steps steps,
                    int repetitions, const VerifyFunction& verify) {
  std::vector<RowSet> sets = MakeSteps(world, steps);
  Measurement result;
  result.repetitions = repetitions;
  const bool conventional = steps == Steps::kConventional;
  std::mt19937 random(3);
  result.good = true;
  auto check = [&](size_t step, uint32_t row) {
    const uint32_t head = random() % shape.head_count;
    const cuda::VerifyLaunch launch = world.Launch(sets[step], 0);
    const cuda::DeviceRow& device_row = sets[step].host[row];
    if (!conventional) world.Poison(0);
    const std::vector<float> before = ReadState(launch, device_row.source_page, head);
    SSMD_CUDA_CHECK(verify(launch, nullptr));
    SSMD_CUDA_CHECK(cudaDeviceSynchronize());
    const HeadErrors errors = conventional ? CheckConventional(launch, device_row, head, before)
                                           : CheckVerify(launch, device_row, head);
    result.good = result.good && errors.Within(output, shape.is_delta_rule());
    result.errors.Merge(errors);
  };
  // The last row, a random one, and one of the last step, which folds if any does.
  check(0, world.batch() - 1);
  check(random() % sets.size(), random() % world.batch());
  check(sets.size() - 1, random() % world.batch());

  const int layers = static_cast<int>(world.layers());
  const int rounds = std::max(1, kLaunchesMin / static_cast<int>(layers * sets.size()));
  const int count = static_cast<int>(sets.size()) * layers * rounds;
  result.microseconds = MedianMicroseconds(count, repetitions, [&](int i, cudaStream_t stream) {
    const size_t step = static_cast<size_t>(i / layers) % sets.size();
    return verify(world.Launch(sets[step], static_cast<uint32_t>(i % layers)), stream);
  });
  for (const RowSet& set : sets) {
    const Traffic traffic = conventional ? world.ConventionalTraffic() : world.TrafficOf(set);
    result.traffic.read += traffic.read / static_cast<double>(sets.size());
    result.traffic.write += traffic.write / static_cast<double>(sets.size());
  }
  return result;
}

}  // namespace ssmd::bench
