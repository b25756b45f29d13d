// What a step costs through the server, and what of it is gRPC: two tables.
//
//   bench_service [--seconds S] [--csv FILE]
//
// Part 1. A server in this process, one client over loopback, one Steps stream: BeginStep that
// carries the last commit, then Verify of each layer, each awaited as a model must. The same steps
// through the Store directly tell what is left for gRPC, protobuf and the hand-over to a worker.
// Part 2. One Verify each by 1, 4, 8 callers at a time with one row, against one Verify with as
// many rows: the most that merging concurrent launches could save. 64 sequences take turns.
//
// Model: 6 Mamba-2 layers of 4 heads, 128 x 64, bf16 activations, L = 16, T = 1. Wall clock; the
// first tenth of each measurement warms up and is not counted. "gRPC" compares the medians.
#include <grpcpp/grpcpp.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bench/results.h"
#include "service/server.h"
#include "ssmd/v1/state_service.grpc.pb.h"

namespace {

namespace v1 = ssmd::v1;
using SteadyClock = std::chrono::steady_clock;

constexpr uint32_t kLayers = 6, kHeads = 4, kKeyGroups = 1, kDk = 128, kDv = 64;
constexpr uint32_t kRowsMax = 64;

void Check(bool ok, const char* what, const std::string& why) {
  if (ok) return;
  std::fprintf(stderr, "bench_service: %s: %s\n", what, why.c_str());
  std::exit(1);
}

v1::RegisterModelRequest ModelRequest(const char* name, v1::FlushMode mode) {
  v1::RegisterModelRequest request;
  v1::ModelSpec& spec = *request.mutable_spec();
  spec.set_name(name);
  v1::LayerGroup& group = *spec.add_layer_groups();
  group.set_family(v1::FAMILY_MAMBA2);
  for (uint32_t layer = 0; layer < kLayers; ++layer) group.add_layer_ids(layer);
  group.set_head_count(kHeads);
  group.set_key_group_count(kKeyGroups);
  group.set_d_k(kDk);
  group.set_d_v(kDv);
  spec.set_input_form(v1::INPUT_FORM_POST_CONV);
  spec.set_activation_dtype(v1::DATA_TYPE_BF16);
  spec.set_output_dtype(v1::DATA_TYPE_BF16);
  spec.set_checkpoint_dtype(v1::DATA_TYPE_FP32);
  spec.set_window_records(16);
  spec.set_draft_tokens_max(1);
  spec.set_tp_size(1);
  spec.set_pp_size(1);
  spec.set_flush_mode(mode);
  v1::ModelCapacity& capacity = *request.mutable_capacity();
  capacity.set_sequences_max(2 * kRowsMax);
  capacity.set_snapshots_max(1);
  capacity.set_spare_pages(kRowsMax);
  capacity.set_rows_max(kRowsMax);
  capacity.set_steps_max(16);
  return request;
}

// Random inputs of one token a row, the same for every layer.
struct Inputs {
  explicit Inputs(uint32_t row_count)
      : rows(row_count),
        keys(size_t{rows} * kKeyGroups * kDk),
        values(size_t{rows} * kHeads * kDv),
        decays(size_t{rows} * kHeads),
        output(values.size()) {
    std::minstd_rand random(rows);
    const auto uniform = [&](float low, float high) {
      return std::uniform_real_distribution<float>(low, high)(random);
    };
    for (uint16_t& key : keys) key = ssmd::FloatToBf16(uniform(-0.1f, 0.1f));
    for (uint16_t& value : values) value = ssmd::FloatToBf16(uniform(-1, 1));
    for (float& decay : decays) decay = uniform(-0.1f, 0);
  }

