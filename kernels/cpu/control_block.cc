#include "kernels/cpu/control_block.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"

namespace ssmd::cpu {

ControlBlock::ControlBlock(const BackendSpec& spec, FlushRunner* runner)
    : rule_(spec.rule),
      flush_mode_(spec.flush_mode),
      track_freed_(spec.poison_garbage),
      folds_max_(spec.folds_max),
      runner_(runner),
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

void ControlBlock::ClearSlot(SlotIndex slot, uint32_t window, uint64_t rounding_key) {
  Slot& entry = slots_[ToInt(slot)];
  SSMD_CHECK(!entry.live, "slot %u cleared while live", ToInt(slot));
  entry = {
      .cursor = {.version = 1, .rounding_key = rounding_key, .page = kZeroPage, .window = window},
      .live = true};
  AddRef(kZeroPage);
}

ControlBlock::Origin ControlBlock::OriginOf(const Slot& slot) const {
  const SlotCursor& cursor = slot.cursor;
  if (slot.pending.has_value() && cursor.tail > slot.pending->born) {
    return {slot.pending->to, slot.pending->target, rule_.window_records, true};
  }
  return {cursor.base, cursor.page, cursor.window, false};
}

void ControlBlock::CancelFlush(Slot& slot) {
  if (!slot.pending.has_value()) return;
  runner_->Drop(slot.pending->id);
  DropRef(slot.pending->source);
  DropRef(slot.pending->target);
  slot.pending.reset();
}

// The flush's reference to its target becomes the sequence's.
void ControlBlock::InstallFlush(Slot& slot) {
  runner_->Drop(slot.pending->id);
  DropRef(slot.pending->source);
  DropRef(slot.cursor.page);
  slot.cursor.page = slot.pending->target;
  slot.cursor.base = slot.pending->to;
  slot.cursor.window = rule_.window_records;
  slot.pending.reset();
}

void ControlBlock::StartFlush(SlotIndex index) {
  Slot& slot = slots_[ToInt(index)];
  const SlotCursor& cursor = slot.cursor;
  slot.pending = {.id = FlushId{next_flush_++},
                  .slot = index,
                  .rounding_key = cursor.rounding_key,
                  .source = cursor.page,
                  .target = TakePage(),
                  .from = cursor.base,
                  .to = FoldTo(cursor.tail, rule_),
                  .born = cursor.tail};
  AddRef(cursor.page);
  runner_->Start(*slot.pending);
}

// Starts the fold that a step soon to come would have to do. Decided by (h, W, T) and the pages
// that control operations left free, never by how far earlier flushes have got.
void ControlBlock::MaybeStartFlush(SlotIndex index, uint32_t draft_tokens, PlanReport& report) {
  Slot& slot = slots_[ToInt(index)];
  const SlotCursor& cursor = slot.cursor;
  const uint64_t h = cursor.tail - cursor.base;
  if (flush_mode_ != FlushMode::kBackground || slot.pending.has_value()) return;
  if (!FoldIsDue(h, draft_tokens + rule_.draft_tokens_max, cursor.window, rule_)) return;
  if (free_pages_.size() <= folds_max_ / 2) return;  // the rest is for folds that cannot wait
  StartFlush(index);
  ++report.background_started;
}

absl::StatusOr<std::vector<bool>> ControlBlock::ChooseFolds(absl::Span<const PlanRow> rows,
                                                            PlanReport& report) const {
  std::vector<bool> folds(rows.size(), false);
  std::vector<uint32_t> optional_rows;
  uint64_t mandatory = 0;
  // A row that folds drops a pending flush that it does not read, and with it one page.
  std::vector<bool> frees_page(rows.size(), false);
  uint64_t room = free_pages_.size();
  auto h_of = [&](uint32_t i) {
    const Slot& slot = slots_[ToInt(rows[i].slot)];
    return slot.cursor.tail - OriginOf(slot).base;
  };
  for (uint32_t i = 0; i < rows.size(); ++i) {
    const uint32_t draft_tokens = rows[i].draft_tokens;
    if (rows[i].slot == kNoSlot) continue;
    const Slot& slot = slots_[ToInt(rows[i].slot)];
    if (draft_tokens == 0 || !FoldIsDue(h_of(i), draft_tokens, OriginOf(slot).window, rule_))
      continue;
    frees_page[i] = slot.pending.has_value() && !OriginOf(slot).installs_flush;
    if (FoldIsMandatory(h_of(i), draft_tokens, rule_)) {
      folds[i] = true;
      ++mandatory;
      room += frees_page[i];
    } else {
      optional_rows.push_back(i);
    }
  }
  if (mandatory > room) {
    return ErrorWithReason(absl::StatusCode::kResourceExhausted, reason::kNoPage,
                           absl::StrCat("BeginStep: ", mandatory, " rows must fold, ", room,
                                        " pages are free; raise capacity.spare_pages or retry"));
  }
  room -= mandatory;
  // Fullest first, so that no row is put off twice while a fuller one waits; ties by row, so a
  // retry plans the same.
  std::stable_sort(optional_rows.begin(), optional_rows.end(),
                   [&](uint32_t a, uint32_t b) { return h_of(a) > h_of(b); });
  uint64_t budget = folds_max_ > mandatory ? folds_max_ - mandatory : 0;
  for (const uint32_t i : optional_rows) {
    if (budget == 0 || room + frees_page[i] == 0) continue;
    folds[i] = true;
    --budget;
    room += frees_page[i];
    --room;
  }
  report.folds = static_cast<uint32_t>(std::count(folds.begin(), folds.end(), true));
  report.folds_deferred = static_cast<uint32_t>(mandatory + optional_rows.size()) - report.folds;
  return folds;
}

absl::StatusOr<PlanReport> ControlBlock::Plan(const PlanParams& params) {
  Step& step = steps_[ToInt(params.step)];
  SSMD_CHECK(!step.open, "step entry %u planned while open", ToInt(params.step));
  for (const PlanRow& row : params.rows) {
    SSMD_CHECK(row.draft_tokens <= rule_.draft_tokens_max, "T %u > %u", row.draft_tokens,
               rule_.draft_tokens_max);
    if (row.slot == kNoSlot) continue;
    SSMD_CHECK(slots_[ToInt(row.slot)].idle(), "a row plans slot %u, which is not idle",
               ToInt(row.slot));
    SSMD_RETURN_IF_ERROR(CheckVersion(row.slot, row.version));
  }
  PlanReport report;
  SSMD_ASSIGN_OR_RETURN(const std::vector<bool> folds, ChooseFolds(params.rows, report));

  step.open = true;
  step.rows.clear();
  for (size_t i = 0; i < params.rows.size(); ++i) {  // free pages first, for the folds below
    if (!folds[i]) continue;
    Slot& slot = slots_[ToInt(params.rows[i].slot)];
    if (!OriginOf(slot).installs_flush) CancelFlush(slot);
  }
  for (size_t i = 0; i < params.rows.size(); ++i) {
    const PlanRow& planned = params.rows[i];
    if (planned.slot == kNoSlot) {
      step.rows.push_back({.slot = kNoSlot, .draft_tokens = planned.draft_tokens});
      report.padding_tokens += planned.draft_tokens;
      continue;
    }
    Slot& slot = slots_[ToInt(planned.slot)];
    slot.in_step = true;
    StepRow row{.base = slot.cursor.base,
                .tail = slot.cursor.tail,
                .rounding_key = slot.cursor.rounding_key,
                .slot = planned.slot,
                .draft_tokens = planned.draft_tokens};
    if (planned.draft_tokens > 0) {
      const Origin origin = OriginOf(slot);
      row.base = origin.base;
      row.source_page = origin.page;
      row.installs_flush = origin.installs_flush;
      if (origin.installs_flush) runner_->Finish(slot.pending->id);
      AddRef(origin.page);
      if (folds[i]) {
        row.target_page = TakePage();
        row.fold_to = FoldTo(row.tail, rule_);
      }
      ++report.live_rows;
      report.background_used += origin.installs_flush;
      report.committed_records += row.tail - row.base;
      report.draft_tokens += planned.draft_tokens;
    }
    step.rows.push_back(row);
  }
  for (size_t i = 0; i < params.rows.size(); ++i) {
    if (params.rows[i].slot != kNoSlot && params.rows[i].draft_tokens > 0 && !folds[i]) {
      MaybeStartFlush(params.rows[i].slot, params.rows[i].draft_tokens, report);
    }
  }
  return report;
}

void ControlBlock::CloseStep(Step& step) {
  for (const StepRow& row : step.rows) {
    if (row.source_page != kNoPage) DropRef(row.source_page);
    if (row.slot != kNoSlot) slots_[ToInt(row.slot)].in_step = false;
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
    if (row.slot == kNoSlot) continue;
    Slot& slot = slots_[ToInt(row.slot)];
    SlotCursor& cursor = slot.cursor;
    if (row.installs_flush) InstallFlush(slot);
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

absl::Status ControlBlock::CheckVersion(SlotIndex index, uint64_t version) const {
  const uint64_t current = slots_[ToInt(index)].cursor.version;
  if (current == version) return absl::OkStatus();
  return ErrorWithReason(
      absl::StatusCode::kAborted, reason::kVersionMismatch,
      absl::StrCat("slot ", ToInt(index), " has version ", current, ", expected ", version));
}

absl::StatusOr<bool> ControlBlock::FlushSlot(SlotIndex index) {
  Slot& slot = slots_[ToInt(index)];
  SSMD_CHECK(slot.idle(), "flush of slot %u, which is not idle", ToInt(index));
  if (slot.cursor.tail - slot.cursor.base <= rule_.rollback_tokens_min) return false;
  if (free_pages_.empty() && !slot.pending.has_value()) {
    return ErrorWithReason(absl::StatusCode::kResourceExhausted, reason::kNoPage,
                           "FlushSequences: no page is free; raise capacity.spare_pages or retry");
  }
  CancelFlush(slot);
  StartFlush(index);
  runner_->Finish(slot.pending->id);
  InstallFlush(slot);
  return true;
}

absl::Status ControlBlock::BeginImport(SlotIndex index, uint64_t version) {
  Slot& slot = slots_[ToInt(index)];
  SSMD_CHECK(slot.idle(), "import into slot %u, which is not idle", ToInt(index));
  SSMD_RETURN_IF_ERROR(CheckVersion(index, version));
  if (free_pages_.empty()) {
    return ErrorWithReason(absl::StatusCode::kResourceExhausted, reason::kNoPage,
                           "ImportState: no page is free; raise capacity.spare_pages or retry");
  }
  slot.import_page = TakePage();
  return absl::OkStatus();
}

void ControlBlock::EndImport(SlotIndex index, uint64_t position) {
  Slot& slot = slots_[ToInt(index)];
  SSMD_CHECK(slot.import_page != kNoPage, "no import is open on slot %u", ToInt(index));
  CancelFlush(slot);
  DropRef(slot.cursor.page);
  SlotCursor& cursor = slot.cursor;
  cursor.page = std::exchange(slot.import_page, kNoPage);
  cursor.base = cursor.tail = cursor.high_water = position;
  cursor.window = rule_.window_records;
  ++cursor.version;
  slot.import_floor = position;
}

void ControlBlock::AbortImport(SlotIndex index) {
  Slot& slot = slots_[ToInt(index)];
  SSMD_CHECK(slot.import_page != kNoPage, "no import is open on slot %u", ToInt(index));
  DropRef(std::exchange(slot.import_page, kNoPage));
}

absl::Status ControlBlock::CheckInWindow(const SlotCursor& cursor, uint64_t position) const {
  if (position >= cursor.base && position <= cursor.tail) return absl::OkStatus();
  return OutsideWindow(absl::StrCat("position ", position, " is outside the window [", cursor.base,
                                    ", ", cursor.tail, "]; further back needs a snapshot"),
                       cursor.base, cursor.tail);
}

absl::Status ControlBlock::Rollback(SlotIndex index, uint64_t version, uint64_t position) {
  Slot& slot = slots_[ToInt(index)];
  SSMD_CHECK(slot.idle(), "rollback of slot %u, which is not idle", ToInt(index));
  SSMD_RETURN_IF_ERROR(CheckVersion(index, version));
  SSMD_RETURN_IF_ERROR(CheckInWindow(slot.cursor, position));
  if (slot.pending.has_value() && (slot.pending->to > position || slot.pending->born > position)) {
    CancelFlush(slot);
  }
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
  target = {.cursor = source.cursor, .live = true, .import_floor = source.import_floor};
  target.cursor.tail = params.position;
  target.cursor.version = 1;
  target.cursor.window = params.window;
  target.cursor.rounding_key = params.rounding_key;
  AddRef(source.cursor.page);
  return absl::OkStatus();
}

void ControlBlock::ReleaseSlot(SlotIndex index) {
  Slot& slot = slots_[ToInt(index)];
  SSMD_CHECK(slot.idle(), "release of slot %u, which is not idle", ToInt(index));
  CancelFlush(slot);
  DropRef(slot.cursor.page);
  slot = {};
}

std::vector<PageIndex> ControlBlock::TakeFreed() {
  std::vector<PageIndex> freed = std::exchange(freed_, {});
  std::erase_if(freed, [this](PageIndex page) { return page_refs_[ToInt(page)] > 0; });
  return freed;
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
    if (slot.import_page != kNoPage) ++refs[ToInt(slot.import_page)];
    if (slot.pending.has_value()) {
      ++refs[ToInt(slot.pending->source)];
      ++refs[ToInt(slot.pending->target)];
      SSMD_CHECK(cursor.base <= slot.pending->from && slot.pending->to <= cursor.tail,
                 "pending flush outside");
    }
    const uint64_t h = cursor.tail - cursor.base;
    SSMD_CHECK(cursor.base <= cursor.tail && h <= rule_.ring_records - rule_.draft_tokens_max,
               "h = %lu outside [0, R - T_max]", static_cast<unsigned long>(h));
    SSMD_CHECK(cursor.base <= slot.import_floor ||
                   cursor.base + rule_.rollback_tokens_min <= cursor.high_water,
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
