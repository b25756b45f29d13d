#include "bench/kernels/self_check.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>

#include "bench/kernels/check.h"
#include "bench/kernels/fill.h"

namespace ssmd::bench {
namespace {

constexpr uint32_t kRows = 20;

// Of the registration: deferred folds may leave L + T_max records.
uint32_t DraftTokensMax(const LayerShape& shape) { return shape.family == Family::kKda ? 4 : 8; }

std::vector<cuda::DeviceRow> HostileRows(const LayerShape& shape, uint32_t tokens,
                                         std::mt19937& random) {
  std::vector<cuda::DeviceRow> rows(kRows);
  const uint32_t committed_max = kWindow + DraftTokensMax(shape);
  uint32_t token = 0;
  for (uint32_t i = 0; i < kRows; ++i) {
    cuda::DeviceRow& row = rows[i];
    row.base = uint64_t{random()} * 31;
    // The corners first: an empty ring, a full one, and around a full window.
    const uint32_t corners[] = {0, 1, kWindow - 1, kWindow, committed_max, 7, 8};
    const uint32_t h = i < std::size(corners) ? corners[i] : random() % (committed_max + 1);
    row.tail = row.base + h;
    row.slot = (i * 7 + 3) % kRows;
    row.draft_tokens = i < std::size(corners) ? tokens : random() % (tokens + 1);
    row.first_token = token;
    row.source_page = (i * 11 + 5) % kRows;
    const bool folds = i < std::size(corners) ? i % 2 == 1 : random() % 2 == 0;
    row.target_page = folds ? kRows + row.source_page : ToInt(kNoPage);
    row.fold_to = row.base + (shape.family == Family::kKda ? h : h - random() % (h / 4 + 1));
    if (i % 9 == 8) {  // padding
      row = {};
      row.slot = row.source_page = row.target_page = ToInt(kNoSlot);
      row.draft_tokens = tokens;
      row.first_token = token;
    }
    token += row.draft_tokens;
  }
  return rows;
}

// Everything that a launch may write.
struct Written {
  std::vector<std::byte> output, rings, pages;
  friend bool operator==(const Written&, const Written&) = default;
};

class Checker {
 public:
  Checker(const std::string& name, const LayerShape& shape, Dtype output, uint32_t tokens,
          const VerifyFunction& verify)
      : name_(name),
        shape_(shape),
        output_(output),
        verify_(verify),
        world_(shape, kRows, 1, output, tokens, DraftTokensMax(shape), 5) {}

  bool Run() {
    rows_ = world_.Upload(HostileRows(shape_, world_.tokens(), random_));
    launch_ = world_.Launch(rows_, 0);
    PoisonUnownedRecords(launch_, launch_.rows, kRows);
    const Written first = Verify(rows_);
    CheckNumbers(first);
    for (int i = 0; i < 4; ++i) Expect(Verify(rows_) == first, "launches differ");
    std::vector<cuda::DeviceRow> permuted = rows_.host;
    std::shuffle(permuted.begin(), permuted.end(), random_);
    Expect(Verify(world_.Upload(permuted)) == first, "permuted rows differ");
    Expect(world_.PoisonFlags() == std::vector<uint32_t>(kRows), "a good row is poisoned");
    CheckPoison(first);
    std::printf("%-28s %s  errors: output %.1e state %.1e correction %.1e\n", name_.c_str(),
                good_ ? "ok" : "FAILED", errors_.output, errors_.state, errors_.correction);
    std::fflush(stdout);
    return good_;
  }

 private:
  void Expect(bool good, const char* what) {
    if (!good) std::printf("%s: %s\n", name_.c_str(), what);
    good_ = good_ && good;
  }

  Written Verify(const RowSet& rows) {
    world_.Poison(0);
    SSMD_CUDA_CHECK(verify_(world_.Launch(rows, 0), nullptr));
    SSMD_CUDA_CHECK(cudaDeviceSynchronize());
    Expect(world_.WorkCounter(0) == 0, "the work counter is not 0");
    return {ToHost<std::byte>(launch_.output, world_.output_bytes()),
            ToHost<std::byte>(launch_.rings, kRows * launch_.ring.slot_bytes),
            ToHost<std::byte>(launch_.pages, 2 * kRows * launch_.page.page_bytes)};
  }

