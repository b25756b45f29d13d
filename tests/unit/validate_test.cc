// service/validate.cc, validate_model.cc: each check refuses, and names field, expected and actual.
#include "service/validate.h"

#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <functional>

#include "tests/testing/model_specs.h"
#include "tests/testing/raw_specs.h"
#include "tests/testing/status_is.h"

namespace ssmd {
namespace {

using testing::Fails;
using testing::RefusesField;
using testing::SmallSpec;

TEST(ValidateModel, GoodSpecRoundTrips) {
  const auto description = ParseModelSpec(SmallSpec());
  ASSERT_TRUE(description.ok()) << description.status();
  EXPECT_EQ(description->MakeGeometry().layers.size(), 3u);
  EXPECT_EQ(description->MakeGeometry().layers[2].family, Family::kGdn);
  v1::ModelSpec back;
  ToProto(*description, back);
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(back, SmallSpec()))
      << back.DebugString();
}

TEST(ValidateModel, EachMistakeIsNamed) {
  using Spec = v1::ModelSpec;
  const struct {
    std::function<void(Spec&)> spoil;
    const char* field;
    std::vector<absl::string_view> words;
  } cases[] = {
      {[](Spec& s) { s.clear_name(); }, "spec.name", {"name", "1..128 bytes", "got 0"}},
      {[](Spec& s) { s.set_name(std::string(129, 'x')); }, "spec.name", {"got 129"}},
      {[](Spec& s) { s.clear_layer_groups(); }, "spec.layer_groups", {"at least one"}},
      {[](Spec& s) { s.mutable_layer_groups(1)->clear_layer_ids(); },
       "spec.layer_groups[1].layer_ids",
       {"at least one"}},
      {[](Spec& s) { s.mutable_layer_groups(1)->set_layer_ids(0, 5); },
       "spec.layer_groups[1].layer_ids[0]",
       {"unique", "5"}},
      {[](Spec& s) {
         for (uint32_t i = 0; i < 1024; ++i) s.mutable_layer_groups(1)->add_layer_ids(100 + i);
       },
       "spec.layer_groups[1].layer_ids[1022]",
       {"1024"}},
      {[](Spec& s) { s.mutable_layer_groups(0)->clear_family(); },
       "spec.layer_groups[0].family",
       {"FAMILY_MAMBA2", "FAMILY_UNSPECIFIED"}},
      {[](Spec& s) { s.mutable_layer_groups(0)->set_family(static_cast<v1::Family>(77)); },
       "spec.layer_groups[0].family",
       {"77"}},
      {[](Spec& s) { s.mutable_layer_groups(1)->set_d_k(24); },
       "spec.layer_groups[1].d_k",
       {"layer_groups[1].d_k", "multiple of 16", "24"}},
      {[](Spec& s) { s.mutable_layer_groups(1)->set_d_k(0); },
       "spec.layer_groups[1].d_k",
       {"got 0"}},
      {[](Spec& s) { s.mutable_layer_groups(0)->set_d_v(264); },
       "spec.layer_groups[0].d_v",
       {"256", "264"}},
      {[](Spec& s) { s.mutable_layer_groups(0)->set_key_group_count(3); },
       "spec.layer_groups[0].key_group_count",
       {"divisor", "3"}},
      {[](Spec& s) { s.mutable_layer_groups(0)->set_head_count(0); },
       "spec.layer_groups[0].head_count",
       {"4096", "got 0"}},
      {[](Spec& s) { s.clear_input_form(); }, "spec.input_form", {"INPUT_FORM_UNSPECIFIED"}},
      {[](Spec& s) { s.clear_activation_dtype(); }, "spec.activation_dtype", {"activation_dtype"}},
      {[](Spec& s) { s.set_output_dtype(static_cast<v1::DataType>(99)); },
       "spec.output_dtype",
       {"99"}},
      {[](Spec& s) { s.clear_correction_dtype(); }, "spec.correction_dtype", {"fp16 or fp32"}},
      {[](Spec& s) { s.clear_checkpoint_dtype(); }, "spec.checkpoint_dtype", {"checkpoint_dtype"}},
      {[](Spec& s) { s.set_window_records(0); }, "spec.window_records", {"1..128", "got 0"}},
      {[](Spec& s) { s.set_window_records(129); }, "spec.window_records", {"1..128", "got 129"}},
      {[](Spec& s) { s.set_draft_tokens_max(0); }, "spec.draft_tokens_max", {"1..16", "got 0"}},
      {[](Spec& s) { s.set_rollback_tokens_min(5); }, "spec.draft_tokens_max", {"4", "5", "8"}},
      {[](Spec& s) { s.set_rollback_tokens_min(0xffffffff); },
       "spec.draft_tokens_max",
       {"4294967295"}},
      {[](Spec& s) { s.set_tp_size(0); }, "spec.tp_size", {"at least 1"}},
      {[](Spec& s) { s.set_tp_size(2); },
       "spec.rollback_tokens_min",
       {"at least draft_tokens_max 4", "got 2"}},
      {[](Spec& s) { s.set_tp_rank(1); }, "spec.tp_rank", {"below tp_size 1", "got 1"}},
      {[](Spec& s) { s.set_pp_size(0); }, "spec.pp_size", {"at least 1"}},
      {[](Spec& s) { s.set_pp_rank(7); }, "spec.pp_rank", {"below pp_size 1", "got 7"}},
  };
  for (const auto& c : cases) {
    v1::ModelSpec spec = SmallSpec();
    c.spoil(spec);
    const auto refused = ParseModelSpec(spec);
    EXPECT_TRUE(RefusesField(refused, c.field, {})) << c.field;
    for (const absl::string_view word : c.words)
      EXPECT_TRUE(absl::StrContains(refused.status().message(), word)) << refused.status();
  }
}

TEST(ValidateModel, WhatIsNotBuiltIsUnimplemented) {
  for (const auto& spoil : std::initializer_list<std::function<void(v1::ModelSpec&)>>{
           [](v1::ModelSpec& s) { s.set_checkpoint_dtype(v1::DATA_TYPE_BF16); },
           [](v1::ModelSpec& s) { s.set_checkpoint_lp_dtype(v1::DATA_TYPE_BF16); }}) {
    v1::ModelSpec spec = SmallSpec();
    spoil(spec);
    EXPECT_TRUE(Fails(ParseModelSpec(spec), absl::StatusCode::kUnimplemented, {"built"}));
  }
}

TEST(ValidateModel, RawSpecRoundTrips) {
  std::mt19937_64 random(1);
  v1::ModelSpec spec = testing::RawSpec(random);
  spec.set_checkpoint_dtype(v1::DATA_TYPE_FP16);
  spec.set_checkpoint_lp_dtype(v1::DATA_TYPE_FP16);
  spec.set_flush_mode(v1::FLUSH_MODE_BACKGROUND);
  spec.set_rounding_seed(0xfedcba9876543210u);
  const auto description = ParseModelSpec(spec);
  ASSERT_TRUE(description.ok()) << description.status();
  const Geometry geometry = description->MakeGeometry();
  ASSERT_EQ(geometry.raw.size(), 4u);
  EXPECT_EQ(geometry.layers[1].conv_width, 4u);
  EXPECT_EQ(geometry.raw[3].kda_gate, KdaGate::kLowerBound);
  EXPECT_EQ(geometry.flush_mode, FlushMode::kBackground);
  EXPECT_EQ(geometry.rounding_seed, 0xfedcba9876543210u);
  EXPECT_GT(geometry.conv_bytes(), 0u);
  v1::ModelSpec back;
  ToProto(*description, back);
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(back, spec));

