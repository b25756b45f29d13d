#include "client/demo/local_ssm.h"

#include <algorithm>
#include <cmath>

namespace ssmd::demo {
namespace {

template <typename Real>
Eigen::Matrix<Real, Eigen::Dynamic, 1> Slice(absl::Span<const float> values, size_t index,
                                             size_t size) {
  return Eigen::Map<const Eigen::VectorXf>(values.data() + index * size,
                                           static_cast<Eigen::Index>(size))
      .template cast<Real>();
}

}  // namespace

template <typename Real>
typename LocalSsm<Real>::LayerState LocalSsm<Real>::ZeroState(const SsmShape& shape) {
  return LayerState(shape.heads, Matrix::Zero(shape.d_v, shape.d_k));
}

template <typename Real>
absl::StatusOr<std::vector<SsmLayers::Handle>> LocalSsm<Real>::Create(uint32_t count) {
  std::vector<Handle> handles;
  for (uint32_t i = 0; i < count; ++i) {
    handles.push_back(Handle{next_handle_++});
    State& state = states_[handles.back()];
    for (size_t layer = 0; layer < kSsmShapes.size(); ++layer)
      state[layer] = ZeroState(kSsmShapes[layer]);
    conv_.Create(handles.back());
  }
  return handles;
}

template <typename Real>
absl::StatusOr<std::vector<SsmLayers::Handle>> LocalSsm<Real>::Fork(Handle parent, uint32_t count) {
  if (!states_.contains(parent)) return absl::NotFoundError("Fork: no such sequence");
  std::vector<Handle> handles;
  for (uint32_t i = 0; i < count; ++i) {
    handles.push_back(Handle{next_handle_++});
    State copy = states_[parent];
    states_[handles.back()] = std::move(copy);
    conv_.Fork(parent, handles.back());
  }
  return handles;
}

template <typename Real>
absl::Status LocalSsm<Real>::Release(absl::Span<const Handle> sequences) {
  for (Handle sequence : sequences) {
    if (states_.erase(sequence) == 0) return absl::NotFoundError("Release: no such sequence");
    conv_.Release(sequence);
  }
  return absl::OkStatus();
}

template <typename Real>
absl::Status LocalSsm<Real>::Begin(absl::Span<const Row> rows) {
  if (open_) return absl::FailedPreconditionError("Begin: a step is open");
  for (const Row& row : rows)
    if (!states_.contains(row.sequence)) return absl::NotFoundError("Begin: no such sequence");
  rows_.assign(rows.begin(), rows.end());
  conv_.Begin(rows);
  done_.fill(false);
  open_ = true;
  return absl::OkStatus();
}

template <typename Real>
void LocalSsm<Real>::Perturb(Matrix& s) {
  if (noise_ == 0.0) return;
  std::uniform_real_distribution<double> error(-noise_, noise_);
  for (Eigen::Index i = 0; i < s.size(); ++i) s.data()[i] *= static_cast<Real>(1 + error(random_));
}

template <typename Real>
typename LocalSsm<Real>::Vector LocalSsm<Real>::Product(const Matrix& s, const Vector& x) {
  Vector y = s * x;
  if (noise_ == 0.0) return y;
  std::uniform_real_distribution<double> error(-noise_, noise_);
  const double factor = std::sqrt(static_cast<double>(x.size()) / 2);
  for (Eigen::Index i = 0; i < y.size(); ++i)
    y[i] +=
        static_cast<Real>(factor * s.row(i).transpose().cwiseProduct(x).norm() * error(random_));
  return y;
}

template <typename Real>
typename LocalSsm<Real>::Vector LocalSsm<Real>::Update(const SsmShape& shape,
                                                       const RecurrenceInputs& inputs, size_t token,
                                                       uint32_t head, Matrix& s) {
  const size_t group = token * shape.groups + head / (shape.heads / shape.groups);
  const size_t item = token * shape.heads + head;
  const Vector q = Slice<Real>(inputs.q, group, shape.d_k);
  const Vector k = Slice<Real>(inputs.k, group, shape.d_k);
  Vector v = Slice<Real>(inputs.v, item, shape.d_v);
  if (shape.family == SsmFamily::kKda) {
    const Vector alpha = Slice<Real>(inputs.log_alpha, item, shape.d_k).array().exp().matrix();
    s = s * alpha.asDiagonal();
  } else {
    s *= std::exp(static_cast<Real>(inputs.log_alpha[item]));
  }
  if (shape.family == SsmFamily::kMamba2) {
    v *= static_cast<Real>(inputs.value_scale[item]);
  } else {
    v = static_cast<Real>(inputs.beta[item]) * (v - Product(s, k));
  }
  s.noalias() += v * k.transpose();
  Perturb(s);
  return Product(s, q);
}

template <typename Real>
absl::Status LocalSsm<Real>::Layer(size_t layer, const SsmInputs& inputs,
                                   absl::Span<float> output) {
  if (!open_) return absl::FailedPreconditionError("Layer: no step is open");
  const SsmShape& shape = kSsmShapes[layer];
  const RecurrenceInputs recurrence = conv_.Layer(layer, inputs);
  std::vector<LayerState>& drafted = drafted_[layer];
  drafted.clear();
  size_t token = 0;
  for (const Row& row : rows_) {
    for (uint32_t t = 0; t < row.tokens; ++t, ++token) {
      drafted.push_back(t == 0 ? states_.at(row.sequence)[layer] : drafted.back());
      for (uint32_t head = 0; head < shape.heads; ++head) {
        const Vector o = Update(shape, recurrence, token, head, drafted.back()[head]);
        float* out = output.data() + (token * shape.heads + head) * shape.d_v;
        Eigen::Map<Eigen::VectorXf>(out, shape.d_v) = o.template cast<float>();
      }
    }
  }
  conv_.AddSkip(layer, recurrence.v, output);
  done_[layer] = true;
  return absl::OkStatus();
}

template <typename Real>
absl::Status LocalSsm<Real>::Commit(absl::Span<const uint32_t> accepted) {
  if (!open_ || accepted.size() != rows_.size() ||
      !std::all_of(done_.begin(), done_.end(), [](bool done) { return done; }))
    return absl::FailedPreconditionError("Commit: no step with all its layers is open");
  for (size_t i = 0; i < rows_.size(); ++i)
    if (accepted[i] > rows_[i].tokens)
      return absl::OutOfRangeError("Commit: more accepted than drafted");
  conv_.Commit(accepted);
  size_t first = 0;
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (accepted[i] > 0)
      for (size_t layer = 0; layer < kSsmShapes.size(); ++layer)
        states_.at(rows_[i].sequence)[layer] = std::move(drafted_[layer][first + accepted[i] - 1]);
    first += rows_[i].tokens;
  }
  EndStep();
  return absl::OkStatus();
}

template <typename Real>
absl::Status LocalSsm<Real>::Abort() {
  conv_.Abort();
  EndStep();
  return absl::OkStatus();
}

template <typename Real>
void LocalSsm<Real>::EndStep() {
  open_ = false;
  rows_.clear();
  for (std::vector<LayerState>& drafted : drafted_) drafted.clear();
}

template class LocalSsm<float>;
template class LocalSsm<double>;

}  // namespace ssmd::demo
