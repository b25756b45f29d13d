// Every kind of bad input over real stubs: the right code, field, expected and actual; and
// afterwards nothing has changed.
#include <limits>

#include "tests/e2e/harness.h"

namespace ssmd::e2e {
namespace {

class BadInputTest : public ::testing::Test {
 protected:
  BadInputTest() : server_(StartServer()), client_(server_->address()) {
    client_.Start();
    ids_ = client_.Create(2);
    const uint64_t step = client_.Begin({{ids_[0], 1, 2}, {ids_[1], 1, 3}});
    client_.VerifyAll(step, 5);
    client_.Commit(step, {2, 1});
    before_ = Everything();
  }
  // What no failed call may change.
  ~BadInputTest() override { EXPECT_EQ(Everything(), before_); }

  std::string Everything() {
    std::string text;
    for (const auto& [id, info] : client_.Sequences()) text += info.ShortDebugString() + "\n";
    v1::GetStatusResponse status = client_.Status();
    status.clear_uptime_ms();
    status.clear_verify_running();  // a worker counts itself a moment longer than its call
    for (v1::ModelStatus& model :
         *status.mutable_models()) {  // what work that came to nothing cost
      model.clear_steps_aborted();
      model.clear_state_bytes_read();
      model.clear_state_bytes_written();
      model.clear_write_every_step_bytes();
    }
    return text + status.ShortDebugString();
  }

  // A value of ErrorInfo's metadata, or "absent".
  template <typename Response>
  static std::string Metadata(const Reply<Response>& reply, const std::string& key) {
    const auto found = reply.info.metadata().find(key);
    return found == reply.info.metadata().end() ? "absent" : found->second;
  }

  std::unique_ptr<Server> server_;
  Client client_;
  std::vector<uint64_t> ids_;
  std::string before_;
};

// A test that opens a step aborts it at its end, so that the comparison holds.
class StepAborter {
 public:
  StepAborter(Client& client, uint64_t step) : client_(client), step_(step) {}
  ~StepAborter() {
    auto abort = client_.Make<v1::AbortStepRequest>();
    abort.set_step_id(step_);
    EXPECT_TRUE(client_.Call(&Stub::AbortStep, abort).ok());
  }