  spec.clear_flush_mode();  // the same as FUSED
  v1::ModelSpec fused = spec;
  fused.set_flush_mode(v1::FLUSH_MODE_FUSED);
  EXPECT_EQ(Fingerprint(*ParseModelSpec(spec)), Fingerprint(*ParseModelSpec(fused)));
}

TEST(ValidateModel, EachMistakeOfTheRawFormIsNamed) {
  using Spec = v1::ModelSpec;
  const auto at = [](Spec& s, int group, int i = 0) {
    return s.mutable_layer_groups(group)->mutable_parameters(i);
  };
  const float kNan = std::numeric_limits<float>::quiet_NaN();
  const struct {
    std::function<void(Spec&)> spoil;
    const char* field;
    std::vector<absl::string_view> words;
  } cases[] = {
      {[](Spec& s) { s.mutable_layer_groups(0)->mutable_parameters()->RemoveLast(); },
       "spec.layer_groups[0].parameters",
       {"2 entries", "got 1"}},
      {[](Spec& s) { s.set_input_form(v1::INPUT_FORM_POST_CONV); },
       "spec.layer_groups[0].parameters",
       {"none in post-conv form", "got 2"}},
      {[&](Spec& s) { at(s, 0, 1)->set_conv_width(3); },
       "spec.layer_groups[0].parameters[1].conv_width",
       {"4 (as the first", "got 3"}},
      {[&](Spec& s) { at(s, 1)->set_conv_width(5); },
       "spec.layer_groups[1].parameters[0].conv_width",
       {"2..4", "got 5"}},
      {[&](Spec& s) { at(s, 0, 1)->mutable_conv_weight()->RemoveLast(); },
       "spec.layer_groups[0].parameters[1].conv_weight",
       {"expected 384 values, got 383"}},
      {[&](Spec& s) { at(s, 1)->add_conv_bias(1); },
       "spec.layer_groups[1].parameters[0].conv_bias",
       {"expected 48 values, got 49"}},
      {[&](Spec& s) { at(s, 2)->clear_a_log(); },
       "spec.layer_groups[2].parameters[0].a_log",
       {"expected 2 values, got 0"}},
      {[&](Spec& s) { at(s, 2)->mutable_dt_bias()->Truncate(2); },
       "spec.layer_groups[2].parameters[0].dt_bias",
       {"expected 32 values, got 2"}},
      {[&](Spec& s) { at(s, 1)->add_d(1); }, "spec.layer_groups[1].parameters[0].d", {"got 1"}},
      {[=](Spec& s) { at(s, 0, 1)->set_a_log(2, kNan); },
       "spec.layer_groups[0].parameters[1].a_log",
       {"a_log[2] is not finite"}},
      {[&](Spec& s) { at(s, 0)->set_qk_l2_norm(true); },
       "spec.layer_groups[0].parameters[0].qk_l2_norm",
       {"only GDN and KDA"}},
      {[&](Spec& s) { at(s, 2)->clear_kda_gate(); },
       "spec.layer_groups[2].parameters[0].kda_gate",
       {"KDA_GATE_SOFTPLUS", "KDA_GATE_UNSPECIFIED"}},
      {[&](Spec& s) { at(s, 2)->set_kda_gate(static_cast<v1::KdaGate>(9)); },
       "spec.layer_groups[2].parameters[0].kda_gate",
       {"got 9"}},
      {[&](Spec& s) { at(s, 1)->set_kda_gate(v1::KDA_GATE_SOFTPLUS); },
       "spec.layer_groups[1].parameters[0].kda_gate",
       {"not a KDA layer"}},
      {[&](Spec& s) { at(s, 2)->set_gate_lower_bound(0); },
       "spec.layer_groups[2].parameters[0].gate_lower_bound",
       {"below 0"}},
      {[&](Spec& s) { at(s, 1)->set_gate_lower_bound(-1); },
       "spec.layer_groups[1].parameters[0].gate_lower_bound",
       {"none", "-1"}},
      {[](Spec& s) { s.set_flush_mode(static_cast<v1::FlushMode>(7)); },
       "spec.flush_mode",
       {"FLUSH_MODE_FUSED", "7"}},
  };
  for (const auto& c : cases) {
    std::mt19937_64 random(1);
    v1::ModelSpec spec = testing::RawSpec(random);
    c.spoil(spec);
    const auto refused = ParseModelSpec(spec);
    EXPECT_TRUE(RefusesField(refused, c.field, {})) << c.field;
    for (const absl::string_view word : c.words)
      EXPECT_TRUE(absl::StrContains(refused.status().message(), word)) << refused.status();
  }
}

