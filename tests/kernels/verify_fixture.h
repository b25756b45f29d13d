// One sequence of one layer, run by the kernels of the backend under test and by the oracle side by
// side.
//
// History(5); Verify(MakeDrafts(4)); Commit(2): a small vocabulary, so that test bodies read as
// stories. Whatever the kernels must not read is NaN (0xff), whatever they must not write is
// compared. Copyable: a copy is the same sequence, to be continued differently.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/verify_kernel.h"
#include "tests/reference/recurrence.h"
#include "tests/testing/compare.h"
#include "tests/testing/groups.h"
#include "tests/testing/layer_inputs.h"
#include "tests/testing/tensor.h"
#include "tests/testing/tolerance.h"

namespace ssmd::testing {

// Inputs of T tokens: as the kernels get them, and as the oracle gets them.
struct Drafts {
  size_t count = 0;
  std::vector<std::byte> q, k, v;
  std::vector<float> log_alpha, beta, value_scale;
};

// The oracle and what the tolerance needs to know of its history.
struct Track {
  reference::Recurrence oracle;
  std::vector<double> u_mass;  // per element of u
  Magnitudes magnitudes;
};

struct SequenceParams {
  LayerShape shape = {};
  Formats formats = {};
  uint32_t ring_records = 32;
  uint64_t base = 0;
  uint64_t seed = 1;
  float log_alpha_min = -0.1f;  // log_alpha is uniform in [min, max]
  float log_alpha_max = -0.001f;
};

class Sequence {
 public:
  static constexpr size_t kGuardBytes = 256;

  explicit Sequence(const SequenceParams& p)
      : params(p),
        ring_layout(MakeRingLayout(p.shape, p.formats, p.ring_records)),
        base(p.base),
        tail(p.base),
        source(p.shape.state_elements()),
        ring_buffer(ring_layout.slot_bytes + 2 * kGuardBytes, std::byte{0xff}),
        track{{FamilyName(p.shape.family),
               {p.shape.head_count, p.shape.key_group_count, p.shape.d_k, p.shape.d_v}},
              std::vector<double>(p.shape.head_count * p.shape.d_v),
              {}},
        random(p.seed) {
    const float scale = 1 / std::sqrt(static_cast<float>(p.shape.d_k));
    for (float& element : source) {
      const float exact = scale * Normal();
      element = Rounded(p.formats.checkpoint_hp, exact);
      if (p.formats.two_precision()) AppendAs(p.formats.checkpoint_lp, exact, lp);
    }
    std::copy(source.begin(), source.end(), track.oracle.state().begin());
    states.push_back(track.oracle.state());
    MeasureSource();
  }

  std::byte* ring() { return ring_buffer.data() + kGuardBytes; }
  size_t h() const { return tail - base; }
  std::byte* Record(const RingComponent& component, uint64_t position) {
    return ring() + component.offset_bytes +
           RingRow(position, ring_layout.ring_records) * component.row_bytes;
  }
  // The checkpoint as the kernels read it.
  std::vector<std::byte> Hp() const {
    std::vector<std::byte> bytes;
    for (const float x : source) AppendAs(params.formats.checkpoint_hp, x, bytes);
    return bytes;
  }
  RoundingKey RoundingAt(uint64_t fold_position) const {
    return {
        .model_seed = 11, .sequence_key = params.seed, .layer = 3, .fold_position = fold_position};
  }
  Dtype value_dtype() const {
    return params.shape.is_delta_rule() ? params.formats.correction : params.formats.activation;
  }

