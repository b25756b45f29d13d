#include "bench/kernels/check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "bench/kernels/device.h"

namespace ssmd::bench {
namespace {

using cuda::DeviceRow;
using cuda::RingRuns;
using cuda::VerifyLaunch;
using Vector = std::vector<double>;

Vector Widen(const std::vector<std::byte>& bytes, Dtype dtype) {
  Vector values(bytes.size() / DtypeBytes(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == Dtype::kFp32) {
      float value;
      std::memcpy(&value, &bytes[4 * i], 4);
      values[i] = value;
    } else {
      uint16_t bits;
      std::memcpy(&bits, &bytes[2 * i], 2);
      values[i] = dtype == Dtype::kBf16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
    }
  }
  return values;
}

// Elements [first, first + count) of a device tensor.
Vector Read(const void* tensor, uint64_t first, uint64_t count, Dtype dtype) {
  return Widen(ToHost<std::byte>(static_cast<const std::byte*>(tensor) + first * DtypeBytes(dtype),
                                 count * DtypeBytes(dtype)),
               dtype);
}

// One token as the recurrence sees it.
struct Token {
  Vector k, v;       // v or u of a record
  Vector log_alpha;  // per channel
  double scale = 1;  // dt or beta
};

struct Head {
  const VerifyLaunch& launch;
  const DeviceRow& row;
  const uint32_t head;
  const LayerShape& shape = launch.shape;
  const uint32_t group = head / shape.heads_per_group();
  const uint32_t in_group = head % shape.heads_per_group();
  const bool channelwise = shape.family == Family::kKda;
  const Dtype value_dtype =
      shape.is_delta_rule() ? launch.formats.correction : launch.formats.activation;

  // Record of position p.
  Vector Record(const RingRuns& runs, uint32_t run, uint64_t p, uint64_t first, uint64_t count,
                Dtype dtype) const {
    const uint64_t r = uint64_t{run} * launch.ring.ring_records + p % launch.ring.ring_records;
    return Read(
        launch.rings + row.slot * launch.ring.slot_bytes + runs.offset_bytes + r * runs.row_bytes,
        first, count, dtype);
  }
  Vector PerChannel(Vector decays) const {
    if (!channelwise) decays.assign(shape.d_k, decays[0]);
    return decays;
  }
  Token Committed(uint64_t p) const {
    Token token;
    token.k = Record(launch.ring.key, group, p, 0, shape.d_k, launch.formats.activation);
    token.v = Record(launch.ring.value, head, p, 0, shape.d_v, value_dtype);
    token.log_alpha = PerChannel(
        channelwise ? Record(launch.ring.log_alpha, head, p, 0, shape.d_k, Dtype::kFp32)
                    : Record(launch.ring.log_alpha, group, p, in_group, 1, Dtype::kFp32));
    if (!shape.is_delta_rule())
      token.scale = Record(launch.ring.value_scale, group, p, in_group, 1, Dtype::kFp32)[0];
    return token;
  }
  // Token s of the row.
  Token New(uint32_t s) const {
    Token token;
    const Dtype activation = launch.formats.activation;
    const uint64_t index = uint64_t{row.first_token} + s;
    const uint64_t token_head = index * shape.head_count + head;
    const uint64_t token_group = index * shape.key_group_count + group;
    token.k = Read(launch.inputs.k, token_group * shape.d_k, shape.d_k, activation);
    token.v = Read(launch.inputs.v, token_head * shape.d_v, shape.d_v, activation);
    const uint32_t decays = shape.decays_per_head();
    token.log_alpha =
        PerChannel(Read(launch.inputs.log_alpha, token_head * decays, decays, Dtype::kFp32));
    const float* scale = shape.is_delta_rule() ? launch.inputs.beta : launch.inputs.value_scale;
    if (scale != nullptr) token.scale = Read(scale, token_head, 1, Dtype::kFp32)[0];
    return token;
  }
  Vector Query(uint32_t s) const {
    const uint64_t token_group = (uint64_t{row.first_token} + s) * shape.key_group_count + group;
    return Read(launch.inputs.q, token_group * shape.d_k, shape.d_k, launch.formats.activation);
  }
  Vector Output(uint32_t s) const {
    const uint64_t token_head = (uint64_t{row.first_token} + s) * shape.head_count + head;
    return Read(launch.output, token_head * shape.d_v, shape.d_v, launch.formats.output);
  }
};

// S := S Diag(alpha), then S += u k^T with u = dt x, a record's u, or beta (v - S k).
Vector Advance(Vector& state, const Token& token, bool solve, double scale) {
  const size_t d_k = token.k.size(), d_v = token.v.size();
  Vector alpha(d_k), u(d_v);
  for (size_t c = 0; c < d_k; ++c) alpha[c] = std::exp(token.log_alpha[c]);
  for (size_t r = 0; r < d_v; ++r) {
    double* row = &state[r * d_k];
    double read = 0;
    for (size_t c = 0; c < d_k; ++c) read += (row[c] *= alpha[c]) * token.k[c];
    u[r] = scale * (solve ? token.v[r] - read : token.v[r]);
    for (size_t c = 0; c < d_k; ++c) row[c] += u[r] * token.k[c];
  }
  return u;
}

Vector Multiply(const Vector& state, const Vector& q) {
  Vector output(state.size() / q.size());
  for (size_t r = 0; r < output.size(); ++r) {
    for (size_t c = 0; c < q.size(); ++c) output[r] += state[r * q.size() + c] * q[c];
  }
  return output;
}

double RelativeError(const Vector& actual, const Vector& exact) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    error += (actual[i] - exact[i]) * (actual[i] - exact[i]);
    norm += exact[i] * exact[i];
  }
  return std::sqrt(error / std::max(norm, 1e-300));
}

}  // namespace

