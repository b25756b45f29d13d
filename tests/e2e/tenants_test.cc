// Two tenants of one server: whatever RPC one of them tries, the other's things are not there.
#include <google/protobuf/dynamic_message.h>

#include <set>

#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "tests/e2e/any_call.h"
#include "tests/e2e/harness.h"
#include "tests/e2e/transfers.h"
#include "tests/testing/fake_clock.h"
#include "tests/testing/our_methods.h"
#include "tests/testing/temp_folder.h"

namespace ssmd::e2e {
namespace {

namespace pb = google::protobuf;

constexpr char kA[] = "secret-of-tenant-a", kB[] = "secret-of-tenant-b",
               kAdmin[] = "secret-of-operations";

// What a request may name.
struct Names {
  uint64_t epoch = 0, session = 0, model = 0, sequence = 0, version = 1, step = 0, old_session = 0;
  std::string digest;
  uint64_t position = 2;
  v1::StateDescriptor state;
};

// How a request of several forms names something.
struct Form {
  bool snapshot = false;      // not a sequence
  bool commit_first = false;  // BeginStep: a step besides
  std::string call;           // of a Steps message, or the one of ImportState
};

// Fills whatever names something. `known`: by its number or name, as other messages have it.
void Fill(pb::Message& message, const Names& names, const Form& form) {
  const pb::Descriptor& type = *message.GetDescriptor();
  const pb::Reflection& set = *message.GetReflection();
  const std::map<std::string, uint64_t> numbers = {{"server_epoch", names.epoch},
                                                   {"session_id", names.session},
                                                   {"model_id", names.model},
                                                   {"sequence_id", names.sequence},
                                                   {"sequence_ids", names.sequence},
                                                   {"version", names.version},
                                                   {"versions", names.version},
                                                   {"step_id", names.step},
                                                   {"old_session_id", names.old_session},
                                                   {"position", names.position},
                                                   {"position_max", 1u << 20},
                                                   {"count", 1},
                                                   {"layer_id", 3},
                                                   {"draft_tokens", 1},
                                                   {"accepted", 1}};
  for (int i = 0; i < type.field_count(); ++i) {
    const pb::FieldDescriptor* const field = type.field(i);
    const std::string& name = field->name();
    if (field->message_type() == v1::StateDescriptor::descriptor()) {
      set.MutableMessage(&message, field)->CopyFrom(names.state);
    } else if (field->message_type() == v1::SnapshotKey::descriptor()) {
      if (name == "key" || form.snapshot) Fill(*set.MutableMessage(&message, field), names, form);
    } else if (field->cpp_type() == pb::FieldDescriptor::CPPTYPE_MESSAGE) {
      if (name == "context" || name == form.call || (name == "commit_first" && form.commit_first))
        Fill(*set.MutableMessage(&message, field), names, form);
    } else if (name == "digest") {
      set.SetString(&message, field, names.digest);
    } else if (name == "digests") {
      set.AddString(&message, field, names.digest);
    } else if (const auto number = numbers.find(name); number != numbers.end()) {
      if (field->real_containing_oneof() != nullptr && form.snapshot) continue;
      if (type.name() == "ForkSequencesRequest" && name == "position") continue;  // the tail
      const auto wide = number->second;
      const auto narrow = static_cast<uint32_t>(wide);
      const bool is_wide = field->cpp_type() == pb::FieldDescriptor::CPPTYPE_UINT64;
      if (field->is_repeated()) {
        is_wide ? set.AddUInt64(&message, field, wide) : set.AddUInt32(&message, field, narrow);
      } else {
        is_wide ? set.SetUInt64(&message, field, wide) : set.SetUInt32(&message, field, narrow);
      }
    }
  }
}

// Every form in which a method can name something.
std::vector<Form> FormsOf(const std::string& method) {
  if (method == "Steps")
    return {{.call = "begin"},
            {.commit_first = true, .call = "begin"},
            {.call = "verify"},
            {.call = "commit"},
            {.call = "abort"}};
  if (method == "ImportState") return {{.call = "header"}};
  if (method == "BeginStep") return {{}, {.commit_first = true}};
  if (method == "CreateSequences") return {{.snapshot = true}};
  if (method == "ExportState") return {{}, {.snapshot = true}};
  return {{}};
}

class TenantsTest : public ::testing::Test {
 protected:
  TenantsTest() {
    ServerConfig config = SmallConfig();
    config.sessions_max = 32;
    config.tokens_file = folder_.Write("tokens", Tokens(""));
    server_ = StartServer(config, {.clock = clock_.AsClock(), .start_sweeper = false});
  }
  static std::string Tokens(const std::string& quota) {
    return absl::StrCat("token ", kA, " a worker\ntoken ", kB, " b worker\ntoken ", kAdmin,
                        " ops admin\n", quota);
  }
  void SetQuota(const std::string& quota) {
    folder_.Write("tokens", Tokens(quota));
    clock_.Advance(absl::Minutes(1));  // leases in these tests are longer
    server_->Sweep();
  }
  Client As(const std::string& token, uint32_t lease_ms = 600'000) {
    Client client(server_->address());
    client.token = token;
    client.Start(lease_ms);
    return client;
  }
  Reply<v1::CreateSnapshotResponse> Snapshot(Client& client, uint64_t sequence, uint64_t version,
                                             const std::string& digest, uint64_t position) {
    auto request = client.Make<v1::CreateSnapshotRequest>();
    request.set_sequence_id(sequence);
    request.set_version(version);
    request.mutable_key()->set_digest(digest);
    request.mutable_key()->set_position(position);
    return client.Call(&Stub::CreateSnapshot, request);
  }
  static Reply<v1::CreateSequencesResponse> TryCreate(Client& client, uint32_t count) {
    auto request = client.Make<v1::CreateSequencesRequest>();
    request.set_count(count);
    return client.Call(&Stub::CreateSequences, request);
  }
  // A sequence with two committed tokens, at version 2.
  static uint64_t Advanced(Client& client) {
    const uint64_t id = client.Create(1)[0];
    const uint64_t step = client.Begin({{id, 1, 2}});
    client.VerifyAll(step, 2);
    client.Commit(step, {2});
    return id;
  }
  static Exported ExportSnapshot(Client& client, const std::string& digest, uint64_t position) {
    auto request = client.Make<v1::ExportStateRequest>();
    request.mutable_snapshot()->set_digest(digest);
    request.mutable_snapshot()->set_position(position);
    return Export(client, request);
  }