TEST(ValidateStep, PaddingModesAndPartial) {
  const StepLimits limits{.rows_max = 4, .draft_tokens_max = 4, .step_timeout_ms_max = 100};
  v1::BeginStepRequest request;
  for (const uint64_t id : {0, 7, 0}) {
    request.add_sequence_ids(id);
    request.add_versions(id == 0 ? 0 : 3);
    request.add_draft_tokens(2);
  }
  request.set_allow_partial(true);
  auto parsed = ParseBeginStep(request, limits);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->request.rows[2].sequence, kPaddingRow);
  EXPECT_TRUE(parsed->request.allow_partial);
  EXPECT_FALSE(parsed->request.rows[1].commit_all);

  request.add_commit_modes(v1::COMMIT_MODE_UNSPECIFIED);
  request.add_commit_modes(v1::COMMIT_MODE_ALL);
  EXPECT_TRUE(
      RefusesField(ParseBeginStep(request, limits), "commit_modes", {"3 entries", "got 2"}));
  request.add_commit_modes(v1::COMMIT_MODE_COUNTS);
  EXPECT_TRUE(ParseBeginStep(request, limits)->request.rows[1].commit_all);
  EXPECT_FALSE(ParseBeginStep(request, limits)->request.rows[0].commit_all);
  request.set_commit_modes(0, static_cast<v1::CommitMode>(9));
  EXPECT_TRUE(RefusesField(ParseBeginStep(request, limits), "commit_modes[0]", {"COUNTS", "9"}));
  request.set_commit_modes(0, v1::COMMIT_MODE_ALL);
  request.set_versions(2, 1);
  EXPECT_TRUE(RefusesField(ParseBeginStep(request, limits), "versions[2]", {"padding", "got 1"}));
}

