#include "client/demo/model.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ssmd::demo {
namespace {

constexpr uint32_t kHidden = 384;
constexpr float kNormEpsilon = 1e-6f;
constexpr uint32_t kMixerDim = 256;  // heads * d_v of every mixer
constexpr uint32_t kGateRank = 32;   // KDA's f
constexpr uint32_t kAttentionHeads = 4, kAttentionDim = 64;

using RowVector = Eigen::Matrix<float, 1, Eigen::Dynamic>;

// y = x W^T. One dot product per output: its order of summation depends on the length alone.
Matrix Linear(const Matrix& x, const Matrix& weight) {
  Matrix y(x.rows(), weight.rows());
  for (Eigen::Index out = 0; out < weight.rows(); ++out)
    for (Eigen::Index n = 0; n < x.rows(); ++n) y(n, out) = x.row(n).dot(weight.row(out));
  return y;
}

// x / sqrt(mean(x^2) + eps) * weight over each run of weight.size() channels.
Matrix RmsNorm(const Matrix& x, const Matrix& weight) {
  Matrix y(x.rows(), x.cols());
  const Eigen::Index size = weight.size();
  for (Eigen::Index n = 0; n < x.rows(); ++n)
    for (Eigen::Index begin = 0; begin < x.cols(); begin += size) {
      const auto in = x.row(n).segment(begin, size);
      const float scale =
          1.0f / std::sqrt(in.squaredNorm() / static_cast<float>(size) + kNormEpsilon);
      y.row(n).segment(begin, size) = (in * scale).cwiseProduct(weight.row(0));
    }
  return y;
}

float Sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float Silu(float x) { return x * Sigmoid(x); }
float Softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Each run of 128 channels to unit length, times `scale`.
Matrix L2Norm(Matrix x, float scale) {
  for (Eigen::Index n = 0; n < x.rows(); ++n)
    for (Eigen::Index begin = 0; begin < x.cols(); begin += 128) {
      auto part = x.row(n).segment(begin, 128);
      part *= scale / std::sqrt(part.squaredNorm() + 1e-6f);
    }
  return x;
}

// Rotates pairs (i, i + 32) of each 64-wide head by position * 10000^(-i / 32).
void Rotate(RowVector x, uint64_t position, float* out) {
  for (uint32_t i = 0; i < kAttentionDim / 2; ++i) {
    const double angle = static_cast<double>(position) * std::pow(10000.0, -double{1} * i / 32);
    const float cosine = static_cast<float>(std::cos(angle));
    const float sine = static_cast<float>(std::sin(angle));
    for (uint32_t head = 0; head < kAttentionHeads; ++head) {
      const uint32_t low = head * kAttentionDim + i, high = low + kAttentionDim / 2;
      out[low] = x[low] * cosine - x[high] * sine;
      out[high] = x[high] * cosine + x[low] * sine;
    }
  }
}

absl::Span<const float> All(const Matrix& m) { return {m.data(), static_cast<size_t>(m.size())}; }

uint32_t ProjectionWidth(SsmFamily family) {
  switch (family) {
    case SsmFamily::kMamba2:
      return kMixerDim + 512 + 4;  // z | x B C | dt
    case SsmFamily::kGdn:
      return 768 + kMixerDim + 4 + 4;  // q k v | z | a | b
    case SsmFamily::kKda:
      return 768 + kMixerDim + 2 + kGateRank;  // q k v | z | b | f
  }
  return 0;
}

}  // namespace

// Collects tensors and the first error among them.
class HybridModel::Loader {
 public:
  explicit Loader(const Safetensors& weights) : weights_(weights) {}

  // 1-d tensors become one row.
  Matrix Get(const std::string& name, std::vector<uint64_t> shape) {
    auto values = weights_.Floats(name, shape);
    if (!values.ok()) {
      if (status_.ok()) status_ = values.status();
      return {};
    }
    count_ += values->size();
    const auto rows = static_cast<Eigen::Index>(shape.size() == 1 ? 1 : shape[0]);
    return Eigen::Map<const Matrix>(values->data(), rows, static_cast<Eigen::Index>(shape.back()));
  }

