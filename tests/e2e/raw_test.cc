// The raw input form over real stubs, against the float64 reference, with background flushes.
#include "tests/e2e/transfers.h"
#include "tests/testing/compare.h"

namespace ssmd::e2e {
namespace {

// FP32 throughout: sums of 16 keys and 4 taps, and exponentials of order 1.
constexpr double kTolerance = 1e-3;

class RawTest : public ::testing::TestWithParam<v1::FlushMode> {
 protected:
  RawTest() : server_(StartServer()), client_(server_->address()) {
    spec_ = testing::RawSpec(client_.random, &parameters_);
    spec_.set_flush_mode(GetParam());
    client_.Start(0, spec_);
  }
  std::unique_ptr<Server> server_;
  Client client_;
  std::vector<RawParameters> parameters_;
  v1::ModelSpec spec_;
};

TEST_P(RawTest, OutputsMatchTheReference) {
  std::vector<testing::RawOracle> oracles;
  for (size_t i = 0; i < 4; ++i)
    oracles.emplace_back(testing::RawShape(testing::kRawLayers[i]), parameters_[i], Dtype::kFp32);
  const uint64_t id = client_.Create(1)[0];
  for (uint64_t version = 1; version < 25; ++version) {
    const uint32_t tokens = 1 + static_cast<uint32_t>(client_.random() % 4);
    const uint32_t accepted = static_cast<uint32_t>(client_.random() % (tokens + 1));
    const uint64_t step = client_.Begin({{id, version, tokens}});
    for (size_t i = 0; i < 4; ++i) {
      const LayerShape shape = testing::RawShape(testing::kRawLayers[i]);
      std::vector<reference::RawToken> raw;
      testing::PackedRawInputs packed;
      for (uint32_t t = 0; t < tokens; ++t) {
        raw.push_back(testing::RandomRawToken(shape, Dtype::kFp32, 1.0f, client_.random));
        packed.Append(raw.back(), Dtype::kFp32);
      }
      v1::VerifyRequest request = PackRaw(testing::kRawLayers[i], tokens, packed);
      client_.FillContext(*request.mutable_context());
      request.set_model_id(client_.model_id);
      request.set_step_id(step);
      const auto verified = client_.Call(&Stub::Verify, request);
      ASSERT_TRUE(verified.ok()) << verified.status.error_message();
      testing::RawOracle drafts = oracles[i];
      std::vector<double> expected;
      for (uint32_t t = 0; t < tokens; ++t) {
        for (const double value : drafts.Step(raw[t])) expected.push_back(value);
        if (t < accepted) oracles[i].Step(raw[t]);
      }
      EXPECT_TRUE(testing::Near(Floats(verified.body.output().data()), expected, kTolerance))
          << "layer " << testing::kRawLayers[i] << ", version " << version;
    }
    client_.Commit(step, {accepted});
  }
  const StoreCounters counters =
      (*server_->core().models.Find(client_.model_id))->store->counters();
  if (GetParam() == v1::FLUSH_MODE_BACKGROUND) {
    EXPECT_GT(counters.flushes_background, 0u);
  } else {
    EXPECT_GT(counters.flushes_fused, 0u);
  }
}

TEST_P(RawTest, CapabilitiesReturnTheParameters) {
  v1::GetCapabilitiesRequest request;
  request.set_model_id(client_.model_id);
  const auto reply = client_.Call(&Stub::GetCapabilities, request);
  ASSERT_TRUE(reply.ok());
  EXPECT_EQ(reply.body.spec().SerializeAsString(), spec_.SerializeAsString());
  EXPECT_GT(reply.body.footprint().conv_bytes(), 0u);
  EXPECT_LT(reply.body.footprint().conv_bytes(), reply.body.footprint().ring_bytes());
}

TEST_P(RawTest, TensorsOfTheOtherFormAreRefused) {
  const uint64_t id = client_.Create(1)[0];
  const uint64_t step = client_.Begin({{id, 1, 1}});
  const auto call = [&](v1::VerifyRequest request) {
    client_.FillContext(*request.mutable_context());
    request.set_model_id(client_.model_id);
    request.set_step_id(step);
    return client_.Call(&Stub::Verify, request);
  };
  EXPECT_TRUE(RefusesField(call(RandomTensors(3, /*raw=*/false, 1, client_.random)), "q",
                           {"none in raw form"}));
  v1::VerifyRequest request = RandomTensors(11, /*raw=*/true, 1, client_.random);
  request.clear_gate();
  EXPECT_TRUE(RefusesField(call(request), "gate", {"fp32 [1, 2, 16]", "got none"}));
  request = RandomTensors(9, /*raw=*/true, 1, client_.random);
  *request.mutable_dt() = request.a();
  EXPECT_TRUE(RefusesField(call(request), "dt", {"none for a gdn"}));
  EXPECT_TRUE(call(RandomTensors(9, /*raw=*/true, 1, client_.random)).ok());  // still open
}

INSTANTIATE_TEST_SUITE_P(FlushModes, RawTest,
                         ::testing::Values(v1::FLUSH_MODE_FUSED, v1::FLUSH_MODE_BACKGROUND),
                         [](const auto& param) {
                           return param.param == v1::FLUSH_MODE_FUSED ? "Fused" : "Background";
                         });

}  // namespace
}  // namespace ssmd::e2e
