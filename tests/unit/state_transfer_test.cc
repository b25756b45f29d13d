// service/state_transfer.cc: descriptors field by field; chunks in any order, each byte once.
#include "service/state_transfer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"
#include "service/validate.h"
#include "tests/testing/raw_specs.h"
#include "tests/testing/status_is.h"

namespace ssmd {
namespace {

using testing::Fails;
using testing::RefusesField;

constexpr OwnerId kOwner{1};
constexpr uint64_t kChunkMax = 256;

class StateTransferTest : public ::testing::Test {
 protected:
  StateTransferTest() {
    model_ = Register(testing::RawSpec(random_));
    sequence_ = model_->store->CreateSequences(kOwner, 1)->ids[0];
  }
  ModelRef Register(const v1::ModelSpec& spec) {
    const auto registered =
        table_.Register(*ParseModelSpec(spec), {.sequences_max = 4, .snapshots_max = 2});
    EXPECT_TRUE(registered.ok()) << registered.status();
    return registered->model;
  }

  // Chunks of every component of the model, of random values, in the order of an export.
  std::vector<v1::StateChunk> Chunks(uint64_t chunk_bytes) {
    std::vector<v1::StateChunk> chunks;
    const Geometry& geometry = model_->store->geometry();
    for (size_t i = 0; i < geometry.layers.size(); ++i) {
      const LayerShape& shape = geometry.layers[i];
      const uint64_t window =
          shape.conv_width == 0 ? 0 : uint64_t{shape.conv_width - 1} * shape.conv_channels();
      for (const auto& [component, count] :
           {std::pair{v1::StateChunk::COMPONENT_STATE, shape.state_elements()},
            {v1::StateChunk::COMPONENT_CONV, window}}) {
        std::vector<float> values(count);
        for (float& value : values)
          value = static_cast<float>(static_cast<int64_t>(random_() % 2000) - 1000);
        for (uint64_t at = 0; at < 4 * count; at += chunk_bytes) {
          v1::StateChunk chunk;
          chunk.set_layer_id(model_->layer_ids[i]);
          chunk.set_component(component);
          chunk.set_offset_bytes(at);
          chunk.set_data(reinterpret_cast<const char*>(values.data()) + at,
                         std::min(chunk_bytes, 4 * count - at));
          chunks.push_back(std::move(chunk));
        }
      }
    }
    return chunks;
  }
  static uint64_t Checksum(const std::vector<v1::StateChunk>& chunks) {
    StateChecksum checksum;
    for (const v1::StateChunk& chunk : chunks)
      checksum.Update(chunk.data().data(), chunk.data().size());
    return checksum.value();
  }

  struct Import {
    std::unique_ptr<StateImport> handle;
    std::unique_ptr<StateAssembler> assembler;
  };
  Import Begin(uint64_t version, v1::ConvOrder order = v1::CONV_ORDER_TIME_CHANNEL) {
    Import import;
    auto begun = model_->store->BeginImport(kOwner, {sequence_, version});
    EXPECT_TRUE(begun.ok()) << begun.status();
    import.handle = *std::move(begun);
    v1::StateDescriptor descriptor = DescribeState(*model_, 7);
    descriptor.set_conv_order(order);
    import.assembler =
        std::make_unique<StateAssembler>(model_.get(), descriptor, kChunkMax, import.handle.get());
    return import;
  }
  // What an export of the sequence says, chunk by chunk.
  std::vector<v1::StateChunk> Export(uint64_t version, uint64_t chunk_bytes = kChunkMax) {
    StateReader reader(model_.get(), *model_->store->BeginExport(kOwner, {sequence_, version}),
                       chunk_bytes);
    std::vector<v1::StateChunk> chunks;
    v1::ExportStateResponse message;
    while (true) {
      message.Clear();
      const auto next = reader.Next(message);
      EXPECT_TRUE(next.ok()) << next.status();
      if (!next.ok() || !*next) return chunks;
      if (message.has_chunk()) chunks.push_back(message.chunk());
      if (message.has_finish()) {
        EXPECT_EQ(message.finish().checksum(), Checksum(chunks));
      }
    }
  }
  static std::string Flat(const std::vector<v1::StateChunk>& chunks) {
    std::string bytes;
    for (const v1::StateChunk& chunk : chunks) bytes += chunk.data();
    return bytes;
  }

