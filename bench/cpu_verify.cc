// How near the CPU verify kernel comes to the memory bandwidth: one table.
//
//   cpu_verify [threads] [--csv FILE]
//
// Shapes of the paper's evaluation, one layer, FP32 checkpoints of 384 MiB in all, h = 15 of L = 16
// committed records. GB/s counts the checkpoint (read, and for a fold written); records and
// activations are on top. "of read" compares with a plain read of the same checkpoints by the same
// threads. Median of 7 passes; the first, which warms up, is not counted. Whether 384 MiB leave the
// last-level cache depends on the machine: the plain read is subject to the same cache.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <thread>
#include <vector>

#include "kernels/cpu/verify_kernel.h"

namespace {

using ssmd::Family;

constexpr size_t kStateBytes = size_t{384} << 20;
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
        rows_(kStateBytes / (shape_.state_elements() * sizeof(float))),
        source_(Allocate(rows_ * shape_.state_elements())),
        target_(Allocate(rows_ * shape_.state_elements())),
        ring_(rows_ * ring_layout_.slot_bytes, std::byte{0x3c}),
        keys_(16 * shape_.key_group_count * shape_.d_k, uint16_t{0x3c00}),
        values_(16 * shape_.head_count * shape_.d_v, uint16_t{0x3f00}),
        scalars_(16 * shape_.head_count * shape_.decays_per_head(), -0.02f),
        betas_(16 * shape_.head_count, 0.5f),
        output_(rows_, std::vector<float>(16 * shape_.head_count * shape_.d_v)) {
    for (size_t row = 0; row < rows_; ++row) {
      std::byte* slot = ring_.data() + row * ring_layout_.slot_bytes;
      const auto& log_alpha = ring_layout_.log_alpha;
      auto* decays = reinterpret_cast<float*>(slot + log_alpha.offset_bytes);
      std::fill_n(decays, log_alpha.row_bytes / sizeof(float) * kRingRecords, -0.02f);
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
    std::fill_n(floats, count, 0.01f);
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
  FILE* csv = nullptr;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--csv") == 0 && i + 1 < argc) {
      csv = std::fopen(argv[++i], "w");
      if (csv == nullptr) {
        std::perror(argv[i]);
        return 1;
      }
    } else if (const int count = std::atoi(argv[i]); count > 0) {
      threads = static_cast<unsigned>(count);
    } else {
      std::fprintf(stderr, "usage: cpu_verify [threads] [--csv FILE]\n");
      return 2;
    }
  }
  if (csv != nullptr) std::fprintf(csv, "layer,threads,read_gb_s,draft_tokens,fold,gb_s,of_read\n");
  std::printf("%s, %u threads, h = %d, bf16 activations\n", ssmd::cpu::VectorTarget(), threads,
              static_cast<int>(kCommitted));
  std::printf("%-22s %9s %4s %5s %9s %8s\n", "layer", "read GB/s", "T", "fold", "GB/s", "of read");
  for (const Case& c : kCases) {
    Bench bench(c, threads);
    const double read = bench.checkpoint_bytes() / bench.PlainReadSeconds() * 1e-9;
    for (uint32_t draft_tokens : {1, 4, 8, 16}) {
      for (bool fold : {false, true}) {
        const double bytes = bench.checkpoint_bytes() * (fold ? 2 : 1);
        const double rate = bytes / bench.VerifySeconds(draft_tokens, fold) * 1e-9;
        std::printf("%-22s %9.1f %4u %5s %9.1f %7.0f%%\n", c.name, read, draft_tokens,
                    fold ? "yes" : "no", rate, 100 * rate / read);
        if (csv != nullptr)
          std::fprintf(csv, "%s,%u,%.2f,%u,%d,%.2f,%.3f\n", c.name, threads, read, draft_tokens,
                       fold ? 1 : 0, rate, rate / read);
      }
    }
  }
  if (csv != nullptr) std::fclose(csv);
}