TEST(ValidateStep, ParallelArraysLimitsAndDuplicates) {
  const StepLimits limits{.rows_max = 3, .draft_tokens_max = 4, .step_timeout_ms_max = 100};
  const auto request = [](std::vector<uint64_t> ids, size_t versions,
                          std::vector<uint32_t> drafts) {
    v1::BeginStepRequest made;
    for (const uint64_t id : ids) made.add_sequence_ids(id);
    for (size_t i = 0; i < versions; ++i) made.add_versions(1);
    for (const uint32_t t : drafts) made.add_draft_tokens(t);
    return made;
  };
  const auto good = ParseBeginStep(request({7, 8}, 2, {0, 4}), limits);
  ASSERT_TRUE(good.ok()) << good.status();
  EXPECT_EQ(good->request.rows[1].sequence, SequenceId{8});
  EXPECT_EQ(good->request.rows[1].draft_tokens, 4u);
  EXPECT_EQ(good->step_timeout_ms, 100u);

  EXPECT_TRUE(
      RefusesField(ParseBeginStep(request({}, 0, {}), limits), "sequence_ids", {"1..3", "0"}));
  EXPECT_TRUE(RefusesField(ParseBeginStep(request({1, 2, 3, 4}, 4, {1, 1, 1, 1}), limits),
                           "sequence_ids", {"1..3", "got 4"}));
  EXPECT_TRUE(RefusesField(ParseBeginStep(request({1, 2}, 1, {1, 1}), limits), "versions",
                           {"expected 2", "got 1"}));
  EXPECT_TRUE(RefusesField(ParseBeginStep(request({1, 2}, 2, {1}), limits), "draft_tokens",
                           {"expected 2", "got 1"}));
  EXPECT_TRUE(RefusesField(ParseBeginStep(request({1, 2}, 2, {1, 5}), limits), "draft_tokens[1]",
                           {"0..4", "got 5"}));
  EXPECT_TRUE(RefusesField(ParseBeginStep(request({9, 8, 9}, 3, {1, 1, 1}), limits),
                           "sequence_ids[2]",
                           {"sequence_ids[2] duplicates sequence_ids[0]", "0x0000000000000009"}));
  v1::BeginStepRequest late = request({1}, 1, {1});
  late.set_step_timeout_ms(101);
  EXPECT_TRUE(RefusesField(ParseBeginStep(late, limits), "step_timeout_ms", {"0..100", "got 101"}));
}

class ValidateTensorsTest : public ::testing::Test {
 protected:
  static void Set(v1::Tensor* tensor, v1::DataType dtype, std::vector<uint64_t> shape,
                  size_t bytes) {
    tensor->Clear();
    tensor->set_dtype(dtype);
    for (const uint64_t extent : shape) tensor->add_shape(extent);
    tensor->mutable_data()->resize(bytes);
  }
  // Three tokens of a Mamba-2 layer in BF16.
  static v1::VerifyRequest Mamba() {
    v1::VerifyRequest request;
    Set(request.mutable_q(), v1::DATA_TYPE_BF16, {3, 2, 16}, 192);
    Set(request.mutable_k(), v1::DATA_TYPE_BF16, {3, 2, 16}, 192);
    Set(request.mutable_v(), v1::DATA_TYPE_BF16, {3, 4, 8}, 192);
    Set(request.mutable_log_alpha(), v1::DATA_TYPE_FP32, {3, 4}, 48);
    return request;
  }
  static TensorExpectations Expect(Family family) {
    return {.shape = {family, 4, 2, 16, 8},
            .formats = {.activation = Dtype::kBf16, .output = Dtype::kFp16},
            .token_count = 3,
            .message_bytes_max = 1u << 20};
  }
};