  const absl::Status& status() const { return status_; }
  uint64_t count() const { return count_; }

 private:
  const Safetensors& weights_;
  absl::Status status_;
  uint64_t count_ = 0;
};

absl::StatusOr<std::unique_ptr<HybridModel>> HybridModel::Load(const Safetensors& weights) {
  std::unique_ptr<HybridModel> model(new HybridModel);
  Loader load(weights);
  model->embedding_ = load.Get("embedding.weight", {kVocabulary, kModelDim});
  model->norm_ = load.Get("norm.weight", {kModelDim});
  size_t ssm_layers = 0, attention_layers = 0;
  for (size_t i = 0; i < model->blocks_.size(); ++i) {
    Block& block = model->blocks_[i];
    const std::string prefix = absl::StrCat("blocks.", i, "."), mixer = prefix + "mixer.";
    block.norm1 = load.Get(prefix + "norm1.weight", {kModelDim});
    block.norm2 = load.Get(prefix + "norm2.weight", {kModelDim});
    block.gate = load.Get(prefix + "mlp.gate.weight", {kHidden, kModelDim});
    block.up = load.Get(prefix + "mlp.up.weight", {kHidden, kModelDim});
    block.down = load.Get(prefix + "mlp.down.weight", {kModelDim, kHidden});
    block.out_proj = load.Get(mixer + "out_proj.weight", {kModelDim, kMixerDim});
    block.attention = i % 4 == 3;
    block.index = block.attention ? attention_layers++ : ssm_layers++;
    if (block.attention) {
      block.in_proj = load.Get(mixer + "qkv_proj.weight", {3 * kMixerDim, kModelDim});
      continue;
    }
    const SsmShape& shape = kSsmShapes[block.index];
    const uint32_t channels = ConvChannels(shape.family);
    block.in_proj = load.Get(mixer + "in_proj.weight", {ProjectionWidth(shape.family), kModelDim});
    block.conv_weight = load.Get(mixer + "conv.weight", {channels, kConvWidth});
    block.a_log = load.Get(mixer + "A_log", {shape.heads});
    switch (shape.family) {
      case SsmFamily::kMamba2:
        block.conv_bias = load.Get(mixer + "conv.bias", {channels});
        block.skip = load.Get(mixer + "D", {shape.heads});
        block.dt_bias = load.Get(mixer + "dt_bias", {shape.heads});
        block.mixer_norm = load.Get(mixer + "norm.weight", {kMixerDim});
        break;
      case SsmFamily::kGdn:
        block.dt_bias = load.Get(mixer + "dt_bias", {shape.heads});
        block.mixer_norm = load.Get(mixer + "norm.weight", {shape.d_v});
        break;
      case SsmFamily::kKda:
        block.f_proj = load.Get(mixer + "f_proj.weight", {shape.heads * shape.d_k, kGateRank});
        block.dt_bias = load.Get(mixer + "dt_bias", {shape.heads, shape.d_k});
        block.mixer_norm = load.Get(mixer + "norm.weight", {shape.d_v});
        break;
    }
  }
  if (!load.status().ok()) return load.status();
  model->parameter_count_ = load.count();
  return model;
}

Matrix HybridModel::Convolve(const Block& block, const Matrix& inputs,
                             absl::Span<const ModelRow> rows) {
  Matrix y(inputs.rows(), inputs.cols());
  Eigen::Index n = 0;
  for (const ModelRow& row : rows) {
    ConvWindow& window = row.cache->conv_[block.index];
    for (size_t t = 0; t < row.tokens.size(); ++t, ++n) {
      window.Append({inputs.row(n).data(), static_cast<size_t>(inputs.cols())});
      const int64_t oldest = window.end() - kConvWidth;
      for (Eigen::Index c = 0; c < inputs.cols(); ++c) {
        float sum = block.conv_bias.size() > 0 ? block.conv_bias(0, c) : 0.0f;
        for (uint32_t tap = 0; tap < kConvWidth; ++tap)
          sum += block.conv_weight(c, tap) * window.row(oldest + tap)[c];
        y(n, c) = Silu(sum);
      }
    }
  }
  return y;
}

