// ShortConv: short convolutions, gates and norms of the SSM layers in this process, and the
// convolutions' windows of its sequences. What LocalSsm needs, and a worker that speaks the
// post-conv form; a worker in raw form has none of it.
//
//   y = SiLU(bias + sum_i weight_i z_(p - 3 + i)) per channel; z: projections, 0 before the first
//   Mamba-2  v|k|q = y; dt = softplus(dt + dt_bias); log_alpha = -exp(A_log) dt, value scale dt
//   GDN/KDA  q|k|v = y, q and k to unit length per key group, q / sqrt(d_k);
//            log_alpha = -exp(A_log) softplus(gate + dt_bias), beta = sigmoid(b)
//
// FP32. Written from the equations; it shares no code with the service. Not thread-safe.
#pragma once

#include <map>
#include <random>
#include <string>
#include <vector>

#include "client/demo/ssm.h"

namespace ssmd::demo {

// [N, ...] as in ssm.h: q, k [group, d_k]; v [head, d_v]; log_alpha [head] or KDA [head, d_k];
// beta (GDN, KDA) and value_scale (Mamba-2) [head], else empty.
struct RecurrenceInputs {
  std::vector<float> q, k, v, log_alpha, beta, value_scale;
};

class ShortConv {
 public:
  using Handle = SsmLayers::Handle;

  // `noise`: see compare.h; 0: none. Requires: `parameters` outlive this object.
  explicit ShortConv(const AllSsmParameters& parameters, double noise = 0.0)
      : parameters_(parameters), noise_(noise) {}

  void Create(Handle sequence);
  void Fork(Handle parent, Handle child) { windows_[child] = windows_.at(parent); }
  void Release(Handle sequence) { windows_.erase(sequence); }

  // A step: Begin, Layer per layer, Commit or Abort. Requires: the sequences are known.
  void Begin(absl::Span<const SsmLayers::Row> rows) { rows_.assign(rows.begin(), rows.end()); }
  RecurrenceInputs Layer(size_t layer, const SsmInputs& inputs);
  // output += D v.
  void AddSkip(size_t layer, absl::Span<const float> v, absl::Span<float> output);
  void Commit(absl::Span<const uint32_t> accepted);
  void Abort();

  // The windows of a sequence between steps, as bytes.
  std::string Save(Handle sequence) const;
  absl::Status Load(Handle sequence, const std::string& bytes);

 private:
  // The projections of the last kConvWidth - 1 tokens, then those of the step's drafts.
  using Window = std::vector<float>;
  using Windows = std::array<Window, kSsmShapes.size()>;

  std::vector<float> Convolve(size_t layer, absl::Span<const float> projection);
  void Normalise(size_t d_k, float scale, std::vector<float>& x);
  // `value` with an error of at most noise_ * magnitude.
  float Perturbed(float value, float magnitude);
  float Perturbed(float value) { return Perturbed(value, value); }

  const AllSsmParameters& parameters_;
  const double noise_;
  std::mt19937_64 random_{2};
  std::map<Handle, Windows> windows_;
  std::vector<SsmLayers::Row> rows_;  // of the open step
};

}  // namespace ssmd::demo