TEST_F(ValidateTensorsTest, GoodOnesPass) {
  v1::VerifyRequest request = Mamba();
  auto parsed = ParseVerifyTensors(request, Expect(Family::kMamba2));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->inputs.q, request.q().data().data());
  EXPECT_EQ(parsed->inputs.beta, nullptr);
  EXPECT_EQ(parsed->inputs.value_scale, nullptr);
  EXPECT_EQ(parsed->output_bytes, 3u * 4 * 8 * 2);
  EXPECT_TRUE(parsed->aligned.empty());

  Set(request.mutable_value_scale(), v1::DATA_TYPE_FP32, {3, 4}, 48);
  EXPECT_NE(ParseVerifyTensors(request, Expect(Family::kMamba2))->inputs.value_scale, nullptr);

  request.clear_value_scale();
  Set(request.mutable_beta(), v1::DATA_TYPE_FP32, {3, 4}, 48);
  EXPECT_TRUE(ParseVerifyTensors(request, Expect(Family::kGdn)).ok());
  Set(request.mutable_log_alpha(), v1::DATA_TYPE_FP32, {3, 4, 16}, 768);
  EXPECT_TRUE(ParseVerifyTensors(request, Expect(Family::kKda)).ok());
}

TEST_F(ValidateTensorsTest, EachMistakeIsNamed) {
  using Request = v1::VerifyRequest;
  constexpr auto kBf16 = v1::DATA_TYPE_BF16;
  constexpr auto kFp32 = v1::DATA_TYPE_FP32;
  const uint64_t huge = uint64_t{1} << 63;
  const struct {
    std::function<void(Request&)> spoil;
    const char* field;
    std::vector<absl::string_view> words;
    Family family = Family::kMamba2;
  } cases[] = {
      {[](Request& r) { r.clear_q(); }, "q", {"bf16 [3, 2, 16]", "got none"}},
      {[](Request& r) { r.mutable_k()->set_dtype(kFp32); },
       "k.dtype",
       {"DATA_TYPE_BF16", "DATA_TYPE_FP32"}},
      {[](Request& r) { r.mutable_k()->set_dtype(static_cast<v1::DataType>(9)); },
       "k.dtype",
       {"9"}},
      {[](Request& r) {
         Set(r.mutable_q(), kBf16, {3, 32}, 192);
       },
       "q.shape",
       {"q.shape: expected [3, 2, 16], got [3, 32]"}},
      {[](Request& r) {
         Set(r.mutable_v(), kBf16, {4, 4, 8}, 256);
       },
       "v.shape",
       {"expected [3, 4, 8], got [4, 4, 8]"}},
      {[=](Request& r) {
         Set(r.mutable_v(), kBf16, {huge, huge, 8}, 192);
       },
       "v.shape",
       {"9223372036854775808"}},
      {[](Request& r) { Set(r.mutable_v(), kBf16, std::vector<uint64_t>(100, 1), 2); },
       "v.shape",
       {", ...]"}},
      {[](Request& r) { r.mutable_v()->mutable_data()->pop_back(); },
       "v.data",
       {"expected 192 bytes, got 191 bytes"}},
      {[](Request& r) { r.mutable_v()->mutable_data()->push_back('x'); }, "v.data", {"193"}},
      {[](Request& r) { r.clear_log_alpha(); }, "log_alpha", {"fp32 [3, 4]", "none"}},
      {[](Request& r) {
         Set(r.mutable_beta(), kFp32, {3, 4}, 48);
       },
       "beta",
       {"none for a mamba2"}},
      {[](Request& r) {
         Set(r.mutable_value_scale(), kFp32, {3, 5}, 60);
       },
       "value_scale.shape",
       {"[3, 4]", "[3, 5]"}},
      {[](Request&) {}, "beta", {"fp32 [3, 4]", "none"}, Family::kGdn},
      {[](Request& r) {
         Set(r.mutable_beta(), kFp32, {3, 4}, 48);
         Set(r.mutable_value_scale(), kFp32, {3, 4}, 48);
       },
       "value_scale",
       {"none for a gdn"},
       Family::kGdn},
      {[](Request&) {}, "log_alpha.shape", {"[3, 4, 16]", "[3, 4]"}, Family::kKda},
  };
  for (const auto& c : cases) {
    v1::VerifyRequest request = Mamba();
    c.spoil(request);
    const auto refused = ParseVerifyTensors(request, Expect(c.family));
    EXPECT_TRUE(RefusesField(refused, c.field, {})) << c.field;
    for (const absl::string_view word : c.words)
      EXPECT_TRUE(absl::StrContains(refused.status().message(), word)) << refused.status();
  }
}

