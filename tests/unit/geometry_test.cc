// Limits of a model, each from both sides, and the sizes that follow from a geometry.
#include "state_store/geometry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

namespace ssmd {
namespace {

Geometry Valid() {
  return {.layers = {{Family::kMamba2, 128, 8, 128, 64}, {Family::kKda, 32, 32, 128, 128}}};
}

TEST(Geometry, NamesTheFieldAndTheValue) {
  struct Case {
    const char* field;
    const char* value;
    std::function<void(Geometry&)> break_it;
  };
  const Case cases[] = {
      {"layers", "got 0", [](Geometry& g) { g.layers.clear(); }},
      {"layers[1].head_count", "got 0", [](Geometry& g) { g.layers[1].head_count = 0; }},
      {"layers[0].key_group_count", "got 9", [](Geometry& g) { g.layers[0].key_group_count = 9; }},
      {"layers[0].key_group_count", "got 129",
       [](Geometry& g) { g.layers[0].key_group_count = 129; }},
      {"layers[0].d_k", "got 0", [](Geometry& g) { g.layers[0].d_k = 0; }},
      {"layers[0].d_k", "got 24", [](Geometry& g) { g.layers[0].d_k = 24; }},
      {"layers[0].d_k", "got 272", [](Geometry& g) { g.layers[0].d_k = 272; }},
      {"layers[1].d_v", "got 12", [](Geometry& g) { g.layers[1].d_v = 12; }},
      {"window_records", "got 0", [](Geometry& g) { g.window_records = 0; }},
      {"window_records", "got 129", [](Geometry& g) { g.window_records = 129; }},
      {"draft_tokens_max", "got 0", [](Geometry& g) { g.draft_tokens_max = 0; }},
      {"draft_tokens_max", "got 17", [](Geometry& g) { g.draft_tokens_max = 17; }},
      {"draft_tokens_max", "9 + rollback_tokens_min 8",
       [](Geometry& g) { g.draft_tokens_max = 9, g.rollback_tokens_min = 8; }},
      {"correction_dtype", "got bf16", [](Geometry& g) { g.formats.correction = Dtype::kBf16; }},
      {"activation_dtype", "not set", [](Geometry& g) { g.formats.activation = Dtype::kNone; }},
  };
  EXPECT_TRUE(ValidateGeometry(Valid()).ok());
  for (const Case& c : cases) {
    Geometry geometry = Valid();
    c.break_it(geometry);
    const absl::Status status = ValidateGeometry(geometry);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.field;
    EXPECT_EQ(GetDetail(status, detail::kField), c.field);
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(c.value));
  }
  Geometry edge = Valid();
  edge.draft_tokens_max = 8, edge.rollback_tokens_min = 8;  // K + T_max = L
  EXPECT_TRUE(ValidateGeometry(edge).ok());
}

// Nemotron-3-Super: 40 layers of 128 heads of 64 x 128 in FP32 are 160 MiB a sequence.
TEST(Geometry, SizesOfAKnownModel) {
  const Geometry geometry{.layers = std::vector<LayerShape>(40, {Family::kMamba2, 128, 8, 128, 64}),
                          .formats = {.correction = Dtype::kNone}};
  ASSERT_TRUE(ValidateGeometry(geometry).ok());
  EXPECT_EQ(geometry.checkpoint_bytes(), uint64_t{160} << 20);
  // x and B in bf16, dt and log alpha in FP32.
  EXPECT_EQ(geometry.record_bytes(), 40u * (128 * 64 * 2 + 8 * 128 * 2 + 128 * 4 + 128 * 4));
  EXPECT_EQ(geometry.ring_records(), 32u);
  const Capacity capacity{
      .sequences_max = 10, .snapshots_max = 2, .spare_pages = 3, .rows_max = 8, .steps_max = 2};
  EXPECT_EQ(*ReservedBytes(geometry, capacity), (16 + kExportSlots) * geometry.checkpoint_bytes() +
                                                    (12 + kExportSlots) * geometry.ring_bytes());
}

TEST(Geometry, CapacityLimits) {
  const Capacity valid{
      .sequences_max = 1, .snapshots_max = 0, .spare_pages = 1, .rows_max = 1, .steps_max = 1};
  EXPECT_TRUE(ValidateCapacity(valid).ok());
  for (uint32_t Capacity::*field : {&Capacity::sequences_max, &Capacity::spare_pages,
                                    &Capacity::rows_max, &Capacity::steps_max}) {
    Capacity broken = valid;
    broken.*field = 0;
    EXPECT_EQ(ValidateCapacity(broken).code(), absl::StatusCode::kInvalidArgument);
    broken.*field = ~0u;
    EXPECT_EQ(ValidateCapacity(broken).code(), absl::StatusCode::kInvalidArgument);
  }
}

// The flush rule at its edges, L = 16, T_max = 8, K = 2, R = 32.
TEST(FlushRule, Edges) {
  constexpr FlushRule kRule{
      .window_records = 16, .draft_tokens_max = 8, .rollback_tokens_min = 2, .ring_records = 32};
  EXPECT_FALSE(FoldIsDue(15, 1, 16, kRule));
  EXPECT_TRUE(FoldIsDue(16, 1, 16, kRule));
  EXPECT_TRUE(FoldIsDue(9, 8, 16, kRule));
  EXPECT_FALSE(FoldIsDue(2, 8, 9, kRule)) << "K records stay";
  EXPECT_FALSE(FoldIsMandatory(16, 8, kRule));
  EXPECT_TRUE(FoldIsMandatory(17, 8, kRule)) << "17 + 8 + 8 > 32";
  EXPECT_EQ(FoldTo(100, kRule), 98u);
}

}  // namespace
}  // namespace ssmd
