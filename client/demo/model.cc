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

  std::vector<float> GetVector(const std::string& name, std::vector<uint64_t> shape) {
    const Matrix values = Get(name, std::move(shape));
    return {values.data(), values.data() + values.size()};
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
    SsmParameters& small = model->ssm_parameters_[block.index];
    small.conv_weight = load.GetVector(mixer + "conv.weight", {channels, kConvWidth});
    small.a_log = load.GetVector(mixer + "A_log", {shape.heads});
    switch (shape.family) {
      case SsmFamily::kMamba2:
        small.conv_bias = load.GetVector(mixer + "conv.bias", {channels});
        small.d = load.GetVector(mixer + "D", {shape.heads});
        small.dt_bias = load.GetVector(mixer + "dt_bias", {shape.heads});
        block.mixer_norm = load.Get(mixer + "norm.weight", {kMixerDim});
        break;
      case SsmFamily::kGdn:
        small.dt_bias = load.GetVector(mixer + "dt_bias", {shape.heads});
        block.mixer_norm = load.Get(mixer + "norm.weight", {shape.d_v});
        break;
      case SsmFamily::kKda:
        block.f_proj = load.Get(mixer + "f_proj.weight", {shape.heads * shape.d_k, kGateRank});
        small.dt_bias = load.GetVector(mixer + "dt_bias", {shape.heads, shape.d_k});
        block.mixer_norm = load.Get(mixer + "norm.weight", {shape.d_v});
        break;
    }
  }
  if (!load.status().ok()) return load.status();
  model->parameter_count_ = load.count();
  return model;
}

absl::StatusOr<Matrix> HybridModel::SsmMixer(const Block& block, const Matrix& x,
                                             SsmLayers& ssm) const {
  const SsmShape& shape = kSsmShapes[block.index];
  const bool mamba2 = shape.family == SsmFamily::kMamba2, kda = shape.family == SsmFamily::kKda;
  const Eigen::Index heads = shape.heads, channels = ConvChannels(shape.family);
  const Matrix projected = Linear(x, block.in_proj);
  const Eigen::Index conv_begin = mamba2 ? kMixerDim : 0, z_begin = mamba2 ? 0 : channels;
  const Eigen::Index rest = kMixerDim + channels;
  const Matrix projection = projected.middleCols(conv_begin, channels);
  const Matrix z = projected.middleCols(z_begin, kMixerDim);
  const Matrix gate = kda ? Linear(projected.rightCols(kGateRank), block.f_proj)
                          : Matrix(projected.middleCols(rest, heads));
  Matrix b;  // follows z (KDA) or a (GDN)
  if (!mamba2) b = projected.middleCols(kda ? rest : rest + heads, heads);

  Matrix o(x.rows(), kMixerDim);
  absl::Status status =
      ssm.Layer(block.index, {.projection = All(projection), .gate = All(gate), .b = All(b)},
                {o.data(), static_cast<size_t>(o.size())});
  if (!status.ok()) return status;

  const Matrix gates = z.unaryExpr(&Silu);
  if (mamba2) return Linear(RmsNorm(o.cwiseProduct(gates), block.mixer_norm), block.out_proj);
  return Linear(RmsNorm(o, block.mixer_norm).cwiseProduct(gates), block.out_proj);
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
      absl::StatusOr<Matrix> mixed = SsmMixer(block, normed, ssm);
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
