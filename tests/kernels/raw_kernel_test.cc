// The raw form: convolution, norms and gates against tests/reference/raw.h, alone and in a backend.
#include "kernels/cpu/raw_kernel.h"

#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/cpu/verify_kernel.h"
#include "tests/testing/compare.h"
#include "tests/testing/raw_inputs.h"
#include "tests/testing/tensor.h"
#include "tests/testing/test_device.h"

namespace ssmd::testing {
namespace {

constexpr Family kFamilies[] = {Family::kMamba2, Family::kGdn, Family::kKda};
constexpr Dtype kDtypes[] = {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32};

// One layer whose ring holds the window before `tail` and garbage elsewhere.
struct Prepared {
  std::vector<std::byte> q, k, v;
  std::vector<float> log_alpha, beta, value_scale;
  uint32_t flags = 0;
  friend bool operator==(const Prepared&, const Prepared&) = default;
};

class RawFixture {
 public:
  RawFixture(Family family, Dtype activation, uint32_t conv_width, const RawOptions& options,
             uint64_t tail_position, uint64_t seed)
      : shape{family, 4, 2, 48, 24, conv_width},
        formats{.activation = activation},
        tail(tail_position),
        ring_layout(MakeRingLayout(shape, formats, 24)),
        ring(ring_layout.slot_bytes, std::byte{0xff}),
        random(seed),
        parameters(RandomRawParameters(shape, options, random)),
        layer(shape, parameters),
        oracle(shape, parameters, activation) {
    const uint64_t window = std::min<uint64_t>(tail, conv_width - 1);
    for (uint64_t p = tail - window; p < tail; ++p) {
      const reference::RawToken token = MakeToken();
      oracle.form.window.push_back(token.projection);
      PackedRawInputs packed;
      packed.Append(token, activation);
      std::memcpy(ConvRow(p), packed.projection.data(), packed.projection.size());
    }
  }

  reference::RawToken MakeToken() { return RandomRawToken(shape, formats.activation, 1, random); }
  std::byte* ConvRow(uint64_t position) {
    return ring.data() + ring_layout.conv.offset_bytes +
           position % ring_layout.conv_rows * ring_layout.conv.row_bytes;
  }

  Prepared Run(const PackedRawInputs& packed, uint32_t T) {
    const cpu::RawBuffer buffer(shape, formats, T);
    const cpu::RawOutputs& out = buffer.outputs();
    cpu::RawItem item{.shape = &shape,
                      .formats = &formats,
                      .layer = &layer,
                      .ring_layout = &ring_layout,
                      .ring = ring.data(),
                      .tail = tail,
                      .draft_tokens = T,
                      .inputs = packed.view(),
                      .outputs = out};
    Prepared result;
    for (item.group = 0; item.group < shape.key_group_count; ++item.group)
      result.flags |= cpu::PrepareGroup(item);
    const size_t bytes = DtypeBytes(formats.activation);
    const size_t keys = T * shape.key_group_count * shape.d_k * bytes;
    const size_t heads = T * shape.head_count;
    result.q.assign(out.q, out.q + keys);
    result.k.assign(out.k, out.k + keys);
    result.v.assign(out.v, out.v + heads * shape.d_v * bytes);
    result.log_alpha.assign(out.log_alpha, out.log_alpha + heads * shape.decays_per_head());
    if (out.beta != nullptr) result.beta.assign(out.beta, out.beta + heads);
    if (out.value_scale != nullptr)
      result.value_scale.assign(out.value_scale, out.value_scale + heads);
    return result;
  }