// Each family of the raw form: what is there passes, and one tensor less, or one of another, does
// not.
TEST_F(ValidateTensorsTest, RawFormByFamily) {
  constexpr auto kBf16 = v1::DATA_TYPE_BF16;
  for (const Family family : {Family::kMamba2, Family::kGdn, Family::kKda}) {
    TensorExpectations expected = Expect(family);
    expected.raw = true;
    expected.shape.conv_width = 4;
    const auto good = [&] {
      v1::VerifyRequest request;
      Set(request.mutable_projection(), kBf16, {3, 96}, 576);
      if (family == Family::kMamba2) Set(request.mutable_dt(), kBf16, {3, 4}, 24);
      if (family == Family::kGdn) Set(request.mutable_a(), kBf16, {3, 4}, 24);
      if (family != Family::kMamba2) Set(request.mutable_b(), kBf16, {3, 4}, 24);
      if (family == Family::kKda) Set(request.mutable_gate(), kBf16, {3, 4, 16}, 384);
      return request;
    };
    const auto parsed = ParseVerifyTensors(good(), expected);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_NE(parsed->raw.projection, nullptr);
    EXPECT_EQ(parsed->raw.dt != nullptr, family == Family::kMamba2);
    EXPECT_EQ(parsed->raw.gate != nullptr, family == Family::kKda);
    EXPECT_EQ(parsed->inputs.q, nullptr);

    using Field = v1::Tensor* (v1::VerifyRequest::*)();
    using Has = bool (v1::VerifyRequest::*)() const;
    const struct {
      const char* name;
      Field field;
      Has has;
    } raw_fields[] = {
        {"projection", &v1::VerifyRequest::mutable_projection, &v1::VerifyRequest::has_projection},
        {"dt", &v1::VerifyRequest::mutable_dt, &v1::VerifyRequest::has_dt},
        {"a", &v1::VerifyRequest::mutable_a, &v1::VerifyRequest::has_a},
        {"b", &v1::VerifyRequest::mutable_b, &v1::VerifyRequest::has_b},
        {"gate", &v1::VerifyRequest::mutable_gate, &v1::VerifyRequest::has_gate}};
    for (const auto& raw : raw_fields) {
      v1::VerifyRequest request = good();
      const bool wanted = (request.*raw.has)();
      if (wanted) {
        (request.*raw.field)()->Clear();
        EXPECT_TRUE(
            RefusesField(ParseVerifyTensors(request, expected), raw.name, {"bf16 [3", "got none"}));
      } else {
        Set((request.*raw.field)(), kBf16, {3, 4}, 24);
        EXPECT_TRUE(RefusesField(ParseVerifyTensors(request, expected), raw.name,
                                 {absl::StrCat("none for a ", FamilyName(family))}));
      }
    }
    v1::VerifyRequest other = good();
    Set(other.mutable_v(), kBf16, {3, 4, 8}, 192);
    EXPECT_TRUE(RefusesField(ParseVerifyTensors(other, expected), "v", {"none in raw form"}));
    other = good();
    other.mutable_projection()->set_shape(1, 95);
    EXPECT_TRUE(RefusesField(ParseVerifyTensors(other, expected), "projection.shape",
                             {"expected [3, 96], got [3, 95]"}));
  }
  v1::VerifyRequest post = Mamba();
  Set(post.mutable_projection(), kBf16, {3, 96}, 576);
  EXPECT_TRUE(RefusesField(ParseVerifyTensors(post, Expect(Family::kMamba2)), "projection",
                           {"none in post-conv form"}));
}