  v1::VerifyRequest Message(uint64_t model_id, uint32_t layer) const {
    v1::VerifyRequest request;
    request.set_model_id(model_id);
    request.set_layer_id(layer);
    const auto fill = [](v1::Tensor& tensor, v1::DataType dtype,
                         std::initializer_list<uint64_t> shape, const auto& data) {
      tensor.set_dtype(dtype);
      for (const uint64_t extent : shape) tensor.add_shape(extent);
      tensor.set_data(reinterpret_cast<const char*>(data.data()), data.size() * sizeof(data[0]));
    };
    fill(*request.mutable_q(), v1::DATA_TYPE_BF16, {rows, kKeyGroups, kDk}, keys);
    fill(*request.mutable_k(), v1::DATA_TYPE_BF16, {rows, kKeyGroups, kDk}, keys);
    fill(*request.mutable_v(), v1::DATA_TYPE_BF16, {rows, kHeads, kDv}, values);
    fill(*request.mutable_log_alpha(), v1::DATA_TYPE_FP32, {rows, kHeads}, decays);
    return request;
  }
  ssmd::VerifyRequest Direct(ssmd::StepId step, uint32_t layer) {
    ssmd::VerifyRequest request;
    request.step = step;
    request.layer = layer;
    request.token_count = rows;
    request.inputs.q = request.inputs.k = keys.data();
    request.inputs.v = values.data();
    request.inputs.log_alpha = decays.data();
    request.output = output.data();
    return request;
  }

  uint32_t rows;
  std::vector<uint16_t> keys, values;
  std::vector<float> decays;
  std::vector<uint16_t> output;
};

struct Result {
  uint64_t steps = 0;
  double per_second = 0, p50_us = 0, p99_us = 0;
  double cpu_us = 0;  // of the whole process, a step; 0: not measured
};

double ProcessCpuMicros() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return 1e6 * static_cast<double>(now.tv_sec) + 1e-3 * static_cast<double>(now.tv_nsec);
}

// Calls `step` for `seconds` and as long again by a tenth, which is dropped.
template <typename Step>
Result Measure(double seconds, Step step) {
  const auto since = [](SteadyClock::time_point start) {
    return std::chrono::duration<double>(SteadyClock::now() - start).count();
  };
  const auto warm = SteadyClock::now();
  while (since(warm) < seconds / 10) step();
  std::vector<double> micros;
  const auto start = SteadyClock::now();
  while (since(start) < seconds) {
    const auto begun = SteadyClock::now();
    step();
    micros.push_back(since(begun) * 1e6);
  }
  const double elapsed = since(start);
  std::sort(micros.begin(), micros.end());
  const auto at = [&](double share) {
    return micros[static_cast<size_t>(share * static_cast<double>(micros.size() - 1))];
  };
  return {micros.size(), static_cast<double>(micros.size()) / elapsed, at(0.5), at(0.99)};
}

void AddAll(ssmd::bench::Results& results, const char* flush, const char* path, uint32_t callers,
            uint32_t rows, const Result& r) {
  const std::string name = std::string(flush) + " " + path + " callers=" + std::to_string(callers) +
                           " rows=" + std::to_string(rows);
  results.Add(name, "steps", "1/s", r.per_second);
  results.Add(name, "step p50", "us", r.p50_us);
  results.Add(name, "step p99", "us", r.p99_us);
  if (r.cpu_us > 0) results.Add(name, "CPU per step", "us", r.cpu_us);
}