  std::mt19937_64 random_{5};
  cpu::ThreadPool pool_{1};
  cpu::CpuDevice device_{8u << 20, &pool_};
  ModelTable table_{{.models_max = 4, .server_epoch = 1},
                    [this](const BackendSpec& spec) { return device_.CreateBackend(spec); }};
  ModelRef model_;
  SequenceId sequence_{};
};

TEST_F(StateTransferTest, TheFirstDifferingFieldIsNamed) {
  using Descriptor = v1::StateDescriptor;
  const struct {
    std::function<void(Descriptor&)> spoil;
    const char* field;
    std::initializer_list<absl::string_view> words;
  } cases[] = {
      {[](Descriptor& d) { d.set_position(~uint64_t{0}); },
       "descriptor.position",
       {"at most 4611686018427387904", "18446744073709551615"}},
      {[](Descriptor& d) { d.set_format_version(2); }, "descriptor.format_version", {"1", "2"}},
      {[](Descriptor& d) { d.set_model_id(77), d.clear_layers(); },
       "descriptor.model_id",
       {"0x000000000000004d"}},
      {[](Descriptor& d) { d.set_state_dtype(v1::DATA_TYPE_BF16); },
       "descriptor.state_dtype",
       {"DATA_TYPE_FP32", "DATA_TYPE_BF16"}},
      {[](Descriptor& d) { d.clear_state_order(); },
       "descriptor.state_order",
       {"STATE_ORDER_HEAD_DV_DK"}},
      {[](Descriptor& d) { d.set_conv_dtype(v1::DATA_TYPE_FP16); }, "descriptor.conv_dtype", {}},
      {[](Descriptor& d) { d.clear_conv_order(); }, "descriptor.conv_order", {"TIME_CHANNEL"}},
      {[](Descriptor& d) { d.set_conv_order(static_cast<v1::ConvOrder>(9)); },
       "descriptor.conv_order",
       {"got 9"}},
      {[](Descriptor& d) { d.mutable_layers()->RemoveLast(); },
       "descriptor.layers",
       {"4 layers", "3 layers"}},
      {[](Descriptor& d) { d.mutable_layers()->SwapElements(0, 1); },
       "descriptor.layers[0].layer_id",
       {"expected 3, got 5"}},
      {[](Descriptor& d) { d.mutable_layers(2)->set_family(v1::FAMILY_KDA); },
       "descriptor.layers[2].family",
       {"FAMILY_GDN", "FAMILY_KDA"}},
      {[](Descriptor& d) { d.mutable_layers(1)->set_head_count(2); },
       "descriptor.layers[1].head_count",
       {"expected 4, got 2"}},
      {[](Descriptor& d) { d.mutable_layers(3)->set_d_k(32); }, "descriptor.layers[3].d_k", {}},
      {[](Descriptor& d) { d.mutable_layers(3)->set_d_v(32); }, "descriptor.layers[3].d_v", {}},
      {[](Descriptor& d) { d.mutable_layers(0)->set_conv_channels(95); },
       "descriptor.layers[0].conv_channels",
       {"expected 96, got 95"}},
      {[](Descriptor& d) { d.mutable_layers(0)->set_conv_width(3); },
       "descriptor.layers[0].conv_width",
       {"expected 4, got 3"}},
      {[](Descriptor& d) { d.set_worker_window(std::string((1u << 20) + 1, 'x')); },
       "descriptor.worker_window",
       {}},
  };
  for (const auto& c : cases) {
    v1::StateDescriptor descriptor = DescribeState(*model_, 7);
    EXPECT_TRUE(CheckDescriptor(*model_, descriptor).ok());
    c.spoil(descriptor);
    EXPECT_TRUE(RefusesField(CheckDescriptor(*model_, descriptor), c.field, c.words));
  }
}

TEST_F(StateTransferTest, ChunksInAnyOrderAndSize) {
  uint64_t version = 1;
  for (const uint64_t chunk_bytes : {256u, 100u, 4u}) {
    const std::vector<v1::StateChunk> chunks = Chunks(chunk_bytes);
    std::vector<v1::StateChunk> shuffled = chunks;
    if (chunk_bytes != 256) std::shuffle(shuffled.begin(), shuffled.end(), random_);
    Import import = Begin(version);
    for (const v1::StateChunk& chunk : shuffled) ASSERT_TRUE(import.assembler->Add(chunk).ok());
    const auto state = import.assembler->Finish(Checksum(chunks));
    ASSERT_TRUE(state.ok()) << state.status();
    EXPECT_EQ(state->version, ++version);
    EXPECT_EQ(state->position, 7u);
    EXPECT_EQ(Flat(Export(version)), Flat(chunks));
    EXPECT_EQ(Flat(Export(version, 12)), Flat(chunks));
  }
}

TEST_F(StateTransferTest, ChannelTimeIsConverted) {
  const std::vector<v1::StateChunk> chunks = Chunks(256);
  // The same windows, [channels, w - 1], in chunks of 4 bytes.
  std::vector<v1::StateChunk> transposed;
  for (const v1::StateChunk& chunk : chunks) {
    if (chunk.component() == v1::StateChunk::COMPONENT_STATE) {
      transposed.push_back(chunk);
      continue;
    }
    const LayerShape shape = testing::RawShape(chunk.layer_id());
    const uint64_t channels = shape.conv_channels(), tokens = shape.conv_width - 1;
    for (uint64_t at = 0; at < chunk.data().size(); at += 4) {
      const uint64_t element = (chunk.offset_bytes() + at) / 4;
      v1::StateChunk moved = chunk;
      moved.set_offset_bytes((element % channels * tokens + element / channels) * 4);
      moved.set_data(chunk.data().substr(at, 4));
      transposed.push_back(std::move(moved));
    }
  }
  std::vector<v1::StateChunk> in_order = transposed;
  std::stable_sort(in_order.begin(), in_order.end(), [](const auto& a, const auto& b) {
    return std::tuple(a.layer_id(), a.component(), a.offset_bytes()) <
           std::tuple(b.layer_id(), b.component(), b.offset_bytes());
  });
  Import import = Begin(1, v1::CONV_ORDER_CHANNEL_TIME);
  for (const v1::StateChunk& chunk : transposed) ASSERT_TRUE(import.assembler->Add(chunk).ok());
  ASSERT_TRUE(import.assembler->Finish(Checksum(in_order)).ok());
  EXPECT_EQ(Flat(Export(2)), Flat(chunks));
}

TEST_F(StateTransferTest, EachMistakeIsNamed) {
  using Chunk = v1::StateChunk;
  const struct {
    std::function<void(Chunk&)> spoil;
    const char* field;
    std::initializer_list<absl::string_view> words;
  } cases[] = {
      {[](Chunk& c) { c.set_layer_id(4); }, "chunk.layer_id", {"raw", "got 4"}},
      {[](Chunk& c) { c.clear_component(); }, "chunk.component", {"COMPONENT_UNSPECIFIED"}},
      {[](Chunk& c) { c.set_component(static_cast<Chunk::Component>(5)); },
       "chunk.component",
       {"got 5"}},
      {[](Chunk& c) { c.clear_data(); }, "chunk.data", {"1..256", "got 0"}},
      {[](Chunk& c) { c.set_data(std::string(260, '\0')); }, "chunk.data", {"1..256", "got 260"}},
      {[](Chunk& c) { c.set_data(std::string(6, '\0')); }, "chunk.data", {"multiple of 4", "6"}},
      {[](Chunk& c) { c.set_offset_bytes(2); }, "chunk.offset_bytes", {"multiple of 4", "got 2"}},
      {[](Chunk& c) { c.set_offset_bytes(4 * 16 * 8 * 4); },
       "chunk.offset_bytes",
       {"[0, 2048)", "[2048, 2048 + 256)"}},
      {[](Chunk& c) { c.set_offset_bytes(2048 - 252); }, "chunk.offset_bytes", {"[0, 2048)"}},
      {[](Chunk& c) { c.set_offset_bytes(~uint64_t{3}); }, "chunk.offset_bytes", {"[0, 2048)"}},
      {[](Chunk& c) { c.set_offset_bytes(252); },  // the byte after those that came
       "chunk.offset_bytes",
       {"layer_id 3 COMPONENT_STATE", "byte 252 again"}},
  };
  for (const auto& c : cases) {
    Import import = Begin(1);
    Chunk chunk = Chunks(256)[0];
    ASSERT_TRUE(import.assembler->Add(chunk).ok());
    c.spoil(chunk);
    EXPECT_TRUE(RefusesField(import.assembler->Add(chunk), c.field, c.words)) << c.field;
  }
  EXPECT_EQ(model_->store->Get(kOwner, sequence_)->version, 1u);
}

TEST_F(StateTransferTest, ACompleteComponentTakesNoMore) {
  Import import = Begin(1);
  for (const v1::StateChunk& chunk : Chunks(256)) ASSERT_TRUE(import.assembler->Add(chunk).ok());
  EXPECT_TRUE(
      RefusesField(import.assembler->Add(Chunks(256)[0]), "chunk.offset_bytes", {"byte 0 again"}));
}

TEST_F(StateTransferTest, EveryComponentIsNeeded) {
  const std::vector<v1::StateChunk> chunks = Chunks(256);
  for (size_t left_out = 0; left_out < chunks.size(); ++left_out) {
    Import import = Begin(1);
    for (size_t i = 0; i < chunks.size(); ++i) {
      if (i == left_out) continue;
      ASSERT_TRUE(import.assembler->Add(chunks[i]).ok());
    }
    const v1::StateChunk& missing = chunks[left_out];
    EXPECT_TRUE(RefusesField(import.assembler->Finish(Checksum(chunks)), "chunk.component",
                             {absl::StrCat("layer_id ", missing.layer_id()),
                              v1::StateChunk::Component_Name(missing.component())}));
  }
}

TEST_F(StateTransferTest, ChecksumAndValues) {
  std::vector<v1::StateChunk> chunks = Chunks(256);
  const uint64_t sent = Checksum(chunks);
  (*chunks[3].mutable_data())[1] ^= 1;
  {
    Import import = Begin(1);
    for (const v1::StateChunk& chunk : chunks) ASSERT_TRUE(import.assembler->Add(chunk).ok());
    EXPECT_TRUE(Fails(import.assembler->Finish(sent), absl::StatusCode::kDataLoss, {"checksum"}));
  }
  for (const size_t at : {size_t{7}, chunks.size() - 1}) {  // a state, a window
    std::vector<v1::StateChunk> poisoned = chunks;
    poisoned[at].mutable_data()->replace(0, 4, "\0\0\xc0\x7f", 4);
    Import import = Begin(1);
    absl::Status status;
    for (size_t i = 0; i < poisoned.size() && status.ok(); ++i)
      status = import.assembler->Add(poisoned[i]);
    EXPECT_TRUE(RefusesField(status, "chunk.data", {"nan"}));
  }
  EXPECT_EQ(model_->store->Get(kOwner, sequence_)->version, 1u);
  EXPECT_EQ(model_->store->usage().imports, 0u);
}

TEST_F(StateTransferTest, ValuesBeyondAnFp16CheckpointAreRefused) {
  v1::ModelSpec spec = testing::SmallSpec();
  spec.set_checkpoint_dtype(v1::DATA_TYPE_FP16);
  model_ = Register(spec);
  sequence_ = model_->store->CreateSequences(kOwner, 1)->ids[0];
  std::vector<v1::StateChunk> chunks = Chunks(256);
  EXPECT_NE(chunks.back().component(), v1::StateChunk::COMPONENT_CONV);
  Import import = Begin(1, v1::CONV_ORDER_UNSPECIFIED);
  v1::StateChunk window = chunks[0];
  window.set_component(v1::StateChunk::COMPONENT_CONV);
  EXPECT_TRUE(RefusesField(import.assembler->Add(window), "chunk.component", {"post-conv"}));
  const float large = 65536.0f;
  chunks[0].mutable_data()->replace(0, 4, reinterpret_cast<const char*>(&large), 4);
  absl::Status status;
  for (size_t i = 0; i < chunks.size() && status.ok(); ++i)
    status = import.assembler->Add(chunks[i]);
  EXPECT_TRUE(RefusesField(status, "chunk.data", {"65536"}));
}

}  // namespace
}  // namespace ssmd
