// The equations are in raw_kernel.h. Channels are worked on in segments of at most kDimMax: q, k
// and each head's v. The file is compiled once per instruction set, as verify_kernel.cc is.
#include "kernels/cpu/raw_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels/check.h"
#include "kernels/cpu/flush_denormals.h"

#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/raw_kernel.cc"
#include "hwy/foreach_target.h"
// Highway wants foreach_target before highway.h.
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/cpu/convert-inl.h"

#ifndef SSMD_KERNELS_CPU_RAW_KERNEL_ONCE
#define SSMD_KERNELS_CPU_RAW_KERNEL_ONCE
namespace ssmd::cpu {

inline constexpr size_t kConvWidthMax = 4;
inline constexpr float kNormEpsilon = 1e-6f;

// Working memory of one thread, 37 KiB.
struct RawScratch {
  alignas(64) float window[(kConvWidthMax - 1 + kDraftTokensMax) * kDimMax];  // [position][channel]
  alignas(64) float values[kDimMax];
};

// log_alpha stays finite: full forgetting is finite too.
inline float LogDecay(float rate, float step) {
  return std::max(-rate * step, -std::numeric_limits<float>::max());
}
// Both without cancellation or overflow for any finite x.
inline float Softplus(float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x))); }
inline float Sigmoid(float x) {
  const float e = std::exp(-std::abs(x));
  return (x < 0 ? e : 1.0f) / (1.0f + e);
}

}  // namespace ssmd::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace ssmd::cpu::HWY_NAMESPACE {

// exp(-|x|), with an argument that the vector exponential is made for.
HWY_INLINE hn::Vec<TagF> ExpOfMinusAbs(hn::Vec<TagF> x) {
  const TagF d;
  return hn::Exp(d, hn::Max(hn::Neg(hn::Abs(x)), hn::Set(d, -1e4f)));
}
HWY_INLINE hn::Vec<TagF> SigmoidOf(hn::Vec<TagF> x) {
  const TagF d;
  const auto e = ExpOfMinusAbs(x);
  const auto one = hn::Set(d, 1.0f);
  return hn::Div(hn::IfThenElse(hn::Lt(x, hn::Zero(d)), e, one), hn::Add(one, e));
}
HWY_INLINE hn::Vec<TagF> SoftplusOf(hn::Vec<TagF> x) {
  const TagF d;
  return hn::Add(hn::Max(x, hn::Zero(d)), hn::Log1p(d, ExpOfMinusAbs(x)));
}

struct RawGroup {
  const RawItem& item;
  RawScratch& scratch;
  const LayerShape& shape = *item.shape;
  const RingLayout& ring = *item.ring_layout;
  const RawLayer& layer = *item.layer;
  const Dtype dtype = item.formats->activation;
  const size_t element_bytes = DtypeBytes(dtype);
  const size_t T = item.draft_tokens;
  const size_t w = shape.conv_width;
  const size_t channels = shape.conv_channels();
  uint32_t flags = kPoisonNone;

  std::byte* ConvRow(uint64_t position) const {
    return item.ring + ring.conv.offset_bytes +
           RingRow(position, ring.conv_rows) * ring.conv.row_bytes;
  }
  void FlagUnless(bool good) {
    if (!good) flags |= kPoisonInput;
  }
  // One element of a [tokens, columns] input.
  float At(const void* tensor, size_t index) const {
    const auto* from = static_cast<const std::byte*>(tensor) + index * element_bytes;
    if (dtype == Dtype::kFp32) {
      float value;
      std::memcpy(&value, from, sizeof(value));
      return value;
    }
    uint16_t code;
    std::memcpy(&code, from, sizeof(code));
    return dtype == Dtype::kBf16 ? Bf16ToFloat(code) : Fp16ToFloat(code);
  }
};

// Projections of channels [first, first + count) at positions tail - (w-1) .. tail + T - 1 to FP32;
// the drafts' are appended to the ring.
HWY_INLINE void LoadWindow(RawGroup& g, size_t first, size_t count) {
  const size_t at = first * g.element_bytes;
  for (size_t i = 0; i + 1 < g.w; ++i) {
    float* to = g.scratch.window + i * count;
    if (g.item.tail + i < g.w - 1) {
      std::fill_n(to, count, 0.0f);
    } else {
      Widen(g.dtype, g.ConvRow(g.item.tail + i - (g.w - 1)) + at, count, to);
    }
  }
  for (size_t s = 0; s < g.T; ++s) {
    const auto* z =
        static_cast<const std::byte*>(g.item.inputs.projection) + s * g.channels * g.element_bytes;
    float* to = g.scratch.window + (g.w - 1 + s) * count;
    std::memcpy(g.ConvRow(g.item.tail + s) + at, z + at, count * g.element_bytes);
    Widen(g.dtype, z + at, count, to);
    g.FlagUnless(AllFinite(to, count));
  }
}

