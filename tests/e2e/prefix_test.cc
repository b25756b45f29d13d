// Snapshots as a prefix cache: look-ups, pages of keys, the worker's window; and flushes on
// request.
#include "tests/e2e/harness.h"

namespace ssmd::e2e {
namespace {

class PrefixTest : public ::testing::Test {
 protected:
  PrefixTest() : server_(StartServer()), client_(server_->address()) {
    v1::ModelCapacity capacity = SmallCapacity();
    capacity.set_snapshots_max(7);
    v1::RegisterModelRequest model;
    *model.mutable_spec() = testing::SmallSpec();
    *model.mutable_capacity() = capacity;
    client_.model_id = client_.Call(&Stub::RegisterModel, model).body.model_id();
    const auto opened = client_.Call(&Stub::OpenSession, v1::OpenSessionRequest()).body;
    client_.epoch = opened.server_epoch(), client_.session_id = opened.session_id();
    id_ = client_.Create(1)[0];
    const uint64_t step = client_.Begin({{id_, 1, 4}});
    client_.VerifyAll(step, 4);
    client_.Commit(step, {4});
  }
  void Store(const std::string& digest, uint64_t position, const std::string& window = "") {
    auto request = client_.Make<v1::CreateSnapshotRequest>();
    request.set_sequence_id(id_);
    request.set_version(2);
    request.mutable_key()->set_digest(digest);
    request.mutable_key()->set_position(position);
    request.set_worker_window(window);
    const auto reply = client_.Call(&Stub::CreateSnapshot, request);
    ASSERT_TRUE(reply.ok()) << reply.status.error_message();
  }
  Reply<v1::LookupPrefixResponse> Lookup(const std::vector<std::string>& digests,
                                         uint64_t position_max) {
    auto request = client_.Make<v1::LookupPrefixRequest>();
    for (const std::string& digest : digests) request.add_digests(digest);
    request.set_position_max(position_max);
    return client_.Call(&Stub::LookupPrefix, request);
  }
  template <typename Keys>
  static std::string Text(const Keys& keys) {
    std::string text;
    for (const v1::SnapshotKey& key : keys)
      absl::StrAppend(&text, key.digest(), key.position(), " ");
    return text;
  }
  double Lookups(const std::string& result) {
    for (const auto& family : server_->core().metrics.registry()->Collect())
      if (family.name == "ssmd_prefix_lookups_total")
        for (const auto& metric : family.metric)
          if (metric.label.at(0).value == result) return metric.counter.value;
    return -1;
  }