  // Random tokens with |q| and |k| near 1.
  Drafts MakeDrafts(size_t count) {
    const LayerShape& s = params.shape;
    Drafts drafts;
    drafts.count = count;
    for (size_t i = 0; i < count * s.key_group_count; ++i) AppendUnit(drafts.q);
    for (size_t i = 0; i < count * s.key_group_count; ++i) AppendUnit(drafts.k);
    for (size_t i = 0; i < count * s.head_count * s.d_v; ++i) Append(Normal(), drafts.v);
    drafts.log_alpha.resize(count * s.head_count * s.decays_per_head());
    for (float& x : drafts.log_alpha) x = Uniform(params.log_alpha_min, params.log_alpha_max);
    if (s.is_delta_rule()) drafts.beta.resize(count * s.head_count);
    for (float& x : drafts.beta) x = Uniform(0.1f, 1);
    if (!s.is_delta_rule()) drafts.value_scale.resize(count * s.head_count);
    for (float& x : drafts.value_scale) x = Uniform(0.05f, 1);
    return drafts;
  }

  // Tokens [first, first + count) of `drafts`.
  Drafts Slice(const Drafts& drafts, size_t first, size_t count) const {
    auto part = [&](const auto& all) {
      const size_t each = all.size() / drafts.count;
      using Vector = std::decay_t<decltype(all)>;
      return Vector(all.begin() + first * each, all.begin() + (first + count) * each);
    };
    return {count,
            part(drafts.q),
            part(drafts.k),
            part(drafts.v),
            part(drafts.log_alpha),
            part(drafts.beta),
            part(drafts.value_scale)};
  }

  // Commits `count` tokens whose records are the oracle's u, rounded once: no kernel involved.
  void History(size_t count) {
    const Drafts drafts = MakeDrafts(count);
    for (size_t s = 0; s < count; ++s) {
      StepOracle(drafts, s, track);
      states.push_back(track.oracle.state());
      WriteRecord(drafts, s);
      ++tail;
    }
  }

  struct Result {
    uint32_t flags = 0;
    std::vector<std::byte> output;
    std::vector<float> target;      // empty: no fold
    std::vector<std::byte> hp, lp;  // the target's bytes
  };

  // Runs the kernel over all key groups (in the order given, or 0, 1, ...). fold_to: -1 no fold.
  Result Verify(const Drafts& drafts, int64_t fold_to = -1, std::vector<uint32_t> groups = {}) {
    const LayerShape& s = params.shape;
    if (groups.empty()) {
      groups.resize(s.key_group_count);
      std::iota(groups.begin(), groups.end(), 0u);
    }
    Result result;
    const size_t output_bytes =
        drafts.count * s.head_count * s.d_v * DtypeBytes(params.formats.output);
    std::vector<std::byte> output(output_bytes + 2 * kGuardBytes, std::byte{0xff});
    const bool folds = fold_to >= 0;
    const Formats& f = params.formats;
    const size_t hp_bytes = s.state_elements() * DtypeBytes(f.checkpoint_hp);
    const size_t lp_bytes = s.state_elements() * DtypeBytes(f.checkpoint_lp);
    std::vector<std::byte> target(folds ? hp_bytes + 2 * kGuardBytes : 0, std::byte{0xff});
    std::vector<std::byte> target_lp(folds ? lp_bytes + 2 * kGuardBytes : 0, std::byte{0xff});
    const bool reads_lp = !folds && f.two_precision();
    const std::vector<std::byte> from = reads_lp ? lp : Hp();
    const std::vector<std::byte> from_before = from;
    const std::vector<std::byte> ring_before = ring_buffer;

    cpu::GroupItem item;
    item.shape = &s;
    item.formats = &params.formats;
    item.ring_layout = &ring_layout;
    item.ring = ring();
    item.source = from.data();
    item.source_dtype = reads_lp ? f.checkpoint_lp : f.checkpoint_hp;
    if (folds) {
      item.target_hp = target.data() + kGuardBytes;
      if (f.two_precision()) item.target_lp = target_lp.data() + kGuardBytes;
      item.rounding = RoundingAt(static_cast<uint64_t>(fold_to));
    }
    item.base = base;
    item.tail = tail;
    item.fold_to = fold_to < 0 ? 0 : static_cast<uint64_t>(fold_to);
    item.draft_tokens = static_cast<uint32_t>(drafts.count);
    item.inputs = {drafts.q.data(), drafts.k.data(), drafts.v.data(), drafts.log_alpha.data()};
    if (!drafts.beta.empty()) item.inputs.beta = drafts.beta.data();
    if (!drafts.value_scale.empty()) item.inputs.value_scale = drafts.value_scale.data();
    item.output = output.data() + kGuardBytes;
    result.flags = VerifyGroups(item, groups);

    EXPECT_EQ(from, from_before);
    EXPECT_TRUE(OnlyDraftRowsChanged(ring_before, drafts.count));
    for (size_t i = 0; i < kGuardBytes; ++i) {
      EXPECT_EQ(output[i], std::byte{0xff});
      EXPECT_EQ(output[kGuardBytes + output_bytes + i], std::byte{0xff});
      for (const auto* to : {&target, &target_lp}) {
        if (!folds) continue;
        EXPECT_EQ((*to)[i], std::byte{0xff});
        EXPECT_EQ((*to)[to->size() - 1 - i], std::byte{0xff});
      }
    }
    result.output.assign(output.begin() + kGuardBytes, output.end() - kGuardBytes);
    if (folds) {
      result.hp.assign(target.begin() + kGuardBytes, target.end() - kGuardBytes);
      result.lp.assign(target_lp.begin() + kGuardBytes, target_lp.end() - kGuardBytes);
      result.target = Decode(f.checkpoint_hp, result.hp);
    }
    return result;
  }

