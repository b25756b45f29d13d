#include "client/demo/short_conv.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <Eigen/Core>

#include "absl/strings/str_cat.h"

namespace ssmd::demo {
namespace {

constexpr size_t kHistory = kConvWidth - 1;

float Sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float Softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Columns [begin, begin + count) of rows of `columns`.
std::vector<float> Columns(const std::vector<float>& rows, size_t columns, size_t begin,
                           size_t count) {
  std::vector<float> out;
  out.reserve(rows.size() / columns * count);
  for (size_t at = begin; at < rows.size(); at += columns)
    out.insert(out.end(), rows.begin() + at, rows.begin() + at + count);
  return out;
}

}  // namespace

void ShortConv::Create(Handle sequence) {
  Windows& windows = windows_[sequence];
  for (size_t layer = 0; layer < windows.size(); ++layer)
    windows[layer].assign(kHistory * ConvChannels(kSsmShapes[layer].family), 0.0f);
}

float ShortConv::Perturbed(float value, float magnitude) {
  if (noise_ == 0.0) return value;
  std::uniform_real_distribution<double> error(-noise_, noise_);
  return value + static_cast<float>(error(random_) * magnitude);
}

std::vector<float> ShortConv::Convolve(size_t layer, absl::Span<const float> projection) {
  const SsmParameters& small = parameters_[layer];
  const size_t channels = ConvChannels(kSsmShapes[layer].family);
  std::vector<float> y(projection.size());
  const float* from = projection.data();
  float* to = y.data();
  for (const SsmLayers::Row& row : rows_) {
    Window& window = windows_.at(row.sequence)[layer];
    window.resize(kHistory * channels);
    window.insert(window.end(), from, from + row.tokens * channels);
    from += row.tokens * channels;
    for (size_t t = 0; t < row.tokens; ++t, to += channels) {
      const float* oldest = &window[t * channels];
      for (size_t c = 0; c < channels; ++c) {
        float sum = small.conv_bias.empty() ? 0.0f : small.conv_bias[c];
        float magnitude = std::abs(sum);
        for (size_t tap = 0; tap < kConvWidth; ++tap) {
          const float term = small.conv_weight[c * kConvWidth + tap] * oldest[tap * channels + c];
          sum += term;
          magnitude += std::abs(term);
        }
        sum = Perturbed(sum, magnitude);
        to[c] = Perturbed(sum * Sigmoid(sum));
      }
    }
  }
  return y;
}

// Each run of d_k to unit length, times `scale`.
void ShortConv::Normalise(size_t d_k, float scale, std::vector<float>& x) {
  for (size_t begin = 0; begin < x.size(); begin += d_k) {
    const Eigen::Map<Eigen::VectorXf> part(&x[begin], static_cast<Eigen::Index>(d_k));
    // A sum of n positive terms has an error of about sqrt(n / 3) roundings, its root half of it.
    float factor = scale / std::sqrt(part.squaredNorm() + 1e-6f);
    factor = Perturbed(factor, factor * std::sqrt(static_cast<float>(d_k) / 12));
    for (size_t i = begin; i < begin + d_k; ++i) x[i] = Perturbed(x[i] * factor);
  }
}

RecurrenceInputs ShortConv::Layer(size_t layer, const SsmInputs& inputs) {
  const SsmShape& shape = kSsmShapes[layer];
  const SsmParameters& small = parameters_[layer];
  const bool mamba2 = shape.family == SsmFamily::kMamba2;
  const size_t keys = size_t{shape.groups} * shape.d_k, values = size_t{shape.heads} * shape.d_v;
  const size_t channels = ConvChannels(shape.family);
  const std::vector<float> y = Convolve(layer, inputs.projection);
  RecurrenceInputs out;
  out.q = Columns(y, channels, mamba2 ? values + keys : 0, keys);
  out.k = Columns(y, channels, mamba2 ? values : keys, keys);
  out.v = Columns(y, channels, mamba2 ? 0 : 2 * keys, values);
  if (!mamba2) {
    Normalise(shape.d_k, 1.0f / std::sqrt(static_cast<float>(shape.d_k)), out.q);
    Normalise(shape.d_k, 1.0f, out.k);
    for (const float b : inputs.b) out.beta.push_back(Perturbed(Sigmoid(b)));
  }
  const size_t gates = small.dt_bias.size(), per_head = gates / shape.heads;
  for (size_t i = 0; i < inputs.gate.size(); ++i) {
    const size_t gate = i % gates;
    const float dt = Perturbed(Softplus(inputs.gate[i] + small.dt_bias[gate]));
    out.log_alpha.push_back(Perturbed(-std::exp(small.a_log[gate / per_head]) * dt));
    if (mamba2) out.value_scale.push_back(dt);
  }
  return out;
}

void ShortConv::AddSkip(size_t layer, absl::Span<const float> v, absl::Span<float> output) {
  const std::vector<float>& d = parameters_[layer].d;
  if (d.empty()) return;
  const SsmShape& shape = kSsmShapes[layer];
  for (size_t i = 0; i < output.size(); ++i)
    output[i] = Perturbed(output[i] + d[i / shape.d_v % shape.heads] * v[i]);
}

void ShortConv::Commit(absl::Span<const uint32_t> accepted) {
  for (size_t i = 0; i < rows_.size(); ++i) {
    Windows& windows = windows_.at(rows_[i].sequence);
    for (size_t layer = 0; layer < windows.size(); ++layer) {
      const size_t channels = ConvChannels(kSsmShapes[layer].family);
      Window& window = windows[layer];
      window.erase(window.begin(), window.begin() + accepted[i] * channels);
      window.resize(kHistory * channels);
    }
  }
  rows_.clear();
}

void ShortConv::Abort() {
  const std::vector<uint32_t> none(rows_.size(), 0);
  Commit(none);
}

std::string ShortConv::Save(Handle sequence) const {
  std::string bytes;
  for (const Window& window : windows_.at(sequence))
    bytes.append(reinterpret_cast<const char*>(window.data()), window.size() * sizeof(float));
  return bytes;
}

absl::Status ShortConv::Load(Handle sequence, const std::string& bytes) {
  Create(sequence);
  if (bytes.size() != Save(sequence).size())
    return absl::InvalidArgumentError(
        absl::StrCat("convolution windows of ", bytes.size(), " bytes are not of this model"));
  const char* from = bytes.data();
  for (Window& window : windows_[sequence]) {
    std::memcpy(window.data(), from, window.size() * sizeof(float));
    from += window.size() * sizeof(float);
  }
  return absl::OkStatus();
}

}  // namespace ssmd::demo
