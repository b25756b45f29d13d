// Field reports 33-38: the short-convolution window moves with the state, or neither moves.
// Raw form: the service holds the window. Every output is compared with the float64 oracle of the
// whole layer, every window byte for byte with the projections that were committed.
#include <gtest/gtest.h>

#include <map>

#include "kernels/cpu/thread_pool.h"
#include "state_store/store.h"
#include "tests/testing/compare.h"
#include "tests/testing/raw_inputs.h"
#include "tests/testing/status_is.h"
#include "tests/testing/test_device.h"

namespace ssmd {
namespace {

using testing::Fails;
using testing::RawOracle;
using TokenOfLayers = std::vector<reference::RawToken>;  // [layer]

constexpr OwnerId kOwner{1};

class ConvWindowTest : public ::testing::Test {
 protected:
  void SetUp() override {
    geometry_ = {.layers = {{Family::kMamba2, 2, 1, 16, 8, 4},
                            {Family::kGdn, 2, 1, 16, 8, 3},
                            {Family::kKda, 2, 1, 16, 8, 2}},
                 .formats = {.activation = Dtype::kFp32, .correction = Dtype::kFp32},
                 .window_records = 8,
                 .draft_tokens_max = 4,
                 .rollback_tokens_min = 4};
    for (const LayerShape& shape : geometry_.layers) {
      geometry_.raw.push_back(testing::RandomRawParameters(shape, {}, random_));
      if (shape.family == Family::kMamba2)  // keys near norm 1 all the same
        for (float& weight : geometry_.raw.back().conv_weight) weight *= 0.3f;
      empty_.emplace_back(shape, geometry_.raw.back(), geometry_.formats.activation);
    }
    store_ = MakeStore();
  }

  std::unique_ptr<Store> MakeStore() {
    auto store =
        Store::Create({.geometry = geometry_,
                       .capacity = {.sequences_max = 3,
                                    .snapshots_max = 16,
                                    .spare_pages = 4,
                                    .rows_max = 2,
                                    .steps_max = 2},
                       .poison_garbage = true},
                      [&](const BackendSpec& spec) { return device_->CreateBackend(spec); });
    EXPECT_TRUE(store.ok()) << store.status();
    return store.ok() ? *std::move(store) : nullptr;
  }

  struct Told {  // what the store was told of a sequence
    std::vector<TokenOfLayers> tokens;
    std::vector<RawOracle> oracle;  // [layer], behind the last token
    uint64_t folds = 0;
  };

  SequenceId Create() {
    const SequenceId id = store_->CreateSequences(kOwner, 1)->ids[0];
    told_[id] = {.oracle = empty_};
    return id;
  }
  // `id` holds the first `position` tokens of `told`.
  void Tell(SequenceId id, const Told& told, uint64_t position) {
    Told& now = told_[id] = {.oracle = empty_, .folds = told.folds + 1};
    for (uint64_t p = 0; p < position; ++p) {
      now.tokens.push_back(told.tokens[p]);
      for (size_t layer = 0; layer < 3; ++layer) now.oracle[layer].Step(told.tokens[p][layer]);
    }
  }
  void Free(SequenceId id) {
    const std::vector<SequenceId> ids = {id};
    ASSERT_TRUE(store_->Release(kOwner, ids).ok());
    told_.erase(id);
  }
  SequenceState State(SequenceId id) { return *store_->Get(kOwner, id); }

  TokenOfLayers AnyToken() {
    TokenOfLayers token;
    for (const LayerShape& shape : geometry_.layers)
      token.push_back(testing::RandomRawToken(shape, geometry_.formats.activation, 1, random_));
    return token;
  }

