// Imports and exports that end early, in every way: the sequence is bit for bit what it was,
// usable, and nothing stays taken.
#include "tests/e2e/transfers.h"
#include "tests/testing/fake_clock.h"

namespace ssmd::e2e {
namespace {

class TransferEndTest : public ::testing::Test {
 protected:
  explicit TransferEndTest(const ServerConfig& config = SmallConfig())
      : server_(StartServer(config, {.clock = clock_.AsClock(), .start_sweeper = false})),
        client_(server_->address()) {}
  void SetUp() override {
    std::mt19937_64 random(3);
    client_.Start(0, testing::RawSpec(random));
    ids_ = client_.Create(2);
    for (const uint64_t id : ids_) Decode(client_, id, 1, RandomStep(true, 4, client_.random), 4);
    donor_ = ExportSequence(client_, ids_[1], 2, 512);
    ASSERT_TRUE(donor_.ok()) << donor_.status.error_message();
    before_ = ExportSequence(client_, ids_[0], 2).bytes();
  }
  uint32_t Imports() {
    return (*server_->core().models.Find(client_.model_id))->store->usage().imports;
  }
  uint32_t Exports() {
    return (*server_->core().models.Find(client_.model_id))->store->usage().exports;
  }
  void ExpectUntouched() {
    EXPECT_TRUE(Poll(absl::Seconds(30), [&] { return Imports() == 0; }));
    const v1::SequenceInfo info = client_.Sequences()[ids_[0]];
    EXPECT_EQ(info.version(), 2u);
    EXPECT_EQ(info.position(), 4u);
    EXPECT_EQ(ExportSequence(client_, ids_[0], 2).bytes(), before_);
  }
  void AbortedStepWorks() {
    const uint64_t step = client_.Begin({{ids_[0], 2, 1}});
    auto abort = client_.Make<v1::AbortStepRequest>();
    abort.set_step_id(step);
    EXPECT_TRUE(client_.Call(&Stub::AbortStep, abort).ok());
  }
  // A header and the first `chunks` chunks.
  std::unique_ptr<ImportCall> Begin(size_t chunks) {
    auto call = std::make_unique<ImportCall>(client_);
    EXPECT_TRUE(call->Header(client_, ids_[0], 2, donor_.state));
    for (size_t i = 0; i < chunks; ++i) EXPECT_TRUE(call->Chunk(donor_.chunks[i]));
    EXPECT_TRUE(Poll(absl::Seconds(30), [&] { return Imports() == 1; }));
    return call;
  }

