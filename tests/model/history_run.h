// One history while it runs: the store, its model, and what both have seen.
#pragma once

#include <xxhash.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/device.h"
#include "tests/model/history.h"
#include "tests/model/store_model.h"
#include "tests/testing/layer_inputs.h"
#include "tests/testing/tolerance.h"

namespace ssmd::testing {

inline constexpr int kVocabulary = 24;
inline constexpr OwnerId kOwner{7};

// Background work that runs when the history's timing seed says so, in any order.
class ManualQueue : public cpu::TaskQueue {
 public:
  void Post(std::function<void()> task) override { tasks_.push_back(std::move(task)); }
  void RunSome(std::mt19937_64& random) {
    for (uint64_t i = random() % (tasks_.size() + 1); i > 0; --i) {
      std::swap(tasks_[random() % tasks_.size()], tasks_.back());
      const std::function<void()> task = std::move(tasks_.back());
      tasks_.pop_back();
      task();
    }
  }

 private:
  std::vector<std::function<void()>> tasks_;
};

class History {
 public:
  History(uint64_t seed, const HistoryOptions& options)
      : random_(seed),
        timing_(options.timing_seed),
        fault_(options.fault),
        background_(options.background),
        pool_(1 + seed % 2) {}

  HistoryResult Run() {
    Setup();
    const int operations = 40 + Below(160);
    for (int i = 0; i < operations && result_.error.empty(); ++i) {
      if (background_) queue_.RunSome(timing_);
      Operate();
      CheckAll();
    }
    Drain();
    return std::move(result_);
  }

 private:
  struct OpenedStep {
    OpenStep opened;
    StoreModel::Step model;
    StepRequest request;
    uint32_t padding_tokens = 0;                          // in a padding row behind the others
    std::map<uint32_t, std::vector<std::byte>> outputs;   // by layer
    std::map<SequenceId, std::vector<std::byte>> before;  // fingerprints
  };

  uint64_t Below(uint64_t bound) { return bound == 0 ? 0 : random_() % bound; }
  bool OneIn(uint64_t n) { return Below(n) == 0; }
  void Fail(std::string why) {
    if (result_.error.empty()) result_.error = std::move(why);
  }
  void Did(const std::string& what) { ++result_.did[what]; }
  void Digest(const std::vector<std::byte>& bytes) {
    result_.digest = XXH3_64bits_withSeed(bytes.data(), bytes.size(), result_.digest);
  }

  void Setup();
  void Operate();
  void CheckAll();
  void Drain();

  void Create();
  void Begin(const OpenedStep* retry);
  void RefusedBegin();
  void Verify();
  void End();
  void Fork();
  void Rollback();
  void Import();
  void Flush();
  void Snapshot();
  void Restore();
  void Release();

  void CheckOutputs(OpenedStep& step, uint32_t layer, const std::vector<std::byte>& output);
  void CheckState(SequenceId id);
  Tolerance MakeTolerance(uint32_t layer, const LayerOracle& oracle, uint64_t records,
                          uint64_t drafts, uint64_t folds) const;
  std::vector<std::byte> Fingerprint(SequenceId id);
  std::optional<SequenceId> AnySequence(bool idle);
  int AnyToken() { return static_cast<int>(Below(kVocabulary)); }
  uint64_t VersionOf(SequenceId id) { return model_->sequences.at(id).version; }
  bool Expect(const absl::Status& status, absl::StatusCode code, const char* what) {
    if (status.code() == code) return true;
    Fail(absl::StrCat(what, ": expected ", absl::StatusCodeToString(code), ", got ",
                      status.ToString()));
    return false;
  }

  std::mt19937_64 random_;
  std::mt19937_64 timing_;  // when background work runs: must change nothing
  const ModelFault fault_;
  const bool background_;
  ManualQueue queue_;
  cpu::ThreadPool pool_;
  HistoryResult result_;
  Geometry geometry_;
  Capacity capacity_;
  TokenInputs inputs_;
  std::vector<Magnitudes> magnitudes_;  // [layer]
  std::unique_ptr<Device> device_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<StoreModel> model_;
  std::map<StepId, OpenedStep> steps_;
  std::vector<OpenedStep> aborted_;
  std::vector<SnapshotKey> keys_;
  int next_key_ = 0;
};

}  // namespace ssmd::testing