  // Runs the kernel, then the oracle, and compares everything that was written.
  void MatchesOracle(uint32_t T) {
    std::vector<reference::RawToken> tokens(T);
    PackedRawInputs packed;
    for (reference::RawToken& token : tokens) {
      token = MakeToken();
      packed.Append(token, formats.activation);
    }
    std::vector<std::byte> ring_before = ring;
    const Prepared prepared = Run(packed, T);
    EXPECT_EQ(prepared.flags, kPoisonNone);
    const size_t row_bytes = packed.projection.size() / T;
    for (uint32_t s = 0; s < T; ++s) {
      const std::byte* row = ConvRow(tail + s);
      EXPECT_EQ(std::memcmp(row, packed.projection.data() + s * row_bytes, row_bytes), 0);
      std::memcpy(ring_before.data() + (row - ring.data()), row, row_bytes);
    }
    EXPECT_EQ(ring, ring_before) << "a byte that no draft owns was written";

    const std::vector<float> q = Decode(formats.activation, prepared.q);
    const std::vector<float> k = Decode(formats.activation, prepared.k);
    const std::vector<float> v = Decode(formats.activation, prepared.v);
    const size_t keys = q.size() / T, values = v.size() / T;
    for (uint32_t s = 0; s < T; ++s) {
      const reference::Token token = oracle.form.Step(tokens[s]);
      const RawErrors errors = oracle.Errors(token);
      for (size_t i = 0; i < keys; ++i) {
        ExpectInRange(q[s * keys + i], token.q[i], errors.q[i]);
        ExpectInRange(k[s * keys + i], token.k[i], errors.k[i]);
      }
      for (size_t i = 0; i < values; ++i) ExpectInRange(v[s * values + i], token.v[i], errors.v[i]);
      auto near = [&](const std::vector<float>& actual, const std::vector<double>& exact) {
        EXPECT_TRUE(Near(absl::MakeSpan(actual).subspan(s * exact.size(), exact.size()), exact,
                         [](double x) { return 32 * 0x1p-24 * std::abs(x); }));
      };
      near(prepared.log_alpha, token.log_alpha);
      if (shape.is_delta_rule()) near(prepared.beta, token.beta);
      if (!shape.is_delta_rule()) near(prepared.value_scale, token.value_scale);
    }
  }

  void ExpectInRange(float actual, double exact, double error) {
    const RoundedRange range(formats.activation, exact, error);
    EXPECT_TRUE(range.low <= actual && actual <= range.high)
        << actual << ", oracle " << exact << " rounds to " << range.low << " .. " << range.high;
    in_doubt += range.doubt() != 0;
    ++compared;
  }

