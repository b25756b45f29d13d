// What ssmctl prints.
#include "client/ctl/format.h"

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "client/tools/terminal.h"
#include "gtest/gtest.h"

namespace ssmd::ctl {
namespace {

v1::GetStatusResponse SomeStatus() {
  v1::GetStatusResponse status;
  status.set_server_epoch(0xabc);
  status.set_server_version("0.1.0");
  status.set_backend("cpu");
  status.set_uptime_ms(3'725'000);
  status.set_sessions(3);
  status.set_state_bytes_used(3 << 20);
  status.set_state_bytes_max(uint64_t{1} << 30);
  v1::ModelStatus& model = *status.add_models();
  model.set_model_id(0x1234);
  model.set_name(std::string(128, 'n'));
  model.mutable_capacity()->set_sequences_max(1'000'000);
  model.set_sequences(999'999);
  model.set_pages_total(2'000'000);
  model.set_steps_committed(4'000'000'000);
  model.set_tokens_accepted(10'000'000'000);
  model.set_tokens_drafted(20'000'000'000);
  model.set_flushes(1'000'000'000);
  model.set_flushes_fused(3);
  model.set_flushes_background(999'999'993);
  model.set_flushes_requested(4);
  return status;
}

void ExpectNarrow(const std::string& text) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    EXPECT_LE(line.size(), 100u) << line;
    EXPECT_FALSE(absl::EndsWith(line, " ")) << line;
  }
}

TEST(CtlFormat, TablesFitAHundredColumns) {
  const v1::GetStatusResponse status = SomeStatus();
  ExpectNarrow(StatusText(status, "127.0.0.1:50051"));
  ExpectNarrow(ModelsText(status));
  ExpectNarrow(SequenceCountsText(status));
  ExpectNarrow(StepsText(status));
  v1::SequenceInfo sequence;
  sequence.set_sequence_id(~uint64_t{0});
  sequence.set_position(1'000'000'000);
  sequence.set_open_step_id(~uint64_t{0});
  ExpectNarrow(SequencesText({sequence}));
  SnapshotRow snapshot{0x1234, std::string(128, 'n'), {}};
  snapshot.key.set_digest(std::string(64, '\xff'));
  ExpectNarrow(SnapshotsText({snapshot}));
}

TEST(CtlFormat, StatusSaysWhatThereIs) {
  const std::string text = StatusText(SomeStatus(), "127.0.0.1:50051");
  EXPECT_TRUE(absl::StrContains(text, "127.0.0.1:50051, version 0.1.0, backend cpu")) << text;
  EXPECT_TRUE(absl::StrContains(text, "0000000000000abc, up 1 h 2 min")) << text;
  EXPECT_TRUE(absl::StrContains(text, "3.0 MiB of 1.0 GiB")) << text;
  EXPECT_TRUE(absl::StrContains(text, "999999/1000000")) << text;
  v1::GetStatusResponse empty;
  empty.set_draining(true);
  EXPECT_TRUE(absl::StrContains(StatusText(empty, "x"), "draining"));
  EXPECT_TRUE(absl::StrContains(StatusText(empty, "x"), "models     none"));
  EXPECT_EQ(ModelsText(empty), "no models\n");
}

TEST(CtlFormat, StepsHaveAcceptanceAndReasons) {
  const std::string text = StepsText(SomeStatus());
  EXPECT_TRUE(absl::StrContains(text, " 2.50 ")) << text;
  EXPECT_TRUE(absl::StrContains(text, "50.0%")) << text;
  for (const char* whole : {"4,000,000,000", "10,000,000,000", "1,000,000,000", "999,999,993"})
    EXPECT_TRUE(absl::StrContains(text, whole)) << text;
  v1::GetStatusResponse idle;
  idle.add_models()->set_name("idle");
  EXPECT_FALSE(absl::StrContains(StepsText(idle), "nan")) << StepsText(idle);
  const Json json = StepsJson(SomeStatus());
  EXPECT_EQ(json["models"][0]["tokens_drafted"], 20'000'000'000);
  EXPECT_EQ(json["models"][0]["flushes_by_reason"]["requested"], 4);
}

TEST(CtlFormat, JsonKeepsEveryBitOfAnId) {
  v1::SequenceInfo sequence;
  sequence.set_sequence_id(0xfedcba9876543211);
  const Json json = SequencesJson({sequence});
  EXPECT_EQ(json["sequences"][0]["sequence_id"], "fedcba9876543211");
  EXPECT_EQ(StatusJson(SomeStatus(), "s")["models"][0]["capacity"]["sequences_max"], 1'000'000);
}

TEST(CtlFormat, IdsAndDigestsReadBack) {
  EXPECT_EQ(ParseId("0x0000000000001234"), 0x1234u);
  EXPECT_EQ(ParseId(IdText(~uint64_t{0})), ~uint64_t{0});
  EXPECT_FALSE(ParseId("").has_value());
  EXPECT_FALSE(ParseId("xyz").has_value());
  EXPECT_FALSE(ParseId("12345678901234567").has_value());
  const std::string binary("\0\xff z", 4);
  for (const std::string& digest : {std::string("prefix/1"), binary, std::string("hex:00")})
    EXPECT_EQ(ParseDigest(DigestText(digest)).value(), digest);
  EXPECT_EQ(DigestText("prefix/1"), "prefix/1");
  EXPECT_EQ(DigestText(binary), "hex:00ff207a");
  for (const char* bad : {"", "hex:", "hex:0", "hex:0g"})
    EXPECT_TRUE(absl::IsInvalidArgument(ParseDigest(bad).status())) << bad;
  EXPECT_FALSE(ParseDigest(std::string(65, 'a')).ok());
}

TEST(Terminal, TablesAlignAndCutTheWidestColumn) {
  client::Table table({{"NAME"}, {"COUNT", client::Table::Align::kRight}});
  table.AddRow({"a", "12"});
  table.AddRow({"a much longer name", "3"});
  EXPECT_EQ(table.ToString(),
            "NAME                COUNT\n"
            "a                      12\n"
            "a much longer name      3\n");
  EXPECT_EQ(table.ToString(16),
            "NAME       COUNT\n"
            "a             12\n"
            "a much...      3\n");
}

TEST(Terminal, SizesAndTimesForPeople) {
  EXPECT_EQ(client::ByteSize(0), "0 B");
  EXPECT_EQ(client::ByteSize(1536), "1.5 KiB");
  EXPECT_EQ(client::WithCommas(1234567), "1,234,567");
  EXPECT_EQ(client::Duration(999), "999 ms");
  EXPECT_EQ(client::Duration(61'000), "1 min 1 s");
  EXPECT_EQ(client::Duration(90'000'000), "1 d 1 h");
}

}  // namespace
}  // namespace ssmd::ctl