// values := SiLU of the convolution at draft s. Returns their squares' sum.
HWY_INLINE float Convolve(RawGroup& g, size_t s, size_t first, size_t count) {
  const TagF d;
  auto squares = hn::Zero(d);
  for (size_t i = 0; i < count; i += hn::Lanes(d)) {
    auto y = hn::LoadU(d, g.layer.bias.data() + first + i);
    for (size_t tap = 0; tap < g.w; ++tap) {
      y = hn::MulAdd(hn::LoadU(d, g.layer.taps.data() + tap * g.channels + first + i),
                     hn::LoadU(d, g.scratch.window + (s + tap) * count + i), y);
    }
    y = hn::Mul(y, SigmoidOf(y));
    hn::StoreU(y, d, g.scratch.values + i);
    squares = hn::MulAdd(y, y, squares);
  }
  return hn::GetLane(hn::SumOfLanes(d, squares));
}

// values := values / divisor * factor.
HWY_INLINE void Normalise(RawGroup& g, size_t count, float divisor, float factor) {
  const TagF d;
  for (size_t i = 0; i < count; i += hn::Lanes(d)) {
    const auto unit = hn::Div(hn::LoadU(d, g.scratch.values + i), hn::Set(d, divisor));
    hn::StoreU(hn::Mul(unit, hn::Set(d, factor)), d, g.scratch.values + i);
  }
}

// One segment of channels: convolved, normalised by a factor unless that is 0, rounded, written to
// column `column` of rows of `columns` elements.
HWY_INLINE void PrepareSegment(RawGroup& g, size_t first, size_t count, float norm_factor,
                               std::byte* to, size_t column, size_t columns) {
  LoadWindow(g, first, count);
  for (size_t s = 0; s < g.T; ++s) {
    const float squares = Convolve(g, s, first, count);
    if (norm_factor != 0) Normalise(g, count, std::sqrt(squares + kNormEpsilon), norm_factor);
    Narrow(g.dtype, g.scratch.values, count, to + (s * columns + column) * g.element_bytes);
  }
}

HWY_INLINE void PrepareConvolved(RawGroup& g) {
  const size_t d_k = g.shape.d_k, d_v = g.shape.d_v;
  const size_t keys = g.shape.key_group_count * d_k, values = g.shape.head_count * d_v;
  const bool mamba2 = !g.shape.is_delta_rule();
  const size_t q = mamba2 ? values + keys : 0;
  const size_t k = mamba2 ? values : keys;
  const size_t v = mamba2 ? 0 : 2 * keys;
  const bool norm = g.layer.qk_l2_norm;
  const size_t column = g.item.group * d_k;
  const float q_factor = norm ? 1 / std::sqrt(static_cast<float>(d_k)) : 0;
  PrepareSegment(g, q + column, d_k, q_factor, g.item.outputs.q, column, keys);
  PrepareSegment(g, k + column, d_k, norm ? 1.0f : 0.0f, g.item.outputs.k, column, keys);
  const size_t heads = g.shape.heads_per_group();
  for (size_t head = g.item.group * heads; head < (g.item.group + 1) * heads; ++head)
    PrepareSegment(g, v + head * d_v, d_v, 0, g.item.outputs.v, head * d_v, values);
}

HWY_INLINE void PrepareChannelGates(RawGroup& g, size_t token_head, size_t head) {
  const TagF d;
  const size_t d_k = g.shape.d_k;
  const auto* raw = static_cast<const std::byte*>(g.item.inputs.gate);
  float* gate = g.scratch.values;
  Widen(g.dtype, raw + token_head * d_k * g.element_bytes, d_k, gate);
  g.FlagUnless(AllFinite(gate, d_k));
  const auto rate = hn::Set(d, g.layer.rate[head]);
  for (size_t i = 0; i < d_k; i += hn::Lanes(d)) {
    const auto x =
        hn::Add(hn::LoadU(d, gate + i), hn::LoadU(d, g.layer.dt_bias.data() + head * d_k + i));
    auto log_alpha = hn::Zero(d);
    if (g.layer.kda_gate == KdaGate::kSoftplus) {
      log_alpha = hn::Max(hn::Neg(hn::Mul(rate, SoftplusOf(x))),
                          hn::Set(d, -std::numeric_limits<float>::max()));
    } else {
      log_alpha = hn::Mul(hn::Set(d, g.layer.gate_lower_bound), SigmoidOf(hn::Mul(rate, x)));
    }
    hn::StoreU(log_alpha, d, g.item.outputs.log_alpha + token_head * d_k + i);
  }
}

