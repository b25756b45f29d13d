// ssmctl as a program, against a real server in this process.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/str_split.h"
#include "tests/e2e/harness.h"

namespace ssmd::e2e {
namespace {

using nlohmann::json;

struct Ran {
  int exit_code = 0;
  std::string out, error;
};

class CtlTest : public ::testing::Test {
 protected:
  CtlTest() {
    ServerConfig config = SmallConfig();
    config.adoption_ms_max = 60'000;
    config.sessions_max = 16;
    server_ = StartServer(config);
    client_ = std::make_unique<Client>(server_->address());
    folder_ = std::filesystem::temp_directory_path() / ("ssmd-ctl-" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
  }
  ~CtlTest() override { std::filesystem::remove_all(folder_); }

  static std::string Read(const std::filesystem::path& path) {
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }

  // Runs "ssmctl <arguments>"; the arguments need no quotes.
  Ran Ctl(const std::string& arguments) {
    const std::filesystem::path out = folder_ / "out";
    ChildProcess child({"/bin/sh", "-c",
                        absl::StrCat("exec " SSMCTL_BINARY " --server ", server_->address(), " ",
                                     arguments, " > ", out.string())});
    Ran ran;
    ran.exit_code = child.Wait();
    ran.error = child.ErrorOutput();
    ran.out = Read(out);
    for (absl::string_view line : absl::StrSplit(ran.out, '\n'))
      EXPECT_LE(line.size(), 100u) << line;
    return ran;
  }
  json CtlJson(const std::string& arguments) {
    const Ran ran = Ctl(arguments + " --json");
    EXPECT_EQ(ran.exit_code, 0) << ran.error;
    return json::parse(ran.out, nullptr, false);
  }

  // A sequence of `tokens` tokens, one step each.
  uint64_t Decode(uint32_t tokens) {
    const uint64_t sequence = client_->Create(1)[0];
    for (uint32_t i = 0; i < tokens; ++i) {
      const uint64_t step = client_->Begin({{sequence, 1 + i, 1}});
      client_->VerifyAll(step, 1);
      client_->Commit(step, {1});
    }
    return sequence;
  }

  std::unique_ptr<Server> server_;
  std::unique_ptr<Client> client_;
  std::filesystem::path folder_;
};

TEST_F(CtlTest, ShowsAnEmptyServerAndAModel) {
  Ran ran = Ctl("status");
  EXPECT_EQ(ran.exit_code, 0) << ran.error;
  EXPECT_TRUE(absl::StrContains(ran.out, "models     none")) << ran.out;
  EXPECT_EQ(Ctl("models").out, "no models\n");

  client_->Start();
  Decode(3);
  const json status = CtlJson("status");
  EXPECT_EQ(status["backend"], "cpu");
  EXPECT_EQ(status["sessions"], 1);
  EXPECT_EQ(status["models"][0]["name"], "small");
  EXPECT_EQ(status["models"][0]["sequences"], 1);
  const json steps = CtlJson("steps")["models"][0];
  EXPECT_EQ(steps["steps_committed"], 3);
  EXPECT_EQ(steps["tokens_drafted"], 3);
  EXPECT_EQ(steps["flushes_by_reason"]["requested"], 0);
  EXPECT_EQ(CtlJson("sequences")["models"][0]["sequences"], 1);
  EXPECT_TRUE(absl::StrContains(Ctl("sequences").out, "owns them only"));
}

TEST_F(CtlTest, AWrongCommandLineIsOneLineAndTwo) {
  for (const char* arguments : {"", "frob", "status --bogus", "export", "flush --model small",
                                "export f --model small", "import", "status more"}) {
    const Ran ran = Ctl(arguments);
    EXPECT_EQ(ran.exit_code, 2) << arguments;
    EXPECT_EQ(ran.out, "");
    EXPECT_EQ(std::count(ran.error.begin(), ran.error.end(), '\n'), 1) << ran.error;
  }
  for (const char* arguments : {"--help", "export --help", "flush --help"})
    EXPECT_EQ(Ctl(arguments).exit_code, 0) << arguments;
}

TEST_F(CtlTest, FailuresAreOneLineAndOne) {
  client_->Start();
  for (const std::string& arguments :
       {std::string("unregister nothing"), std::string("import /nowhere/file"),
        std::string("export /nowhere/file --model small --digest d --position 1"),
        std::string("sequences --model small --adopt 1234"), std::string("model-file /dev/null")}) {
    const Ran ran = Ctl(arguments);
    EXPECT_EQ(ran.exit_code, 1) << arguments;
    EXPECT_EQ(std::count(ran.error.begin(), ran.error.end(), '\n'), 1) << ran.error;
  }
}

TEST_F(CtlTest, AServerThatIsAwayIsOneLineAndOne) {
  ChildProcess child({SSMCTL_BINARY, "--server", "127.0.0.1:1", "status"});
  EXPECT_EQ(child.Wait(), 1);
  EXPECT_TRUE(absl::StrContains(child.ErrorOutput(), "no server at 127.0.0.1:1"));
}

TEST_F(CtlTest, RegistersAndUnregistersAModelFromAFile) {
  v1::RegisterModelRequest request;
  *request.mutable_spec() = testing::SmallSpec();
  *request.mutable_capacity() = SmallCapacity();
  const std::string path = (folder_ / "model.textproto").string();
  std::ofstream(path) << request.DebugString();
  json registered = CtlJson("model-file " + path);
  EXPECT_EQ(registered["created"], true);
  EXPECT_EQ(CtlJson("model-file " + path)["created"], false);
  EXPECT_EQ(CtlJson("unregister small")["model_id"], registered["model_id"]);
  EXPECT_EQ(Ctl("models").out, "no models\n");
  std::ofstream(path) << "spec { nonsense: 1 }";
  EXPECT_TRUE(absl::StrContains(Ctl("model-file " + path).error, "model.textproto:1:"));
}

TEST_F(CtlTest, ASnapshotGoesOutIntoAFileAndComesBack) {
  client_->Start();
  const uint64_t sequence = Decode(5);
  auto snapshot = client_->Make<v1::CreateSnapshotRequest>();
  snapshot.set_sequence_id(sequence);
  snapshot.set_version(6);
  snapshot.mutable_key()->set_digest("prefix");
  snapshot.mutable_key()->set_position(5);
  ASSERT_TRUE(client_->Call(&Stub::CreateSnapshot, snapshot).ok());
  EXPECT_EQ(CtlJson("snapshots")["snapshots"][0]["digest"], "prefix");

  const std::string file = (folder_ / "state").string();
  const std::string command = "export " + file + " --model small --digest prefix --position 5";
  const json exported = CtlJson(command);
  EXPECT_EQ(exported["position"], 5);
  const Ran again = Ctl(command);
  EXPECT_EQ(again.exit_code, 1);
  EXPECT_TRUE(absl::StrContains(again.error, "--force")) << again.error;
  EXPECT_EQ(Ctl(command + " --force").exit_code, 0);

  EXPECT_EQ(Ctl("import " + file).exit_code, 1);  // the snapshot is there
  const json imported = CtlJson("import " + file + " --digest copy");
  EXPECT_EQ(imported["checksum"], exported["checksum"]);
  const std::string copy = (folder_ / "copy").string();
  EXPECT_EQ(CtlJson("export " + copy + " --model small --digest copy --position 5")["checksum"],
            exported["checksum"]);
}

TEST_F(CtlTest, SequencesOfAnEndedSessionAreAdoptedAndLeftAgain) {
  client_->Start();
  v1::OpenSessionRequest open;
  open.set_lease_ms(100);
  open.set_adoption_ms(60'000);
  const auto opened = client_->Call(&Stub::OpenSession, open);
  ASSERT_TRUE(opened.ok());
  client_->session_id = opened.body.session_id();
  const uint64_t sequence = Decode(5);
  const auto gone = [&] { return client_->Status().sessions() == 1; };
  ASSERT_TRUE(Poll(absl::Seconds(20), gone));

  const auto adopt = [&](const std::string& session) {
    return absl::StrCat(" --model small --keep 30 --adopt ", session);
  };
  const auto hex = [](uint64_t id) { return absl::StrCat(absl::Hex(id, absl::kZeroPad16)); };
  const json listed = CtlJson("sequences" + adopt(hex(opened.body.session_id())));
  EXPECT_EQ(listed["sequences"][0]["sequence_id"], hex(sequence));
  EXPECT_EQ(listed["sequences"][0]["position"], 5);
  ASSERT_TRUE(Poll(absl::Seconds(20), gone));
  const json flushed = CtlJson("flush" + adopt(listed["session_id"]));
  EXPECT_EQ(flushed["flushed"], 1);
  EXPECT_EQ(CtlJson("steps")["models"][0]["flushes_by_reason"]["requested"], 1);
  ASSERT_TRUE(Poll(absl::Seconds(20), gone));
  const std::string file = (folder_ / "state").string();
  const json exported =
      CtlJson("export " + file + adopt(flushed["session_id"]) + " --sequence " + hex(sequence));
  EXPECT_EQ(exported["position"], 5);
  EXPECT_TRUE(absl::StrContains(Ctl("import " + file).error, "--digest"));
  EXPECT_EQ(Ctl("import " + file + " --digest moved").exit_code, 0);
}

TEST_F(CtlTest, ATokenOpensAServerThatAsksForOne) {
  const auto write = [&](const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name) << text;
    return (folder_ / name).string();
  };
  ServerConfig config = SmallConfig();
  config.tokens_file = write("tokens", "token 0123456789abcdef team read-only\n");
  server_ = StartServer(config);
  EXPECT_EQ(Ctl("--token-file " + write("token", "0123456789abcdef\n") + " status").exit_code, 0);
  const Ran refused = Ctl("status");
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_TRUE(absl::StrContains(refused.error, "authorization: expected 'Bearer' and a token"))
      << refused.error;
  EXPECT_EQ(std::count(refused.error.begin(), refused.error.end(), '\n'), 1);
}

TEST_F(CtlTest, DrainsAndServesAgain) {
  client_->Start();
  const uint64_t sequence = Decode(1);
  EXPECT_EQ(CtlJson("drain")["sequences"], 1);
  EXPECT_TRUE(client_->Status().draining());
  const Ran late = Ctl("drain --wait 1");  // one lives
  EXPECT_EQ(late.exit_code, 1);
  EXPECT_TRUE(absl::StrContains(late.error, "1 sequences are left")) << late.error;
  auto release = client_->Make<v1::ReleaseSequencesRequest>();
  release.add_sequence_ids(sequence);
  EXPECT_TRUE(client_->Call(&Stub::ReleaseSequences, release).ok());
  EXPECT_EQ(Ctl("drain --wait 60").exit_code, 0);
  EXPECT_EQ(CtlJson("drain --resume")["draining"], false);
  EXPECT_EQ(Ctl("drain --resume --wait 3").exit_code, 2);
}

TEST_F(CtlTest, SetsTheLogLevel) {
  const json first = CtlJson("log-level error");
  EXPECT_EQ(CtlJson(absl::StrCat("log-level ", first["previous"].get<std::string>()))["previous"],
            "error");
  const Ran wrong = Ctl("log-level loud");
  EXPECT_EQ(wrong.exit_code, 1);
  EXPECT_TRUE(absl::StrContains(wrong.error, "'loud'")) << wrong.error;
}

TEST_F(CtlTest, ListsAndEvictsSessionsAndSnapshots) {
  EXPECT_EQ(Ctl("sessions").out, "no sessions\n");
  client_->Start();
  const uint64_t sequence = Decode(2);
  for (const char* digest : {"one", "two"}) {
    auto snapshot = client_->Make<v1::CreateSnapshotRequest>();
    snapshot.set_sequence_id(sequence);
    snapshot.set_version(3);
    snapshot.mutable_key()->set_digest(digest);
    snapshot.mutable_key()->set_position(2);
    ASSERT_TRUE(client_->Call(&Stub::CreateSnapshot, snapshot).ok());
  }
  const std::string one = "evict snapshots --model small --digest one --position 2";
  EXPECT_EQ(CtlJson(one)["evicted"], 1);
  EXPECT_EQ(Ctl(one).exit_code, 1);
  EXPECT_EQ(CtlJson("evict snapshots --model small --all")["evicted"], 1);
  const json sessions = CtlJson("sessions")["sessions"];
  ASSERT_EQ(sessions.size(), 1u);
  EXPECT_EQ(sessions[0]["sequences"], 1);
  const std::string evict =
      absl::StrCat("evict session ", sessions[0]["session_id"].get<std::string>());
  EXPECT_EQ(CtlJson(evict)["sequences_released"], 1);
  EXPECT_EQ(Ctl(evict).exit_code, 1);
  EXPECT_EQ(Ctl("sessions").out, "no sessions\n");
  for (const char* arguments : {"evict", "evict session", "evict snapshots --model small",
                                "evict snapshots --model small --all --digest x --position 1"})
    EXPECT_EQ(Ctl(arguments).exit_code, 2) << arguments;
}

TEST_F(CtlTest, TopPrintsOnePictureAndNeedsATerminalForMore) {
  client_->Start();
  Decode(3);
  const Ran once = Ctl("top --once --interval 0.1");
  EXPECT_EQ(once.exit_code, 0) << once.error;
  EXPECT_TRUE(absl::StrContains(once.out, "TOKENS/S")) << once.out;
  EXPECT_TRUE(absl::StrContains(once.out, "100.0%")) << once.out;
  for (absl::string_view line : absl::StrSplit(once.out, '\n')) EXPECT_LE(line.size(), 80u) << line;
  const Ran watch = Ctl("top");
  EXPECT_EQ(watch.exit_code, 1);
  EXPECT_TRUE(absl::StrContains(watch.error, "--once")) << watch.error;
}

}  // namespace
}  // namespace ssmd::e2e