  // What the oracle says of `drafts`; the sequence itself stays where it is.
  struct Expected {
    std::vector<double> output;
    std::vector<std::vector<double>> u;  // per token
    Magnitudes magnitudes;
  };
  Expected Expect(const Drafts& drafts) const {
    Track copy = track;
    Expected expected;
    for (size_t s = 0; s < drafts.count; ++s) {
      const std::vector<double> o = StepOracle(drafts, s, copy);
      expected.output.insert(expected.output.end(), o.begin(), o.end());
      expected.u.push_back(copy.oracle.u());
    }
    expected.magnitudes = copy.magnitudes;
    return expected;
  }

  // Accepts the first `accepted` of `drafts`.
  void Commit(const Drafts& drafts, size_t accepted) {
    for (size_t s = 0; s < accepted; ++s) {
      StepOracle(drafts, s, track);
      states.push_back(track.oracle.state());
    }
    tail += accepted;
  }

  // Makes `target`, the state at `position`, the checkpoint.
  void Install(const Result& result, uint64_t position) {
    source = result.target;
    lp = result.lp;
    ++folds_done;
    states.erase(states.begin(), states.begin() + static_cast<ptrdiff_t>(position - base));
    base = position;
    MeasureSource();
  }

  // records_before: tokens folded into `source` since it was exact.
  Tolerance Bound(const Expected& expected, size_t draft_tokens, size_t records_before = 0) const {
    const Formats& f = params.formats;
    const bool one_fp32 = f.checkpoint_hp == Dtype::kFp32 && !f.two_precision();
    return Tolerance({.is_delta_rule = params.shape.is_delta_rule(),
                      .d_k = params.shape.d_k,
                      .records = records_before + h() + draft_tokens,
                      .draft_tokens = draft_tokens + (f.two_precision() ? h() : 0),
                      .folds = one_fp32 ? 0 : folds_done + 1,
                      .ring_records = h() + draft_tokens,
                      .correction = f.correction,
                      .output = f.output,
                      .checkpoint_hp = f.checkpoint_hp,
                      .checkpoint_lp = f.checkpoint_lp,
                      .magnitudes = expected.magnitudes});
  }