absl::StatusOr<Matrix> HybridModel::SsmMixer(const Block& block, const Matrix& x,
                                             absl::Span<const ModelRow> rows,
                                             SsmLayers& ssm) const {
  const SsmShape& shape = kSsmShapes[block.index];
  const bool mamba2 = shape.family == SsmFamily::kMamba2, kda = shape.family == SsmFamily::kKda;
  const Eigen::Index n = x.rows(), heads = shape.heads;
  const Matrix projected = Linear(x, block.in_proj);
  const Eigen::Index conv_begin = mamba2 ? kMixerDim : 0, conv_size = block.conv_weight.rows();
  const Eigen::Index z_begin = mamba2 ? 0 : conv_size, rest = kMixerDim + conv_size;
  const Matrix conv = Convolve(block, projected.middleCols(conv_begin, conv_size), rows);
  const Matrix z = projected.middleCols(z_begin, kMixerDim);

  Matrix q, k, v, log_alpha, beta, value_scale;
  if (mamba2) {
    v = conv.leftCols(256);
    k = conv.middleCols(256, 128);
    q = conv.rightCols(128);
  } else {
    q = L2Norm(conv.leftCols(256), 1.0f / std::sqrt(128.0f));
    k = L2Norm(conv.middleCols(256, 256), 1.0f);
    v = conv.rightCols(256);
    // b follows z (KDA) or a (GDN).
    beta = projected.middleCols(kda ? rest : rest + heads, heads).unaryExpr(&Sigmoid);
  }
  // log_alpha = -exp(A_log) softplus(gate + dt_bias), per head or per head and channel.
  const Matrix gate = kda ? Linear(projected.rightCols(kGateRank), block.f_proj)
                          : Matrix(projected.middleCols(rest, heads));
  const Eigen::Index width = gate.cols() / heads;
  log_alpha.resize(n, gate.cols());
  if (mamba2) value_scale.resize(n, heads);
  for (Eigen::Index i = 0; i < n; ++i)
    for (Eigen::Index c = 0; c < gate.cols(); ++c) {
      const float dt = Softplus(gate(i, c) + block.dt_bias.data()[c]);
      log_alpha(i, c) = -std::exp(block.a_log(0, c / width)) * dt;
      if (mamba2) value_scale(i, c) = dt;
    }

  Matrix o(n, kMixerDim);
  absl::Status status = ssm.Layer(block.index,
                                  {.q = All(q),
                                   .k = All(k),
                                   .v = All(v),
                                   .log_alpha = All(log_alpha),
                                   .beta = All(beta),
                                   .value_scale = All(value_scale)},
                                  {o.data(), static_cast<size_t>(o.size())});
  if (!status.ok()) return status;

  const Matrix gates = z.unaryExpr(&Silu);
  if (!mamba2) return Linear(RmsNorm(o, block.mixer_norm).cwiseProduct(gates), block.out_proj);
  for (Eigen::Index head = 0; head < heads; ++head)
    o.middleCols(head * shape.d_v, shape.d_v) +=
        block.skip(0, head) * v.middleCols(head * shape.d_v, shape.d_v);
  return Linear(RmsNorm(o.cwiseProduct(gates), block.mixer_norm), block.out_proj);
}