  // Verifies drafts and checks their outputs.
  void Verify(SequenceId id, const std::vector<TokenOfLayers>& drafts) {
    open_ = drafts;
    const auto begun = store_->BeginStep(
        kOwner, {.rows = {{id, State(id).version, static_cast<uint32_t>(drafts.size())}}});
    ASSERT_TRUE(begun.ok()) << begun.status();
    step_ = begun->id;
    outputs_.clear();
    for (uint32_t layer = 0; layer < 3; ++layer) {
      const LayerShape& shape = geometry_.layers[layer];
      testing::PackedRawInputs packed;
      RawOracle ahead = told_.at(id).oracle[layer];
      std::vector<double> exact;
      for (const TokenOfLayers& token : drafts) {
        packed.Append(token[layer], geometry_.formats.activation);
        const std::vector<double> o = ahead.Step(token[layer]);
        exact.insert(exact.end(), o.begin(), o.end());
      }
      std::vector<float> output(exact.size(), -1.0f);
      const auto verified = store_->Verify(kOwner, {.step = step_,
                                                    .layer = layer,
                                                    .token_count = drafts.size(),
                                                    .raw = packed.view(),
                                                    .output = output.data()});
      ASSERT_TRUE(verified.ok()) << verified.status();
      const testing::Tolerance bound({.is_delta_rule = shape.is_delta_rule(),
                                      .d_k = shape.d_k,
                                      .records = told_.at(id).tokens.size() + drafts.size(),
                                      .draft_tokens = drafts.size() + geometry_.ring_records(),
                                      .folds = told_.at(id).folds + 1,
                                      .ring_records = geometry_.ring_records(),
                                      .raw = true,
                                      .magnitudes = ahead.magnitudes});
      ASSERT_TRUE(testing::Near(output, exact, [&](double value) { return bound.output(value); }))
          << "layer " << layer << ", position " << told_.at(id).tokens.size();
      outputs_.push_back(std::move(output));
    }
  }
  void Verify(SequenceId id, uint32_t drafts) {
    std::vector<TokenOfLayers> tokens(drafts);
    for (TokenOfLayers& token : tokens) token = AnyToken();
    Verify(id, tokens);
  }
  void Commit(SequenceId id, uint32_t accepted) {
    const uint64_t floor = State(id).floor;
    const std::vector<uint32_t> counts = {accepted};
    const auto committed = store_->Commit(kOwner, step_, counts);
    ASSERT_TRUE(committed.ok()) << committed.status();
    Told& told = told_.at(id);
    for (uint32_t i = 0; i < accepted; ++i) {
      told.tokens.push_back(open_[i]);
      for (size_t layer = 0; layer < 3; ++layer) told.oracle[layer].Step(open_[i][layer]);
    }
    told.folds += State(id).floor != floor;
  }
  void Decode(SequenceId id, uint64_t tokens) {
    for (uint64_t i = 0; i < tokens && !HasFatalFailure(); ++i) {
      Verify(id, 1);
      Commit(id, 1);
    }
  }
  void Rollback(SequenceId id, uint64_t position) {
    ASSERT_TRUE(store_->Rollback(kOwner, {id, State(id).version}, position).ok());
    const Told told = told_.at(id);
    Tell(id, told, position);
  }

  // The last w - 1 committed projections before `position`, zeros before token 0.
  std::vector<std::byte> Window(SequenceId id, uint32_t layer, uint64_t position) {
    const uint64_t rows = geometry_.layers[layer].conv_width - 1;
    std::vector<std::byte> window;
    for (uint64_t row = 0; row < rows; ++row) {
      const bool before_start = position + row < rows;
      for (uint32_t channel = 0; channel < geometry_.layers[layer].conv_channels(); ++channel) {
        const double value =
            before_start ? 0
                         : told_.at(id).tokens[position + row - rows][layer].projection[channel];
        testing::AppendAs(geometry_.formats.activation, static_cast<float>(value), window);
      }
    }
    return window;
  }
  void ExpectWindows(SequenceId id) {
    const auto reader = store_->BeginExport(kOwner, {id, State(id).version});
    ASSERT_TRUE(reader.ok()) << reader.status();
    ASSERT_EQ((*reader)->position(), told_.at(id).tokens.size());
    for (uint32_t layer = 0; layer < 3; ++layer) {
      const std::vector<std::byte> expected = Window(id, layer, (*reader)->position());
      std::vector<std::byte> window(expected.size());
      ASSERT_TRUE((*reader)->ReadWindow(layer, absl::MakeSpan(window)).ok());
      EXPECT_EQ(window, expected) << "layer " << layer << ", position " << (*reader)->position();
    }
  }

  struct Exported {
    uint64_t position = 0;
    std::vector<std::vector<float>> states;
    std::vector<std::vector<std::byte>> windows;
  };
  Exported Export(SequenceId id) {
    const auto reader = store_->BeginExport(kOwner, {id, State(id).version});
    EXPECT_TRUE(reader.ok()) << reader.status();
    Exported exported{.position = (*reader)->position()};
    for (uint32_t layer = 0; layer < 3; ++layer) {
      const LayerShape& shape = geometry_.layers[layer];
      exported.states.emplace_back(shape.state_elements());
      exported.windows.emplace_back((shape.conv_width - 1) * shape.conv_channels() *
                                    DtypeBytes(geometry_.formats.activation));
      EXPECT_TRUE((*reader)->ReadLayer(layer, absl::MakeSpan(exported.states.back())).ok());
      EXPECT_TRUE((*reader)->ReadWindow(layer, absl::MakeSpan(exported.windows.back())).ok());
    }
    return exported;
  }
  void Import(SequenceId id, const Exported& exported) {
    auto import = store_->BeginImport(kOwner, {id, State(id).version});
    ASSERT_TRUE(import.ok()) << import.status();
    for (uint32_t layer = 0; layer < 3; ++layer) {
      ASSERT_TRUE((*import)->WriteLayer(layer, exported.position, exported.states[layer]).ok());
    }
    const auto finished = (*import)->Finish(exported.position, exported.windows);
    ASSERT_TRUE(finished.ok()) << finished.status();
  }