  std::unique_ptr<Server> server_;
  Client client_;
  uint64_t id_ = 0;
};

TEST_F(PrefixTest, LookupsMatchTheLengthOfTheHit) {
  Store("a", 1);
  Store("a", 3);
  Store("b", 2);
  Store("c", 4);
  const auto found = Lookup({"c", "a", "b", "nobody"}, 3);
  ASSERT_TRUE(found.ok()) << found.status.error_message();
  EXPECT_EQ(Text(found.body.keys()), "a1 b2 a3 ");  // ascending by position
  EXPECT_EQ(found.body.too_long(), 1u);
  EXPECT_EQ(Lookup({"c"}, 3).body.keys_size(), 0);
  EXPECT_EQ(Lookup({"nobody"}, 3).body.too_long(), 0u);
  EXPECT_EQ(Lookups("hit"), 1);
  EXPECT_EQ(Lookups("too_long"), 1);
  EXPECT_EQ(Lookups("absent"), 1);
  EXPECT_TRUE(RefusesField(Lookup({}, 3), "digests", {"1..1024", "got 0"}));
  EXPECT_TRUE(RefusesField(Lookup({"a", std::string(65, 'x')}, 3), "digests[1]", {"got 65"}));
  EXPECT_EQ(Lookups("absent"), 1);  // refused calls are not look-ups
}

TEST_F(PrefixTest, PagesOfKeys) {
  for (const char* digest : {"b", "a"})
    for (const uint64_t position : {4, 0, 2}) Store(digest, position);
  Store(std::string("\0\xff", 2), 1);
  for (const uint32_t page_size : {1u, 2u, 3u, 7u, 0u}) {
    auto list = client_.Make<v1::ListSnapshotsRequest>();
    list.set_page_size(page_size);
    std::string text;
    int pages = 0;
    do {
      const auto page = client_.Call(&Stub::ListSnapshots, list);
      ASSERT_TRUE(page.ok()) << page.status.error_message();
      text += Text(page.body.keys());
      list.set_page_token(page.body.next_page_token());
      ++pages;
    } while (!list.page_token().empty() && pages < 20);
    EXPECT_EQ(text, std::string("\0\xff", 2) + "1 a0 a2 a4 b0 b2 b4 ");
    EXPECT_EQ(pages, page_size == 0 ? 1 : static_cast<int>((7 + page_size - 1) / page_size));
  }
  auto list = client_.Make<v1::ListSnapshotsRequest>();
  list.set_page_size(1001);
  EXPECT_TRUE(RefusesField(client_.Call(&Stub::ListSnapshots, list), "page_size", {"0..1000"}));
  list.set_page_size(1);
  list.set_page_token("next");
  EXPECT_TRUE(RefusesField(client_.Call(&Stub::ListSnapshots, list), "page_token", {}));
  // A token outlives the key that it names.
  list.clear_page_token();
  const auto first = client_.Call(&Stub::ListSnapshots, list).body;
  auto drop = client_.Make<v1::DeleteSnapshotRequest>();
  *drop.mutable_key() = first.keys(0);
  EXPECT_TRUE(client_.Call(&Stub::DeleteSnapshot, drop).ok());
  list.set_page_token(first.next_page_token());
  EXPECT_EQ(Text(client_.Call(&Stub::ListSnapshots, list).body.keys()), "a0 ");
}

TEST_F(PrefixTest, TheWorkersWindowComesBack) {
  Store("k", 4, std::string("\0win", 4));
  auto create = client_.Make<v1::CreateSequencesRequest>();
  create.set_count(1);
  create.mutable_from_snapshot()->set_digest("k");
  create.mutable_from_snapshot()->set_position(4);
  create.set_request_id(5);
  for (int i = 0; i < 2; ++i)  // also from the record
    EXPECT_EQ(client_.Call(&Stub::CreateSequences, create).body.worker_window(),
              std::string("\0win", 4));
  auto large = client_.Make<v1::CreateSnapshotRequest>();
  large.set_sequence_id(id_);
  large.set_version(2);
  large.mutable_key()->set_digest("large");
  large.set_worker_window(std::string((1u << 20) - 1000, 'w'));
  EXPECT_TRUE(client_.Call(&Stub::CreateSnapshot, large).ok());
}

TEST_F(PrefixTest, FlushOnRequest) {
  auto flush = client_.Make<v1::FlushSequencesRequest>();
  flush.add_sequence_ids(id_);
  const auto flushed = client_.Call(&Stub::FlushSequences, flush);
  ASSERT_TRUE(flushed.ok()) << flushed.status.error_message();
  EXPECT_EQ(flushed.body.flushed(), 1u);
  const v1::SequenceInfo info = client_.Sequences()[id_];
  EXPECT_EQ(info.floor(), 2u);  // all but K = 2
  EXPECT_EQ(info.version(), 2u);
  EXPECT_EQ(client_.Call(&Stub::FlushSequences, flush).body.flushed(), 0u);
  EXPECT_EQ(client_.Status().models(0).flushes(), 1u);
  client_.Begin({{id_, 2, 1}});
  EXPECT_TRUE(Fails(client_.Call(&Stub::FlushSequences, flush), grpc::FAILED_PRECONDITION,
                    "STEP_OPEN", {}));
  flush.add_sequence_ids(id_);
  EXPECT_TRUE(RefusesField(client_.Call(&Stub::FlushSequences, flush), "sequence_ids[1]", {}));
}

}  // namespace
}  // namespace ssmd::e2e
