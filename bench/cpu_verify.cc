// How near the CPU verify kernel comes to the memory bandwidth: one table.
//
//   cpu_verify [threads] [--csv FILE]
//
// Shapes of the paper's evaluation, one layer, FP32 checkpoints of one and a half times the
// last-level cache, at least 384 MiB, random data, h = 15 of L = 16 committed records. GB/s counts
// the checkpoint (read, and for a fold written); records and activations are on top. "of read"
// compares with a plain read of the same checkpoints by the same threads, measured right before and
// right after: their mean. Median of 7 passes; the first, which warms up, is not counted.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "bench/results.h"
#include "kernels/cpu/verify_kernel.h"

namespace {

using ssmd::Family;

size_t StateBytes() {
  const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);  // 0 or -1 where unknown
  return std::max(size_t{384} << 20, static_cast<size_t>(std::max(cache, 0L)) / 2 * 3);
}

// Uniform in [-scale, scale): a fixed sequence.
class Noise {
 public:
  float operator()(float scale) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return scale * (static_cast<float>(state_ >> 40) * 0x1p-23f - 1);
  }

 private:
  uint64_t state_ = 1;
};

constexpr uint64_t kCommitted = 15;
constexpr uint32_t kRingRecords = 32;

double ThreadCpuSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// CPU seconds of the slowest thread: what a quiet machine's clock would say.
double MedianSeconds(unsigned threads, const std::function<void(unsigned)>& work) {
  std::vector<double> passes;
  for (int pass = 0; pass < 8; ++pass) {
    std::vector<double> seconds(threads);
    std::vector<std::thread> workers;
    for (unsigned t = 0; t < threads; ++t) {
      workers.emplace_back([&, t] {
        const double start = ThreadCpuSeconds();
        work(t);
        seconds[t] = ThreadCpuSeconds() - start;
      });
    }
    for (std::thread& worker : workers) worker.join();
    if (pass > 0) passes.push_back(*std::max_element(seconds.begin(), seconds.end()));
  }
  std::sort(passes.begin(), passes.end());
  return passes[passes.size() / 2];
}

// One load from each 64-byte line, eight in flight.
float PlainRead(const float* from, size_t count) {
  float sums[8] = {};
  for (size_t i = 0; i < count; i += 128) {
    for (size_t line = 0; line < 8; ++line) sums[line] += from[i + 16 * line];
  }
  float sum = 0;
  for (float part : sums) sum += part;
  return sum;
}

struct Case {
  const char* name;
  ssmd::LayerShape shape;
};

const Case kCases[] = {
    {"Nemotron-3-Nano-4B", {Family::kMamba2, 96, 8, 128, 80}},
    {"Nemotron-3-Super-120B", {Family::kMamba2, 128, 8, 128, 64}},
    {"Qwen3.5-4B", {Family::kGdn, 32, 16, 128, 128}},
    {"Qwen3.5-122B", {Family::kGdn, 64, 16, 128, 128}},
    {"KDA 32 heads", {Family::kKda, 32, 32, 128, 128}},
};

