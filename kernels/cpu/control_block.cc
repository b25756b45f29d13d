#include "kernels/cpu/control_block.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"

namespace ssmd::cpu {

ControlBlock::ControlBlock(const BackendSpec& spec)
    : rule_(spec.rule),
      track_freed_(spec.poison_garbage),
      folds_max_(spec.folds_max),
      slots_(spec.slot_count),
      steps_(spec.step_count),
      page_refs_(spec.page_count, 0) {
  page_refs_[ToInt(kZeroPage)] = 1;  // never free
  free_pages_.reserve(spec.page_count);
  for (uint32_t page = spec.page_count; page > 1; --page)
    free_pages_.push_back(PageIndex{page - 1});
}

PageIndex ControlBlock::TakePage() {
  SSMD_CHECK(!free_pages_.empty(), "page taken beyond the plan's count");
  const PageIndex page = free_pages_.back();
  free_pages_.pop_back();
  SSMD_CHECK(page_refs_[ToInt(page)] == 0, "page %u is free with %u references", ToInt(page),
             page_refs_[ToInt(page)]);
  page_refs_[ToInt(page)] = 1;
  return page;
}

void ControlBlock::DropRef(PageIndex page) {
  uint32_t& refs = page_refs_[ToInt(page)];
  SSMD_CHECK(refs > 0, "page %u has no reference to drop", ToInt(page));
  if (--refs > 0) return;
  SSMD_CHECK(page != kZeroPage, "the zero page lost its last reference");
  free_pages_.push_back(page);
  if (track_freed_) freed_.push_back(page);
}

void ControlBlock::ClearSlot(SlotIndex slot, uint32_t window) {
  Slot& entry = slots_[ToInt(slot)];
  SSMD_CHECK(!entry.live, "slot %u cleared while live", ToInt(slot));
  entry = {.cursor = {.version = 1, .page = kZeroPage, .window = window}, .live = true};
  AddRef(kZeroPage);
}

absl::StatusOr<std::vector<bool>> ControlBlock::ChooseFolds(absl::Span<const PlanRow> rows,
                                                            PlanReport& report) const {
  std::vector<bool> folds(rows.size(), false);
  std::vector<uint32_t> optional_rows;
  uint32_t mandatory = 0;
  auto h_of = [&](uint32_t i) {
    const SlotCursor& cursor = slots_[ToInt(rows[i].slot)].cursor;
    return cursor.tail - cursor.base;
  };
  for (uint32_t i = 0; i < rows.size(); ++i) {
    const uint32_t draft_tokens = rows[i].draft_tokens;
    if (draft_tokens == 0) continue;
    if (!FoldIsDue(h_of(i), draft_tokens, slots_[ToInt(rows[i].slot)].cursor.window, rule_))
      continue;
    if (FoldIsMandatory(h_of(i), draft_tokens, rule_)) {
      folds[i] = true;
      ++mandatory;
    } else {
      optional_rows.push_back(i);
    }
  }
  if (mandatory > free_pages_.size()) {
    return ErrorWithReason(
        absl::StatusCode::kResourceExhausted, reason::kNoPage,
        absl::StrCat("BeginStep: ", mandatory, " rows must fold, ", free_pages_.size(),
                     " pages are free; raise capacity.spare_pages or retry"));
  }
  // Fullest first, so that no row is put off twice while a fuller one waits; ties by row, so a
  // retry plans the same.
  std::stable_sort(optional_rows.begin(), optional_rows.end(),
                   [&](uint32_t a, uint32_t b) { return h_of(a) > h_of(b); });
  const uint64_t budget =
      std::min<uint64_t>(std::max(folds_max_, mandatory), free_pages_.size()) - mandatory;
  for (uint64_t i = 0; i < std::min<uint64_t>(budget, optional_rows.size()); ++i)
    folds[optional_rows[i]] = true;
  report.folds = static_cast<uint32_t>(std::count(folds.begin(), folds.end(), true));
  report.folds_deferred = mandatory + static_cast<uint32_t>(optional_rows.size()) - report.folds;
  return folds;
}

absl::StatusOr<PlanReport> ControlBlock::Plan(const PlanParams& params) {
  Step& step = steps_[ToInt(params.step)];
  SSMD_CHECK(!step.open, "step entry %u planned while open", ToInt(params.step));
  for (const PlanRow& row : params.rows) {
    const Slot& slot = slots_[ToInt(row.slot)];
    SSMD_CHECK(slot.live && !slot.in_step, "row plans slot %u: live %d, in a step %d",
               ToInt(row.slot), slot.live, slot.in_step);
    SSMD_CHECK(row.draft_tokens <= rule_.draft_tokens_max, "T %u > %u", row.draft_tokens,
               rule_.draft_tokens_max);
    if (row.version != slot.cursor.version) {
      return ErrorWithReason(absl::StatusCode::kAborted, reason::kVersionMismatch,
                             absl::StrCat("slot ", ToInt(row.slot), " has version ",
                                          slot.cursor.version, ", expected ", row.version));
    }
  }
  PlanReport report;
  SSMD_ASSIGN_OR_RETURN(const std::vector<bool> folds, ChooseFolds(params.rows, report));

  step.open = true;
  step.rows.clear();
  for (size_t i = 0; i < params.rows.size(); ++i) {
    const PlanRow& planned = params.rows[i];
    Slot& slot = slots_[ToInt(planned.slot)];
    slot.in_step = true;
    const SlotCursor& cursor = slot.cursor;
    StepRow row{.base = cursor.base,
                .tail = cursor.tail,
                .slot = planned.slot,
                .draft_tokens = planned.draft_tokens};
    if (planned.draft_tokens > 0) {
      row.source_page = cursor.page;
      AddRef(cursor.page);
      if (folds[i]) {
        row.target_page = TakePage();
        row.fold_to = FoldTo(cursor.tail, rule_);
      }
      ++report.live_rows;
      report.committed_records += cursor.tail - cursor.base;
      report.draft_tokens += planned.draft_tokens;
    }
    step.rows.push_back(row);
  }
  return report;
}

void ControlBlock::CloseStep(Step& step) {
  for (const StepRow& row : step.rows) {
    if (row.source_page != kNoPage) DropRef(row.source_page);
    slots_[ToInt(row.slot)].in_step = false;
  }
  step.rows.clear();
  step.open = false;
}

absl::Status ControlBlock::Commit(const CommitParams& params) {
  Step& step = steps_[ToInt(params.step)];
  SSMD_CHECK(step.open, "commit of step entry %u that is not open", ToInt(params.step));
  SSMD_CHECK(params.accepted.size() == step.rows.size(), "%zu counts for %zu rows",
             params.accepted.size(), step.rows.size());
  for (size_t i = 0; i < step.rows.size(); ++i) {
    if (params.accepted[i] > step.rows[i].draft_tokens) {
      return absl::OutOfRangeError(absl::StrCat("accepted[", i, "] is ", params.accepted[i],
                                                ", row has ", step.rows[i].draft_tokens,
                                                " drafts"));
    }
  }
  for (size_t i = 0; i < step.rows.size(); ++i) {
    const StepRow& row = step.rows[i];
    SlotCursor& cursor = slots_[ToInt(row.slot)].cursor;
    if (row.target_page != kNoPage) {  // absolute assignments, never deltas
      DropRef(cursor.page);
      cursor.page = row.target_page;
      cursor.base = row.fold_to;
      cursor.window = rule_.window_records;
    }
    cursor.tail = row.tail + params.accepted[i];
    cursor.high_water = std::max(cursor.high_water, cursor.tail);
    ++cursor.version;
  }
  CloseStep(step);
  return absl::OkStatus();
}

void ControlBlock::Abort(StepIndex index) {
  Step& step = steps_[ToInt(index)];
  SSMD_CHECK(step.open, "abort of step entry %u that is not open", ToInt(index));
  for (const StepRow& row : step.rows) {
    if (row.target_page != kNoPage) DropRef(row.target_page);
  }
  CloseStep(step);
}

absl::Status ControlBlock::CheckInWindow(const SlotCursor& cursor, uint64_t position) const {
  if (position >= cursor.base && position <= cursor.tail) return absl::OkStatus();
  return OutsideWindow(absl::StrCat("position ", position, " is outside the window [", cursor.base,
                                    ", ", cursor.tail, "]; further back needs a snapshot"),
                       cursor.base, cursor.tail);
}

absl::Status ControlBlock::Rollback(SlotIndex index, uint64_t version, uint64_t position) {
  Slot& slot = slots_[ToInt(index)];
  SSMD_CHECK(slot.live && !slot.in_step, "rollback of slot %u: live %d, in a step %d", ToInt(index),
             slot.live, slot.in_step);
  if (slot.cursor.version != version) {
    return ErrorWithReason(absl::StatusCode::kAborted, reason::kVersionMismatch,
                           absl::StrCat("slot ", ToInt(index), " has version ", slot.cursor.version,
                                        ", expected ", version));
  }
  SSMD_RETURN_IF_ERROR(CheckInWindow(slot.cursor, position));
  slot.cursor.tail = position;
  ++slot.cursor.version;
  return absl::OkStatus();
}

absl::Status ControlBlock::CopySlot(const CopySlotParams& params) {
  const Slot& source = slots_[ToInt(params.source)];
  Slot& target = slots_[ToInt(params.target)];
  SSMD_CHECK(source.live && !target.live, "copy of slot %u (live %d) to %u (live %d)",
             ToInt(params.source), source.live, ToInt(params.target), target.live);
  SSMD_RETURN_IF_ERROR(CheckInWindow(source.cursor, params.position));
  target = {.cursor = source.cursor, .live = true};
  target.cursor.tail = params.position;
  target.cursor.version = 1;
  target.cursor.window = params.window;
  AddRef(source.cursor.page);
  return absl::OkStatus();
}

void ControlBlock::ReleaseSlot(SlotIndex index) {
  Slot& slot = slots_[ToInt(index)];
  SSMD_CHECK(slot.live && !slot.in_step, "release of slot %u: live %d, in a step %d", ToInt(index),
             slot.live, slot.in_step);
  DropRef(slot.cursor.page);
  slot = {};
}

PageCounts ControlBlock::page_counts() const {
  PageCounts counts{.total = static_cast<uint32_t>(page_refs_.size() - 1),
                    .free = static_cast<uint32_t>(free_pages_.size())};
  for (const Step& step : steps_) {
    for (const StepRow& row : step.rows) counts.step_targets += row.target_page != kNoPage;
  }
  return counts;
}

void ControlBlock::CheckInvariants() const {
  std::vector<uint32_t> refs(page_refs_.size(), 0);
  refs[ToInt(kZeroPage)] = 1;
  for (const Slot& slot : slots_) {
    if (!slot.live) continue;
    const SlotCursor& cursor = slot.cursor;
    ++refs[ToInt(cursor.page)];
    const uint64_t h = cursor.tail - cursor.base;
    SSMD_CHECK(cursor.base <= cursor.tail && h <= rule_.ring_records - rule_.draft_tokens_max,
               "h = %lu outside [0, R - T_max]", static_cast<unsigned long>(h));
    SSMD_CHECK(cursor.base == 0 || cursor.base + rule_.rollback_tokens_min <= cursor.high_water,
               "base %lu above high water %lu - K", static_cast<unsigned long>(cursor.base),
               static_cast<unsigned long>(cursor.high_water));
  }
  for (const Step& step : steps_) {
    for (const StepRow& row : step.rows) {
      if (row.source_page != kNoPage) ++refs[ToInt(row.source_page)];
      if (row.target_page != kNoPage) {
        ++refs[ToInt(row.target_page)];
        SSMD_CHECK(page_refs_[ToInt(row.target_page)] == 1, "target page %u is shared",
                   ToInt(row.target_page));
      }
    }
  }
  SSMD_CHECK(refs == page_refs_, "page references do not add up");
  for (const PageIndex page : free_pages_)
    SSMD_CHECK(refs[ToInt(page)] == 0, "page %u free and in use", ToInt(page));
  SSMD_CHECK(static_cast<size_t>(std::count(refs.begin(), refs.end(), 0u)) == free_pages_.size(),
             "free list");
}

}  // namespace ssmd::cpu
