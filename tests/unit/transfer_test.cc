// ExportState and ImportState against a server in the same process that holds one state, and the
// files in between.
#include "client/transfer.h"

#include <grpcpp/grpcpp.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "client/checksum.h"
#include "client/session.h"
#include "client/state_file.h"
#include "gtest/gtest.h"

namespace ssmd::client {
namespace {

constexpr uint64_t kModel = 0x33;

// Two layers, the first with a window: 2*3*4 floats, 3*5 bf16; 1*1*2 floats.
v1::StateDescriptor SmallState() {
  v1::StateDescriptor state;
  state.set_format_version(1);
  state.set_model_id(kModel);
  state.set_position(17);
  state.set_state_dtype(v1::DATA_TYPE_FP32);
  state.set_conv_dtype(v1::DATA_TYPE_BF16);
  v1::LayerStateDescriptor& first = *state.add_layers();
  first.set_layer_id(9);
  first.set_head_count(2);
  first.set_d_v(3);
  first.set_d_k(4);
  first.set_conv_channels(5);
  first.set_conv_width(4);
  v1::LayerStateDescriptor& second = *state.add_layers();
  second.set_layer_id(2);
  second.set_head_count(1);
  second.set_d_v(1);
  second.set_d_k(2);
  state.set_worker_window("window");
  return state;
}
constexpr uint64_t kBytes = 96 + 30 + 8;

std::string SomeBytes() {
  std::string bytes;
  for (size_t i = 0; i < kBytes; ++i) bytes.push_back(static_cast<char>(i * 7));
  return bytes;
}

class StateKeeper final : public v1::StateService::Service {
 public:
  std::string bytes = SomeBytes(), imported;
  v1::StateDescriptor imported_state;
  uint64_t chunk_bytes = 20, wrong_checksum = 0;
  int exports = 0, lost_exports = 0;  // attempts; the first ones break off
  bool cut_short = false, imported_checksum_good = false;

