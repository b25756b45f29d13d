// Export, then import elsewhere: decoding goes on as if nothing had happened.
#include "tests/e2e/transfers.h"
#include "tests/testing/compare.h"

namespace ssmd::e2e {
namespace {

// FP32 states and records: replaying the window rounds its sums in another order than the fold
// does.
constexpr double kReplayTolerance = 1e-4;

v1::ModelSpec Spec(bool raw, uint32_t rollback_tokens_min) {
  std::mt19937_64 random(99);
  v1::ModelSpec spec = raw ? testing::RawSpec(random) : testing::SmallSpec();
  spec.set_rollback_tokens_min(rollback_tokens_min);
  return spec;
}

// Two servers with the same model; one sequence with a history on the first.
class TransferTest : public ::testing::TestWithParam<bool> {
 protected:
  TransferTest()
      : here_server_(StartServer()),
        there_server_(StartServer()),
        here_(here_server_->address()),
        there_(there_server_->address()) {}
  void Start(uint32_t rollback_tokens_min) {
    here_.Start(0, Spec(raw_, rollback_tokens_min));
    there_.Start(0, Spec(raw_, rollback_tokens_min));
    id_ = here_.Create(1)[0];
    for (const uint32_t accepted : {4, 3, 4, 1, 4}) Step(here_, id_, accepted);
  }
  void Step(Client& client, uint64_t id, uint32_t accepted) {
    Decode(client, id, version_++, RandomStep(raw_, 4, here_.random), accepted);
  }
  void Flush() {
    auto flush = here_.Make<v1::FlushSequencesRequest>();
    flush.add_sequence_ids(id_);
    ASSERT_TRUE(here_.Call(&Stub::FlushSequences, flush).ok());
  }
  Exported ExportHere(uint32_t chunk_bytes = 0) {
    Exported exported = ExportSequence(here_, id_, version_, chunk_bytes);
    EXPECT_TRUE(exported.ok()) << exported.status.error_code() << exported.status.error_message();
    EXPECT_TRUE(exported.finished);
    return exported;
  }
  // Imports into a new sequence of the other server that has a past of its own.
  uint64_t ImportThere(const Exported& exported) {
    const uint64_t id = there_.Create(1)[0];
    Decode(there_, id, 1, RandomStep(raw_, 3, here_.random), 3);
    const auto imported = Import(there_, id, 2, exported);
    EXPECT_TRUE(imported.ok()) << imported.status.error_message();
    EXPECT_EQ(imported.body.server_epoch(), there_.epoch);
    EXPECT_EQ(imported.body.version(), 3u);
    EXPECT_EQ(imported.body.position(), 16u);
    return id;
  }
  // Both go on with equal tokens; compares outputs.
  void GoOn(uint64_t there_id, bool exactly) {
    uint64_t there_version = 3;
    for (const uint32_t accepted : {2, 4, 0, 4, 3, 4, 4}) {
      const std::vector<v1::VerifyRequest> layers = RandomStep(raw_, 4, here_.random);
      const std::string here = Decode(here_, id_, version_++, layers, accepted);
      const std::string there = Decode(there_, there_id, there_version++, layers, accepted);
      if (exactly) {
        EXPECT_EQ(here, there);
      } else {
        const std::vector<float> exact = Floats(here);
        EXPECT_TRUE(testing::Near(Floats(there), std::vector<double>(exact.begin(), exact.end()),
                                  kReplayTolerance));
      }
    }
  }

