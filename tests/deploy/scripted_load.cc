// A load that counts what it does. Reads commands from stdin, one a line, and answers each with one
// line of JSON on stdout: everything counted so far, by this program alone.
//
//   round   every kind of work once: steps (some aborted, expired, stale, poisoned), rollback,
//   fork,
//           snapshot, lookups, flush, export and import, refusals, a lease that runs out
//   hold    leaves an open step, a held BeginStep and a stream behind
//
//   scripted_load ADDRESS
//
// Exit status 0 at the end of stdin; anything unexpected ends it with an exception.
#include <array>
#include <iostream>
#include <map>
#include <numeric>
#include <optional>

#include "absl/strings/str_format.h"
#include "service/status_map.h"
#include "tests/e2e/steps_client.h"
#include "tests/e2e/transfers.h"

namespace ssmd::e2e {
namespace {

constexpr uint32_t kLeaseMs = 600'000, kShortLeaseMs = 100;
constexpr uint64_t kStateBytes = 1280 * 4;  // SmallSpec: (2 * 4 * 16 * 8 + 2 * 16 * 8) floats
constexpr uint32_t kLayers = 3;

class Load {
 public:
  explicit Load(const std::string& address) : address_(address), client_(address) {
    v1::RegisterModelRequest model;
    *model.mutable_spec() = testing::SmallSpec();
    *model.mutable_capacity() = SmallCapacity();
    const auto registered = Call("RegisterModel", &Stub::RegisterModel, model);
    client_.model_id = registered.body.model_id();
    record_bytes_ = registered.body.footprint().record_bytes();
    Count("reserved_bytes", static_cast<double>(registered.body.footprint().reserved_bytes()));
    Open(client_, kLeaseMs);
    auto create = client_.Make<v1::CreateSequencesRequest>();
    create.set_count(2);
    const auto created = Call("CreateSequences", &Stub::CreateSequences, create);
    ids_ = {created.body.sequence_ids(0), created.body.sequence_ids(1)};
    for (const char* name : {"background", "deferred", "held_begins", "open_steps"}) Count(name, 0);
  }

  void Round() {
    for (int i = 0; i < 6; ++i) Step({4, 2});
    Step({3, 0});
    AbortedSteps();
    Refusals();
    auto rollback = client_.Make<v1::RollbackRequest>();
    Name(rollback, 0);
    rollback.set_position(Info(0).position() - 1);
    Call("Rollback", &Stub::Rollback, rollback);
    Count("rollbacks");
    ++versions_[0];
    ForkAndSnapshot();
    auto flush = client_.Make<v1::FlushSequencesRequest>();
    flush.add_sequence_ids(ids_[0]);
    const uint32_t records = Info(0).committed_records();
    Call("FlushSequences", &Stub::FlushSequences, flush);
    Count("requested", records > 0);
    Folded(1, records - testing::SmallSpec().rollback_tokens_min());
    MoveState();
    LeaseRunsOut();
    CancelledStream();
  }

  void Hold() {
    stream_.emplace(client_, /*with_context=*/true, std::chrono::seconds(kLeaseMs / 1000));
    const uint32_t records = Info(0).committed_records();
    const uint64_t step = stream_->Begin({{ids_[0], versions_[0], 1}});
    CountRpc("BeginStep", grpc::Status::OK);
    Planned({0}, {records});
    stream_->Send(client_.StepOf({{ids_[0], versions_[0] + 1, 1}}));  // waits for the first
    stream_->Await(stream_->SendAbort(step ^ 1));  // in order: when this is answered it is held
    CountRpc("AbortStep", grpc::Status(grpc::NOT_FOUND, ""));
    Count("open_steps");
    Count("held_begins");
  }

  void Print() const {
    std::cout << '{';
    const char* separator = "";
    for (const auto& [name, value] : counts_) {
      std::cout << separator << '"' << name << "\":" << absl::StrFormat("%.17g", value);
      separator = ",";
    }
    std::cout << '}' << std::endl;
  }

 private:
  void Count(const std::string& name, double amount = 1) { counts_[name] += amount; }
  void CountRpc(const std::string& method, const grpc::Status& status, double seconds = 0) {
    Count(absl::StrCat("rpc/", method, "/",
                       CodeName(static_cast<absl::StatusCode>(status.error_code()))));
    double& longest = counts_[absl::StrCat("longest/", method)];
    longest = std::max(longest, seconds);
  }

  // A call, counted by method and code; what is not OK must have been expected.
  template <typename Request, typename Response>
  Reply<Response> Call(const std::string& method,
                       grpc::Status (Stub::*stub)(grpc::ClientContext*, const Request&, Response*),
                       const Request& request, grpc::StatusCode expected = grpc::OK) {
    const absl::Time begun = absl::Now();
    auto reply = client_.Call(stub, request);
    CountRpc(method, reply.status, absl::ToDoubleSeconds(absl::Now() - begun));
    EXPECT_EQ(reply.status.error_code(), expected) << method << reply.status.error_message();
    return reply;
  }