  LayerShape shape;
  Formats formats;
  uint64_t tail;
  RingLayout ring_layout;
  std::vector<std::byte> ring;
  std::mt19937_64 random;
  RawParameters parameters;
  cpu::RawLayer layer;
  RawOracle oracle;
  size_t in_doubt = 0, compared = 0;
};

// Every combination of the optional parameters.
std::vector<RawOptions> AllOptions() {
  std::vector<RawOptions> all;
  for (int bits = 0; bits < 32; ++bits)
    all.push_back({!!(bits & 1), !!(bits & 2), !!(bits & 4), !!(bits & 8), !!(bits & 16)});
  return all;
}

void Sweep(size_t stride) {
  size_t index = 0, in_doubt = 0, compared = 0;
  for (Family family : kFamilies) {
    for (Dtype dtype : kDtypes) {
      for (uint32_t width : {2, 3, 4}) {
        // Near the start, at the wrap (24 + w - 1 rows), and far out.
        for (uint64_t tail : {0ul, 1ul, 2ul, 3ul, 22ul, 24ul, 27ul, (1ul << 40) + 25}) {
          for (uint32_t T : {1, 2, 3, 4, 7, 8, 16}) {
            if (++index % stride != 0) continue;
            const RawOptions options = AllOptions()[index % 32];
            SCOPED_TRACE(std::string(FamilyName(family)) + " " + DtypeName(dtype) + " w " +
                         std::to_string(width) + " tail " + std::to_string(tail) + " T " +
                         std::to_string(T) + " options " + std::to_string(index % 32));
            RawFixture fixture(family, dtype, width, options, tail, index);
            fixture.MatchesOracle(T);
            if (dtype != Dtype::kFp32) in_doubt += fixture.in_doubt, compared += fixture.compared;
            if (::testing::Test::HasFailure()) return;
          }
        }
      }
    }
  }
  // Teeth: nearly every 16-bit value must be the one that the oracle rounds to.
  EXPECT_LT(in_doubt, compared / 20) << compared;
}

TEST(RawKernel, MatchesOracle) { Sweep(1); }

TEST(RawKernel, MatchesOracleOnEveryInstructionSet) {
  for (int64_t target : {HWY_AVX3, HWY_AVX2, HWY_SSE4, HWY_SCALAR}) {
    hwy::SetSupportedTargetsForTest(0);
    if (target != HWY_SCALAR && (hwy::SupportedTargets() & target) == 0) continue;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(hwy::TargetName(target));
    Sweep(11);
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

TEST(RawKernel, EveryCombinationOfOptionalParameters) {
  for (Family family : kFamilies) {
    for (const RawOptions& options : AllOptions()) {
      RawFixture fixture(family, Dtype::kFp32, 4, options, 5, 9);
      fixture.MatchesOracle(3);
    }
  }
}

TEST(RawKernel, FourTokensAtOnceEqualFourSteps) {
  for (Family family : kFamilies) {
    for (Dtype dtype : kDtypes) {
      RawFixture at_once(family, dtype, 4, {}, 25, 3);
      PackedRawInputs packed;
      std::vector<PackedRawInputs> singles(4);
      for (PackedRawInputs& single : singles) {
        const reference::RawToken token = at_once.MakeToken();
        packed.Append(token, dtype);
        single.Append(token, dtype);
      }
      RawFixture one_by_one = at_once;
      const Prepared all = at_once.Run(packed, 4);
      Prepared joined;
      for (const PackedRawInputs& single : singles) {
        const Prepared one = one_by_one.Run(single, 1);
        ++one_by_one.tail;
        auto join = [](auto& to, const auto& from) {
          to.insert(to.end(), from.begin(), from.end());
        };
        join(joined.q, one.q);
        join(joined.k, one.k);
        join(joined.v, one.v);
        join(joined.log_alpha, one.log_alpha);
        join(joined.beta, one.beta);
        join(joined.value_scale, one.value_scale);
      }
      EXPECT_TRUE(joined == all);
      EXPECT_EQ(one_by_one.ring, at_once.ring);
    }
  }
}

TEST(RawKernel, FlagsRawInputsThatAreNotFinite) {
  for (Family family : kFamilies) {
    for (auto tensor : {&PackedRawInputs::projection, &PackedRawInputs::dt, &PackedRawInputs::a,
                        &PackedRawInputs::b, &PackedRawInputs::gate}) {
      for (float bad : {INFINITY, -INFINITY, NAN}) {
        RawFixture fixture(family, Dtype::kBf16, 3, {}, 2, 4);
        PackedRawInputs packed;
        for (int s = 0; s < 3; ++s) packed.Append(fixture.MakeToken(), Dtype::kBf16);
        std::vector<std::byte>& bytes = packed.*tensor;
        if (bytes.empty()) continue;
        EncodeOne(Dtype::kBf16, bad, bytes.data() + fixture.random() % (bytes.size() / 2) * 2);
        EXPECT_EQ(fixture.Run(packed, 3).flags, kPoisonInput);
      }
    }
  }
}

// Gates far out stay finite and inside their range.
TEST(RawKernel, GatesSaturateWithoutOverflow) {
  for (Family family : kFamilies) {
    for (bool lower_bound : {false, true}) {
      for (float value : {-3e38f, -200.0f, 200.0f, 3e38f}) {
        RawFixture fixture(family, Dtype::kFp32, 2, {.lower_bound = lower_bound}, 7, 5);
        fixture.layer.rate.assign(4, 3e38f);
        PackedRawInputs packed;
        reference::RawToken token = fixture.MakeToken();
        for (auto* gate : {&token.dt, &token.a, &token.b, &token.gate})
          std::fill(gate->begin(), gate->end(), value);
        packed.Append(token, Dtype::kFp32);
        const Prepared prepared = fixture.Run(packed, 1);
        EXPECT_EQ(prepared.flags, kPoisonNone);
        for (const float a : prepared.log_alpha) EXPECT_TRUE(std::isfinite(a) && a <= 0) << a;
        for (const float b : prepared.beta) EXPECT_TRUE(b >= 0 && b <= 1) << b;
        for (const float dt : prepared.value_scale) EXPECT_TRUE(std::isfinite(dt) && dt >= 0) << dt;
      }
    }
  }
}

// Plan, Verify and Commit of a whole layer: random acceptance, folds, ring wraps, rollbacks.
struct BackendCase {
  Family family;
  Dtype activation;
  uint32_t width;
  Dtype hp, lp;
  FlushMode mode;
};

void FollowTheAcceptedStream(const BackendCase& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  const LayerShape shape{c.family, 4, 2, 32, 24, c.width};
  const RawOptions options = AllOptions()[8 + random() % 8 + 16 * (random() % 2)];  // normalised
  const float scale = 1;
  BackendSpec spec{.layers = {shape},
                   .raw = {RandomRawParameters(shape, options, random)},
                   .formats = {.activation = c.activation,
                               .correction = Dtype::kFp32,
                               .checkpoint_hp = c.hp,
                               .checkpoint_lp = c.lp},
                   .rule = {6, 4, 1, 14},
                   .rounding_seed = 77,
                   .slot_count = 2,
                   .page_count = 6,
                   .step_count = 1,
                   .rows_max = 2,
                   .folds_max = 2,
                   .flush_mode = c.mode,
                   .poison_garbage = true};
  if (c.family == Family::kMamba2)  // keys near norm 1 all the same
    for (float& weight : spec.raw[0].conv_weight) weight *= 0.3f;
  cpu::ThreadPool pool(2);
  const auto device = MakeTestDevice(1 << 28, &pool);
  auto created = device->CreateBackend(spec);
  ASSERT_TRUE(created.ok()) << created.status();
  Backend& backend = **created;
  struct Row {
    RawOracle oracle;             // at `tail`
    std::vector<RawOracle> past;  // before each token since the floor
    uint64_t version = 1, tail = 0, base = 0, folds = 0;
  };
  const RawOracle empty(shape, spec.raw[0], c.activation);
  std::vector<Row> rows(2, Row{empty, {}});
  for (uint32_t slot = 0; slot < 2; ++slot) backend.ClearSlot(SlotIndex{slot}, 6, slot + 1);

  auto tolerance = [&](const Row& row, const Magnitudes& m, uint64_t T) {
    return Tolerance({.is_delta_rule = shape.is_delta_rule(),
                      .d_k = shape.d_k,
                      .records = row.tail + T,
                      .draft_tokens = T + 14,
                      .folds = row.folds + 1,
                      .ring_records = 14,
                      .raw = true,
                      .correction = Dtype::kFp32,
                      .output = Dtype::kFp32,
                      .checkpoint_hp = c.hp,
                      .checkpoint_lp = c.lp,
                      .magnitudes = m});
  };
  for (int step = 0; step < 40; ++step) {
    std::vector<PlanRow> plan;
    PackedRawInputs packed;
    std::vector<std::vector<reference::RawToken>> drafts(2);
    uint64_t tokens = 0;
    for (uint32_t i = 0; i < 2; ++i) {
      drafts[i].resize(1 + random() % 4);
      for (auto& token : drafts[i]) {
        token = RandomRawToken(shape, c.activation, scale, random);
        packed.Append(token, c.activation);
        ++tokens;
      }
      plan.push_back({SlotIndex{i}, rows[i].version, static_cast<uint32_t>(drafts[i].size())});
    }
    const auto report = backend.Plan({.step = StepIndex{0}, .rows = plan});
    ASSERT_TRUE(report.ok()) << report.status();
    std::vector<float> output(tokens * shape.head_count * shape.d_v, NAN);
    VerifyParams params{
        .step = StepIndex{0}, .token_count = tokens, .raw = packed.view(), .output = output.data()};
    const auto verified = backend.Verify(params);
    ASSERT_TRUE(verified.ok());
    EXPECT_TRUE(verified->poisoned.empty());
    std::vector<float> again(output.size(), NAN);
    params.output = again.data();
    ASSERT_TRUE(backend.Verify(params).ok());
    EXPECT_EQ(std::memcmp(output.data(), again.data(), output.size() * sizeof(float)), 0);

    size_t at = 0;
    std::vector<uint32_t> accepted;
    for (uint32_t i = 0; i < 2; ++i) {
      Row& row = rows[i];
      RawOracle ahead = row.oracle;
      std::vector<double> expected;
      for (const auto& token : drafts[i]) {
        const std::vector<double> o = ahead.Step(token);
        expected.insert(expected.end(), o.begin(), o.end());
      }
      const Tolerance bound = tolerance(row, ahead.magnitudes, drafts[i].size());
      EXPECT_TRUE(Near(absl::MakeSpan(output).subspan(at, expected.size()), expected,
                       [&](double exact) { return bound.output(exact); }))
          << "row " << i << " step " << step;
      at += expected.size();
      accepted.push_back(static_cast<uint32_t>(random() % (drafts[i].size() + 1)));
      for (uint32_t s = 0; s < accepted[i]; ++s) {
        row.past.push_back(row.oracle);
        row.oracle.Step(drafts[i][s]);
      }
    }
    ASSERT_TRUE(backend.Commit({.step = StepIndex{0}, .accepted = accepted}).ok());
    for (uint32_t i = 0; i < 2; ++i) {
      Row& row = rows[i];
      row.tail += accepted[i];
      ++row.version;
      const SlotCursor cursor = backend.ReadCursor(SlotIndex{i});
      row.folds += cursor.base != row.base;
      row.past.erase(row.past.begin(),
                     row.past.begin() + static_cast<ptrdiff_t>(cursor.base - row.base));
      row.base = cursor.base;
      if (random() % 5 == 0 && row.tail > row.base) {
        const uint64_t back = 1 + random() % (row.tail - row.base);
        ASSERT_TRUE(backend.Rollback(SlotIndex{i}, row.version, row.tail - back).ok());
        row.tail -= back;
        ++row.version;
        const Magnitudes seen = row.oracle.magnitudes;
        row.oracle = row.past[row.past.size() - back];
        row.oracle.magnitudes = seen;
        row.past.resize(row.past.size() - back, row.oracle);
      }
      std::vector<float> state(shape.state_elements());
      ASSERT_TRUE(backend.ReadState(SlotIndex{i}, 0, row.tail, absl::MakeSpan(state)).ok());
      const Tolerance bound = tolerance(row, row.oracle.magnitudes, 0);
      EXPECT_TRUE(Near(state, row.oracle.recurrence.state(), bound.state()));
      const size_t row_bytes = shape.conv_channels() * DtypeBytes(c.activation);
      std::vector<std::byte> window((shape.conv_width - 1) * row_bytes);
      ASSERT_TRUE(backend.ReadWindow(SlotIndex{i}, 0, row.tail, absl::MakeSpan(window)).ok());
      const std::vector<float> held = Decode(c.activation, window);
      const auto& exact = row.oracle.form.window;
      for (size_t p = 0; p < shape.conv_width - 1; ++p) {
        for (size_t ch = 0; ch < shape.conv_channels(); ++ch) {
          const size_t missing = shape.conv_width - 1 - exact.size();
          EXPECT_EQ(held[p * shape.conv_channels() + ch], p < missing ? 0 : exact[p - missing][ch]);
        }
      }
    }
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(rows[0].folds, 3u);
}

TEST(RawKernel, BackendFollowsTheAcceptedStream) {
  uint64_t seed = 0;
  for (Family family : kFamilies) {
    for (Dtype dtype : kDtypes) {
      for (FlushMode mode : {FlushMode::kFused, FlushMode::kBackground}) {
        for (const auto& [hp, lp] : {std::pair{Dtype::kFp32, Dtype::kNone},
                                     {Dtype::kFp32, Dtype::kFp16},
                                     {Dtype::kFp16, Dtype::kFp16},
                                     {Dtype::kFp16, Dtype::kNone}}) {
          ++seed;
          SCOPED_TRACE(std::string(FamilyName(family)) + " " + DtypeName(dtype) + " " +
                       DtypeName(hp) + "/" + DtypeName(lp) + " seed " + std::to_string(seed));
          FollowTheAcceptedStream(
              {family, dtype, 2 + static_cast<uint32_t>(seed % 3), hp, lp, mode}, seed);
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

}  // namespace
}  // namespace ssmd::testing