TEST_F(ValidateTensorsTest, ReplyThatCannotFitIsRefusedBeforeItIsComputed) {
  TensorExpectations expected = Expect(Family::kMamba2);
  expected.message_bytes_max = 200;
  const auto refused = ParseVerifyTensors(Mamba(), expected);
  EXPECT_TRUE(Fails(refused, absl::StatusCode::kResourceExhausted, {"192 bytes", "200"}));
  EXPECT_EQ(GetDetail(refused.status(), detail::kReason), reason::kLimit);
}

TEST(ValidateBytes, MisalignedBytesAreCopied) {
  alignas(8) char bytes[16] = "0123456789abcde";
  std::vector<std::unique_ptr<float[]>> aligned;
  EXPECT_EQ(AlignedBytes({bytes + 4, 8}, 4, aligned), bytes + 4);
  EXPECT_TRUE(aligned.empty());
  const void* copy = AlignedBytes({bytes + 1, 9}, 4, aligned);
  ASSERT_EQ(aligned.size(), 1u);
  EXPECT_EQ(copy, aligned[0].get());
  EXPECT_EQ(std::memcmp(copy, "123456789", 9), 0);
}

TEST(ValidateSmall, PageTokens) {
  for (const std::string& digest :
       {std::string("d"), std::string(64, '\xff'), std::string("\0x", 2)}) {
    const SnapshotKey key{digest, 0x123456789abcdef0u};
    const std::string token = MakePageToken(42, key);
    const auto parsed = ParsePageToken(42, token);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, key);
    EXPECT_TRUE(RefusesField(ParsePageToken(43, token), "page_token", {"next_page_token"}));
    for (size_t i = 0; i < token.size(); ++i) {
      std::string broken = token;
      broken[i] = broken[i] == '0' ? '1' : '0';
      EXPECT_FALSE(ParsePageToken(42, broken).ok()) << i;
      EXPECT_FALSE(ParsePageToken(42, token.substr(0, i)).ok()) << i;
    }
  }
  EXPECT_FALSE(ParsePageToken(42, "next").ok());
  EXPECT_FALSE(ParsePageToken(42, std::string(10'000, 'a')).ok());
  EXPECT_EQ(*ParsePageSize(0), 100u);
  EXPECT_EQ(*ParsePageSize(1000), 1000u);
  EXPECT_TRUE(RefusesField(ParsePageSize(1001), "page_size", {"0..1000", "1001"}));
}

TEST(ValidateSmall, DigestsAndWindows) {
  v1::LookupPrefixRequest request;
  EXPECT_TRUE(RefusesField(ParseDigests(request.digests()), "digests", {"1..1024", "got 0"}));
  request.add_digests("a");
  request.add_digests("");
  EXPECT_TRUE(RefusesField(ParseDigests(request.digests()), "digests[1]", {"1..64", "got 0"}));
  request.set_digests(1, std::string(65, 'x'));
  EXPECT_TRUE(RefusesField(ParseDigests(request.digests()), "digests[1]", {"got 65"}));
  request.set_digests(1, std::string(64, 'x'));
  EXPECT_EQ(ParseDigests(request.digests())->size(), 2u);
  for (int i = 0; i < 1023; ++i) request.add_digests("y");
  EXPECT_TRUE(RefusesField(ParseDigests(request.digests()), "digests", {"got 1025"}));
  EXPECT_TRUE(CheckWorkerWindow("worker_window", std::string(1u << 20, 'w')).ok());
  EXPECT_TRUE(RefusesField(CheckWorkerWindow("worker_window", std::string((1u << 20) + 1, 'w')),
                           "worker_window", {"1048576", "1048577"}));
}

TEST(ValidateSmall, KeysNamesAndIds) {
  v1::SnapshotKey key;
  EXPECT_TRUE(RefusesField(ParseSnapshotKey("key", key), "key.digest", {"1..64", "got 0"}));
  key.set_digest(std::string(65, 'd'));
  EXPECT_TRUE(RefusesField(ParseSnapshotKey("key", key), "key.digest", {"1..64", "got 65"}));
  key.set_digest(std::string("\0d", 2));
  key.set_position(9);
  EXPECT_EQ(ParseSnapshotKey("key", key)->digest, std::string("\0d", 2));
  EXPECT_TRUE(CheckClientName(std::string(128, 'x')).ok());
  EXPECT_TRUE(RefusesField(CheckClientName(std::string(129, 'x')), "client_name", {"128", "129"}));
}

}  // namespace
}  // namespace ssmd
