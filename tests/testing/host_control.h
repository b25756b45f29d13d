// The CUDA backend's control state in host memory, worked on by one host thread.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/control_logic.h"

namespace ssmd::cuda {

class OneThread {
 public:
  uint32_t rank() const { return 0; }
  uint32_t size() const { return 1; }
  void Sync() {}
  uint64_t Sum(uint64_t value) { return value; }
  uint32_t Min(uint32_t value) { return value; }
  uint32_t ExclusiveScan(uint32_t* values, uint32_t count) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < count; ++i) sum += std::exchange(values[i], sum);
    return sum;
  }
};

// A ControlState in host memory.
struct HostControl {
  explicit HostControl(const BackendSpec& spec)
      : slots(spec.slot_count),
        refs(spec.page_count),
        freed(spec.page_count),
        step_states(spec.step_count),
        steps(spec.step_count),
        rows(spec.step_count * spec.rows_max),
        reports(spec.step_count),
        commits(spec.step_count),
        scratch(kScratchArrays * spec.rows_max + kHistogramWords),
        folds(spec.rows_max) {
    refs[0] = 1;
    free_pages.resize(spec.page_count);
    for (uint32_t page = spec.page_count; page > 1; --page) free_pages[counters.free++] = page - 1;
    state = {.rule = spec.rule,
             .flush_mode = spec.flush_mode,
             .folds_max = spec.folds_max,
             .slot_count = spec.slot_count,
             .page_count = spec.page_count,
             .step_count = spec.step_count,
             .rows_max = spec.rows_max,
             .slots = slots.data(),
             .page_refs = refs.data(),
             .free_pages = free_pages.data(),
             .page_freed = freed.data(),
             .counters = &counters,
             .step_states = step_states.data(),
             .steps = steps.data(),
             .rows = rows.data(),
             .reports = reports.data(),
             .commit_results = commits.data(),
             .scratch = scratch.data(),
             .folds = folds.data(),
             .fold_count = &fold_count};
  }
  HostControl(const HostControl&) = delete;
  HostControl& operator=(const HostControl&) = delete;

  ControlResult Do(const SlotArguments& arguments) { return RunSlotOp(state, arguments); }

  // Copies everything from or to a GPU's control state of the same spec.
  void Download(const ControlState& gpu) { Copy(gpu, cudaMemcpyDeviceToHost); }
  void Upload(const ControlState& gpu) { Copy(gpu, cudaMemcpyHostToDevice); }

  void CheckInvariants() const {
    std::vector<uint32_t> expected(refs.size());
    expected[0] = 1;
    auto add = [&](uint32_t page) { ++expected.at(page); };
    for (const DeviceSlot& slot : slots) {
      if (!slot.live) continue;
      add(slot.page);
      if (slot.import_page != kNone) add(slot.import_page);
      if (!HasFlush(slot)) continue;
      add(slot.flush_source);
      add(slot.flush_target);
    }
    uint32_t targets = 0;
    for (uint32_t step = 0; step < step_states.size(); ++step) {
      for (uint32_t i = 0; step_states[step].open && i < step_states[step].row_count; ++i) {
        const DeviceRow& row = state.step_rows(step)[i];
        if (row.source_page != kNone) add(row.source_page);
        if (row.target_page == kNone) continue;
        add(row.target_page);
        ++targets;
        EXPECT_EQ(refs[row.target_page], 1u);
      }
    }
    EXPECT_EQ(refs, expected);
    EXPECT_EQ(counters.step_targets, targets);
    std::vector<uint32_t> free(free_pages.begin(), free_pages.begin() + counters.free);
    std::sort(free.begin(), free.end());
    std::vector<uint32_t> unused;
    for (uint32_t page = 0; page < refs.size(); ++page) {
      if (refs[page] == 0) unused.push_back(page);
    }
    EXPECT_EQ(free, unused);
  }

  std::vector<DeviceSlot> slots;
  std::vector<uint32_t> refs, free_pages, freed;
  ControlCounters counters;
  std::vector<StepState> step_states;
  std::vector<DeviceStep> steps;
  std::vector<DeviceRow> rows;
  std::vector<DevicePlanReport> reports;
  std::vector<ControlResult> commits;
  std::vector<uint32_t> scratch;
  std::vector<DeviceFold> folds;
  uint32_t fold_count = 0;
  ControlState state;

 private:
  void Copy(const ControlState& gpu, cudaMemcpyKind direction) {
    auto copy = [&](auto* here, auto* there, size_t count) {
      const bool download = direction == cudaMemcpyDeviceToHost;
      const size_t bytes = count * sizeof(*here);
      EXPECT_EQ(download ? cudaMemcpy(here, there, bytes, direction)
                         : cudaMemcpy(there, here, bytes, direction),
                cudaSuccess);
    };
    copy(slots.data(), gpu.slots, slots.size());
    copy(refs.data(), gpu.page_refs, refs.size());
    copy(free_pages.data(), gpu.free_pages, free_pages.size());
    copy(&counters, gpu.counters, 1);
    copy(step_states.data(), gpu.step_states, step_states.size());
    copy(rows.data(), gpu.rows, rows.size());
  }
};

}  // namespace ssmd::cuda