HWY_INLINE void PrepareGates(RawGroup& g) {
  const RawInputs& in = g.item.inputs;
  const RawOutputs& out = g.item.outputs;
  const size_t heads = g.shape.heads_per_group();
  for (size_t s = 0; s < g.T; ++s) {
    for (size_t head = g.item.group * heads; head < (g.item.group + 1) * heads; ++head) {
      const size_t i = s * g.shape.head_count + head;
      if (g.shape.is_delta_rule()) {
        const float b = g.At(in.b, i);
        g.FlagUnless(std::isfinite(b));
        out.beta[i] = Sigmoid(b);
      }
      if (g.shape.family == Family::kKda) {
        PrepareChannelGates(g, i, head);
        continue;
      }
      const float raw = g.At(g.shape.is_delta_rule() ? in.a : in.dt, i);
      g.FlagUnless(std::isfinite(raw));
      const float step = Softplus(raw + g.layer.dt_bias[head]);
      out.log_alpha[i] = LogDecay(g.layer.rate[head], step);
      if (!g.shape.is_delta_rule()) out.value_scale[i] = step;
    }
  }
}

uint32_t PrepareGroupTarget(const RawItem& item, RawScratch& scratch) {
  RawGroup g{item, scratch};
  PrepareConvolved(g);
  PrepareGates(g);
  return g.flags;
}

}  // namespace ssmd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ssmd::cpu {

HWY_EXPORT(PrepareGroupTarget);

RawLayer::RawLayer(const LayerShape& shape, const RawParameters& parameters)
    : taps(parameters.conv_weight.size()),
      bias(parameters.conv_bias),
      rate(parameters.a_log),
      dt_bias(parameters.dt_bias),
      d(parameters.d),
      qk_l2_norm(parameters.qk_l2_norm),
      kda_gate(parameters.kda_gate),
      gate_lower_bound(parameters.gate_lower_bound) {
  const size_t channels = shape.conv_channels(), w = shape.conv_width;
  SSMD_CHECK(taps.size() == channels * w, "conv_weight of %zu values", taps.size());
  for (size_t c = 0; c < channels; ++c) {
    for (size_t tap = 0; tap < w; ++tap)
      taps[tap * channels + c] = parameters.conv_weight[c * w + tap];
  }
  bias.resize(channels);
  dt_bias.resize(size_t{shape.head_count} * shape.decays_per_head());
  SSMD_CHECK(rate.size() == shape.head_count, "a_log of %zu values", rate.size());
  for (float& x : rate) x = std::min(std::exp(x), std::numeric_limits<float>::max());
}

RawBuffer::RawBuffer(const LayerShape& shape, const Formats& formats, uint64_t tokens) {
  const uint64_t activation = DtypeBytes(formats.activation);
  const uint64_t keys = tokens * shape.key_group_count * shape.d_k * activation;
  const uint64_t values = tokens * shape.head_count * shape.d_v * activation;
  const uint64_t heads = tokens * shape.head_count * sizeof(float);
  uint64_t end = 0;
  auto place = [&](uint64_t bytes) { return std::exchange(end, end + RoundUp(bytes, 64)); };
  const uint64_t q = place(keys), k = place(keys), v = place(values);
  const uint64_t log_alpha = place(heads * shape.decays_per_head()), per_head = place(heads);
  bytes_ = std::make_unique_for_overwrite<std::byte[]>(end);
  std::byte* data = bytes_.get();
  outputs_ = {.q = data + q,
              .k = data + k,
              .v = data + v,
              .log_alpha = reinterpret_cast<float*>(data + log_alpha)};
  (shape.is_delta_rule() ? outputs_.beta : outputs_.value_scale) =
      reinterpret_cast<float*>(data + per_head);
}

uint32_t PrepareGroup(const RawItem& item) {
  const LayerShape& shape = *item.shape;
  SSMD_CHECK(shape.conv_width >= 2 && shape.conv_width <= kConvWidthMax, "conv_width %u",
             shape.conv_width);
  SSMD_CHECK(item.draft_tokens > 0 && item.draft_tokens <= kDraftTokensMax &&
                 item.draft_tokens + shape.conv_width - 1 <= item.ring_layout->conv_rows,
             "T %u, %u conv rows", item.draft_tokens, item.ring_layout->conv_rows);
  thread_local RawScratch scratch;
  const FlushDenormals flush_denormals;
  return HWY_DYNAMIC_DISPATCH(PrepareGroupTarget)(item, scratch);
}

}  // namespace ssmd::cpu
#endif  // HWY_ONCE
