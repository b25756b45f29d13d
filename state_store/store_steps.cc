// Steps: begin, verify per layer, commit, abort. Nothing here moves a cursor but through the
// backend.
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "kernels/check.h"
#include "state_store/store_internal.h"

namespace ssmd {
namespace {

absl::Status StepAborted(StepId id, absl::string_view why) {
  return ErrorWithReason(absl::StatusCode::kAborted, reason::kStepAborted,
                         absl::StrCat(Name(id), " was aborted: ", why));
}

std::string PoisonText(uint32_t flags) {
  std::vector<absl::string_view> parts;
  if (flags & kPoisonInput) parts.push_back("an input is NaN or infinite");
  if (flags & kPoisonDecay) parts.push_back("a log_alpha is positive");
  if (flags & kPoisonOverflow) parts.push_back("a result left its format's range");
  std::string text;
  for (absl::string_view part : parts) absl::StrAppend(&text, text.empty() ? "" : ", ", part);
  return text;
}

}  // namespace

// The idle sequence at the expected version that a row names.
absl::StatusOr<Store::Sequence*> Store::FindRow(OwnerId owner, const StepRequest::Row& row) {
  SSMD_ASSIGN_OR_RETURN(Sequence * sequence, FindVersion(owner, {row.sequence, row.version}));
  SSMD_RETURN_IF_ERROR(CheckIdle(*sequence));
  return sequence;
}

absl::Status Store::CheckRows(const StepRequest& request) const {
  const uint32_t rows_max = options_.capacity.rows_max;
  if (request.rows.empty() || request.rows.size() > rows_max) {
    return InvalidField("sequence_ids",
                        absl::StrCat("sequence_ids: expected 1..", rows_max,
                                     " rows (rows_max), got ", request.rows.size()));
  }
  absl::flat_hash_map<SequenceId, size_t> row_of;
  for (size_t i = 0; i < request.rows.size(); ++i) {
    const StepRequest::Row& row = request.rows[i];
    if (row.draft_tokens > options_.geometry.draft_tokens_max) {
      return InvalidField("draft_tokens",
                          absl::StrCat("draft_tokens[", i, "]: expected at most ",
                                       options_.geometry.draft_tokens_max,
                                       " (draft_tokens_max), got ", row.draft_tokens));
    }
    if (row.sequence == kPaddingRow) {
      if (row.version == 0) continue;
      return InvalidField(
          "versions",
          absl::StrCat("versions[", i, "]: a padding row has version 0, got ", row.version));
    }
    if (auto [first, is_new] = row_of.emplace(row.sequence, i); !is_new) {
      return InvalidField("sequence_ids",
                          absl::StrCat("sequence_ids[", i, "] repeats sequence_ids[", first->second,
                                       "], ", Name(row.sequence)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<OpenStep> Store::BeginStep(OwnerId owner, const StepRequest& request) {
  MutexLock lock(&mu_);
  if (retired_) return Retired();
  SSMD_RETURN_IF_ERROR(CheckRows(request));
  for (const StepRequest::Row& row : request.rows) {  // is it a repeat?
    auto found = sequences_.find(row.sequence);
    if (found == sequences_.end() || found->second->owner != owner) continue;
    const std::shared_ptr<Step>& open = found->second->open;
    if (open == nullptr) continue;  // with allow_partial this row may be one that was left out
    if (!open->ending && open->request.SameRows(request)) return open->reply;
    break;
  }

  std::vector<Sequence*> sequences;
  std::vector<PlanRow> plan;
  OpenStep reply;
  for (size_t i = 0; i < request.rows.size(); ++i) {
    const StepRequest::Row& row = request.rows[i];
    Sequence* sequence = nullptr;
    absl::Status status;
    if (row.sequence != kPaddingRow) {
      auto found = FindRow(owner, row);
      if (!found.ok()) status = Annotate(found.status(), absl::StrCat("row ", i));
      if (!found.ok() && !request.allow_partial) return status;
      if (found.ok()) sequence = *found;
    }
    sequences.push_back(sequence);
    plan.push_back({sequence ? sequence->slot : kNoSlot, row.version, row.draft_tokens});
    reply.positions.push_back(sequence ? sequence->position : 0);
    if (request.allow_partial) reply.row_status.push_back(status);
  }
  if (free_steps_.empty()) {
    return Exhausted(reason::kLimit,
                     absl::StrCat("steps_max: ", options_.capacity.steps_max, " steps are open"),
                     options_.retry_after_ms);
  }
  auto report = backend_->Plan({.step = free_steps_.back(), .rows = plan});
  if (!report.ok()) {
    return absl::IsResourceExhausted(report.status())
               ? WithDetail(report.status(), detail::kRetryAfterMs,
                            absl::StrCat(options_.retry_after_ms))
               : report.status();
  }

  auto step = std::make_shared<Step>();
  step->index = free_steps_.back();
  free_steps_.pop_back();
  step->id = StepId{NextId()};
  step->owner = owner;
  step->request = request;
  step->report = *report;
  step->sequences = sequences;
  step->layer_done.assign(options_.geometry.layers.size(), false);
  step->layer_busy.assign(options_.geometry.layers.size(), false);
  reply.id = step->id;
  reply.folds = report->folds;
  step->reply = reply;
  for (Sequence* sequence : sequences) {
    if (sequence != nullptr) sequence->open = step;
  }
  open_steps_.emplace(step->id, step);
  ++counters_.steps_begun;
  if (report->live_rows > 0) {
    counters_.ring_occupancy.Observe(
        static_cast<double>(report->committed_records) /
        (static_cast<double>(report->live_rows) * options_.geometry.window_records));
  }
  return reply;
}

absl::StatusOr<uint64_t> Store::StepTokenCount(OwnerId owner, StepId id) const {
  MutexLock lock(&mu_);
  SSMD_ASSIGN_OR_RETURN(const std::shared_ptr<Step> step, FindStep(owner, id));
  return step->token_count();
}

void Store::CountVerify(const Step& step, uint32_t layer) {
  const LayerShape& shape = options_.geometry.layers[layer];
  const RingLayout ring =
      MakeRingLayout(shape, options_.geometry.formats, options_.geometry.ring_records());
  const PageLayout page = MakePageLayout(shape, options_.geometry.formats);
  const PlanReport& report = step.report;
  ++counters_.layers_verified;
  // A row that folds reads HP, and so does every row where there is no LP.
  const uint64_t lp_rows = page.lp_bytes == 0 ? 0 : report.live_rows - report.folds;
  counters_.checkpoint_hp_read_bytes += (report.live_rows - lp_rows) * page.hp_bytes;
  counters_.checkpoint_hp_write_bytes += report.folds * page.hp_bytes;
  counters_.checkpoint_lp_read_bytes += lp_rows * page.lp_bytes;
  counters_.checkpoint_lp_write_bytes += report.folds * page.lp_bytes;
  counters_.ring_read_bytes += report.committed_records * ring.record_bytes();
  counters_.ring_write_bytes += report.draft_tokens * ring.record_bytes();
  counters_.write_every_step_bytes += (report.live_rows + report.draft_tokens) * page.hp_bytes;
}

absl::StatusOr<std::optional<CommitResult>> Store::Verify(OwnerId owner,
                                                          const VerifyRequest& request) {
  std::shared_ptr<Step> step;
  {
    MutexLock lock(&mu_);
    SSMD_ASSIGN_OR_RETURN(step, FindStep(owner, request.step));
    if (request.layer >= options_.geometry.layers.size()) {
      return InvalidField("layer_id", absl::StrCat("layer index ", request.layer, " of ",
                                                   options_.geometry.layers.size(), " layers"));
    }
    if (request.token_count != step->token_count()) {
      return InvalidField("q", absl::StrCat("expected ", step->token_count(),
                                            " tokens (the step's), got ", request.token_count));
    }
    // The same layer twice at a time would write the same records: one waits for the other.
    auto layer_free = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      return step->phase != Step::Phase::kOpen || step->ending || !step->layer_busy[request.layer];
    };
    mu_.Await(absl::Condition(&layer_free));
    if (step->phase == Step::Phase::kAborted) return StepAborted(step->id, step->why_aborted);
    if (step->phase == Step::Phase::kCommitted) {
      return absl::FailedPreconditionError(absl::StrCat(Name(step->id), " is committed"));
    }
    if (step->ending) return StepAborted(step->id, "it is being ended by another call");
    step->layer_busy[request.layer] = true;
    ++step->verifies_running;
  }

  absl::StatusOr<VerifyReport> report = VerifyReport();
  if (request.token_count > 0) {
    report = backend_->Verify({.step = step->index,
                               .layer = request.layer,
                               .token_count = request.token_count,
                               .inputs = request.inputs,
                               .raw = request.raw,
                               .output = request.output});
  }

  MutexLock lock(&mu_);
  step->layer_busy[request.layer] = false;
  --step->verifies_running;
  std::string why;
  if (!report.ok()) {
    why = absl::StrCat("layer index ", request.layer, " failed: ", report.status().message());
  } else if (!report->poisoned.empty()) {
    const PoisonedRow& first = report->poisoned.front();
    counters_.poisoned_rows += report->poisoned.size();
    why = absl::StrCat("row ", first.row, " (", Name(step->request.rows[first.row].sequence),
                       "), layer index ", request.layer, ": ", PoisonText(first.flags));
  }
  if (!why.empty()) {
    AbortLocked(step, why);
    return report.ok() ? StepAborted(step->id, why)
                       : Annotate(report.status(), absl::StrCat(Name(step->id), " aborted"));
  }
  CountVerify(*step, request.layer);
  if (!step->layer_done[request.layer]) {
    step->layer_done[request.layer] = true;
    ++step->layers_done;
  }
  if (!step->request.auto_commit || step->ending || step->layers_done < step->layer_done.size() ||
      step->verifies_running > 0) {
    return std::nullopt;
  }
  std::vector<uint32_t> everything;
  for (const StepRequest::Row& row : step->request.rows) everything.push_back(row.draft_tokens);
  SSMD_ASSIGN_OR_RETURN(CommitResult result, CommitLocked(step, everything));
  return result;
}

void Store::CloseStep(const std::shared_ptr<Step>& step) {
  uint32_t live = 0;
  for (Sequence* sequence : step->sequences) {
    if (sequence == nullptr) continue;
    sequence->open.reset();
    ++live;
  }
  step->sequences.clear();
  free_steps_.push_back(step->index);
  open_steps_.erase(step->id);
  if (live > 0) {
    ended_steps_.emplace(step->id, step);
    return;
  }
  // Nobody can remember a step of padding alone, so the store does, one at a time.
  Record(last_padding_step_, nullptr);
  ended_steps_.emplace(step->id, step);
  Record(last_padding_step_, step);
}

absl::StatusOr<CommitResult> Store::CommitLocked(const std::shared_ptr<Step>& step,
                                                 absl::Span<const uint32_t> accepted) {
  absl::Status committed = backend_->Commit({.step = step->index, .accepted = accepted});
  if (!committed.ok()) return Annotate(committed, Name(step->id));
  CommitResult result;
  for (size_t i = 0; i < accepted.size(); ++i) {
    if (step->sequences[i] == nullptr) {
      result.versions.push_back(0);
      result.positions.push_back(0);
      continue;
    }
    Sequence& sequence = *step->sequences[i];
    ++sequence.version;
    sequence.position += accepted[i];
    result.versions.push_back(sequence.version);
    result.positions.push_back(sequence.position);
    Record(sequence.last_commit, step);
    sequence.last_rollback.reset();
    counters_.tokens_accepted += accepted[i];
    for (uint32_t token = 0; token < accepted[i]; ++token) ++counters_.tokens_accepted_at[token];
  }
  ++counters_.steps_committed;
  counters_.rows_committed += step->report.live_rows;
  counters_.tokens_drafted += step->report.draft_tokens;
  counters_.flushes_fused += step->report.folds;
  counters_.flushes_background += step->report.background_used;
  counters_.flushes_deferred += step->report.folds_deferred;
  step->phase = Step::Phase::kCommitted;
  step->accepted.assign(accepted.begin(), accepted.end());
  step->result = result;
  CloseStep(step);
  return result;
}

absl::StatusOr<CommitResult> Store::Commit(OwnerId owner, StepId id,
                                           absl::Span<const uint32_t> accepted) {
  MutexLock lock(&mu_);
  SSMD_ASSIGN_OR_RETURN(const std::shared_ptr<Step> step, FindStep(owner, id));
  auto settled = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return step->phase != Step::Phase::kOpen || (!step->ending && step->verifies_running == 0);
  };
  mu_.Await(absl::Condition(&settled));
  switch (step->phase) {
    case Step::Phase::kAborted:
      return StepAborted(id, step->why_aborted);
    case Step::Phase::kCommitted:
      if (absl::MakeConstSpan(step->accepted) == accepted) return step->result;  // a repeat
      return absl::FailedPreconditionError(absl::StrCat(
          Name(id), " is committed with other accepted counts; a commit cannot be changed"));
    case Step::Phase::kOpen:
      break;
  }
  if (accepted.size() != step->request.rows.size()) {
    return InvalidField("accepted",
                        absl::StrCat("accepted: expected ", step->request.rows.size(),
                                     " counts (rows of the step), got ", accepted.size()));
  }
  for (size_t i = 0; i < accepted.size(); ++i) {
    const StepRequest::Row& row = step->request.rows[i];
    if (!row.commit_all || accepted[i] == row.draft_tokens) continue;
    return WithDetail(
        absl::OutOfRangeError(absl::StrCat("accepted[", i, "]: row commits all of its ",
                                           row.draft_tokens, " tokens, got ", accepted[i])),
        detail::kField, "accepted");
  }
  // A step without tokens has nothing to verify.
  if (step->token_count() > 0 && step->layers_done < step->layer_done.size()) {
    return ErrorWithReason(absl::StatusCode::kFailedPrecondition, reason::kLayersMissing,
                           absl::StrCat(Name(id), ": ", step->layers_done, " of ",
                                        step->layer_done.size(), " layers are verified"));
  }
  return CommitLocked(step, accepted);
}

// Waits for running Verifies, then frees what the step holds. No effect on a step that ended
// meanwhile.
void Store::AbortLocked(const std::shared_ptr<Step>& step, absl::string_view why) {
  step->ending = true;
  auto quiet = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return step->verifies_running == 0; };
  mu_.Await(absl::Condition(&quiet));
  if (step->phase != Step::Phase::kOpen) return;
  backend_->Abort(step->index);
  step->phase = Step::Phase::kAborted;
  step->why_aborted = std::string(why);
  ++counters_.steps_aborted;
  for (Sequence* sequence : step->sequences) {
    if (sequence != nullptr) Record(sequence->last_abort, step);
  }
  CloseStep(step);
}

absl::Status Store::Abort(OwnerId owner, StepId id) {
  MutexLock lock(&mu_);
  SSMD_ASSIGN_OR_RETURN(const std::shared_ptr<Step> step, FindStep(owner, id));
  if (step->phase == Step::Phase::kOpen) AbortLocked(step, "AbortStep was called");
  if (step->phase == Step::Phase::kCommitted) {
    return absl::FailedPreconditionError(absl::StrCat(Name(id), " is committed; use Rollback"));
  }
  return absl::OkStatus();
}

uint32_t Store::AbortExpired(absl::Time now) {
  MutexLock lock(&mu_);
  std::vector<std::shared_ptr<Step>> expired;
  for (const auto& [id, step] : open_steps_) {
    if (step->request.deadline <= now) expired.push_back(step);
  }
  uint32_t aborted = 0;
  for (const std::shared_ptr<Step>& step : expired) {
    AbortLocked(step, "its step_timeout_ms passed");
    aborted += step->phase == Step::Phase::kAborted;
  }
  counters_.steps_expired += aborted;
  return aborted;
}

}  // namespace ssmd