  void Open(Client& client, uint32_t lease_ms) {
    v1::OpenSessionRequest open;
    open.set_lease_ms(lease_ms);
    open.set_client_name("load");
    const auto opened = Call("OpenSession", &Stub::OpenSession, open);
    client.epoch = opened.body.server_epoch();
    client.session_id = opened.body.session_id();
    Count("sessions_opened");
  }

  template <typename Request>
  void Name(Request& request, size_t row) const {
    request.set_sequence_id(ids_[row]);
    request.set_version(versions_[row]);
  }

  v1::SequenceInfo Info(size_t row) {
    auto request = client_.Make<v1::GetSequencesRequest>();
    request.add_sequence_ids(ids_[row]);
    return Call("GetSequences", &Stub::GetSequences, request).body.sequences(0);
  }

  // Before a step is begun: what its plan adds to the occupancy.
  void Planned(const std::vector<size_t>& rows, const std::vector<uint32_t>& records) {
    Count("begun");
    const double ratio = std::accumulate(records.begin(), records.end(), 0.0) /
                         static_cast<double>(rows.size()) / testing::SmallSpec().window_records();
    Count("occupancy", ratio);
    Count(absl::StrCat("occupancy/", ratio));
  }

  void Folded(uint64_t folds, uint64_t records_read) {
    Count("hp_read", static_cast<double>(folds * kStateBytes));
    Count("hp_write", static_cast<double>(folds * kStateBytes));
    Count("ring_read", static_cast<double>(records_read * record_bytes_));
  }

  uint64_t Begin(const std::vector<size_t>& rows, uint32_t tokens, uint32_t timeout_ms = 0) {
    std::vector<Client::Row> request_rows;
    std::vector<uint32_t> records;
    for (const size_t row : rows) {
      request_rows.push_back({ids_[row], versions_[row], tokens});
      records.push_back(Info(row).committed_records());
    }
    auto request = client_.StepOf(request_rows);
    request.set_step_timeout_ms(timeout_ms);
    const auto begun = Call("BeginStep", &Stub::BeginStep, request);
    Planned(rows, records);
    folds_ = begun.body.flushing_rows();
    records_ = std::accumulate(records.begin(), records.end(), uint64_t{0});
    return begun.body.step_id();
  }

  void Verify(uint64_t step, size_t rows, uint32_t tokens) {
    for (const uint32_t layer_id : kSmallLayers) {
      const auto total = static_cast<uint32_t>(rows * tokens);
      Call("Verify", &Stub::Verify, client_.VerifyOf(step, layer_id, total));
    }
    const auto row_tokens = static_cast<double>(rows * tokens);
    Count("layers", kLayers);
    Count("hp_read", static_cast<double>(rows * kStateBytes));
    Count("hp_write", static_cast<double>(folds_ * kStateBytes));
    Count("ring_read", static_cast<double>(records_ * record_bytes_));
    Count("ring_write", row_tokens * static_cast<double>(record_bytes_));
    Count("baseline", (static_cast<double>(rows) + row_tokens) * static_cast<double>(kStateBytes));
  }

  void Step(const std::vector<uint32_t>& accepted) {
    constexpr uint32_t kTokens = 4;
    const uint64_t step = Begin({0, 1}, kTokens);
    Verify(step, 2, kTokens);
    Call("Commit", &Stub::Commit, client_.CommitOf(step, accepted));
    Count("committed");
    Count("rows", 2);
    Count("drafted", 2 * kTokens);
    Count("fused", folds_);
    for (size_t row = 0; row < 2; ++row) {
      ++versions_[row];
      Count("accepted", accepted[row]);
      for (uint32_t i = 0; i < kTokens; ++i) Count(absl::StrCat("accepted/", i), i < accepted[row]);
    }
  }

  void AbortedSteps() {
    auto abort = client_.Make<v1::AbortStepRequest>();
    abort.set_step_id(Begin({1}, 1));
    Call("AbortStep", &Stub::AbortStep, abort);
    Count("aborted");

    const uint64_t poisoned = Begin({1}, 1);
    v1::VerifyRequest verify = client_.VerifyOf(poisoned, 3, 1);
    verify.mutable_q()->mutable_data()->replace(0, 4, "\xff\xff\xff\xff", 4);
    Call("Verify", &Stub::Verify, verify, grpc::ABORTED);
    Count("aborted");
    Count("poisoned");

    Begin({1}, 1, /*timeout_ms=*/1);
    EXPECT_TRUE(Poll(absl::Seconds(30), [&] { return Info(1).open_step_id() == 0; }));
    Count("expired");
  }

