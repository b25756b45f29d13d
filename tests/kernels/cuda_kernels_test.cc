// Every entry of the dispatch table of verify kernels against the float64 oracle. Needs a GPU.
#include "gtest/gtest.h"
#include "kernels/cuda/verify_dispatch.h"
#include "tests/kernels/verify_fixture.h"

namespace ssmd::testing {
namespace {

// {heads, key groups, d_k, d_v}: odd ones, and those of published models, with fewer heads.
constexpr uint32_t kShapes[][4] = {{3, 1, 16, 8},    {6, 3, 48, 24},   {4, 2, 80, 40},
                                   {16, 1, 128, 64}, {12, 1, 128, 80}, {4, 2, 128, 128},
                                   {4, 4, 128, 128}, {3, 3, 144, 72},  {2, 1, 256, 256}};
constexpr Dtype kDtypes[] = {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32};

TEST(CudaKernels, EveryEntryMatchesTheOracle) {
  for (const cuda::VerifyKernel& kernel : cuda::VerifyKernels()) {
    RunVerifyKernel(&kernel);
    size_t index = 0, ran = 0;
    for (const Family family : {Family::kMamba2, Family::kGdn, Family::kKda}) {
      for (const auto& s : kShapes) {
        for (const uint32_t T : {1, 2, 3, 4, 5, 8, 16}) {
          for (const uint32_t h : {0u, 1u, 9u, 16u}) {
            ++index;
            const LayerShape shape{family, s[0], s[1], s[2], s[3]};
            const Formats formats{.activation = kDtypes[index % 3],
                                  .correction = index / 3 % 2 ? Dtype::kFp32 : Dtype::kFp16,
                                  .output = kDtypes[index / 6 % 3]};
            const uint32_t ring_records = 16 + 2 * std::max(T, 4u) + (index % 5 == 0 ? 9 : 0);
            cuda::VerifyLaunch launch{.shape = shape, .formats = formats};
            launch.draft_tokens_max = T;
            launch.rule = RuleOf(T, index % 2 ? 0 : std::min(h, 3u), ring_records);
            if (!kernel.supports(launch)) continue;
            Sequence sequence({.shape = shape,
                               .formats = formats,
                               .ring_records = ring_records,
                               .base = index * 2654435761u % 100000,
                               .seed = index});
            sequence.History(h);
            const int64_t fold_to =
                index % 2 ? -1 : static_cast<int64_t>(sequence.tail - std::min(h, 3u));
            SCOPED_TRACE(std::string(kernel.name) + " " + sequence.Name() + " T " +
                         std::to_string(T) + " fold_to " + std::to_string(fold_to));
            sequence.VerifyMatchesOracle(sequence.MakeDrafts(T), fold_to);
            ++ran;
            if (HasFailure()) return;
          }
        }
      }
    }
    RunVerifyKernel(nullptr);
    std::printf("  %-24s %zu cases\n", kernel.name, ran);
    // The specialised entries take few shapes: they have a test of their own.
    if (std::string_view(kernel.name) == "general") {
      EXPECT_GT(ran, 0u);
    }
  }
}

// The kernels specialised for sm_90a, on the models they are built for with fewer groups: every T,
// folds included, by the entry of the table that a registration would get.
TEST(CudaKernels, SpecialisedShapesMatchTheOracle) {
  constexpr struct {
    Family family;
    uint32_t heads, groups, d_v;
    const char* kernel;
    uint32_t tokens_max;  // with more, a ring may hold more records than the kernel takes
  } kModels[] = {{Family::kMamba2, 12, 1, 80, "sm90 for one token", 8},
                 {Family::kMamba2, 32, 2, 64, "sm90", 8},
                 {Family::kGdn, 4, 2, 128, "sm90", 8},
                 {Family::kGdn, 8, 2, 128, "sm90", 8},
                 {Family::kKda, 4, 4, 128, "sm90 for one token", 4}};
  size_t index = 0;
  for (const auto& model : kModels) {
    for (const uint32_t T : {1, 2, 3, 4, 5, 8}) {
      for (const uint32_t h : {0u, 1u, 9u, 16u}) {
        for (const bool folds : {false, true}) {
          if (T > model.tokens_max) continue;
          ++index;
          const LayerShape shape{model.family, model.heads, model.groups, 128, model.d_v};
          const Formats formats{.output = index % 2 ? Dtype::kBf16 : Dtype::kFp32};
          const uint32_t ring_records = 16 + 2 * T;
          const uint32_t kept = model.family == Family::kKda || index % 3 ? 0 : std::min(h, 3u);
          cuda::VerifyLaunch launch{.shape = shape, .formats = formats};
          launch.draft_tokens_max = T;
          launch.rule = RuleOf(T, kept, ring_records);
          const cuda::VerifyKernel* kernel = cuda::FindVerifyKernel(launch);
          ASSERT_NE(kernel, nullptr);
          if (index == 1 && std::string_view(kernel->name) == "general")
            GTEST_SKIP() << "no sm_90 GPU";
          // KDA is built for R - T_max of at most 20.
          const bool built = model.family != Family::kKda || T <= 4;
          ASSERT_STREQ(kernel->name, built ? model.kernel : "general");
          RunVerifyKernel(kernel);
          Sequence sequence({.shape = shape,
                             .formats = formats,
                             .ring_records = ring_records,
                             .base = index * 2654435761u % 100000,
                             .seed = index});
          sequence.History(h);
          const int64_t fold_to = folds ? static_cast<int64_t>(sequence.tail - kept) : -1;
          SCOPED_TRACE(std::string(kernel->name) + " " + sequence.Name() + " T " +
                       std::to_string(T) + " fold_to " + std::to_string(fold_to));
          sequence.VerifyMatchesOracle(sequence.MakeDrafts(T), fold_to);
          if (HasFailure()) return;
        }
      }
    }
  }
  RunVerifyKernel(nullptr);
}

}  // namespace
}  // namespace ssmd::testing