  // Runs the kernel, then the oracle, and compares everything that was written.
  Result VerifyMatchesOracle(const Drafts& drafts, int64_t fold_to = -1,
                             size_t records_before = 0) {
    const Result result = Verify(drafts, fold_to);
    const Expected expected = Expect(drafts);
    const Tolerance bound = Bound(expected, drafts.count, records_before);
    EXPECT_EQ(result.flags, kPoisonNone);
    EXPECT_TRUE(Near(Decode(params.formats.output, result.output), expected.output,
                     [&](double exact) { return bound.output(exact); }));
    if (fold_to >= 0) {
      EXPECT_TRUE(
          Near(result.target, states[static_cast<uint64_t>(fold_to) - base], bound.state()));
    }
    ExpectRecords(drafts, expected, bound);
    return result;
  }

  std::string Name() const {
    const LayerShape& s = params.shape;
    return std::string(FamilyName(s.family)) + " d_k " + std::to_string(s.d_k) + " d_v " +
           std::to_string(s.d_v) + " heads " + std::to_string(s.head_count) + "/" +
           std::to_string(s.key_group_count) + " " + DtypeName(params.formats.activation) + "/" +
           DtypeName(params.formats.correction) + "/" + DtypeName(params.formats.output) +
           " page " + DtypeName(params.formats.checkpoint_hp) + "/" +
           DtypeName(params.formats.checkpoint_lp) + " h " + std::to_string(h()) + " row " +
           std::to_string(base % params.ring_records);
  }

  SequenceParams params;
  RingLayout ring_layout;
  uint64_t base = 0;
  uint64_t tail = 0;
  std::vector<float> source;  // HP
  std::vector<std::byte> lp;
  size_t folds_done = 0;
  std::vector<std::byte> ring_buffer;
  Track track;                              // at `tail`
  std::vector<std::vector<double>> states;  // the oracle's at base, base + 1, ..., tail
  std::mt19937_64 random;

 private:
  float Uniform(float low, float high) {
    return std::uniform_real_distribution<float>(low, high)(random);
  }
  float Normal() { return std::normal_distribution<float>()(random); }
  void Append(float value, std::vector<std::byte>& to) {
    to.resize(to.size() + DtypeBytes(params.formats.activation));
    EncodeOne(params.formats.activation, value,
              to.data() + to.size() - DtypeBytes(params.formats.activation));
  }
  void AppendUnit(std::vector<std::byte>& to) {
    std::vector<float> values(params.shape.d_k);
    for (float& x : values) x = Normal();
    const float square = std::inner_product(values.begin(), values.end(), values.begin(), 0.0f);
    for (float x : values) Append(x / std::sqrt(square), to);
  }

  static double Norm(const double* values, size_t count) {
    return std::sqrt(std::inner_product(values, values + count, values, 0.0));
  }
  void MeasureSource() {
    const std::vector<double> wide(source.begin(), source.end());
    for (size_t row = 0; row < wide.size(); row += params.shape.d_k) {
      track.magnitudes.state_row =
          std::max(track.magnitudes.state_row, Norm(wide.data() + row, params.shape.d_k));
    }
  }

  std::vector<double> StepOracle(const Drafts& drafts, size_t s, Track& at) const {
    const Drafts one = Slice(drafts, s, 1);
    auto widen = [&](const std::vector<std::byte>& bytes) {
      const std::vector<float> values = Decode(params.formats.activation, bytes);
      return std::vector<double>(values.begin(), values.end());
    };
    auto copy = [](const std::vector<float>& from) {
      return std::vector<double>(from.begin(), from.end());
    };
    reference::Token token{widen(one.q),        widen(one.k),   widen(one.v),
                           copy(one.log_alpha), copy(one.beta), copy(one.value_scale)};
    std::vector<double> o = at.oracle.Step(token);
    Magnitudes& m = at.magnitudes;
    Cover(m, token, params.shape.d_k);
    for (size_t row = 0; row < at.u_mass.size(); ++row) {
      const size_t decays = params.shape.decays_per_head();
      const auto first = token.log_alpha.begin() + row / params.shape.d_v * decays;
      const double alpha = std::exp(*std::max_element(first, first + decays));
      at.u_mass[row] = alpha * at.u_mass[row] + std::abs(at.oracle.u()[row]);
      m.u_mass = std::max(m.u_mass, at.u_mass[row]);
    }
    return o;
  }