 private:
  Client& client_;
  const uint64_t step_;
};

TEST_F(BadInputTest, Fencing) {
  auto request = client_.Make<v1::GetSequencesRequest>();
  request.clear_context();
  EXPECT_TRUE(RefusesField(client_.Call(&Stub::GetSequences, request), "context.server_epoch",
                           {"expected", "none"}));
  request = client_.Make<v1::GetSequencesRequest>();
  request.mutable_context()->set_server_epoch(client_.epoch + 1);
  const auto lost = client_.Call(&Stub::GetSequences, request);
  EXPECT_TRUE(Fails(lost, grpc::FAILED_PRECONDITION, "STATE_LOST", {"restarted"}));
  EXPECT_EQ(Metadata(lost, "server_epoch"), absl::StrCat(client_.epoch));
  request.mutable_context()->set_server_epoch(client_.epoch);
  request.mutable_context()->set_session_id(client_.session_id ^ 1);
  EXPECT_TRUE(Fails(client_.Call(&Stub::GetSequences, request), grpc::NOT_FOUND, "", {"session"}));
  request = client_.Make<v1::GetSequencesRequest>();
  request.set_model_id(99);
  EXPECT_TRUE(Fails(client_.Call(&Stub::GetSequences, request), grpc::NOT_FOUND, "",
                    {"model_id", "0x0000000000000063"}));
}

// A wrong epoch or session stops every RPC that carries a context.
TEST_F(BadInputTest, EveryFencedRpcIsFenced) {
  Client stranger(server_->address());
  stranger.model_id = client_.model_id;
  const auto check = [&](auto method, auto request) {
    request.mutable_context()->set_server_epoch(client_.epoch ^ 4);
    request.mutable_context()->set_session_id(client_.session_id);
    EXPECT_TRUE(Fails(stranger.Call(method, request), grpc::FAILED_PRECONDITION, "STATE_LOST", {}));
    request.mutable_context()->set_server_epoch(client_.epoch);
    request.mutable_context()->set_session_id(12345);
    EXPECT_TRUE(
        Fails(stranger.Call(method, request), grpc::NOT_FOUND, "SESSION_EXPIRED", {"session"}));
  };
  check(&Stub::KeepAlive, v1::KeepAliveRequest());
  check(&Stub::CloseSession, v1::CloseSessionRequest());
  check(&Stub::CreateSequences, stranger.Make<v1::CreateSequencesRequest>());
  check(&Stub::ForkSequences, stranger.Make<v1::ForkSequencesRequest>());
  check(&Stub::ReleaseSequences, stranger.Make<v1::ReleaseSequencesRequest>());
  check(&Stub::GetSequences, stranger.Make<v1::GetSequencesRequest>());
  check(&Stub::BeginStep, stranger.StepOf({{ids_[0], 2, 1}}));
  check(&Stub::Verify, stranger.VerifyOf(1, 3, 1));
  check(&Stub::Commit, stranger.CommitOf(1, {1}));
  check(&Stub::AbortStep, stranger.Make<v1::AbortStepRequest>());
  check(&Stub::Rollback, stranger.Make<v1::RollbackRequest>());
  check(&Stub::CreateSnapshot, stranger.Make<v1::CreateSnapshotRequest>());
  check(&Stub::DeleteSnapshot, stranger.Make<v1::DeleteSnapshotRequest>());
  check(&Stub::UnregisterModel, stranger.Make<v1::UnregisterModelRequest>());
  check(&Stub::AdoptSequences, stranger.Make<v1::AdoptSequencesRequest>());
  check(&Stub::FlushSequences, stranger.Make<v1::FlushSequencesRequest>());
  check(&Stub::LookupPrefix, stranger.Make<v1::LookupPrefixRequest>());
  check(&Stub::ListSnapshots, stranger.Make<v1::ListSnapshotsRequest>());
}

TEST_F(BadInputTest, Rows) {
  const auto begin = [&](const std::vector<Client::Row>& rows) {
    return client_.Call(&Stub::BeginStep, client_.StepOf(rows));
  };
  EXPECT_TRUE(RefusesField(begin({}), "sequence_ids", {"1..4", "got 0"}));
  EXPECT_TRUE(RefusesField(begin({{1, 1, 1}, {2, 1, 1}, {3, 1, 1}, {4, 1, 1}, {5, 1, 1}}),
                           "sequence_ids", {"1..4", "got 5"}));
  EXPECT_TRUE(RefusesField(begin({{ids_[0], 2, 1}, {ids_[1], 2, 1}, {ids_[0], 2, 1}}),
                           "sequence_ids[2]", {"duplicates sequence_ids[0]"}));
  EXPECT_TRUE(RefusesField(begin({{ids_[0], 2, 5}}), "draft_tokens[0]", {"0..4", "got 5"}));
  EXPECT_TRUE(Fails(begin({{ids_[0], 1, 1}}), grpc::ABORTED, "VERSION_MISMATCH",
                    {"row 0", "has version 2", "expected 1"}));
  EXPECT_TRUE(Fails(begin({{ids_[0], 2, 1}, {ids_[1], 3, 1}}), grpc::ABORTED, "VERSION_MISMATCH",
                    {"row 1", "has version 2", "expected 3"}));
  EXPECT_TRUE(Fails(begin({{ids_[0] ^ (1u << 20), 2, 1}}), grpc::NOT_FOUND, "", {"row 0"}));
  EXPECT_TRUE(
      RefusesField(begin({{ids_[0], 2, 1}, {0, 2, 1}}), "versions[1]", {"padding", "got 2"}));
  v1::BeginStepRequest ragged = client_.StepOf({{ids_[0], 2, 1}});
  ragged.add_versions(1);
  EXPECT_TRUE(RefusesField(client_.Call(&Stub::BeginStep, ragged), "versions", {"1", "got 2"}));
  v1::BeginStepRequest late = client_.StepOf({{ids_[0], 2, 1}});
  late.set_step_timeout_ms(SmallConfig().step_timeout_ms_max + 1);
  EXPECT_TRUE(RefusesField(client_.Call(&Stub::BeginStep, late), "step_timeout_ms", {"0..60000"}));
}

TEST_F(BadInputTest, Tensors) {
  const uint64_t step = client_.Begin({{ids_[0], 2, 2}, {ids_[1], 2, 1}});
  StepAborter aborter(client_, step);
  const struct {
    uint32_t layer_id;
    std::function<void(v1::VerifyRequest&)> spoil;
    const char* field;
    std::initializer_list<absl::string_view> words;
  } cases[] = {
      {3, [](auto& r) { r.set_layer_id(4); }, "layer_id", {"small", "got 4"}},
      {3,
       [](auto& r) { r.mutable_q()->set_shape(0, 2); },
       "q.shape",
       {"expected [3, 2, 16], got [2, 2, 16]"}},
      {3, [](auto& r) { r.mutable_k()->mutable_shape()->RemoveLast(); }, "k.shape", {"[3, 2]"}},
      {3,
       [](auto& r) { r.mutable_v()->set_dtype(v1::DATA_TYPE_BF16); },
       "v.dtype",
       {"DATA_TYPE_FP32", "DATA_TYPE_BF16"}},
      {3,
       [](auto& r) { r.mutable_v()->mutable_data()->resize(383); },
       "v.data",
       {"384 bytes", "383 bytes"}},
      {3, [](auto& r) { r.clear_q(); }, "q", {"got none"}},
      {3, [](auto& r) { *r.mutable_beta() = r.log_alpha(); }, "beta", {"none for a mamba2"}},
      {9, [](auto& r) { r.clear_beta(); }, "beta", {"fp32 [3, 2]", "none"}},
      {9, [](auto& r) { *r.mutable_value_scale() = r.beta(); }, "value_scale", {"none for a gdn"}},
  };
  for (const auto& c : cases) {
    v1::VerifyRequest request = client_.VerifyOf(step, c.layer_id, 3);
    c.spoil(request);
    EXPECT_TRUE(RefusesField(client_.Call(&Stub::Verify, request), c.field, c.words)) << c.field;
  }
  EXPECT_TRUE(client_.Call(&Stub::Verify, client_.VerifyOf(step, 3, 3)).ok());  // still open
}

TEST_F(BadInputTest, PoisonAbortsTheStepAndNothingElse) {
  const float kNan = std::numeric_limits<float>::quiet_NaN();
  const struct {
    uint32_t layer_id;
    std::function<std::string*(v1::VerifyRequest&)> tensor;
    size_t index;  // of an element of row 1, the third token
    float value;
    const char* word;
  } cases[] = {
      {3, [](auto& r) { return r.mutable_q()->mutable_data(); }, 2 * 32, kNan, "NaN"},
      {5, [](auto& r) { return r.mutable_v()->mutable_data(); }, 2 * 32 + 5, -INFINITY, "infinite"},
      {9, [](auto& r) { return r.mutable_beta()->mutable_data(); }, 2 * 2, kNan, "NaN"},
      {3, [](auto& r) { return r.mutable_log_alpha()->mutable_data(); }, 2 * 4 + 1, 0.5f,
       "log_alpha is positive"},
      {9, [](auto& r) { return r.mutable_log_alpha()->mutable_data(); }, 2 * 2 + 1, kNan, "NaN"},
  };
  for (const auto& c : cases) {
    const uint64_t step = client_.Begin({{ids_[0], 2, 2}, {ids_[1], 2, 1}});
    v1::VerifyRequest request = client_.VerifyOf(step, c.layer_id, 3);
    std::memcpy(c.tensor(request)->data() + c.index * sizeof(float), &c.value, sizeof(float));
    EXPECT_TRUE(Fails(client_.Call(&Stub::Verify, request), grpc::ABORTED, "STEP_ABORTED",
                      {"row 1", absl::StrCat("layer_id ", c.layer_id), c.word}));
    EXPECT_TRUE(Fails(client_.Call(&Stub::Commit, client_.CommitOf(step, {0, 0})), grpc::ABORTED,
                      "STEP_ABORTED", {c.word}));
    EXPECT_EQ(Everything(), before_);
  }
}

TEST_F(BadInputTest, AcceptedCounts) {
  const uint64_t step = client_.Begin({{ids_[0], 2, 2}, {ids_[1], 2, 1}});
  StepAborter aborter(client_, step);
  client_.VerifyAll(step, 3);
  EXPECT_TRUE(RefusesField(client_.Call(&Stub::Commit, client_.CommitOf(step, {1})), "accepted",
                           {"expected 2", "got 1"}));
  EXPECT_TRUE(Fails(client_.Call(&Stub::Commit, client_.CommitOf(step, {2, 2})), grpc::OUT_OF_RANGE,
                    "", {"accepted[1] is 2", "1 drafts"}));
  EXPECT_TRUE(Fails(client_.Call(&Stub::Commit, client_.CommitOf(step, {0xffffffff, 0})),
                    grpc::OUT_OF_RANGE, "", {"accepted[0]"}));
}

TEST_F(BadInputTest, WrongOrderOfCalls) {
  const uint64_t step = client_.Begin({{ids_[0], 2, 2}});
  const auto missing = client_.Call(&Stub::Commit, client_.CommitOf(step, {1}));
  EXPECT_TRUE(Fails(missing, grpc::FAILED_PRECONDITION, "LAYERS_MISSING", {"0 of 3"}));
  EXPECT_TRUE(Fails(client_.Call(&Stub::BeginStep, client_.StepOf({{ids_[0], 2, 1}})),
                    grpc::FAILED_PRECONDITION, "STEP_OPEN", {"row 0"}));
  auto release = client_.Make<v1::ReleaseSequencesRequest>();
  release.add_sequence_ids(ids_[1]);
  release.add_sequence_ids(ids_[0]);
  EXPECT_TRUE(Fails(client_.Call(&Stub::ReleaseSequences, release), grpc::FAILED_PRECONDITION,
                    "STEP_OPEN", {}));
  auto rollback = client_.Make<v1::RollbackRequest>();
  rollback.set_sequence_id(ids_[0]);
  rollback.set_version(2);
  EXPECT_TRUE(
      Fails(client_.Call(&Stub::Rollback, rollback), grpc::FAILED_PRECONDITION, "STEP_OPEN", {}));
  auto abort = client_.Make<v1::AbortStepRequest>();
  abort.set_step_id(step);
  EXPECT_TRUE(client_.Call(&Stub::AbortStep, abort).ok());
  EXPECT_TRUE(Fails(client_.Call(&Stub::Verify, client_.VerifyOf(step, 3, 2)), grpc::ABORTED,
                    "STEP_ABORTED", {}));
  EXPECT_TRUE(Fails(client_.Call(&Stub::Commit, client_.CommitOf(step, {1})), grpc::ABORTED,
                    "STEP_ABORTED", {}));
  EXPECT_TRUE(Fails(client_.Call(&Stub::Verify, client_.VerifyOf(12345, 3, 2)), grpc::NOT_FOUND, "",
                    {"step"}));
  EXPECT_TRUE(Fails(client_.Call(&Stub::Commit, client_.CommitOf(12345, {1})), grpc::NOT_FOUND, "",
                    {"step"}));
}

TEST_F(BadInputTest, ForkRollbackSnapshotArguments) {
  auto fork = client_.Make<v1::ForkSequencesRequest>();
  fork.set_sequence_id(ids_[0]);
  fork.set_version(2);
  fork.set_count(0);
  EXPECT_TRUE(RefusesField(client_.Call(&Stub::ForkSequences, fork), "count", {"1..6", "got 0"}));
  fork.set_count(1);
  fork.set_position(3);
  const auto beyond = client_.Call(&Stub::ForkSequences, fork);
  EXPECT_TRUE(Fails(beyond, grpc::OUT_OF_RANGE, "ROLLBACK_FLOOR", {"3"}));
  EXPECT_EQ(Metadata(beyond, "floor"), "0");
  EXPECT_EQ(Metadata(beyond, "tail"), "2");
  fork.set_version(7);
  EXPECT_TRUE(Fails(client_.Call(&Stub::ForkSequences, fork), grpc::ABORTED, "VERSION_MISMATCH",
                    {"version 2", "expected 7"}));
  auto rollback = client_.Make<v1::RollbackRequest>();
  rollback.set_sequence_id(ids_[0]);
  rollback.set_version(2);
  rollback.set_position(3);
  const auto forward = client_.Call(&Stub::Rollback, rollback);
  EXPECT_TRUE(Fails(forward, grpc::OUT_OF_RANGE, "ROLLBACK_FLOOR", {"3"}));
  EXPECT_EQ(Metadata(forward, "tail"), "2");
  auto snapshot = client_.Make<v1::CreateSnapshotRequest>();
  snapshot.set_sequence_id(ids_[0]);
  snapshot.set_version(2);
  EXPECT_TRUE(RefusesField(client_.Call(&Stub::CreateSnapshot, snapshot), "key.digest", {"1..64"}));
  snapshot.mutable_key()->set_digest("d");
  snapshot.mutable_key()->set_position(3);
  EXPECT_TRUE(Fails(client_.Call(&Stub::CreateSnapshot, snapshot), grpc::OUT_OF_RANGE,
                    "ROLLBACK_FLOOR", {"3"}));
  auto drop = client_.Make<v1::DeleteSnapshotRequest>();
  *drop.mutable_key() = snapshot.key();
  EXPECT_TRUE(Fails(client_.Call(&Stub::DeleteSnapshot, drop), grpc::NOT_FOUND, "", {"3"}));
  auto create = client_.Make<v1::CreateSequencesRequest>();
  create.set_count(1);
  *create.mutable_from_snapshot() = snapshot.key();
  EXPECT_TRUE(
      Fails(client_.Call(&Stub::CreateSequences, create), grpc::NOT_FOUND, "", {"snapshot"}));
  create.clear_from_snapshot();
  create.set_count(7);
  EXPECT_TRUE(RefusesField(client_.Call(&Stub::CreateSequences, create), "count", {"1..6", "7"}));
}

TEST_F(BadInputTest, OtherSessionsSequencesAndSteps) {
  Client other(server_->address());
  other.Start();
  const uint64_t step = client_.Begin({{ids_[0], 2, 1}});
  {
    StepAborter aborter(client_, step);
    const auto denied = [](const auto& reply) {
      return Fails(reply, grpc::PERMISSION_DENIED, "", {"another session"});
    };
    EXPECT_TRUE(denied(other.Call(&Stub::BeginStep, other.StepOf({{ids_[1], 2, 1}}))));
    EXPECT_TRUE(denied(other.Call(&Stub::Verify, other.VerifyOf(step, 3, 1))));
    EXPECT_TRUE(denied(other.Call(&Stub::Commit, other.CommitOf(step, {1}))));
    auto abort = other.Make<v1::AbortStepRequest>();
    abort.set_step_id(step);
    EXPECT_TRUE(denied(other.Call(&Stub::AbortStep, abort)));
    auto get = other.Make<v1::GetSequencesRequest>();
    get.add_sequence_ids(ids_[1]);
    EXPECT_TRUE(denied(other.Call(&Stub::GetSequences, get)));
    auto release = other.Make<v1::ReleaseSequencesRequest>();
    release.add_sequence_ids(ids_[1]);
    EXPECT_TRUE(denied(other.Call(&Stub::ReleaseSequences, release)));
    EXPECT_TRUE(other.Sequences().empty());
  }
  EXPECT_TRUE(other.Call(&Stub::CloseSession, other.Make<v1::CloseSessionRequest>()).ok());
}

TEST_F(BadInputTest, ReleasedIdsAreStale) {
  const uint64_t gone = client_.Create(1)[0];
  auto release = client_.Make<v1::ReleaseSequencesRequest>();
  release.add_sequence_ids(gone);
  EXPECT_TRUE(client_.Call(&Stub::ReleaseSequences, release).ok());
  EXPECT_TRUE(
      Fails(client_.Call(&Stub::ReleaseSequences, release), grpc::NOT_FOUND, "", {"released"}));
  const uint64_t reused = client_.Create(1)[0];  // the same slot, another generation
  EXPECT_NE(reused, gone);
  EXPECT_TRUE(Fails(client_.Call(&Stub::BeginStep, client_.StepOf({{gone, 1, 1}})), grpc::NOT_FOUND,
                    "", {"released"}));
  release.set_sequence_ids(0, reused);
  release.add_sequence_ids(reused);
  EXPECT_TRUE(RefusesField(client_.Call(&Stub::ReleaseSequences, release), "sequence_ids[1]",
                           {"duplicates sequence_ids[0]"}));
  release.mutable_sequence_ids()->RemoveLast();
  EXPECT_TRUE(client_.Call(&Stub::ReleaseSequences, release).ok());
}

TEST_F(BadInputTest, OversizedMessages) {
  v1::VerifyRequest request = client_.VerifyOf(1, 3, 1);
  request.mutable_q()->mutable_data()->resize(SmallConfig().message_bytes_max + 1);
  const auto reply = client_.Call(&Stub::Verify, request);  // gRPC's own answer: no details
  EXPECT_EQ(reply.status.error_code(), grpc::RESOURCE_EXHAUSTED) << reply.status.error_message();
  EXPECT_TRUE(absl::StrContains(reply.status.error_message(), "larger than max"));
}

TEST_F(BadInputTest, ModelSpecs) {
  v1::RegisterModelRequest request;
  *request.mutable_spec() = testing::SmallSpec();
  request.mutable_spec()->mutable_layer_groups(1)->set_d_k(24);
  EXPECT_TRUE(RefusesField(client_.Call(&Stub::RegisterModel, request), "spec.layer_groups[1].d_k",
                           {"multiple of 16", "24"}));
  *request.mutable_spec() = testing::SmallSpec();
  request.mutable_capacity()->set_rows_max(5);
  const auto other = client_.Call(&Stub::RegisterModel, request);
  EXPECT_TRUE(Fails(other, grpc::FAILED_PRECONDITION, "", {"rows_max is 4, request expected 5"}));
  request.mutable_spec()->set_input_form(v1::INPUT_FORM_RAW);
  EXPECT_TRUE(RefusesField(client_.Call(&Stub::RegisterModel, request),
                           "spec.layer_groups[0].parameters", {"2 entries", "got 0"}));
  request.mutable_spec()->set_input_form(v1::INPUT_FORM_POST_CONV);
  request.mutable_spec()->set_checkpoint_dtype(v1::DATA_TYPE_BF16);
  EXPECT_TRUE(
      Fails(client_.Call(&Stub::RegisterModel, request), grpc::UNIMPLEMENTED, "", {"bf16"}));
  *request.mutable_spec() = testing::SmallSpec();
  request.mutable_spec()->set_name("too big");
  request.mutable_capacity()->set_sequences_max(100'000);
  EXPECT_TRUE(Fails(client_.Call(&Stub::RegisterModel, request), grpc::RESOURCE_EXHAUSTED,
                    "NO_MEMORY", {}));
  v1::OpenSessionRequest open;
  open.set_lease_ms(99);
  EXPECT_TRUE(
      RefusesField(client_.Call(&Stub::OpenSession, open), "lease_ms", {"100..", "got 99"}));
  open.set_lease_ms(0);
  open.set_client_name(std::string(129, 'x'));
  EXPECT_TRUE(RefusesField(client_.Call(&Stub::OpenSession, open), "client_name", {"128", "129"}));
}

}  // namespace
}  // namespace ssmd::e2e