  testing::FakeClock clock_;
  std::unique_ptr<Server> server_;
  Client client_;
  std::vector<uint64_t> ids_;
  Exported donor_;
  std::string before_;
};

TEST_F(TransferEndTest, EndedOrCancelledAtAnyPoint) {
  ASSERT_GT(donor_.chunks.size(), 10u);
  for (size_t chunks = 0; chunks <= donor_.chunks.size(); ++chunks) {
    const auto ended = Begin(chunks)->End();
    EXPECT_TRUE(RefusesField(ended, "finish", {"ended before"}));
    ExpectUntouched();
    const auto cancelled = Begin(chunks);
    cancelled->context.TryCancel();
    EXPECT_EQ(cancelled->Await().status.error_code(), grpc::CANCELLED);
    ExpectUntouched();
  }
  AbortedStepWorks();
  const v1::ModelStatus status = client_.Status().models(0);
  EXPECT_EQ(status.pages_free(), status.pages_total());
  // And after all that an import succeeds.
  const auto imported = Import(client_, ids_[0], 2, donor_);
  ASSERT_TRUE(imported.ok()) << imported.status.error_message();
  EXPECT_EQ(ExportSequence(client_, ids_[0], 3).bytes(), donor_.bytes());
}

TEST_F(TransferEndTest, MistakesChangeNothing) {
  const auto with = [&](const std::function<void(ImportCall&)>& messages) {
    ImportCall call(client_);
    messages(call);
    return call.End();
  };
  EXPECT_TRUE(RefusesField(with([](ImportCall&) {}), "finish", {}));
  EXPECT_TRUE(RefusesField(with([&](ImportCall& c) { c.Chunk(donor_.chunks[0]); }), "header", {}));
  EXPECT_TRUE(
      RefusesField(with([&](ImportCall& c) { c.Write(v1::ImportStateRequest()); }), "header", {}));
  EXPECT_TRUE(RefusesField(with([&](ImportCall& c) {
                             c.Header(client_, ids_[0], 2, donor_.state);
                             c.Header(client_, ids_[0], 2, donor_.state);
                           }),
                           "header", {"second"}));
  EXPECT_TRUE(RefusesField(with([&](ImportCall& c) {
                             c.Header(client_, ids_[0], 2, donor_.state);
                             c.Write(v1::ImportStateRequest());
                           }),
                           "message", {}));
  EXPECT_TRUE(Fails(with([&](ImportCall& c) { c.Header(client_, ids_[0], 1, donor_.state); }),
                    grpc::ABORTED, "VERSION_MISMATCH", {"version 2", "expected 1"}));
  EXPECT_TRUE(Fails(with([&](ImportCall& c) { c.Header(client_, 123, 1, donor_.state); }),
                    grpc::NOT_FOUND, "", {"sequence"}));
  Exported wrong = donor_;
  wrong.checksum ^= 1;
  EXPECT_TRUE(Fails(Import(client_, ids_[0], 2, wrong), grpc::DATA_LOSS, "", {"checksum"}));
  wrong = donor_;
  wrong.chunks.pop_back();
  EXPECT_TRUE(RefusesField(Import(client_, ids_[0], 2, wrong), "chunk.component",
                           {"layer_id 11 COMPONENT_CONV"}));
  wrong = donor_;
  wrong.chunks[1] = wrong.chunks[0];
  EXPECT_TRUE(RefusesField(Import(client_, ids_[0], 2, wrong), "chunk.offset_bytes", {"again"}));
  Client stranger(server_->address());
  stranger.model_id = client_.model_id, stranger.epoch = client_.epoch ^ 4;
  EXPECT_TRUE(
      Fails(Import(stranger, ids_[0], 2, donor_), grpc::FAILED_PRECONDITION, "STATE_LOST", {}));
  stranger.epoch = client_.epoch, stranger.session_id = 77;
  EXPECT_TRUE(Fails(Import(stranger, ids_[0], 2, donor_), grpc::NOT_FOUND, "SESSION_EXPIRED", {}));
  EXPECT_EQ(ExportSequence(stranger, ids_[0], 2).info.reason(), "SESSION_EXPIRED");
  ExpectUntouched();
  AbortedStepWorks();
}

TEST_F(TransferEndTest, TheSequenceWaitsWhileAnImportRuns) {
  const auto call = Begin(3);
  EXPECT_TRUE(Fails(client_.Call(&Stub::BeginStep, client_.StepOf({{ids_[0], 2, 1}})),
                    grpc::FAILED_PRECONDITION, "IMPORT_OPEN", {}));
  auto release = client_.Make<v1::ReleaseSequencesRequest>();
  release.add_sequence_ids(ids_[0]);
  EXPECT_TRUE(Fails(client_.Call(&Stub::ReleaseSequences, release), grpc::FAILED_PRECONDITION,
                    "IMPORT_OPEN", {}));
  EXPECT_TRUE(
      Fails(Import(client_, ids_[0], 2, donor_), grpc::FAILED_PRECONDITION, "IMPORT_OPEN", {}));
  auto fork = client_.Make<v1::ForkSequencesRequest>();  // sees the old state
  fork.set_sequence_id(ids_[0]);
  fork.set_version(2);
  fork.set_count(1);
  const auto forked = client_.Call(&Stub::ForkSequences, fork);
  ASSERT_TRUE(forked.ok()) << forked.status.error_message();
  EXPECT_EQ(ExportSequence(client_, forked.body.sequence_ids(0), 1).bytes(), before_);
  auto unregister = client_.Make<v1::UnregisterModelRequest>();
  EXPECT_TRUE(Fails(client_.Call(&Stub::UnregisterModel, unregister), grpc::FAILED_PRECONDITION, "",
                    {"1 imports"}));
  for (size_t i = 3; i < donor_.chunks.size(); ++i) EXPECT_TRUE(call->Chunk(donor_.chunks[i]));
  call->FinishMessage(donor_.checksum);
  const auto imported = call->End();
  ASSERT_TRUE(imported.ok()) << imported.status.error_message();
  EXPECT_EQ(ExportSequence(client_, ids_[0], 3).bytes(), donor_.bytes());
}

TEST_F(TransferEndTest, AStalledImportDoesNotHoldTheLease) {
  const auto call = Begin(3);
  const uint32_t lease = SmallConfig().lease_ms_default;
  clock_.Advance(absl::Milliseconds(lease - 1));
  EXPECT_TRUE(client_.Call(&Stub::KeepAlive, client_.Make<v1::KeepAliveRequest>()).ok());
  clock_.Advance(absl::Milliseconds(lease - 1));
  server_->Sweep();
  EXPECT_EQ(Imports(), 1u);  // other calls renew it
  clock_.Advance(absl::Milliseconds(lease));
  server_->Sweep();
  EXPECT_EQ(Imports(), 0u);  // at once, whatever the peer does
  EXPECT_TRUE(Fails(call->Await(), grpc::NOT_FOUND, "SESSION_EXPIRED", {"ended during the call"}));
  EXPECT_EQ(client_.Status().models(0).sequences(), 0u);
  EXPECT_EQ(client_.Status().models(0).pages_free(), client_.Status().models(0).pages_total());
}

TEST_F(TransferEndTest, AClosedSessionEndsItsImportAndTheHeirFindsTheOldState) {
  v1::OpenSessionRequest open;
  open.set_adoption_ms(10'000);
  Client keeper(server_->address());
  keeper.epoch = client_.epoch, keeper.model_id = client_.model_id;
  keeper.session_id = client_.Call(&Stub::OpenSession, open).body.session_id();
  const uint64_t id = keeper.Create(1)[0];
  Decode(keeper, id, 1, RandomStep(true, 2, client_.random), 2);
  const std::string before = ExportSequence(keeper, id, 2).bytes();
  ImportCall call(keeper);
  EXPECT_TRUE(call.Header(keeper, id, 2, donor_.state));
  EXPECT_TRUE(call.Chunk(donor_.chunks[0]));
  EXPECT_TRUE(Poll(absl::Seconds(30), [&] { return Imports() == 1; }));
  EXPECT_TRUE(keeper.Call(&Stub::CloseSession, keeper.Make<v1::CloseSessionRequest>()).ok());
  EXPECT_EQ(call.Await().status.error_code(), grpc::NOT_FOUND);
  auto adopt = client_.Make<v1::AdoptSequencesRequest>();
  adopt.set_old_session_id(keeper.session_id);
  const auto adopted = client_.Call(&Stub::AdoptSequences, adopt);
  ASSERT_TRUE(adopted.ok()) << adopted.status.error_message();
  EXPECT_EQ(adopted.body.sequences(0).version(), 2u);
  EXPECT_EQ(ExportSequence(client_, id, 2).bytes(), before);
}

// A model whose export is larger than every flow-control window: the server must wait for the peer.
class StalledExportTest : public TransferEndTest {
 protected:
  StalledExportTest() : TransferEndTest(Large()) {}
  static ServerConfig Large() {
    ServerConfig config = SmallConfig();
    config.state_bytes_max = 512u << 20;
    config.chunk_bytes_max = 64u << 10;
    config.imports_max = 1;
    config.poison_garbage = false;
    return config;
  }
  void SetUp() override {
    v1::ModelSpec spec = testing::SmallSpec();
    spec.set_name("large");
    spec.mutable_layer_groups()->RemoveLast();
    spec.clear_correction_dtype();
    v1::LayerGroup& group = *spec.mutable_layer_groups(0);
    group.set_head_count(64);
    group.set_d_k(128);
    group.set_d_v(128);
    for (uint32_t id = 100; id < 102; ++id) group.add_layer_ids(id);
    client_.Start(0, spec);
    ids_ = client_.Create(2);
  }
};

TEST_F(StalledExportTest, BackpressureAndTheEndOfTheSession) {
  grpc::ClientContext context;
  auto request = client_.Make<v1::ExportStateRequest>();
  request.set_sequence_id(ids_[0]);
  request.set_version(1);
  auto reader = client_.stub->ExportState(&context, request);
  v1::ExportStateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  EXPECT_TRUE(message.has_state());
  // 16 MiB do not fit on the way: the export waits, and its place is taken.
  absl::SleepFor(absl::Milliseconds(100));
  EXPECT_EQ(Exports(), 1u);
  const Exported second = ExportSequence(client_, ids_[1], 1);
  EXPECT_EQ(second.status.error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_EQ(second.info.reason(), "LIMIT_REACHED");
  // The live sequence goes on meanwhile.
  client_.Begin({{ids_[0], 1, 1}});
  clock_.Advance(absl::Milliseconds(SmallConfig().lease_ms_default));
  server_->Sweep();
  EXPECT_EQ(Exports(), 0u);
  while (reader->Read(&message)) {
  }
  EXPECT_FALSE(reader->Finish().ok());
  EXPECT_EQ(client_.Status().models(0).pages_free(), client_.Status().models(0).pages_total());
}

TEST_F(StalledExportTest, ACancelledExportGivesItsPlaceBack) {
  auto request = client_.Make<v1::ExportStateRequest>();
  request.set_sequence_id(ids_[0]);
  request.set_version(1);
  {
    grpc::ClientContext context;
    auto reader = client_.stub->ExportState(&context, request);
    v1::ExportStateResponse message;
    ASSERT_TRUE(reader->Read(&message));
    context.TryCancel();
    EXPECT_EQ(reader->Finish().error_code(), grpc::CANCELLED);
  }
  EXPECT_TRUE(Poll(absl::Seconds(30), [&] { return Exports() == 0; }));
  const Exported whole = Export(client_, request);
  ASSERT_TRUE(whole.ok()) << whole.status.error_message();
  EXPECT_EQ(whole.bytes().size(), 4u * 64 * 128 * 128 * 4);
  EXPECT_EQ(whole.chunks[0].data().size(), 64u << 10);
}

TEST_F(StalledExportTest, ImportsAreBounded) {
  const Exported donor = ExportSequence(client_, ids_[1], 1);
  ASSERT_TRUE(donor.ok());
  ImportCall first(client_);
  EXPECT_TRUE(first.Header(client_, ids_[0], 1, donor.state));
  EXPECT_TRUE(Poll(absl::Seconds(30), [&] { return Imports() == 1; }));
  const auto second = Import(client_, ids_[1], 1, donor);
  EXPECT_TRUE(Fails(second, grpc::RESOURCE_EXHAUSTED, "LIMIT_REACHED", {"imports_max", "1"}));
  EXPECT_TRUE(second.retry.has_retry_delay());
  first.End();
  EXPECT_TRUE(Import(client_, ids_[1], 1, donor).ok());
}

}  // namespace
}  // namespace ssmd::e2e
