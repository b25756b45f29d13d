// What one timed configuration runs on: pages, rings and inputs of some layers of one shape, filled
// with random data, and the planned rows of a step.
//
// Launches go round over the layers, as a decode step does: rows, inputs and outputs stay warm,
// state and records are cold once all layers together pass the L2.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "bench/kernels/device.h"
#include "kernels/cuda/verify_launch.h"

namespace ssmd::bench {

inline constexpr uint32_t kWindow = 16;  // L

struct BenchShape {
  std::string name;
  LayerShape layer;
};
const std::vector<BenchShape>& BenchShapes();

// Rows of a step on the host and the device.
struct RowSet {
  std::vector<cuda::DeviceRow> host;
  DeviceArray<cuda::DeviceRow> rows;
  DeviceArray<cuda::DeviceStep> step;
};

// Bytes that one launch has to move.
struct Traffic {
  double read = 0, write = 0;
};

class World {
 public:
  // Steps of up to `tokens` tokens a row, of a model whose rings hold L + 2 T_max records.
  World(const LayerShape& shape, uint32_t batch, uint32_t layers, Dtype output, uint32_t tokens,
        uint32_t draft_tokens_max, uint64_t seed = 1);

  uint32_t batch() const { return batch_; }
  uint32_t layers() const { return layers_; }
  uint32_t tokens() const { return tokens_; }
  const PageLayout& page() const { return page_; }
  const cuda::DeviceRingLayout& ring() const { return ring_; }
  size_t output_bytes() const { return outputs_.size(); }

  // Row i has committed[i] records at a random ring origin, folds them all if `folds` says so, and
  // verifies `tokens` tokens.
  RowSet MakeRows(const std::vector<uint32_t>& committed, const std::vector<bool>& folds);
  RowSet Upload(std::vector<cuda::DeviceRow> rows) const;

  cuda::VerifyLaunch Launch(const RowSet& rows, uint32_t layer) const;
  Traffic TrafficOf(const RowSet& rows) const;
  // One read and one write of the state per row, in place.
  Traffic ConventionalTraffic() const;

  // 0xff (NaN) in every output and in every target page of `layer`.
  void Poison(uint32_t layer) const;
  std::vector<uint32_t> PoisonFlags() const;
  uint32_t WorkCounter(uint32_t layer) const;

 private:
  const LayerShape shape_;
  const Formats formats_;
  const uint32_t batch_, layers_, tokens_;
  const FlushRule rule_;
  const PageLayout page_;
  const cuda::DeviceRingLayout ring_;
  std::mt19937_64 random_;
  DeviceArray<std::byte> pages_;  // per layer: `batch` sources, `batch` targets
  DeviceArray<std::byte> rings_;
  DeviceArray<std::byte> q_, k_, v_, outputs_;
  DeviceArray<float> log_alpha_, scale_;
  DeviceArray<uint32_t> poison_, counters_;
};

}  // namespace ssmd::bench
