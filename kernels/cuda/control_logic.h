// What the control stream decides: plan, commit, abort, and the operations on one slot; the same
// decisions as cpu/control_block.cc, made by a team of threads over the rows of a step.
//
// One definition for the kernels of control.cu, where a team is a block, and for tests without a
// GPU, where it is one thread. A Team has rank(), size(), Sync(), Sum(value), Min(value) and
// ExclusiveScan(values, count), which are called by all its threads and also synchronise them.
// Rows of a step name distinct slots, so rows are independent but for the pages, which move by
// atomic counters.
#pragma once

#include "kernels/cuda/control_state.h"

namespace ssmd::cuda {

SSMD_HOST_DEVICE inline uint32_t AtomicAdd(uint32_t* word, uint32_t value) {
#ifdef __CUDA_ARCH__
  return atomicAdd(word, value);
#else
  return (*word += value) - value;
#endif
}

// ---- pages

SSMD_HOST_DEVICE inline void AddRef(const ControlState& c, uint32_t page) {
  AtomicAdd(&c.page_refs[page], 1);
}

SSMD_HOST_DEVICE inline void DropRef(const ControlState& c, uint32_t page) {
  if (AtomicAdd(&c.page_refs[page], ~0u) > 1) return;
  c.page_freed[page] = 1;
  c.counters->freed = 1;
  c.free_pages[AtomicAdd(&c.counters->free, 1)] = page;
}

// Requires: called by one thread, and a page is free.
SSMD_HOST_DEVICE inline uint32_t TakePage(const ControlState& c) {
  const uint32_t page = c.free_pages[--c.counters->free];
  c.page_refs[page] = 1;
  c.page_freed[page] = 0;
  return page;
}

// ---- slots

SSMD_HOST_DEVICE inline bool HasFlush(const DeviceSlot& slot) { return slot.flush_target != kNone; }

// The next step of the slot reads the page of its pending flush.
SSMD_HOST_DEVICE inline bool InstallsFlush(const DeviceSlot& slot) {
  return HasFlush(slot) && slot.tail > slot.flush_born;
}

SSMD_HOST_DEVICE inline bool IsIdle(const DeviceSlot& slot) {
  return slot.live && !slot.in_step && slot.import_page == kNone;
}

SSMD_HOST_DEVICE inline void CancelFlush(const ControlState& c, DeviceSlot& slot) {
  if (!HasFlush(slot)) return;
  DropRef(c, slot.flush_source);
  DropRef(c, slot.flush_target);
  slot.flush_source = slot.flush_target = kNone;
}

// The flush's reference to its target becomes the sequence's.
SSMD_HOST_DEVICE inline void InstallFlush(const ControlState& c, DeviceSlot& slot) {
  DropRef(c, slot.flush_source);
  DropRef(c, slot.page);
  slot.page = slot.flush_target;
  slot.base = slot.flush_to;
  slot.window = c.rule.window_records;
  slot.flush_source = slot.flush_target = kNone;
}

SSMD_HOST_DEVICE inline DeviceFold StartFlush(const ControlState& c, uint32_t index,
                                              uint32_t target) {
  DeviceSlot& slot = c.slots[index];
  slot.flush_source = slot.page;
  slot.flush_target = target;
  slot.flush_from = slot.base;
  slot.flush_to = FoldTo(slot.tail, c.rule);
  slot.flush_born = slot.tail;
  AddRef(c, slot.page);
  return {slot.flush_from, slot.flush_to, slot.rounding_key, index, slot.page, target};
}

// ---- plan

// Clears flags until at most `limit` are left: those of the largest h stay, ties by row.
template <class Team>
SSMD_HOST_DEVICE void KeepFullest(Team& team, uint32_t* flags, const uint32_t* h, uint32_t count,
                                  uint64_t limit, uint32_t* ranks, uint32_t* histogram) {
  uint64_t mine = 0;
  for (uint32_t i = team.rank(); i < count; i += team.size()) mine += flags[i];
  if (team.Sum(mine) <= limit) return;
  for (uint32_t i = team.rank(); i < kHistogramWords; i += team.size()) histogram[i] = 0;
  team.Sync();
  for (uint32_t i = team.rank(); i < count; i += team.size()) {
    if (flags[i]) AtomicAdd(&histogram[h[i]], 1);
  }
  team.Sync();
  uint32_t last = kHistogramWords - 1;  // the fill at which the limit is reached
  uint64_t left = limit;
  while (histogram[last] <= left) left -= histogram[last--];
  for (uint32_t i = team.rank(); i < count; i += team.size()) ranks[i] = flags[i] && h[i] == last;
  team.ExclusiveScan(ranks, count);
  for (uint32_t i = team.rank(); i < count; i += team.size())
    flags[i] = flags[i] && (h[i] > last || (h[i] == last && ranks[i] < left));
  team.Sync();
}

// Plans a step from `plan`, `count` rows; the outcome is in c.reports[step]. A plan that fails
// changes nothing but makes the step one of no rows.
template <class Team>
SSMD_HOST_DEVICE void PlanStep(Team& team, const ControlState& c, uint32_t step,
                               const DevicePlanRow* plan, uint32_t count) {
  const FlushRule& rule = c.rule;
  uint32_t* const h = c.scratch;
  uint32_t* const fold = h + c.rows_max;
  uint32_t* const frees = fold + c.rows_max;  // a fold drops a pending flush, and with it one page
  uint32_t* const other = frees + c.rows_max;
  uint32_t* const ranks = other + c.rows_max;
  uint32_t* const histogram = ranks + c.rows_max;
  auto finish = [&](const DevicePlanReport& report, uint32_t rows, uint32_t tokens) {
    team.Sync();
    if (team.rank() != 0) return;
    c.reports[step] = report;
    c.steps[step] = {rows, tokens};
  };

  uint32_t stale = kNone, broken = count > c.rows_max || c.step_states[step].open ? 0 : kNone;
  for (uint32_t i = team.rank(); i < count && broken == kNone; i += team.size()) {
    const DevicePlanRow& row = plan[i];
    if (row.draft_tokens > rule.draft_tokens_max) broken = i;
    if (row.slot == kNone) continue;
    if (row.slot >= c.slot_count || !IsIdle(c.slots[row.slot])) {
      broken = i;
    } else if (stale == kNone && c.slots[row.slot].version != row.version) {
      stale = i;
    }
  }
  broken = team.Min(broken);
  stale = team.Min(stale);
  if (team.rank() == 0) *c.fold_count = 0;
  if (broken != kNone) return finish({.result = {ControlCode::kBroken, broken}}, 0, 0);
  if (stale != kNone) {
    const uint64_t version = c.slots[plan[stale].slot].version;
    return finish({.result = {ControlCode::kVersionMismatch, stale, version}}, 0, 0);
  }

  // Who must fold, who may.
  uint64_t mandatory = 0, mandatory_frees = 0, optional = 0;
  for (uint32_t i = team.rank(); i < count; i += team.size()) {
    h[i] = fold[i] = frees[i] = other[i] = 0;
    const uint32_t drafts = plan[i].draft_tokens;
    if (plan[i].slot == kNone || drafts == 0) continue;
    const DeviceSlot& slot = c.slots[plan[i].slot];
    const bool installs = InstallsFlush(slot);
    const uint64_t committed = slot.tail - (installs ? slot.flush_to : slot.base);
    if (!FoldIsDue(committed, drafts, installs ? rule.window_records : slot.window, rule)) continue;
    h[i] = static_cast<uint32_t>(committed);
    frees[i] = HasFlush(slot) && !installs;
    if (FoldIsMandatory(committed, drafts, rule)) {
      fold[i] = 1;
      ++mandatory;
      mandatory_frees += frees[i];
    } else {
      other[i] = 1;
      ++optional;
    }
  }
  mandatory = team.Sum(mandatory);
  mandatory_frees = team.Sum(mandatory_frees);
  optional = team.Sum(optional);
  uint64_t room = c.counters->free + mandatory_frees;
  if (mandatory > room)
    return finish({.result = {ControlCode::kNoPage, kNone, mandatory, room}}, 0, 0);
  room -= mandatory;
  const uint64_t budget = c.folds_max > mandatory ? c.folds_max - mandatory : 0;
  // Fullest first. Of the rows that need a page from outside, `room` can have one; rows that free
  // one need none; of both, `budget` fold.
  for (uint32_t i = team.rank(); i < count; i += team.size()) {
    if (frees[i] && other[i]) other[i] = 0, frees[i] = 2;
  }
  team.Sync();
  KeepFullest(team, other, h, count, room, ranks, histogram);
  for (uint32_t i = team.rank(); i < count; i += team.size()) other[i] |= frees[i] == 2;
  team.Sync();
  KeepFullest(team, other, h, count, budget, ranks, histogram);

  // Free pages first, for the folds below.
  for (uint32_t i = team.rank(); i < count; i += team.size()) {
    fold[i] |= other[i];
    if (fold[i] && frees[i]) CancelFlush(c, c.slots[plan[i].slot]);
    ranks[i] = fold[i];
    other[i] = plan[i].draft_tokens;
  }
  team.Sync();
  const uint32_t folds = team.ExclusiveScan(ranks, count);
  const uint32_t tokens = team.ExclusiveScan(other, count);
  const uint32_t free = c.counters->free;

  DevicePlanReport sums;
  PlanReport& report = sums.report;
  for (uint32_t i = team.rank(); i < count; i += team.size()) {
    const uint32_t drafts = plan[i].draft_tokens;
    DeviceRow row{.slot = plan[i].slot,
                  .draft_tokens = drafts,
                  .first_token = other[i],
                  .source_page = kNone,
                  .target_page = kNone};
    if (row.slot == kNone) {
      report.padding_tokens += drafts;
    } else {
      DeviceSlot& slot = c.slots[row.slot];
      slot.in_step = 1;
      row.base = slot.base;
      row.tail = slot.tail;
      row.rounding_key = slot.rounding_key;
      if (drafts > 0) {
        row.installs_flush = InstallsFlush(slot);
        row.source_page = row.installs_flush ? slot.flush_target : slot.page;
        if (row.installs_flush) row.base = slot.flush_to;
        AddRef(c, row.source_page);
        if (fold[i]) {
          row.target_page = c.free_pages[free - 1 - ranks[i]];
          c.page_refs[row.target_page] = 1;
          c.page_freed[row.target_page] = 0;
          row.fold_to = FoldTo(row.tail, rule);
        }
        report.live_rows += 1;
        report.background_used += row.installs_flush;
        report.committed_records += row.tail - row.base;
        report.draft_tokens += drafts;
      }
    }
    c.step_rows(step)[i] = row;
  }

  // Folds that a step soon to come would have to do, while pages last beyond the reserve.
  uint32_t started = 0;
  const uint32_t left = free - folds, reserve = c.folds_max / 2;
  if (c.flush_mode == FlushMode::kBackground && left > reserve) {
    for (uint32_t i = team.rank(); i < count; i += team.size()) {
      ranks[i] = 0;
      if (plan[i].slot == kNone || plan[i].draft_tokens == 0 || fold[i]) continue;
      const DeviceSlot& slot = c.slots[plan[i].slot];
      ranks[i] = frees[i] =
          !HasFlush(slot) &&
          FoldIsDue(slot.tail - slot.base, plan[i].draft_tokens + rule.draft_tokens_max,
                    slot.window, rule);
    }
    team.Sync();
    const uint32_t wanted = team.ExclusiveScan(ranks, count);
    started = wanted < left - reserve ? wanted : left - reserve;
    for (uint32_t i = team.rank(); i < count; i += team.size()) {
      const bool starts = plan[i].slot != kNone && plan[i].draft_tokens > 0 && !fold[i] &&
                          frees[i] && ranks[i] < started;
      if (!starts) continue;
      const uint32_t target = c.free_pages[left - 1 - ranks[i]];
      c.page_refs[target] = 1;
      c.page_freed[target] = 0;
      const DeviceFold flush = StartFlush(c, plan[i].slot, target);
      c.folds[ranks[i]] = flush;
      sums.background_records += flush.to - flush.from;
    }
  }
  report.live_rows = static_cast<uint32_t>(team.Sum(report.live_rows));
  report.background_used = static_cast<uint32_t>(team.Sum(report.background_used));
  report.committed_records = team.Sum(report.committed_records);
  report.draft_tokens = team.Sum(report.draft_tokens);
  report.padding_tokens = team.Sum(report.padding_tokens);
  sums.background_records = team.Sum(sums.background_records);
  report.background_started = started;
  report.folds = folds;
  report.folds_deferred = static_cast<uint32_t>(mandatory + optional) - folds;
  if (team.rank() == 0) {
    c.counters->free = left - started;
    c.counters->step_targets += folds;
    *c.fold_count = started;
    c.step_states[step] = {1, count, folds};
  }
  finish(sums, count, tokens);
}

// ---- end of a step

// accepted [row]: 0..T. All are checked before any is applied; the outcome is in
// c.commit_results[step].
template <class Team>
SSMD_HOST_DEVICE void CommitStep(Team& team, const ControlState& c, uint32_t step,
                                 const uint32_t* accepted) {
  StepState& state = c.step_states[step];
  const DeviceRow* rows = c.step_rows(step);
  const uint32_t count = state.open ? state.row_count : 0;
  const bool open = state.open;
  uint32_t bad = kNone;
  for (uint32_t i = team.rank(); i < count && bad == kNone; i += team.size()) {
    if (accepted[i] > rows[i].draft_tokens) bad = i;
  }
  bad = team.Min(bad);
  ControlResult result;
  if (!open) result.code = ControlCode::kBroken;
  if (bad != kNone) {
    result = {ControlCode::kAcceptedTooMany, bad, accepted[bad], rows[bad].draft_tokens};
  }
  for (uint32_t i = team.rank(); i < count && bad == kNone; i += team.size()) {
    const DeviceRow& row = rows[i];
    if (row.slot == kNone) continue;
    DeviceSlot& slot = c.slots[row.slot];
    if (row.installs_flush) InstallFlush(c, slot);
    if (row.target_page != kNone) {  // absolute assignments, never deltas
      DropRef(c, slot.page);
      slot.page = row.target_page;
      slot.base = row.fold_to;
      slot.window = c.rule.window_records;
    }
    slot.tail = row.tail + accepted[i];
    if (slot.tail > slot.high_water) slot.high_water = slot.tail;
    ++slot.version;
    slot.in_step = 0;
    if (row.source_page != kNone) DropRef(c, row.source_page);
  }
  team.Sync();
  if (team.rank() != 0) return;
  c.commit_results[step] = result;
  if (!open || bad != kNone) return;
  c.counters->step_targets -= state.targets;
  state = {};
  c.steps[step] = {};
}

template <class Team>
SSMD_HOST_DEVICE void AbortStep(Team& team, const ControlState& c, uint32_t step) {
  StepState& state = c.step_states[step];
  const DeviceRow* rows = c.step_rows(step);
  const uint32_t count = state.open ? state.row_count : 0;
  for (uint32_t i = team.rank(); i < count; i += team.size()) {
    const DeviceRow& row = rows[i];
    if (row.target_page != kNone) DropRef(c, row.target_page);
    if (row.source_page != kNone) DropRef(c, row.source_page);
    if (row.slot != kNone) c.slots[row.slot].in_step = 0;
  }
  team.Sync();
  if (team.rank() != 0) return;
  c.commit_results[step] = {state.open ? ControlCode::kOk : ControlCode::kBroken};
  c.counters->step_targets -= state.targets;
  state = {};
  c.steps[step] = {};
}

// ---- operations on one slot, by one thread

enum class SlotOp : uint32_t {
  kClear,
  kRelease,
  kRollback,
  kCopy,
  kBeginFlush,  // fold_count and folds[0] say what to fold; kEndFlush installs it
  kEndFlush,
  kBeginImport,
  kEndImport,
  kAbortImport,
};

struct SlotArguments {
  SlotOp op{};
  uint32_t slot = 0;
  uint32_t target = 0;        // kCopy
  uint32_t window = 0;        // kClear, kCopy
  uint64_t version = 0;       // kRollback, kBeginImport
  uint64_t position = 0;      // kRollback, kCopy, kEndImport
  uint64_t rounding_key = 0;  // kClear, kCopy
};

SSMD_HOST_DEVICE inline ControlResult RunSlotOp(const ControlState& c, const SlotArguments& args) {
  constexpr ControlResult kBroken{ControlCode::kBroken};
  DeviceSlot& slot = c.slots[args.slot];
  const ControlResult outside{ControlCode::kOutsideWindow, kNone, slot.base, slot.tail};
  const bool in_window = args.position >= slot.base && args.position <= slot.tail;
  switch (args.op) {
    case SlotOp::kClear:
      if (slot.live) return kBroken;
      slot = DeviceSlot{};
      slot.version = 1;
      slot.rounding_key = args.rounding_key;
      slot.window = args.window;
      slot.live = 1;
      AddRef(c, slot.page);
      return {};
    case SlotOp::kRelease:
      if (!IsIdle(slot)) return kBroken;
      CancelFlush(c, slot);
      DropRef(c, slot.page);
      slot = DeviceSlot{};
      return {};
    case SlotOp::kRollback:
      if (!IsIdle(slot)) return kBroken;
      if (slot.version != args.version) return {ControlCode::kVersionMismatch, kNone, slot.version};
      if (!in_window) return outside;
      if (HasFlush(slot) && (slot.flush_to > args.position || slot.flush_born > args.position))
        CancelFlush(c, slot);
      slot.tail = args.position;
      ++slot.version;
      return {};
    case SlotOp::kCopy: {
      DeviceSlot& target = c.slots[args.target];
      if (!slot.live || target.live) return kBroken;
      if (!in_window) return outside;
      target = DeviceSlot{};
      target.base = slot.base;
      target.tail = args.position;
      target.high_water = slot.high_water;
      target.version = 1;
      target.rounding_key = args.rounding_key;
      target.import_floor = slot.import_floor;
      target.page = slot.page;
      target.window = args.window;
      target.live = 1;
      AddRef(c, slot.page);
      return {};
    }
    case SlotOp::kBeginFlush:
      *c.fold_count = 0;
      if (!IsIdle(slot)) return kBroken;
      if (slot.tail - slot.base <= c.rule.rollback_tokens_min) return {ControlCode::kNothing};
      if (c.counters->free == 0 && !HasFlush(slot)) return {ControlCode::kNoPage};
      CancelFlush(c, slot);
      c.folds[0] = StartFlush(c, args.slot, TakePage(c));
      *c.fold_count = 1;
      return {ControlCode::kOk, kNone, slot.flush_to - slot.flush_from};
    case SlotOp::kEndFlush:
      if (!HasFlush(slot)) return kBroken;
      InstallFlush(c, slot);
      return {};
    case SlotOp::kBeginImport:
      if (!IsIdle(slot)) return kBroken;
      if (slot.version != args.version) return {ControlCode::kVersionMismatch, kNone, slot.version};
      if (c.counters->free == 0) return {ControlCode::kNoPage};
      slot.import_page = TakePage(c);
      return {};
    case SlotOp::kEndImport:
      if (slot.import_page == kNone) return kBroken;
      CancelFlush(c, slot);
      DropRef(c, slot.page);
      slot.page = slot.import_page;
      slot.import_page = kNone;
      slot.base = slot.tail = slot.high_water = slot.import_floor = args.position;
      slot.window = c.rule.window_records;
      ++slot.version;
      return {};
    case SlotOp::kAbortImport:
      if (slot.import_page == kNone) return kBroken;
      DropRef(c, slot.import_page);
      slot.import_page = kNone;
      return {};
  }
  return kBroken;
}

}  // namespace ssmd::cuda
