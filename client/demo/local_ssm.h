// LocalSsm: the recurrences of the SSM layers, one token after another, in this process.
//
// What an engine without a state service does: a state per sequence and layer, and because a state
// cannot be un-updated, a copy of it after each token of a step, of which Commit keeps one. Written
// from the equations, as the yardstick of RemoteSsm; it shares no code with the service.
// ShortConv makes q, k, v and the gates.
//
//   Mamba-2  S = alpha S + (scale v) k^T                       o = S q + D v
//   GDN/KDA  S = S Diag(alpha);  u = beta (v - S k);  S = S + u k^T;  o = S q
#pragma once

#include <Eigen/Core>
#include <map>
#include <random>
#include <vector>

#include "client/demo/short_conv.h"
#include "client/demo/ssm.h"

namespace ssmd::demo {

template <typename Real>  // float or double: arithmetic and states
class LocalSsm final : public SsmLayers {
 public:
  // `noise`: see Perturb. 0: plain. Requires: `parameters` outlive this object.
  explicit LocalSsm(const AllSsmParameters& parameters, double noise = 0.0)
      : noise_(noise), conv_(parameters, noise) {}

  absl::StatusOr<std::vector<Handle>> Create(uint32_t count) override;
  absl::StatusOr<std::vector<Handle>> Fork(Handle parent, uint32_t count) override;
  absl::Status Release(absl::Span<const Handle> sequences) override;
  absl::Status Begin(absl::Span<const Row> rows) override;
  absl::Status Layer(size_t layer, const SsmInputs& inputs, absl::Span<float> output) override;
  absl::Status Commit(absl::Span<const uint32_t> accepted) override;
  absl::Status Abort() override;

 private:
  using Matrix = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using Vector = Eigen::Matrix<Real, Eigen::Dynamic, 1>;
  using LayerState = std::vector<Matrix>;  // [head] of [d_v, d_k]
  using State = std::array<LayerState, kSsmShapes.size()>;

  void EndStep();
  static LayerState ZeroState(const SsmShape& shape);
  // S after one token of one head from S before it; returns o.
  Vector Update(const SsmShape& shape, const RecurrenceInputs& inputs, size_t token, uint32_t head,
                Matrix& s);
  // Rounding errors of a machine whose unit roundoff is noise_: each element of the state gets a
  // random relative error of at most noise_, each dot product S x one of at most noise_ per partial
  // sum (their squares sum to about d_k / 2 times the squared norm of its terms).
  void Perturb(Matrix& s);
  Vector Product(const Matrix& s, const Vector& x);

  const double noise_;
  ShortConv conv_;
  std::mt19937_64 random_{1};
  uint64_t next_handle_ = 1;
  std::map<Handle, State> states_;
  std::vector<Row> rows_;  // of the open step
  bool open_ = false;
  std::array<bool, kSsmShapes.size()> done_{};
  // [layer][token]: the state after each token of the open step, all rows.
  std::array<std::vector<LayerState>, kSsmShapes.size()> drafted_;
};

}  // namespace ssmd::demo