class Bench {
 public:
  explicit Bench(double seconds) : seconds_(seconds) {
    ssmd::ServerConfig config;
    config.listen = "127.0.0.1:0";
    config.metrics_listen = "";
    auto started = ssmd::Server::Start(config);
    Check(started.ok(), "server", started.status().ToString());
    server_ = *std::move(started);
    stub_ = v1::StateService::NewStub(
        grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    v1::OpenSessionResponse opened;
    const grpc::Status status = stub_->OpenSession(&context, {}, &opened);
    Check(status.ok(), "OpenSession", status.error_message());
    context_.set_server_epoch(opened.server_epoch());
    context_.set_session_id(opened.session_id());
  }

  uint64_t Register(const char* name, v1::FlushMode mode) {
    grpc::ClientContext context;
    v1::RegisterModelResponse response;
    const grpc::Status status = stub_->RegisterModel(&context, ModelRequest(name, mode), &response);
    Check(status.ok(), "RegisterModel", status.error_message());
    return response.model_id();
  }
  ssmd::Store& store(uint64_t model_id) { return *(*server_->core().models.Find(model_id))->store; }

  Result Streamed(uint64_t model_id, uint32_t rows) {
    const Rows owned = Create(model_id, ssmd::OwnerId{context_.session_id()}, rows);
    Inputs inputs(rows);
    grpc::ClientContext context;
    const auto stream = stub_->Steps(&context);
    v1::StepsRequest begin;
    *begin.mutable_context() = context_;
    begin.mutable_begin()->set_model_id(model_id);
    for (const ssmd::SequenceId id : owned.ids) {
      begin.mutable_begin()->add_sequence_ids(static_cast<uint64_t>(id));
      begin.mutable_begin()->add_versions(0);
      begin.mutable_begin()->add_draft_tokens(1);
    }
    std::vector<v1::StepsRequest> verifies(kLayers);
    for (uint32_t layer = 0; layer < kLayers; ++layer)
      *verifies[layer].mutable_verify() = inputs.Message(model_id, layer);
    uint64_t version = 0;
    v1::StepsResponse reply;
    const auto call = [&](const v1::StepsRequest& request) {
      const bool alive = stream->Write(request) && stream->Read(&reply);
      Check(alive && reply.status().code() == 0, "Steps", reply.status().message());
    };
    const Result result = Measure(seconds_, [&] {
      ++version;
      for (uint64_t& v : *begin.mutable_begin()->mutable_versions()) v = version;
      call(begin);
      v1::CommitRequest& commit = *begin.mutable_begin()->mutable_commit_first();
      commit.set_step_id(reply.begin().step_id());
      if (commit.accepted_size() == 0)
        for (uint32_t row = 0; row < rows; ++row) commit.add_accepted(1);
      for (v1::StepsRequest& verify : verifies) {
        verify.mutable_verify()->set_step_id(commit.step_id());
        call(verify);
      }
    });
    context.TryCancel();
    while (stream->Read(&reply)) {
    }
    (void)stream->Finish();
    while (store(model_id).usage().open_steps > 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    store(model_id).ReleaseOwner(owned.owner);
    return result;
  }

  // The same steps without a server. `callers` at a time, each with `rows` rows of its own, or with
  // `sets` times as many, of which every step takes the next: so that no state stays in a core's
  // own cache.
  Result Direct(uint64_t model_id, uint32_t callers, uint32_t rows, uint32_t sets = 1) {
    ssmd::Store& direct = store(model_id);
    std::vector<Result> results(callers);
    std::atomic<uint64_t> all_steps{0};
    const double cpu_before = ProcessCpuMicros();
    std::vector<std::thread> threads;
    for (uint32_t t = 0; t < callers; ++t) {
      threads.emplace_back([&, t] {
        const Rows owned = Create(model_id, ssmd::OwnerId{1000 + t}, rows * sets);
        Inputs inputs(rows);
        ssmd::StepRequest request;
        request.rows.resize(rows, {.draft_tokens = 1});
        const std::vector<uint32_t> accepted(rows, 1);
        uint64_t steps = 0;
        results[t] = Measure(seconds_, [&] {
          ++all_steps;
          for (uint32_t i = 0; i < rows; ++i) {
            request.rows[i].sequence = owned.ids[steps % sets * rows + i];
            request.rows[i].version = 1 + steps / sets;
          }
          ++steps;
          const auto step = direct.BeginStep(owned.owner, request);
          Check(step.ok(), "BeginStep", step.status().ToString());
          for (uint32_t layer = 0; layer < kLayers; ++layer) {
            const auto verified = direct.Verify(owned.owner, inputs.Direct(step->id, layer));
            Check(verified.ok(), "Verify", verified.status().ToString());
          }
          const auto committed = direct.Commit(owned.owner, step->id, accepted);
          Check(committed.ok(), "Commit", committed.status().ToString());
        });
        direct.ReleaseOwner(owned.owner);
      });
    }
    for (std::thread& thread : threads) thread.join();
    Result sum;
    sum.cpu_us = (ProcessCpuMicros() - cpu_before) / static_cast<double>(all_steps.load());
    for (const Result& r : results) {
      sum.steps += r.steps;
      sum.per_second += r.per_second;
      sum.p50_us += r.p50_us / callers;
      sum.p99_us = std::max(sum.p99_us, r.p99_us);
    }
    return sum;
  }

 private:
  struct Rows {
    ssmd::OwnerId owner;
    std::vector<ssmd::SequenceId> ids;
  };
  Rows Create(uint64_t model_id, ssmd::OwnerId owner, uint32_t rows) {
    const auto created = store(model_id).CreateSequences(owner, rows);
    Check(created.ok(), "CreateSequences", created.status().ToString());
    return {owner, created->ids};
  }

  const double seconds_;
  std::unique_ptr<ssmd::Server> server_;
  std::unique_ptr<v1::StateService::Stub> stub_;
  v1::CallContext context_;
};

}  // namespace

int main(int argc, char** argv) {
  double seconds = 2;
  const char* csv = nullptr;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    const bool known = (flag == "--seconds" || flag == "--csv") && i + 1 < argc;
    if (known && flag == "--csv") csv = argv[i + 1];
    if (known && flag == "--seconds") seconds = std::atof(argv[i + 1]);
    if (!known || seconds <= 0) {
      std::fprintf(stderr,
                   "usage: bench_service [--seconds S] [--csv FILE]   (FILE is appended to)\n");
      return 2;
    }
  }
  spdlog::set_level(spdlog::level::off);
  ssmd::bench::Results results("bench_service", csv);
  Bench bench(seconds);
  const struct {
    const char* name;
    v1::FlushMode mode;
  } modes[] = {{"fused", v1::FLUSH_MODE_FUSED}, {"background", v1::FLUSH_MODE_BACKGROUND}};