  const bool raw_ = GetParam();
  std::unique_ptr<Server> here_server_, there_server_;
  Client here_, there_;
  uint64_t id_ = 0, version_ = 1;
};

TEST_P(TransferTest, AFlushedSequenceGoesOnBitForBit) {
  Start(0);
  Flush();
  const uint64_t there = ImportThere(ExportHere());
  EXPECT_EQ(there_.Sequences()[there].floor(), 16u);
  GoOn(there, /*exactly=*/true);
}

TEST_P(TransferTest, RecordsInTheWindowAreReplayed) {
  Start(2);
  EXPECT_GT(here_.Sequences()[id_].committed_records(), 0u);
  GoOn(ImportThere(ExportHere()), /*exactly=*/false);
}

TEST_P(TransferTest, ThroughASnapshot) {
  Start(0);
  Flush();
  auto snapshot = here_.Make<v1::CreateSnapshotRequest>();
  snapshot.set_sequence_id(id_);
  snapshot.set_version(version_);
  snapshot.mutable_key()->set_digest("k");
  snapshot.mutable_key()->set_position(16);
  snapshot.set_worker_window("window");
  ASSERT_TRUE(here_.Call(&Stub::CreateSnapshot, snapshot).ok());
  const std::string live = ExportHere().bytes();
  auto request = here_.Make<v1::ExportStateRequest>();
  *request.mutable_snapshot() = snapshot.key();
  const Exported exported = Export(here_, request);
  ASSERT_TRUE(exported.ok()) << exported.status.error_message();
  EXPECT_EQ(exported.state.worker_window(), "window");
  EXPECT_EQ(exported.bytes(), live);
  GoOn(ImportThere(exported), /*exactly=*/true);
  request.mutable_snapshot()->set_position(15);
  const Exported absent = Export(here_, request);
  EXPECT_EQ(absent.status.error_code(), grpc::NOT_FOUND);
}

TEST_P(TransferTest, ChunkSizesAndTheLiveSequenceGoesOn) {
  Start(2);
  const Exported whole = ExportHere();
  const Exported parts = ExportHere(12);
  EXPECT_GT(parts.chunks.size(), whole.chunks.size());
  EXPECT_EQ(parts.bytes(), whole.bytes());
  EXPECT_EQ(parts.checksum, whole.checksum);
  EXPECT_EQ(whole.state.position(), 16u);
  EXPECT_EQ(whole.state.layers_size(), raw_ ? 4 : 3);
  const uint64_t there = ImportThere(parts);
  EXPECT_EQ(ExportSequence(there_, there, 3).bytes(), whole.bytes());

  auto request = here_.Make<v1::ExportStateRequest>();
  request.set_sequence_id(id_);
  request.set_version(version_);
  request.set_chunk_bytes(6);
  Exported refused = Export(here_, request);
  EXPECT_EQ(refused.status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(refused.bad_request.field_violations(0).field(), "chunk_bytes");
  request.set_chunk_bytes(0);
  request.set_version(version_ - 1);
  refused = Export(here_, request);
  EXPECT_EQ(refused.info.reason(), "VERSION_MISMATCH");
  request.clear_source();
  refused = Export(here_, request);
  EXPECT_EQ(refused.bad_request.field_violations(0).field(), "source");
  EXPECT_EQ(here_.Status().models(0).pages_free() + 1, here_.Status().models(0).pages_total());
}

TEST_P(TransferTest, AnotherShardIsRefusedByName) {
  Start(4);
  v1::ModelSpec shard = Spec(raw_, 4);
  shard.set_tp_size(2);
  v1::RegisterModelRequest model;
  *model.mutable_spec() = shard;
  *model.mutable_capacity() = SmallCapacity();
  const auto registered = there_.Call(&Stub::RegisterModel, model);
  ASSERT_TRUE(registered.ok()) << registered.status.error_message();
  there_.model_id = registered.body.model_id();
  const uint64_t id = there_.Create(1)[0];
  const std::string before = ExportSequence(there_, id, 1).bytes();
  const Exported exported = ExportHere();
  EXPECT_TRUE(
      RefusesField(Import(there_, id, 1, exported), "descriptor.model_id", {"expected 0x"}));
  EXPECT_EQ(there_.Sequences()[id].version(), 1u);
  EXPECT_EQ(ExportSequence(there_, id, 1).bytes(), before);
}

INSTANTIATE_TEST_SUITE_P(Forms, TransferTest, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "Raw" : "PostConv"; });

}  // namespace
}  // namespace ssmd::e2e
