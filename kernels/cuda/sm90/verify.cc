#include "kernels/cuda/sm90/verify.h"

#include <cstdint>

#include "kernels/cuda/sm90/shapes.h"

namespace ssmd::cuda::sm90 {
namespace {

struct BuiltShape {
  Family family;
  uint32_t heads_per_group, d_v;
  uint32_t tokens_min, tokens_max;  // T of its rows
  uint32_t committed_max;           // records of a row before the step
  cudaError_t (*enqueue)(const VerifyLaunch& launch, cudaStream_t stream);
};
// Any number of key groups.
constexpr BuiltShape kBuiltShapes[] = {
    {Family::kMamba2, 12, 80, 1, 1, 24, EnqueueShape<Family::kMamba2, 12, 80, 1>},
    {Family::kMamba2, 16, 64, 1, 1, 24, EnqueueShape<Family::kMamba2, 16, 64, 1>},
    {Family::kGdn, 2, 128, 1, 1, 24, EnqueueShape<Family::kGdn, 2, 128, 1>},
    {Family::kGdn, 4, 128, 1, 1, 24, EnqueueShape<Family::kGdn, 4, 128, 1>},
    {Family::kKda, 1, 128, 1, 1, 20, EnqueueShape<Family::kKda, 1, 128, 1>},
    {Family::kMamba2, 16, 64, 2, 8, 24, EnqueueShape<Family::kMamba2, 16, 64, 8>},
    {Family::kGdn, 2, 128, 2, 8, 24, EnqueueShape<Family::kGdn, 2, 128, 8>},
    {Family::kGdn, 4, 128, 2, 8, 24, EnqueueShape<Family::kGdn, 4, 128, 8>},
};

bool DeviceIsHopper() {
  static const bool hopper = [] {
    int device = 0, major = 0, minor = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
               cudaSuccess &&
           cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) ==
               cudaSuccess &&
           major == 9 && minor == 0;
  }();
  return hopper;
}

const BuiltShape* FindShape(const VerifyLaunch& launch, uint32_t tokens) {
  const LayerShape& shape = launch.shape;
  // A row whose fold was put off holds up to R - T_max records.
  const uint32_t committed = launch.rule.ring_records - launch.rule.draft_tokens_max;
  for (const BuiltShape& built : kBuiltShapes) {
    if (built.family == shape.family && built.heads_per_group == shape.heads_per_group() &&
        built.d_v == shape.d_v && built.tokens_min <= tokens && tokens <= built.tokens_max &&
        committed <= built.committed_max)
      return &built;
  }
  return nullptr;
}

}  // namespace

bool Supports(const VerifyLaunch& launch, uint32_t tokens) {
  constexpr uint64_t kItemsMax = uint64_t{1} << 30;  // indices of items are 32 bits
  const LayerShape& shape = launch.shape;
  const Formats& formats = launch.formats;
  return shape.d_k == 128 && shape.head_count % 4 == 0 && formats.activation == Dtype::kBf16 &&
         (!shape.is_delta_rule() || formats.correction == Dtype::kFp16) &&
         (formats.output == Dtype::kFp32 || formats.output == Dtype::kBf16) &&
         formats.checkpoint_hp == Dtype::kFp32 && !formats.two_precision() &&
         !(shape.family == Family::kKda && launch.rule.rollback_tokens_min != 0) &&
         uint64_t{launch.rows_max} * shape.head_count * 2 <= kItemsMax &&
         FindShape(launch, tokens) != nullptr && DeviceIsHopper();
}

bool Supports(const VerifyLaunch& launch) {
  const uint32_t tokens_max = launch.rule.draft_tokens_max;  // of the registration, not the step
  return Supports(launch, 1) && (tokens_max <= 1 || Supports(launch, tokens_max));
}

cudaError_t EnqueueOfOneToken(const VerifyLaunch& launch, cudaStream_t stream) {
  return FindShape(launch, 1)->enqueue(launch, stream);
}

cudaError_t EnqueueOfMoreTokens(const VerifyLaunch& launch, cudaStream_t stream) {
  return FindShape(launch, launch.draft_tokens_max)->enqueue(launch, stream);
}

cudaError_t EnqueueVerify(const VerifyLaunch& launch, cudaStream_t stream) {
  if (launch.draft_tokens_max <= 1) return EnqueueOfOneToken(launch, stream);
  if (const cudaError_t error = EnqueueOfMoreTokens(launch, stream); error != cudaSuccess)
    return error;
  VerifyLaunch of_one_token = launch;
  of_one_token.rows_settled = true;  // by the time that the kernel just enqueued lets it start
  return EnqueueOfOneToken(of_one_token, stream);
}

}  // namespace ssmd::cuda::sm90