  void CheckNumbers(const Written& written) {
    const size_t token_bytes = shape_.head_count * shape_.d_v * DtypeBytes(output_);
    for (const cuda::DeviceRow& row : rows_.host) {
      const std::byte* output = &written.output[row.first_token * token_bytes];
      if (row.draft_tokens == 0) continue;
      if (row.slot == ToInt(kNoSlot)) {
        Expect(std::all_of(output, output + row.draft_tokens * token_bytes,
                           [](std::byte b) { return b == std::byte{0}; }),
               "padding is not zero");
        continue;
      }
      for (const uint32_t head : {uint32_t{0}, shape_.head_count - 1,
                                  static_cast<uint32_t>(random_() % shape_.head_count),
                                  static_cast<uint32_t>(random_() % shape_.head_count)}) {
        const HeadErrors errors = CheckVerify(launch_, row, head);
        if (!errors.Within(output_, shape_.is_delta_rule())) {
          std::printf(
              "  slot %u head %u h %u folds %d to %u: output %.1e state %.1e correction %.1e "
              "record %g\n",
              row.slot, head, static_cast<uint32_t>(row.tail - row.base),
              row.target_page != ToInt(kNoPage), static_cast<uint32_t>(row.fold_to - row.base),
              errors.output, errors.state, errors.correction, errors.record);
          Expect(false, "errors past the bound");
        }
        errors_.Merge(errors);
      }
    }
    // Heads that were not compared must have been written too: no NaN is left.
    const uint32_t token_count = rows_.host.back().first_token + rows_.host.back().draft_tokens;
    const size_t elements = token_count * shape_.head_count * shape_.d_v;
    bool complete = true;
    for (size_t i = 0; i < elements; ++i) {
      uint32_t bits = 0;
      const size_t bytes = DtypeBytes(output_);
      std::memcpy(&bits, &written.output[i * bytes], bytes);
      complete = complete && bits != (bytes == 2 ? 0xffffu : 0xffffffffu);
    }
    Expect(complete, "outputs were left out");
  }

  // A NaN in one row's v, then a positive log decay in another's.
  void CheckPoison(const Written& good) {
    const uint32_t victims[] = {2, 5};
    const uint64_t v =
        uint64_t{rows_.host[victims[0]].first_token} * shape_.head_count * shape_.d_v;
    auto* value = static_cast<uint16_t*>(const_cast<void*>(launch_.inputs.v)) + v + 77;
    auto* decay =
        const_cast<float*>(launch_.inputs.log_alpha) +
        uint64_t{rows_.host[victims[1]].first_token} * shape_.head_count * shape_.decays_per_head();
    const float positive = 0.25f;
    SSMD_CUDA_CHECK(cudaMemset(value, 0xff, 2));
    SSMD_CUDA_CHECK(cudaMemcpy(decay, &positive, 4, cudaMemcpyHostToDevice));
    const Written bad = Verify(rows_);
    const std::vector<uint32_t> flags = world_.PoisonFlags();
    const size_t token_bytes = shape_.head_count * shape_.d_v * DtypeBytes(output_);
    for (uint32_t i = 0; i < kRows; ++i) {
      if (i == victims[0]) {
        Expect((flags[i] & kPoisonInput) != 0, "NaN is not reported");
      } else if (i == victims[1]) {
        Expect(flags[i] == kPoisonDecay, "a positive decay is not reported");
      } else {
        Expect(flags[i] == 0, "a good row is reported");
        const size_t first = rows_.host[i].first_token * token_bytes;
        const size_t last = first + rows_.host[i].draft_tokens * token_bytes;
        Expect(std::equal(&bad.output[first], &bad.output[last], &good.output[first]),
               "a poisoned row disturbs another");
      }
    }
  }

  const std::string name_;
  const LayerShape shape_;
  const Dtype output_;
  const VerifyFunction verify_;
  World world_;
  RowSet rows_;
  cuda::VerifyLaunch launch_;
  std::mt19937 random_{11};
  HeadErrors errors_;
  bool good_ = true;
};

}  // namespace

bool SelfCheck(const std::string& name, const LayerShape& shape, Dtype output, uint32_t tokens,
               const VerifyFunction& verify) {
  return Checker(name, shape, output, tokens, verify).Run();
}

}  // namespace ssmd::bench