  const testing::TempFolder folder_;
  testing::FakeClock clock_;
  std::unique_ptr<Server> server_;
};

// The reply, with the names of the request replaced: what is left must not tell what there is.
std::string Blinded(const AnyReply& reply, const Names& names) {
  std::string text = absl::StrCat("code ", reply.status.error_code(), "\n",
                                  reply.status.error_message(), "\n", reply.status.error_details());
  for (const std::string& message : reply.messages) absl::StrAppend(&text, "\n", message);
  for (const uint64_t id :
       {names.session, names.model, names.sequence, names.step, names.old_session})
    text = absl::StrReplaceAll(text, {{absl::StrFormat("%016x", id), "<name>"}});
  return text;
}

TEST_F(TenantsTest, WhatAnotherTenantHasIsUnknownToEveryMethod) {
  Client a = As(kA), b = As(kB);
  // A: a snapshot, an open step, a session that left a sequence, a model of its own.
  const uint64_t idle = Advanced(a), busy = a.Create(1)[0];
  ASSERT_TRUE(Snapshot(a, idle, 2, "prefix", 2).body.created());
  const uint64_t step = a.Begin({{busy, 1, 1}});
  v1::OpenSessionRequest open;
  open.set_adoption_ms(600'000);
  Client gone = As(kA);
  gone.session_id = gone.Call(&Stub::OpenSession, open).body.session_id();
  gone.Create(1);
  ASSERT_TRUE(gone.Call(&Stub::CloseSession, gone.Make<v1::CloseSessionRequest>()).ok());
  v1::RegisterModelRequest own_model;
  *own_model.mutable_spec() = testing::SmallSpec();
  own_model.mutable_spec()->set_name("own");
  *own_model.mutable_capacity() = SmallCapacity();
  const uint64_t own = a.Call(&Stub::RegisterModel, own_model).body.model_id();
  ASSERT_NE(own, 0u);

  const Exported before = ExportSnapshot(a, "prefix", 2);
  ASSERT_TRUE(before.ok()) << before.status.error_message();
  const auto fingerprint = [&] {
    return absl::StrCat(
        a.Call(&Stub::GetSequences, a.Make<v1::GetSequencesRequest>()).body.SerializeAsString(),
        a.Call(&Stub::ListSnapshots, a.Make<v1::ListSnapshotsRequest>()).body.SerializeAsString());
  };
  const std::string untouched = fingerprint();

  Names mine;  // B's
  mine.epoch = b.epoch;
  mine.session = b.session_id;
  mine.model = b.model_id;
  mine.state = before.state;
  Names theirs = mine;
  theirs.sequence = idle;
  theirs.version = 2;
  theirs.step = step;
  theirs.old_session = gone.session_id;
  theirs.digest = "prefix";
  Names nobodys = theirs;
  nobodys.sequence ^= uint64_t{1} << 40;
  nobodys.step ^= uint64_t{1} << 40;
  nobodys.old_session ^= uint64_t{1} << 40;
  nobodys.digest = "nobody";
  Names their_session = theirs, no_session = theirs;
  their_session.session = a.session_id;
  no_session.session = a.session_id ^ uint64_t { 1 } << 40;
  Names their_model = theirs, no_model = theirs;
  their_model.model = own;
  no_model.model = own ^ uint64_t { 1 } << 40;
  const struct {
    const char* what;
    const Names &taken, &free;
  } attempts[] = {{"things", theirs, nobodys},
                  {"session", their_session, no_session},
                  {"model", their_model, no_model}};

  pb::DynamicMessageFactory messages;
  // They name nothing: tested below, or (OpenSession, RegisterModel) make the caller's own.
  const std::set<std::string> nameless = {"OpenSession", "RegisterModel", "GetStatus"};
  for (const auto* method : testing::OurMethods()) {
    if (nameless.contains(method->name())) continue;
    for (const auto& [what, taken, free] : attempts) {
      if (method->name() == "CloseSession" && taken.session == b.session_id) continue;  // B's own
      for (const Form& form : FormsOf(method->name())) {
        const auto attempt = [&](const Names& names) {
          const std::unique_ptr<pb::Message> request(
              messages.GetPrototype(method->input_type())->New());
          Fill(*request, names, form);
          const AnyReply reply = CallAny(b.channel, testing::PathOf(*method),
                                         {request->SerializeAsString()}, Bearer(kB));
          return Blinded(reply, names);
        };
        EXPECT_EQ(attempt(taken), attempt(free)) << method->name() << " of another's " << what;
      }
    }
  }

  EXPECT_EQ(fingerprint(), untouched);
  EXPECT_EQ(ExportSnapshot(a, "prefix", 2).bytes(), before.bytes());
  for (const uint32_t layer : kSmallLayers)
    EXPECT_TRUE(a.Call(&Stub::Verify, a.VerifyOf(step, layer, 1)).ok());
  EXPECT_EQ(a.Commit(step, {1}).positions(0), 1u);
  auto adopt = a.Make<v1::AdoptSequencesRequest>();
  adopt.set_old_session_id(gone.session_id);
  EXPECT_EQ(a.Call(&Stub::AdoptSequences, adopt).body.sequences_size(), 1);
}

TEST_F(TenantsTest, TheAnswersAreThoseOfTheErrorTable) {
  Client a = As(kA), b = As(kB);
  const uint64_t id = Advanced(a);
  ASSERT_TRUE(Snapshot(a, id, 2, "prefix", 2).ok());
  EXPECT_TRUE(Fails(b.Call(&Stub::BeginStep, b.StepOf({{id, 2, 1}})), grpc::NOT_FOUND, "",
                    {"unknown or released"}));
  v1::BeginStepRequest partial = b.StepOf({{id, 2, 1}});
  partial.set_allow_partial(true);
  const auto begun = b.Call(&Stub::BeginStep, partial);
  ASSERT_TRUE(begun.ok()) << begun.status.error_message();
  EXPECT_EQ(begun.body.row_status(0).code(), grpc::NOT_FOUND);
  EXPECT_EQ(begun.body.positions(0), 0u);  // padding
  EXPECT_EQ(ExportSnapshot(b, "prefix", 2).status.error_code(), grpc::NOT_FOUND);
  Client intruder = As(kB);
  intruder.session_id = a.session_id;
  EXPECT_TRUE(Fails(intruder.Call(&Stub::KeepAlive, intruder.Make<v1::KeepAliveRequest>()),
                    grpc::NOT_FOUND, "SESSION_EXPIRED", {}));
  // To each session of its own tenant as well: one answer for all.
  Client a2 = As(kA);
  EXPECT_TRUE(Fails(a2.Call(&Stub::BeginStep, a2.StepOf({{id, 2, 1}})), grpc::NOT_FOUND, "", {}));
}

TEST_F(TenantsTest, EqualKeysOfTwoTenantsAreTwoSnapshots) {
  Client a = As(kA), b = As(kB);
  b.random.seed(1);  // other tokens
  const uint64_t of_a = Advanced(a), of_b = Advanced(b);
  EXPECT_TRUE(Snapshot(a, of_a, 2, "prefix", 2).body.created());
  EXPECT_TRUE(Snapshot(b, of_b, 2, "prefix", 2).body.created());
  EXPECT_FALSE(Snapshot(b, of_b, 2, "prefix", 2).body.created());
  const std::string bytes = ExportSnapshot(a, "prefix", 2).bytes();
  EXPECT_NE(bytes, ExportSnapshot(b, "prefix", 2).bytes());
  for (Client* client : {&a, &b}) {
    auto lookup = client->Make<v1::LookupPrefixRequest>();
    lookup.add_digests("prefix");
    lookup.set_position_max(100);
    const auto found = client->Call(&Stub::LookupPrefix, lookup);
    ASSERT_EQ(found.body.keys_size(), 1);
    EXPECT_EQ(found.body.keys(0).digest(), "prefix");
    const auto listed =
        client->Call(&Stub::ListSnapshots, client->Make<v1::ListSnapshotsRequest>());
    ASSERT_EQ(listed.body.keys_size(), 1);
    EXPECT_EQ(listed.body.keys(0).digest(), "prefix");
    EXPECT_EQ(listed.body.next_page_token(), "");
  }
  auto drop = b.Make<v1::DeleteSnapshotRequest>();
  drop.mutable_key()->set_digest("prefix");
  drop.mutable_key()->set_position(2);
  EXPECT_TRUE(b.Call(&Stub::DeleteSnapshot, drop).ok());
  EXPECT_TRUE(Fails(b.Call(&Stub::DeleteSnapshot, drop), grpc::NOT_FOUND, "", {}));
  EXPECT_EQ(ExportSnapshot(a, "prefix", 2).bytes(), bytes);
}

TEST_F(TenantsTest, PagesOfAListingStayInTheTenant) {
  Client a = As(kA), b = As(kB);
  const uint64_t of_b = Advanced(b), of_a = Advanced(a);
  ASSERT_TRUE(Snapshot(a, of_a, 2, "x", 2).ok());
  ASSERT_TRUE(Snapshot(b, of_b, 2, "y", 2).ok());  // tenants' keys stand side by side
  for (Client* client : {&a, &b}) {
    auto list = client->Make<v1::ListSnapshotsRequest>();
    list.set_page_size(1);
    const auto page = client->Call(&Stub::ListSnapshots, list);
    ASSERT_EQ(page.body.keys_size(), 1);
    EXPECT_EQ(page.body.keys(0).digest(), client == &a ? "x" : "y");
    EXPECT_EQ(page.body.next_page_token(), "");
  }
}

TEST_F(TenantsTest, StatusShowsATenantItsOwnAndAnAdminAll) {
  Client a = As(kA), b = As(kB);
  a.Create(2);
  b.Create(1);
  v1::RegisterModelRequest own_model;
  *own_model.mutable_spec() = testing::SmallSpec();
  own_model.mutable_spec()->set_name("own");
  *own_model.mutable_capacity() = SmallCapacity();
  EXPECT_TRUE(a.Call(&Stub::RegisterModel, own_model).body.created());
  EXPECT_FALSE(a.Call(&Stub::RegisterModel, own_model).body.created());
  EXPECT_EQ(a.Status().models_size(), 2);
  ASSERT_EQ(b.Status().models_size(), 1);
  EXPECT_EQ(a.Status().models(0).sequences(), 2u);
  EXPECT_EQ(b.Status().models(0).sequences(), 1u);
  EXPECT_EQ(b.Status().sessions(), 1u);
  Client admin(server_->address());
  admin.token = kAdmin;
  const v1::GetStatusResponse all = admin.Status();
  ASSERT_EQ(all.models_size(), 2);
  EXPECT_EQ(all.models(0).sequences(), 3u);
  EXPECT_EQ(all.sessions(), 2u);
  EXPECT_TRUE(b.Call(&Stub::RegisterModel, own_model).body.created()) << "as if it were new";
  EXPECT_EQ(b.Status().models_size(), 2);
}

TEST_F(TenantsTest, QuotasOfSequences) {
  SetQuota("quota a sequences=2\n");
  Client a = As(kA), b = As(kB);
  EXPECT_TRUE(Fails(TryCreate(a, 3), grpc::RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED",
                    {"tenant a", "sequences=2", "0 in use", "3 more"}));
  const std::vector<uint64_t> ids = a.Create(2);
  EXPECT_EQ(b.Create(3).size(), 3u);
  auto fork = a.Make<v1::ForkSequencesRequest>();
  fork.set_sequence_id(ids[0]);
  fork.set_version(1);
  fork.set_count(1);
  EXPECT_TRUE(
      Fails(a.Call(&Stub::ForkSequences, fork), grpc::RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", {}));
  Client a2 = As(kA);  // another session of the tenant
  EXPECT_TRUE(Fails(TryCreate(a2, 1), grpc::RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", {}));
  auto release = a.Make<v1::ReleaseSequencesRequest>();
  release.add_sequence_ids(ids[0]);
  EXPECT_TRUE(a.Call(&Stub::ReleaseSequences, release).ok());
  EXPECT_TRUE(a.Call(&Stub::ForkSequences,
                     [&] {
                       fork.set_sequence_id(ids[1]);
                       return fork;
                     }())
                  .ok());
  EXPECT_TRUE(a.Call(&Stub::CloseSession, a.Make<v1::CloseSessionRequest>()).ok());
  EXPECT_EQ(a2.Create(2).size(), 2u);
  SetQuota("quota a sequences=1\n");  // less than there are: nothing is taken away
  EXPECT_EQ(a2.Sequences().size(), 2u);
  EXPECT_TRUE(Fails(TryCreate(a2, 1), grpc::RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", {}));
  SetQuota("");
  EXPECT_EQ(a2.Create(1).size(), 1u);
}

TEST_F(TenantsTest, WhatIsKeptForAdoptionCounts) {
  SetQuota("quota a sequences=2\n");
  Client heir = As(kA), a = As(kA);
  v1::OpenSessionRequest open;
  open.set_adoption_ms(5000);
  a.session_id = a.Call(&Stub::OpenSession, open).body.session_id();
  const std::vector<uint64_t> ids = a.Create(2);
  EXPECT_TRUE(a.Call(&Stub::CloseSession, a.Make<v1::CloseSessionRequest>()).ok());
  EXPECT_FALSE(TryCreate(heir, 1).ok());
  auto adopt = heir.Make<v1::AdoptSequencesRequest>();
  adopt.set_old_session_id(a.session_id);
  adopt.add_sequence_ids(ids[0]);
  EXPECT_TRUE(heir.Call(&Stub::AdoptSequences, adopt).ok());
  EXPECT_FALSE(TryCreate(heir, 1).ok());
  clock_.Advance(absl::Milliseconds(5000));
  server_->Sweep();  // nobody came for the other one
  EXPECT_EQ(heir.Create(1).size(), 1u);
  EXPECT_FALSE(TryCreate(heir, 1).ok());
  const Model& model = *server_->core().models.All().front();
  EXPECT_EQ(model.store->usage().sequences, 2u);
  EXPECT_EQ(heir.Status().models(0).sequences(), 2u);
}

TEST_F(TenantsTest, QuotasOfPagesAndSnapshotBytes) {
  Client a = As(kA), b = As(kB);
  const Geometry& geometry = server_->core().models.All().front()->store->geometry();
  const uint64_t bytes = geometry.checkpoint_bytes() + geometry.ring_bytes();
  SetQuota(absl::StrCat("quota a pages=3 snapshot-bytes=", 2 * bytes - 1, "\n"));
  const uint64_t id = Advanced(a), of_b = Advanced(b);
  EXPECT_TRUE(Snapshot(a, id, 2, "x", 2).ok());
  EXPECT_TRUE(Fails(Snapshot(a, id, 2, "y", 2), grpc::RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED",
                    {"snapshot-bytes"}));
  EXPECT_TRUE(Snapshot(a, id, 2, "x", 2).ok()) << "a repeat";
  EXPECT_TRUE(Fails(TryCreate(a, 2), grpc::RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", {"pages=3"}));
  EXPECT_EQ(a.Create(1).size(), 1u);
  EXPECT_TRUE(Snapshot(b, of_b, 2, "x", 2).ok());
  // A model that goes takes the snapshots of all tenants along.
  EXPECT_TRUE(a.Call(&Stub::CloseSession, a.Make<v1::CloseSessionRequest>()).ok());
  EXPECT_TRUE(b.Call(&Stub::CloseSession, b.Make<v1::CloseSessionRequest>()).ok());
  Client admin = As(kAdmin);
  const auto unregistered =
      admin.Call(&Stub::UnregisterModel, admin.Make<v1::UnregisterModelRequest>());
  ASSERT_TRUE(unregistered.ok()) << unregistered.status.error_message();
  EXPECT_EQ(unregistered.body.snapshots_dropped(), 2u);
  for (const uint32_t tenant : {1u, 2u, 3u})
    EXPECT_EQ(server_->core().tenants.Of(TenantId{tenant}).pages(), 0u) << tenant;
}

}  // namespace
}  // namespace ssmd::e2e