class Bench {
 public:
  Bench(const Case& c, unsigned threads)
      : shape_(c.shape),
        threads_(threads),
        ring_layout_(ssmd::MakeRingLayout(shape_, formats_, kRingRecords)),
        rows_(StateBytes() / (shape_.state_elements() * sizeof(float))),
        source_(Allocate(rows_ * shape_.state_elements())),
        target_(Allocate(rows_ * shape_.state_elements())),
        ring_(rows_ * ring_layout_.slot_bytes),
        keys_(16 * shape_.key_group_count * shape_.d_k),
        values_(16 * shape_.head_count * shape_.d_v),
        scalars_(16 * shape_.head_count * shape_.decays_per_head(), -0.02f),
        betas_(16 * shape_.head_count, 0.5f),
        output_(rows_, std::vector<float>(16 * shape_.head_count * shape_.d_v)) {
    Noise noise;
    for (uint16_t& key : keys_) key = ssmd::FloatToBf16(noise(0.1f));
    for (uint16_t& value : values_) value = ssmd::FloatToBf16(noise(1));
    // Sixteen-bit records of any of their formats; then the FP32 ones over them.
    for (size_t i = 0; i + 1 < ring_.size(); i += 2) {
      const uint16_t bits = ssmd::FloatToFp16(noise(0.5f));
      std::memcpy(ring_.data() + i, &bits, sizeof(bits));
    }
    for (size_t row = 0; row < rows_; ++row) {
      std::byte* slot = ring_.data() + row * ring_layout_.slot_bytes;
      const auto fill = [&](const ssmd::RingComponent& component, float low, float high) {
        auto* floats = reinterpret_cast<float*>(slot + component.offset_bytes);
        for (size_t i = 0; i < component.row_bytes / sizeof(float) * kRingRecords; ++i)
          floats[i] = (low + high) / 2 + noise((high - low) / 2);
      };
      fill(ring_layout_.log_alpha, -0.1f, 0);
      fill(ring_layout_.value_scale, 0, 1);
    }
  }
  ~Bench() {
    std::free(source_);
    std::free(target_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  double checkpoint_bytes() const { return 4.0 * rows_ * shape_.state_elements(); }

  double PlainReadSeconds() {
    return MedianSeconds(threads_, [&](unsigned t) {
      volatile float sink = 0;
      for (size_t row = t; row < rows_; row += threads_)
        sink = PlainRead(source_ + row * shape_.state_elements(), shape_.state_elements());
      (void)sink;
    });
  }

  double VerifySeconds(uint32_t draft_tokens, bool fold) {
    return MedianSeconds(threads_, [&](unsigned t) {
      for (size_t row = t; row < rows_; row += threads_) {
        ssmd::cpu::GroupItem item;
        item.shape = &shape_;
        item.formats = &formats_;
        item.ring_layout = &ring_layout_;
        item.ring = ring_.data() + row * ring_layout_.slot_bytes;
        item.source = reinterpret_cast<const std::byte*>(source_ + row * shape_.state_elements());
        if (fold)
          item.target_hp = reinterpret_cast<std::byte*>(target_ + row * shape_.state_elements());
        item.base = row;  // any origin
        item.tail = row + kCommitted;
        item.fold_to = item.tail;
        item.draft_tokens = draft_tokens;
        item.inputs = {keys_.data(), keys_.data(), values_.data(), scalars_.data(), betas_.data()};
        item.output = output_[row].data();
        for (item.group = 0; item.group < shape_.key_group_count; ++item.group)
          ssmd::cpu::VerifyGroup(item);
      }
    });
  }

 private:
  static float* Allocate(size_t count) {
    auto* floats = static_cast<float*>(std::aligned_alloc(4096, (count * 4 + 4095) / 4096 * 4096));
    Noise noise;
    for (size_t i = 0; i < count; ++i) floats[i] = noise(1);
    return floats;
  }

  ssmd::LayerShape shape_;
  ssmd::Formats formats_;
  unsigned threads_;
  ssmd::RingLayout ring_layout_;
  size_t rows_;
  float* source_;
  float* target_;
  std::vector<std::byte> ring_;
  std::vector<uint16_t> keys_, values_;
  std::vector<float> scalars_, betas_;
  std::vector<std::vector<float>> output_;
};

}  // namespace

int main(int argc, char** argv) {
  unsigned threads = 2;
  const char* csv = nullptr;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--csv") == 0 && i + 1 < argc) {
      csv = argv[++i];
    } else if (const int count = std::atoi(argv[i]); count > 0) {
      threads = static_cast<unsigned>(count);
    } else {
      std::fprintf(stderr, "usage: cpu_verify [threads] [--csv FILE]   (FILE is appended to)\n");
      return 2;
    }
  }
  ssmd::bench::Results results("cpu_verify", csv);
  std::printf("%s, %u threads, %zu MiB of state, h = %d, bf16 activations\n",
              ssmd::cpu::VectorTarget(), threads, StateBytes() >> 20, static_cast<int>(kCommitted));
  std::printf("%-22s %9s %4s %5s %9s %8s\n", "layer", "read GB/s", "T", "fold", "GB/s", "of read");
  for (const Case& c : kCases) {
    Bench bench(c, threads);
    const auto read_rate = [&] {
      return bench.checkpoint_bytes() / bench.PlainReadSeconds() * 1e-9;
    };
    double before = read_rate();
    for (uint32_t draft_tokens : {1, 4, 8, 16}) {
      for (bool fold : {false, true}) {
        const double bytes = bench.checkpoint_bytes() * (fold ? 2 : 1);
        const double rate = bytes / bench.VerifySeconds(draft_tokens, fold) * 1e-9;
        const double after = read_rate(), read = (before + after) / 2;
        before = after;
        std::printf("%-22s %9.1f %4u %5s %9.1f %7.0f%%\n", c.name, read, draft_tokens,
                    fold ? "yes" : "no", rate, 100 * rate / read);
        std::fflush(stdout);
        const std::string name = std::string(c.name) + " T=" + std::to_string(draft_tokens) +
                                 (fold ? " fold" : "") + " threads=" + std::to_string(threads);
        results.Add(name, "plain read", "GB/s", read);
        results.Add(name, "checkpoint bytes", "GB/s", rate);
        results.Add(name, "of plain read", "1", rate / read);
      }
    }
  }
}