  grpc::Status OpenSession(grpc::ServerContext*, const v1::OpenSessionRequest*,
                           v1::OpenSessionResponse* reply) override {
    reply->set_server_epoch(1);
    reply->set_session_id(2);
    reply->set_lease_ms(600'000);
    return grpc::Status::OK;
  }
  grpc::Status GetCapabilities(grpc::ServerContext*, const v1::GetCapabilitiesRequest*,
                               v1::GetCapabilitiesResponse* reply) override {
    reply->set_chunk_bytes_max(static_cast<uint32_t>(chunk_bytes));
    return grpc::Status::OK;
  }
  grpc::Status ExportState(grpc::ServerContext*, const v1::ExportStateRequest* request,
                           grpc::ServerWriter<v1::ExportStateResponse>* writer) override {
    ++exports;
    EXPECT_EQ(request->snapshot().digest(), "digest");
    v1::ExportStateResponse reply;
    reply.set_server_epoch(1);
    *reply.mutable_state() = SmallState();
    writer->Write(reply);
    Checksum checksum;
    const std::vector<StateComponent> components = ComponentsOf(SmallState()).value();
    for (const StateComponent& component : components) {
      for (uint64_t at = 0; at < component.bytes; at += chunk_bytes) {
        v1::StateChunk& chunk = *reply.mutable_chunk();
        chunk.set_layer_id(component.layer_id);
        chunk.set_component(component.component);
        chunk.set_offset_bytes(at);
        chunk.set_data(
            bytes.substr(component.first + at, std::min(chunk_bytes, component.bytes - at)));
        checksum.Add(chunk.data());
        writer->Write(reply);
        if (exports <= lost_exports) return {grpc::StatusCode::UNAVAILABLE, "gone"};
      }
      if (cut_short) return grpc::Status::OK;
    }
    reply.mutable_finish()->set_checksum(checksum.value() ^ wrong_checksum);
    writer->Write(reply);
    return grpc::Status::OK;
  }
  grpc::Status ImportState(grpc::ServerContext*, grpc::ServerReader<v1::ImportStateRequest>* reader,
                           v1::ImportStateResponse* reply) override {
    v1::ImportStateRequest request;
    Checksum checksum;
    while (reader->Read(&request)) {
      if (request.has_header()) imported_state = request.header().state();
      if (request.has_chunk()) {
        EXPECT_LE(request.chunk().data().size(), chunk_bytes);
        imported += request.chunk().data();
        checksum.Add(request.chunk().data());
      }
      if (request.has_finish())
        imported_checksum_good = request.finish().checksum() == checksum.value();
      if (imported_state.position() == 99)
        return {grpc::StatusCode::INVALID_ARGUMENT, "position 99"};
    }
    reply->set_server_epoch(1);
    reply->set_version(6);
    return grpc::Status::OK;
  }
};

class TransferTest : public ::testing::Test {
 protected:
  TransferTest() {
    grpc::ServerBuilder builder;
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    Client::Options options;
    options.environment.sleep = [](absl::Duration) {};
    session_ = Client::FromChannel(server_->InProcessChannel({}), options)
                   ->OpenSession({.keep_alive_interval = absl::Hours(1)})
                   .value();
    key_.set_digest("digest");
    key_.set_position(17);
    folder_ =
        std::filesystem::temp_directory_path() / ("ssmd-transfer-" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
    path_ = folder_ / "state";
  }
  ~TransferTest() override {
    session_->Abandon();
    session_.reset();
    server_->Shutdown();
    std::filesystem::remove_all(folder_);
  }

  absl::StatusOr<ExportSummary> Export() {
    StateFileWriter writer(path_, key_);
    auto summary = session_->ExportState(kModel, key_, writer);
    if (!summary.ok()) return summary;
    if (absl::Status finished = writer.Finish(); !finished.ok()) return finished;
    return summary;
  }

  StateKeeper service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Session> session_;
  v1::SnapshotKey key_;
  std::filesystem::path folder_;
  std::string path_;
};

TEST_F(TransferTest, AStateGoesIntoAFileAndBack) {
  const auto summary = Export();
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_EQ(summary->bytes, kBytes);
  EXPECT_EQ(summary->descriptor.position(), 17u);
  EXPECT_FALSE(std::filesystem::exists(path_ + ".part"));

  const auto file = StateFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->key().digest(), "digest");
  EXPECT_EQ((*file)->checksum(), summary->checksum);
  EXPECT_EQ((*file)->bytes(), kBytes);
  const auto imported = session_->ImportState(kModel, {5, 1}, **file);
  ASSERT_TRUE(imported.ok()) << imported.status();
  EXPECT_EQ(imported->version(), 6u);
  EXPECT_EQ(service_.imported, service_.bytes);
  EXPECT_EQ(service_.imported_state.worker_window(), "window");
  EXPECT_TRUE(service_.imported_checksum_good);
}

TEST_F(TransferTest, ALostExportStartsOver) {
  service_.lost_exports = 2;
  ASSERT_TRUE(Export().ok());
  EXPECT_EQ(service_.exports, 3);
  EXPECT_TRUE(StateFile::Open(path_).ok());
}

// Fails like a network would, and counts how often it is asked.
struct BrokenEnd : StateSink, StateSource {
  absl::Status Begin(const v1::StateDescriptor&) override { return absl::OkStatus(); }
  absl::Status Write(const StateComponent&, uint64_t, absl::string_view) override { return Fail(); }
  const v1::StateDescriptor& descriptor() const override { return state; }
  absl::Status Read(const StateComponent&, uint64_t, absl::Span<char>) override { return Fail(); }
  absl::Status Fail() {
    ++failures;
    return absl::UnavailableError("the disk is away");
  }
  const v1::StateDescriptor state = SmallState();
  int failures = 0;
};

TEST_F(TransferTest, AnErrorOfTheCallersOwnEndIsReturnedAsItIsAndNotRepeated) {
  BrokenEnd end;
  EXPECT_EQ(session_->ExportState(kModel, key_, end).status(),
            absl::UnavailableError("the disk is away"));
  EXPECT_EQ(service_.exports, 1);
  EXPECT_EQ(session_->ImportState(kModel, {5, 1}, end).status(),
            absl::UnavailableError("the disk is away"));
  EXPECT_EQ(end.failures, 2);
  EXPECT_TRUE(session_->status().ok());
}

TEST_F(TransferTest, WrongOrMissingBytesLeaveNoFile) {
  service_.wrong_checksum = 1;
  EXPECT_TRUE(absl::IsDataLoss(Export().status()));
  service_.wrong_checksum = 0;
  service_.cut_short = true;
  EXPECT_TRUE(absl::IsDataLoss(Export().status()));
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(TransferTest, ARefusedImportHasTheServersError) {
  class Wrong final : public StateSource {
   public:
    Wrong() : state_(SmallState()) { state_.set_position(99); }
    const v1::StateDescriptor& descriptor() const override { return state_; }
    absl::Status Read(const StateComponent&, uint64_t, absl::Span<char>) override {
      return absl::OkStatus();
    }

   private:
    v1::StateDescriptor state_;
  } wrong;
  const absl::Status status = session_->ImportState(kModel, {5, 1}, wrong).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_EQ(status.message(), "ImportState: position 99");
}

TEST_F(TransferTest, DamagedFilesAreRefused) {
  ASSERT_TRUE(Export().ok());
  std::string good;
  {
    std::ifstream in(path_, std::ios::binary);
    good.assign(std::istreambuf_iterator<char>(in), {});
  }
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 4);
    std::ofstream(path_, std::ios::binary) << bad;
    ASSERT_TRUE(absl::IsDataLoss(StateFile::Open(path_).status())) << "byte " << at;
  }
  for (size_t size : {size_t{0}, size_t{15}, size_t{40}, good.size() - 1}) {
    std::ofstream(path_, std::ios::binary) << good.substr(0, size);
    EXPECT_TRUE(absl::IsDataLoss(StateFile::Open(path_).status())) << size;
  }
  EXPECT_TRUE(absl::IsNotFound(StateFile::Open(path_ + "x").status()));
}

TEST(ComponentsOf, RefusesSizesThatOverflow) {
  v1::StateDescriptor state = SmallState();
  EXPECT_EQ(TotalBytes(ComponentsOf(state).value()), kBytes);
  state.mutable_layers(1)->set_head_count(~0u);
  state.mutable_layers(1)->set_d_v(~0u);
  EXPECT_TRUE(absl::IsInvalidArgument(ComponentsOf(state).status()));
  state = SmallState();
  state.clear_conv_dtype();
  EXPECT_TRUE(absl::IsInvalidArgument(ComponentsOf(state).status()));
}

}  // namespace
}  // namespace ssmd::client
