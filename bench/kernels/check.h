// Compares what a launch wrote with the float64 recurrence, for one row and head.
#pragma once

#include <vector>

#include "kernels/cuda/verify_launch.h"

namespace ssmd::bench {

// Relative 2-norm errors of one head; NaN never passes.
struct HeadErrors {
  double output = 0;
  double state = 0;       // of S', folding rows
  double correction = 0;  // of the appended u, GDN and KDA
  double record = 0;      // 1 if a part of the new record that is a copy differs
  bool Within(Dtype output_dtype, bool delta_rule) const;
  void Merge(const HeadErrors& other);
};

// All tokens of the row. The launch has finished. Inputs, committed records and the source page are
// unchanged.
HeadErrors CheckVerify(const cuda::VerifyLaunch& launch, const cuda::DeviceRow& row, uint32_t head);

// T = 1, the conventional step: `before` is the head's state before it ran.
HeadErrors CheckConventional(const cuda::VerifyLaunch& launch, const cuda::DeviceRow& row,
                             uint32_t head, const std::vector<float>& before);
std::vector<float> ReadState(const cuda::VerifyLaunch& launch, uint32_t page, uint32_t head);

}  // namespace ssmd::bench