bool HeadErrors::Within(Dtype output_dtype, bool delta_rule) const {
  // bf16 rounds to 2^-9 at most, 2^-9 / sqrt(3) on average; u carries fp16's 2^-12 / sqrt(3).
  const double output_max = output_dtype == Dtype::kBf16 ? 3e-3 : delta_rule ? 5e-4 : 1e-5;
  return output <= output_max && state <= 2e-6 && correction <= 5e-4 && record == 0;
}

void HeadErrors::Merge(const HeadErrors& other) {
  auto merge = [](double& a, double b) { a = b > a || b != b ? b : a; };
  merge(output, other.output);
  merge(state, other.state);
  merge(correction, other.correction);
  merge(record, other.record);
}

std::vector<float> ReadState(const VerifyLaunch& launch, uint32_t page, uint32_t head) {
  const uint64_t elements = uint64_t{launch.shape.d_v} * launch.shape.d_k;
  return ToHost<float>(
      launch.pages + page * launch.page.page_bytes + head * elements * sizeof(float), elements);
}

HeadErrors CheckVerify(const VerifyLaunch& launch, const DeviceRow& row, uint32_t head) {
  const Head at{launch, row, head};
  const bool delta_rule = launch.shape.is_delta_rule();
  const std::vector<float> source = ReadState(launch, row.source_page, head);
  Vector state(source.begin(), source.end());
  HeadErrors errors;
  const bool folds = row.target_page != ToInt(kNoPage);
  for (uint64_t p = row.base;; ++p) {
    if (folds && p == row.fold_to) {
      const std::vector<float> target = ReadState(launch, row.target_page, head);
      errors.state = RelativeError(Vector(target.begin(), target.end()), state);
    }
    if (p == row.tail) break;
    const Token token = at.Committed(p);
    Advance(state, token, false, token.scale);
  }
  for (uint32_t t = 0; t < row.draft_tokens; ++t) {
    HeadErrors of_token;
    const Token token = at.New(t);
    const Vector u = Advance(state, token, delta_rule, token.scale);
    of_token.output = RelativeError(at.Output(t), Multiply(state, at.Query(t)));
    const Token appended = at.Committed(row.tail + t);
    if (delta_rule) of_token.correction = RelativeError(appended.v, u);
    if (appended.k != token.k || appended.log_alpha != token.log_alpha ||
        (!delta_rule && (appended.v != token.v || appended.scale != token.scale)))
      of_token.record = 1;
    errors.Merge(of_token);
  }
  return errors;
}

HeadErrors CheckConventional(const VerifyLaunch& launch, const DeviceRow& row, uint32_t head,
                             const std::vector<float>& before) {
  const Head at{launch, row, head};
  Vector state(before.begin(), before.end());
  const Token token = at.New(0);
  Advance(state, token, launch.shape.is_delta_rule(), token.scale);
  HeadErrors errors;
  errors.output = RelativeError(at.Output(0), Multiply(state, at.Query(0)));
  const std::vector<float> after = ReadState(launch, row.source_page, head);
  errors.state = RelativeError(Vector(after.begin(), after.end()), state);
  return errors;
}

}  // namespace ssmd::bench