  void Refusals() {
    Call("BeginStep", &Stub::BeginStep, client_.StepOf({{ids_[0], versions_[0] - 1, 1}}),
         grpc::ABORTED);
    Count("stale");
    auto create = client_.Make<v1::CreateSequencesRequest>();
    create.set_count(5);  // of 6, and 2 live
    Call("CreateSequences", &Stub::CreateSequences, create, grpc::RESOURCE_EXHAUSTED);
    Count("refused");
  }

  void Copied(uint64_t records) {
    Count("ring_copy", static_cast<double>(records * record_bytes_));
  }

  void ForkAndSnapshot() {
    const v1::SequenceInfo info = Info(0);
    auto fork = client_.Make<v1::ForkSequencesRequest>();
    Name(fork, 0);
    fork.set_count(2);
    const auto forked = Call("ForkSequences", &Stub::ForkSequences, fork);
    Count("forks", 2);
    Copied(2 * uint64_t{info.committed_records()});
    auto release = client_.Make<v1::ReleaseSequencesRequest>();
    for (const uint64_t id : forked.body.sequence_ids()) release.add_sequence_ids(id);
    Call("ReleaseSequences", &Stub::ReleaseSequences, release);

    auto snapshot = client_.Make<v1::CreateSnapshotRequest>();
    Name(snapshot, 0);
    snapshot.mutable_key()->set_digest("prefix");
    snapshot.mutable_key()->set_position(info.position());
    Call("CreateSnapshot", &Stub::CreateSnapshot, snapshot);
    Count("snapshots");
    Copied(info.committed_records());
    Lookup("prefix", info.position());
    Lookup("prefix", info.position());
    Lookup("prefix", info.position() - 1);
    for (int i = 0; i < 3; ++i) Lookup("nobody", info.position());
    Count("hit", 2);
    Count("too_long");
    Count("absent", 3);
    auto drop = client_.Make<v1::DeleteSnapshotRequest>();
    *drop.mutable_key() = snapshot.key();
    Call("DeleteSnapshot", &Stub::DeleteSnapshot, drop);
  }

  void Lookup(const std::string& digest, uint64_t position_max) {
    auto lookup = client_.Make<v1::LookupPrefixRequest>();
    lookup.add_digests(digest);
    lookup.set_position_max(position_max);
    Call("LookupPrefix", &Stub::LookupPrefix, lookup);
  }

  // Row 1 goes out and comes back.
  void MoveState() {
    const uint32_t records = Info(1).committed_records();
    const Exported exported = ExportSequence(client_, ids_[1], versions_[1]);
    EXPECT_TRUE(exported.ok()) << exported.status.error_message();
    CountRpc("ExportState", exported.status);
    Count("exports");
    Copied(records);
    const auto imported = Import(client_, ids_[1], versions_[1], exported);
    EXPECT_TRUE(imported.ok()) << imported.status.error_message();
    CountRpc("ImportState", imported.status);
    Count("imports");
    versions_[1] = imported.body.version();
  }

  void LeaseRunsOut() {
    Client forgotten(address_);
    Open(forgotten, kShortLeaseMs);
    EXPECT_TRUE(Poll(absl::Seconds(30), [&] {
      return Call("GetStatus", &Stub::GetStatus, v1::GetStatusRequest()).body.sessions() == 1;
    }));
    Count("leases_expired");
  }

  void CancelledStream() {
    {
      StepsClient steps(client_);
      steps.Await(steps.SendAbort(1));  // the server has seen the stream
      CountRpc("AbortStep", grpc::Status(grpc::NOT_FOUND, ""));
    }  // cancelled
    CountRpc("Steps", grpc::Status::CANCELLED);
    Count("cancelled");
  }

  const std::string address_;
  Client client_;
  uint64_t record_bytes_ = 0;
  std::array<uint64_t, 2> ids_{}, versions_{1, 1};
  uint64_t folds_ = 0, records_ = 0;  // of the step begun last
  std::map<std::string, double> counts_;
  std::optional<StepsClient> stream_;
};

int Run(const std::string& address) {
  Load load(address);
  load.Print();
  for (std::string command; std::getline(std::cin, command); load.Print()) {
    if (command == "round") load.Round();
    if (command == "hold") load.Hold();
  }
  return 0;
}

}  // namespace
}  // namespace ssmd::e2e

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  ::testing::GTEST_FLAG(throw_on_failure) = true;  // EXPECT outside of a test
  if (argc != 2) {
    std::cerr << "usage: scripted_load ADDRESS < commands\n";
    return 2;
  }
  return ssmd::e2e::Run(argv[1]);
}
