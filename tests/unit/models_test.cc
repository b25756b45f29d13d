// service/models.cc: fingerprints, capacities, idempotent registration.
#include "service/models.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <set>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"
#include "service/validate.h"
#include "tests/testing/model_specs.h"
#include "tests/testing/raw_specs.h"
#include "tests/testing/status_is.h"

namespace ssmd {
namespace {

using testing::Fails;
using testing::SmallSpec;

ModelDescription Small(const std::function<void(v1::ModelSpec&)>& change = [](v1::ModelSpec&) {}) {
  v1::ModelSpec spec = SmallSpec();
  change(spec);
  auto parsed = ParseModelSpec(spec);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return *parsed;
}

class ModelsTest : public ::testing::Test {
 protected:
  cpu::ThreadPool pool_{1};
  cpu::CpuDevice device_{8u << 20, &pool_};
  ModelTable table_{{.models_max = 2, .defaults = {.sequences_max = 8}, .server_epoch = 0x1234},
                    [this](const BackendSpec& spec) { return device_.CreateBackend(spec); }};
};

TEST_F(ModelsTest, FingerprintSeesEveryField) {
  using Spec = v1::ModelSpec;
  const std::function<void(Spec&)> changes[] = {
      [](Spec&) {},
      [](Spec& s) { s.set_name("other"); },
      [](Spec& s) { s.mutable_layer_groups(0)->set_layer_ids(0, 4); },
      [](Spec& s) { s.mutable_layer_groups(0)->set_head_count(8); },
      [](Spec& s) { s.mutable_layer_groups(0)->set_key_group_count(4); },
      [](Spec& s) { s.mutable_layer_groups(0)->set_d_k(32); },
      [](Spec& s) { s.mutable_layer_groups(0)->set_d_v(16); },
      [](Spec& s) { s.mutable_layer_groups(1)->set_family(v1::FAMILY_KDA); },
      [](Spec& s) { s.set_activation_dtype(v1::DATA_TYPE_BF16); },
      [](Spec& s) { s.set_correction_dtype(v1::DATA_TYPE_FP16); },
      [](Spec& s) { s.set_output_dtype(v1::DATA_TYPE_BF16); },
      [](Spec& s) { s.set_window_records(16); },
      [](Spec& s) { s.set_draft_tokens_max(3); },
      [](Spec& s) { s.set_rollback_tokens_min(1); },
      // Sharded models need K >= T_max.
      [](Spec& s) { s.set_rollback_tokens_min(4); },
      [](Spec& s) { s.set_rollback_tokens_min(4), s.set_tp_size(2); },
      [](Spec& s) { s.set_rollback_tokens_min(4), s.set_tp_size(2), s.set_tp_rank(1); },
      [](Spec& s) { s.set_rollback_tokens_min(4), s.set_pp_size(2); },
      [](Spec& s) { s.set_rollback_tokens_min(4), s.set_pp_size(2), s.set_pp_rank(1); },
      [](Spec& s) { s.mutable_layer_groups()->SwapElements(0, 1); },
      // Equal layers, grouped otherwise.
      [](Spec& s) {
        *s.add_layer_groups() = s.layer_groups(1);
        s.mutable_layer_groups(2)->set_layer_ids(0, 11);
      },
      [](Spec& s) { s.mutable_layer_groups(1)->add_layer_ids(11); },
      [](Spec& s) { s.set_checkpoint_dtype(v1::DATA_TYPE_FP16); },
      [](Spec& s) { s.set_checkpoint_lp_dtype(v1::DATA_TYPE_FP16); },
      [](Spec& s) { s.set_flush_mode(v1::FLUSH_MODE_BACKGROUND); },
      [](Spec& s) { s.set_rounding_seed(1); },
      [](Spec& s) { s.set_rounding_seed(uint64_t{1} << 32); },
  };
  std::set<uint64_t> seen;
  for (const auto& change : changes) {
    const ModelDescription description = Small(change);
    EXPECT_TRUE(seen.insert(Fingerprint(description)).second);
    EXPECT_EQ(Fingerprint(description), Fingerprint(Small(change)));
  }
  EXPECT_FALSE(seen.contains(0));
}

// Parameters are part of the model, to the last bit.
TEST_F(ModelsTest, FingerprintSeesEveryParameter) {
  using Parameters = v1::LayerParameters;
  const std::function<void(Parameters&)> changes[] = {
      [](Parameters&) {},
      [](Parameters& p) { p.set_conv_weight(17, std::nextafter(p.conv_weight(17), 2.0f)); },
      [](Parameters& p) { p.set_conv_bias(3, -p.conv_bias(3)); },
      [](Parameters& p) { p.clear_conv_bias(); },
      [](Parameters& p) { p.set_a_log(0, 0.0f); },
      [](Parameters& p) { p.set_a_log(0, -0.0f); },
      [](Parameters& p) { p.set_dt_bias(1, 3); },
      [](Parameters& p) { p.clear_dt_bias(); },
      [](Parameters& p) { p.set_qk_l2_norm(!p.qk_l2_norm()); },
      [](Parameters& p) { p.set_gate_lower_bound(-4); },
      [](Parameters& p) { p.set_kda_gate(v1::KDA_GATE_SOFTPLUS), p.clear_gate_lower_bound(); },
  };
  std::set<uint64_t> seen;
  for (const auto& change : changes) {
    std::mt19937_64 random(1);
    v1::ModelSpec spec = testing::RawSpec(random);
    change(*spec.mutable_layer_groups(2)->mutable_parameters(0));  // KDA
    const auto parsed = ParseModelSpec(spec);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_TRUE(seen.insert(Fingerprint(*parsed)).second) << seen.size();
  }
  std::mt19937_64 random(1);
  v1::ModelSpec spec = testing::RawSpec(random);
  spec.mutable_layer_groups(0)->mutable_parameters(1)->clear_d();
  EXPECT_TRUE(seen.insert(Fingerprint(*ParseModelSpec(spec))).second);
}

TEST_F(ModelsTest, UnregisterRefusesWhileInUseAndGivesTheMemoryBack) {
  const ModelRef model = table_.Register(Small(), {.snapshots_max = 2})->model;
  Store& store = *model->store;
  const SequenceId id = store.CreateSequences(OwnerId{1}, 1)->ids[0];
  ASSERT_TRUE(store.CreateSnapshot(OwnerId{1}, {id, 1}, {"k", 0}).ok());
  const auto in_use = absl::StatusCode::kFailedPrecondition;
  EXPECT_TRUE(Fails(table_.Unregister(model->id), in_use, {"1 sequences"}));
  ASSERT_TRUE(store.Release(OwnerId{1}, {id}).ok());
  {
    const auto exported = store.BeginExport({"k", 0});
    EXPECT_TRUE(Fails(table_.Unregister(model->id), in_use, {"1 exports"}));
  }
  EXPECT_EQ(table_.Unregister(model->id)->snapshots, 1u);
  EXPECT_TRUE(Fails(table_.Unregister(model->id), absl::StatusCode::kNotFound, {}));
  EXPECT_EQ(table_.All().size(), 0u);
  // A call that still holds it makes nothing any more.
  EXPECT_TRUE(Fails(store.CreateSequences(OwnerId{1}, 1), absl::StatusCode::kNotFound, {}));
  EXPECT_TRUE(Fails(store.BeginStep(OwnerId{1}, {.rows = {{}}}), absl::StatusCode::kNotFound, {}));
  EXPECT_TRUE(Fails(store.BeginExport({"k", 0}), absl::StatusCode::kNotFound, {}));
}

TEST_F(ModelsTest, RegisteringInTurnNeverRunsOut) {
  std::set<uint64_t> first_ids;
  for (int i = 0; i < 10; ++i) {
    uint64_t id = 0;
    {
      const ModelRef model = table_.Register(Small(), {})->model;
      id = model->id;
      const SequenceId sequence = model->store->CreateSequences(OwnerId{1}, 1)->ids[0];
      EXPECT_TRUE(first_ids.insert(static_cast<uint64_t>(sequence)).second);
      ASSERT_TRUE(model->store->Release(OwnerId{1}, {sequence}).ok());
    }
    ASSERT_TRUE(table_.Unregister(id).ok());
    EXPECT_EQ(device_.bytes_used(), 0u);
  }
}

// The fingerprint is part of the contract between servers: it must not change by accident.
TEST_F(ModelsTest, FingerprintIsStable) {
  const std::string bytes = CanonicalSpec(Small());
  EXPECT_EQ(bytes.size(), 36u * 4 + 5);
  EXPECT_EQ(bytes.substr(0, 13), std::string("\1\0\0\0\5\0\0\0small", 13));
  EXPECT_EQ(Fingerprint(Small()), 0x71fc916327b0f01cu);
}

TEST_F(ModelsTest, DefaultsAreResolved) {
  const Capacity all =
      ResolveCapacity({}, {.sequences_max = 10, .snapshots_max = 3, .steps_max = 5});
  EXPECT_EQ(all, (Capacity{10, 3, 3, 10, 5}));
  EXPECT_EQ(ResolveCapacity({1, 2, 3, 4, 5}, {}), (Capacity{1, 2, 3, 4, 5}));
  EXPECT_EQ(ResolveCapacity({.sequences_max = 1}, {}).spare_pages, 2u);
  EXPECT_EQ(ResolveCapacity({.sequences_max = 100'000}, {}).rows_max, kRowsMax);
}

TEST_F(ModelsTest, RegisteringAgainReturnsWhatIsThere) {
  const auto first = table_.Register(Small(), {.snapshots_max = 2});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(first->created);
  EXPECT_EQ(first->model->store->capacity().sequences_max, 8u);
  EXPECT_EQ(first->model->layer_index.at(9), 2u);
  EXPECT_EQ(first->model->reserved_bytes, device_.bytes_used());
  const uint64_t used = device_.bytes_used();
  for (const Capacity& same :
       {Capacity{}, Capacity{.snapshots_max = 2}, Capacity{.sequences_max = 8}}) {
    const auto again = table_.Register(Small(), same);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_FALSE(again->created);
    EXPECT_EQ(again->model, first->model);
  }
  EXPECT_TRUE(Fails(table_.Register(Small(), {.sequences_max = 9}),
                    absl::StatusCode::kFailedPrecondition,
                    {"sequences_max is 8, request expected 9"}));
  EXPECT_EQ(device_.bytes_used(), used);
  EXPECT_EQ(table_.All().size(), 1u);
}

TEST_F(ModelsTest, LimitsAreKept) {
  EXPECT_TRUE(Fails(table_.Register(Small(), {.sequences_max = 100'000}),
                    absl::StatusCode::kResourceExhausted, {}));
  EXPECT_EQ(device_.bytes_used(), 0u);
  EXPECT_TRUE(testing::RefusesField(table_.Register(Small(), {.sequences_max = 0xffffffff}),
                                    "capacity.sequences_max", {"4294967295"}));
  for (const char* name : {"a", "b"})
    ASSERT_TRUE(table_.Register(Small([=](v1::ModelSpec& s) { s.set_name(name); }), {}).ok());
  const auto third = table_.Register(Small(), {});
  EXPECT_TRUE(Fails(third, absl::StatusCode::kResourceExhausted, {"models_max", "2"}));
  EXPECT_EQ(GetDetail(third.status(), detail::kReason), reason::kLimit);
  EXPECT_TRUE(Fails(table_.Find(42), absl::StatusCode::kNotFound, {"0x000000000000002a"}));
}

TEST_F(ModelsTest, IdsOfDifferentModelsNeverMeet) {
  const ModelRef a = table_.Register(Small(), {})->model;
  const ModelRef b = table_.Register(Small([](v1::ModelSpec& s) { s.set_name("b"); }), {})->model;
  const SequenceId id = a->store->CreateSequences(OwnerId{1}, 1)->ids[0];
  EXPECT_NE(b->store->CreateSequences(OwnerId{1}, 1)->ids[0], id);
  EXPECT_TRUE(Fails(b->store->Get(OwnerId{1}, id), absl::StatusCode::kNotFound, {}));
}

}  // namespace
}  // namespace ssmd