Matrix HybridModel::Attention(const Block& block, const Matrix& x,
                              absl::Span<const ModelRow> rows) const {
  const Matrix qkv = Linear(x, block.in_proj);
  Matrix o(x.rows(), kMixerDim);
  RowVector q(kMixerDim), scores;
  Eigen::Index n = 0;
  for (const ModelRow& row : rows) {
    std::vector<float>& keys = row.cache->keys_[block.index];
    std::vector<float>& values = row.cache->values_[block.index];
    for (size_t t = 0; t < row.tokens.size(); ++t, ++n) {
      const uint64_t position = row.cache->position() + t;
      Rotate(qkv.row(n).head(kMixerDim), position, q.data());
      keys.resize((position + 1) * kMixerDim);
      Rotate(qkv.row(n).segment(kMixerDim, kMixerDim), position, &keys[position * kMixerDim]);
      values.resize((position + 1) * kMixerDim);
      Eigen::Map<RowVector>(&values[position * kMixerDim], kMixerDim) = qkv.row(n).tail(kMixerDim);
      const auto count = static_cast<Eigen::Index>(position + 1);
      const Eigen::Map<const Matrix> all_keys(keys.data(), count, kMixerDim);
      const Eigen::Map<const Matrix> all_values(values.data(), count, kMixerDim);
      scores.resize(count);
      for (uint32_t head = 0; head < kAttentionHeads; ++head) {
        const Eigen::Index begin = head * kAttentionDim;
        for (Eigen::Index j = 0; j < count; ++j)
          scores[j] =
              q.segment(begin, kAttentionDim).dot(all_keys.row(j).segment(begin, kAttentionDim)) /
              8.0f;
        scores = (scores.array() - scores.maxCoeff()).exp();
        scores /= scores.sum();
        auto out = o.row(n).segment(begin, kAttentionDim);
        out.setZero();
        for (Eigen::Index j = 0; j < count; ++j)
          out += scores[j] * all_values.row(j).segment(begin, kAttentionDim);
      }
    }
  }
  return Linear(o, block.out_proj);
}

absl::StatusOr<Matrix> HybridModel::Forward(absl::Span<const ModelRow> rows, SsmLayers& ssm,
                                            std::vector<Matrix>* hidden) const {
  std::vector<SsmLayers::Row> ssm_rows;
  size_t tokens = 0;
  for (const ModelRow& row : rows) {
    ssm_rows.push_back({row.ssm, static_cast<uint32_t>(row.tokens.size())});
    tokens += row.tokens.size();
  }
  if (absl::Status status = ssm.Begin(ssm_rows); !status.ok()) return status;

  Matrix x(tokens, kModelDim);
  Eigen::Index n = 0;
  for (const ModelRow& row : rows)
    for (uint8_t token : row.tokens) x.row(n++) = embedding_.row(token);
  for (const Block& block : blocks_) {
    const Matrix normed = RmsNorm(x, block.norm1);
    if (block.attention) {
      x += Attention(block, normed, rows);
    } else {
      absl::StatusOr<Matrix> mixed = SsmMixer(block, normed, rows, ssm);
      if (!mixed.ok()) {
        // Drop the rows that this step appended; nothing committed is touched.
        for (const ModelRow& row : rows) row.cache->Truncate(row.cache->position()).IgnoreError();
        return mixed.status();
      }
      x += *mixed;
    }
    const Matrix in = RmsNorm(x, block.norm2);
    const Matrix gates = Linear(in, block.gate).unaryExpr(&Silu);
    x += Linear(gates.cwiseProduct(Linear(in, block.up)), block.down);
    if (hidden != nullptr) hidden->push_back(x);
  }
  for (const ModelRow& row : rows) row.cache->position_ += row.tokens.size();
  return Linear(RmsNorm(x, norm_), embedding_);
}

absl::Status HybridModel::Commit(absl::Span<const ModelRow> rows,
                                 absl::Span<const uint32_t> accepted, SsmLayers& ssm) const {
  if (absl::Status status = ssm.Commit(accepted); !status.ok()) return status;
  for (size_t i = 0; i < rows.size(); ++i) {
    SequenceCache& cache = *rows[i].cache;
    const uint64_t rejected = rows[i].tokens.size() - accepted[i];
    if (absl::Status status = cache.Truncate(cache.position() - rejected); !status.ok())
      return status;
  }
  return absl::OkStatus();
}

}  // namespace ssmd::demo