  std::printf("%u layers, %u heads, %u x %u, T = 1; %u hardware threads\n\n", kLayers, kHeads, kDk,
              kDv, std::thread::hardware_concurrency());
  std::printf("%-11s %5s | %8s %8s %8s %9s | %8s %8s %8s | %6s\n", "flush", "rows", "stream/s",
              "p50 us", "p99 us", "tokens/s", "store/s", "p50 us", "p99 us", "gRPC");
  uint64_t fused_model = 0;
  for (const auto& mode : modes) {
    const uint64_t model = bench.Register(mode.name, mode.mode);
    if (mode.mode == v1::FLUSH_MODE_FUSED) fused_model = model;
    for (const uint32_t rows : {1u, 8u, kRowsMax}) {
      const Result stream = bench.Streamed(model, rows), store = bench.Direct(model, 1, rows);
      AddAll(results, mode.name, "stream", 1, rows, stream);
      AddAll(results, mode.name, "store", 1, rows, store);
      std::printf("%-11s %5u | %8.0f %8.0f %8.0f %9.0f | %8.0f %8.0f %8.0f | %5.0f%%\n", mode.name,
                  rows, stream.per_second, stream.p50_us, stream.p99_us, stream.per_second * rows,
                  store.per_second, store.p50_us, store.p99_us,
                  100 * (1 - store.p50_us / stream.p50_us));
      results.Add(std::string(mode.name) + " rows=" + std::to_string(rows), "gRPC's part of a step",
                  "1", 1 - store.p50_us / stream.p50_us);
    }
  }

  std::printf("\n%7s | %14s %7s %8s | %14s %7s %8s | %s\n", "callers", "apart tokens/s", "p50 us",
              "CPU us/t", "one launch t/s", "p50 us", "CPU us/t", "CPU saved");
  for (const uint32_t callers : {1u, 4u, 8u}) {
    const uint32_t sets = kRowsMax / callers;
    const Result apart = bench.Direct(fused_model, callers, 1, sets);
    const Result merged = bench.Direct(fused_model, 1, callers, sets);
    AddAll(results, "fused", "apart", callers, 1, apart);
    AddAll(results, "fused", "merged", 1, callers, merged);
    const double merged_cpu_us = merged.cpu_us / callers;
    std::printf("%7u | %14.0f %7.0f %8.1f | %14.0f %7.0f %8.1f | %8.0f%%\n", callers,
                apart.per_second, apart.p50_us, apart.cpu_us, merged.per_second * callers,
                merged.p50_us, merged_cpu_us, 100 * (1 - merged_cpu_us / apart.cpu_us));
  }
}