  std::mt19937_64 random_{7};
  cpu::ThreadPool pool_{1};
  const std::unique_ptr<Device> device_ = testing::MakeTestDevice(uint64_t{1} << 32, &pool_);
  Geometry geometry_;
  std::vector<RawOracle> empty_;
  std::unique_ptr<Store> store_;
  std::map<SequenceId, Told> told_;
  StepId step_{};
  std::vector<TokenOfLayers> open_;
  std::vector<std::vector<float>> outputs_;  // [layer] of the last Verify
};

// Report 33: for each accepted count the window is that of the accepted tokens.
TEST_F(ConvWindowTest, RollsBackWithTheRest) {
  const SequenceId id = Create();
  for (uint32_t round = 0; round < 60 && !HasFailure(); ++round) {
    const uint32_t drafts = 1 + round % 4;
    Verify(id, drafts);
    ExpectWindows(id);  // drafts are not in it
    Commit(id, round % (drafts + 1));
    ExpectWindows(id);
  }
}

// Report 34: state and window come out as one pair, and the pair goes on elsewhere.
TEST_F(ConvWindowTest, ExportedPairReproducesTheNextOutput) {
  const SequenceId id = Create();
  Decode(id, 9);
  Verify(id, 4);
  Commit(id, 2);
  ExpectWindows(id);
  const Exported exported = Export(id);
  EXPECT_EQ(exported.position, 11u);
  const Told told = told_.at(id);
  Free(id);
  const SequenceId resumed = Create();
  Decode(resumed, 5);  // another history, to be replaced
  Import(resumed, exported);
  Tell(resumed, told, 11);
  ExpectWindows(resumed);
  for (uint32_t round = 0; round < 10 && !HasFailure(); ++round) {
    Verify(resumed, 4);
    Commit(resumed, round % 5);
    ExpectWindows(resumed);
  }
}

// Report 34: a window of the wrong size, or none, is refused before anything changes.
TEST_F(ConvWindowTest, StateWithoutItsWindowIsRefused) {
  const SequenceId id = Create();
  Decode(id, 6);
  Exported exported = Export(id);
  const uint64_t version = State(id).version;
  for (int mistake = 0; mistake < 3; ++mistake) {
    Exported wrong = exported;
    if (mistake == 0) wrong.windows.clear();
    if (mistake == 1) wrong.windows[1].pop_back();
    if (mistake == 2) std::swap(wrong.windows[0], wrong.windows[2]);
    auto import = store_->BeginImport(kOwner, {id, version});
    for (uint32_t layer = 0; layer < 3; ++layer)
      ASSERT_TRUE((*import)->WriteLayer(layer, 6, wrong.states[layer]).ok());
    EXPECT_TRUE(Fails((*import)->Finish(6, wrong.windows), absl::StatusCode::kInvalidArgument, {}));
  }
  EXPECT_EQ(State(id).version, version);
  Decode(id, 3);
  ExpectWindows(id);
}

// Report 35: every position of the rollback window has both parts.
TEST_F(ConvWindowTest, RestoresAtEveryPosition) {
  const SequenceId id = Create();
  Decode(id, 21);
  const SequenceState state = State(id);
  EXPECT_LE(state.floor, 17u);
  for (uint64_t p = state.floor; p <= state.position; ++p)
    ASSERT_TRUE(*store_->CreateSnapshot(kOwner, {id, state.version}, {"p", p}));
  for (uint64_t p = state.floor; p <= state.position && !HasFailure(); ++p) {
    const SequenceId restored = store_->CreateFromSnapshot(kOwner, {"p", p}, 1)->ids[0];
    Tell(restored, told_.at(id), p);
    ExpectWindows(restored);
    Verify(restored, 3);
    Commit(restored, 1);
    ExpectWindows(restored);
    Free(restored);
  }
  for (uint64_t p = state.position; p-- > state.floor && !HasFailure();) {
    Rollback(id, p);
    ExpectWindows(id);
    Verify(id, 2);  // drafts over the dropped rows
    Commit(id, 0);
    ExpectWindows(id);
  }
  Decode(id, 6);
  ExpectWindows(id);
}

// Report 36: the window moves by every offset, ten thousand times, and is always what a memmove
// would have left.
TEST_F(ConvWindowTest, TenThousandShiftsOfEveryOffset) {
  const SequenceId id = Create();
  std::vector<std::vector<std::byte>> expected;  // [layer], moved by hand
  for (uint32_t layer = 0; layer < 3; ++layer) expected.push_back(Window(id, layer, 0));
  std::vector<TokenOfLayers> some(16);
  for (TokenOfLayers& token : some) token = AnyToken();
  uint64_t version = 1;
  for (uint32_t round = 0; round < 10000; ++round) {
    const uint32_t drafts = 1 + round % 4, accepted = round / 4 % (drafts + 1);
    const auto begun = store_->BeginStep(kOwner, {.rows = {{id, version++, drafts}}});
    ASSERT_TRUE(begun.ok()) << begun.status();
    for (uint32_t layer = 0; layer < 3; ++layer) {
      testing::PackedRawInputs packed, kept;
      for (uint32_t i = 0; i < drafts; ++i) {
        packed.Append(some[(round + i) % 16][layer], Dtype::kFp32);
        if (i < accepted) kept.Append(some[(round + i) % 16][layer], Dtype::kFp32);
      }
      std::vector<float> output(drafts * 16);
      ASSERT_TRUE(store_
                      ->Verify(kOwner, {.step = begun->id,
                                        .layer = layer,
                                        .token_count = drafts,
                                        .raw = packed.view(),
                                        .output = output.data()})
                      .ok());
      std::vector<std::byte>& window = expected[layer];
      window.insert(window.end(), kept.projection.begin(), kept.projection.end());
      window.erase(window.begin(), window.begin() + static_cast<ptrdiff_t>(kept.projection.size()));
    }
    const std::vector<uint32_t> counts = {accepted};
    ASSERT_TRUE(store_->Commit(kOwner, begun->id, counts).ok());
    const auto reader = store_->BeginExport(kOwner, {id, version});
    ASSERT_TRUE(reader.ok());
    for (uint32_t layer = 0; layer < 3; ++layer) {
      std::vector<std::byte> window(expected[layer].size());
      ASSERT_TRUE((*reader)->ReadWindow(layer, absl::MakeSpan(window)).ok());
      ASSERT_EQ(window, expected[layer]) << "round " << round << ", layer " << layer;
    }
  }
}

// Report 37: q, k and v are three blocks of channels beside one state; each comes back as itself.
TEST_F(ConvWindowTest, ComponentsAreKnownByRole) {
  const SequenceId id = Create();
  Decode(id, 7);
  const Exported exported = Export(id);
  const SequenceId copy = Create();
  Import(copy, exported);
  const Exported again = Export(copy);
  EXPECT_EQ(again.position, exported.position);
  EXPECT_EQ(again.states, exported.states);
  EXPECT_EQ(again.windows, exported.windows);
  for (uint32_t layer = 0; layer < 3; ++layer) {
    EXPECT_EQ(exported.windows[layer], Window(id, layer, 7));
    EXPECT_NE(exported.windows[layer].size(), exported.states[layer].size() * sizeof(float));
  }
}

// Report 38: what is published is what the next step uses. From an export at a checkpoint the next
// outputs are the same bytes.
TEST_F(ConvWindowTest, PublishedStateIsTheOneUsed) {
  geometry_.rollback_tokens_min = 0;
  store_ = MakeStore();
  const SequenceId id = Create();
  Decode(id, 13);
  const std::vector<SequenceId> ids = {id};
  ASSERT_TRUE(store_->Flush(kOwner, ids).ok());
  ASSERT_EQ(State(id).floor, 13u);
  const Exported exported = Export(id);
  const SequenceId copy = Create();
  Import(copy, exported);
  Tell(copy, told_.at(id), 13);
  for (int round = 0; round < 3; ++round) {  // before the next fold of either
    std::vector<TokenOfLayers> drafts = {AnyToken(), AnyToken()};
    Verify(id, drafts);
    const auto uninterrupted = outputs_;
    Commit(id, 1);
    Verify(copy, drafts);
    EXPECT_EQ(outputs_, uninterrupted) << "round " << round;
    Commit(copy, 1);
  }
}

// Report 2: a new owner of a dirty slot has no history, in the window either.
TEST_F(ConvWindowTest, FirstTokensOnADirtySlot) {
  std::vector<TokenOfLayers> text(6);
  for (TokenOfLayers& token : text) token = AnyToken();
  std::vector<std::vector<float>> clean;
  for (int owner = 0; owner < 20 && !HasFailure(); ++owner) {
    const SequenceId id = Create();
    ExpectWindows(id);
    for (int i = 0; i < 3; ++i) {
      Verify(id, std::vector<TokenOfLayers>(text.begin() + 2 * i, text.begin() + 2 * i + 2));
      if (owner == 0) clean.insert(clean.end(), outputs_.begin(), outputs_.end());
      for (uint32_t layer = 0; layer < 3; ++layer) EXPECT_EQ(outputs_[layer], clean[3 * i + layer]);
      Commit(id, 2);
    }
    Decode(id, static_cast<uint64_t>(owner));
    Free(id);
  }
}

}  // namespace
}  // namespace ssmd