  void WriteRecord(const Drafts& drafts, size_t s) {
    const Drafts one = Slice(drafts, s, 1);
    std::memcpy(Record(ring_layout.key, tail), one.k.data(), one.k.size());
    std::memcpy(Record(ring_layout.log_alpha, tail), one.log_alpha.data(),
                one.log_alpha.size() * sizeof(float));
    if (ring_layout.target.row_bytes != 0) {
      std::memcpy(Record(ring_layout.target, tail), one.v.data(), one.v.size());
      std::memcpy(Record(ring_layout.beta, tail), one.beta.data(), one.beta.size() * sizeof(float));
    }
    if (params.shape.is_delta_rule()) {
      for (size_t i = 0; i < track.oracle.u().size(); ++i) {
        EncodeOne(value_dtype(), static_cast<float>(track.oracle.u()[i]),
                  Record(ring_layout.value, tail) + i * DtypeBytes(value_dtype()));
      }
    } else {
      std::memcpy(Record(ring_layout.value, tail), one.v.data(), one.v.size());
      std::memcpy(Record(ring_layout.value_scale, tail), one.value_scale.data(),
                  one.value_scale.size() * sizeof(float));
    }
  }

  // Drafts' records: inputs byte for byte, u within the bound on an element of S (|k| is near 1).
  void ExpectRecords(const Drafts& drafts, const Expected& expected, const Tolerance& bound) {
    for (size_t s = 0; s < drafts.count; ++s) {
      const Drafts one = Slice(drafts, s, 1);
      const uint64_t position = tail + s;
      EXPECT_EQ(std::memcmp(Record(ring_layout.key, position), one.k.data(), one.k.size()), 0);
      EXPECT_EQ(std::memcmp(Record(ring_layout.log_alpha, position), one.log_alpha.data(),
                            one.log_alpha.size() * sizeof(float)),
                0);
      const std::byte* value = Record(ring_layout.value, position);
      if (params.shape.is_delta_rule()) {
        const size_t bytes = expected.u[s].size() * DtypeBytes(value_dtype());
        EXPECT_TRUE(
            Near(Decode(value_dtype(), {value, bytes}), expected.u[s], 2 * bound.read_state()));
        if (ring_layout.target.row_bytes == 0) continue;
        EXPECT_EQ(std::memcmp(Record(ring_layout.target, position), one.v.data(), one.v.size()), 0);
        EXPECT_EQ(std::memcmp(Record(ring_layout.beta, position), one.beta.data(),
                              one.beta.size() * sizeof(float)),
                  0);
      } else {
        EXPECT_EQ(std::memcmp(value, one.v.data(), one.v.size()), 0);
        EXPECT_EQ(std::memcmp(Record(ring_layout.value_scale, position), one.value_scale.data(),
                              one.value_scale.size() * sizeof(float)),
                  0);
      }
    }
  }

  ::testing::AssertionResult OnlyDraftRowsChanged(std::vector<std::byte> before,
                                                  size_t draft_count) {
    const RingLayout& r = ring_layout;
    for (const RingComponent& component :
         {r.key, r.value, r.log_alpha, r.value_scale, r.target, r.beta}) {
      for (size_t s = 0; s < draft_count; ++s) {
        const std::byte* row = Record(component, tail + s);
        std::memcpy(before.data() + (row - ring_buffer.data()), row, component.row_bytes);
      }
    }
    if (std::memcmp(before.data(), ring_buffer.data(), before.size()) == 0)
      return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "a ring row that no draft owns was written";
  }
};

}  // namespace ssmd::testing
