// Steps: begin, verify per layer, commit, abort. Nothing here moves a cursor but through the
// backend.
#include <utility>

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

absl::StatusOr<OpenStep> Store::BeginStep(OwnerId owner, const StepRequest& request) {
  absl::MutexLock lock(&mu_);
  const uint32_t rows_max = options_.capacity.rows_max;
  if (request.rows.empty() || request.rows.size() > rows_max) {
    return InvalidField("sequence_ids",
                        absl::StrCat("sequence_ids: expected 1..", rows_max,
                                     " rows (rows_max), got ", request.rows.size()));
  }
  absl::flat_hash_map<SequenceId, size_t> row_of;
  std::vector<Sequence*> sequences;
  for (size_t i = 0; i < request.rows.size(); ++i) {
    const StepRequest::Row& row = request.rows[i];
    if (auto [first, is_new] = row_of.emplace(row.sequence, i); !is_new) {
      return InvalidField("sequence_ids",
                          absl::StrCat("sequence_ids[", i, "] repeats sequence_ids[", first->second,
                                       "], ", Name(row.sequence)));
    }
    if (row.draft_tokens > options_.geometry.draft_tokens_max) {
      return InvalidField("draft_tokens",
                          absl::StrCat("draft_tokens[", i, "]: expected at most ",
                                       options_.geometry.draft_tokens_max,
                                       " (draft_tokens_max), got ", row.draft_tokens));
    }
    auto sequence = Find(owner, row.sequence);
    if (!sequence.ok()) return Annotate(sequence.status(), absl::StrCat("row ", i));
    sequences.push_back(*sequence);
  }
  if (const std::shared_ptr<Step>& open = sequences[0]->open;
      open != nullptr && !open->ending && open->request.rows == request.rows &&
      open->request.auto_commit == request.auto_commit) {
    return open->reply;  // a repeat
  }

  std::vector<PlanRow> plan;
  OpenStep reply;
  for (size_t i = 0; i < request.rows.size(); ++i) {
    const StepRequest::Row& row = request.rows[i];
    auto current = FindVersion(owner, {row.sequence, row.version});
    if (!current.ok()) return Annotate(current.status(), absl::StrCat("row ", i));
    if (sequences[i]->open != nullptr) {
      return ErrorWithReason(absl::StatusCode::kFailedPrecondition, reason::kStepOpen,
                             absl::StrCat("row ", i, ": ", Name(row.sequence), " has ",
                                          Name(sequences[i]->open->id), " open"));
    }
    plan.push_back({sequences[i]->slot, row.version, row.draft_tokens});
    reply.positions.push_back(sequences[i]->position);
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
  for (Sequence* sequence : sequences) sequence->open = step;
  open_steps_.emplace(step->id, step);
  ++counters_.steps_begun;
  return reply;
}

absl::StatusOr<uint64_t> Store::StepTokenCount(OwnerId owner, StepId id) const {
  absl::MutexLock lock(&mu_);
  SSMD_ASSIGN_OR_RETURN(const std::shared_ptr<Step> step, FindStep(owner, id));
  return step->report.draft_tokens;
}

void Store::CountVerify(const Step& step, uint32_t layer) {
  const LayerShape& shape = options_.geometry.layers[layer];
  const RingLayout ring =
      MakeRingLayout(shape, options_.geometry.formats, options_.geometry.ring_records());
  const uint64_t state =
      shape.state_elements() * DtypeBytes(options_.geometry.formats.checkpoint_hp);
  const PlanReport& report = step.report;
  ++counters_.layers_verified;
  counters_.checkpoint_read_bytes += report.live_rows * state;
  counters_.checkpoint_write_bytes += report.folds * state;
  counters_.ring_read_bytes += report.committed_records * ring.record_bytes();
  counters_.ring_write_bytes += report.draft_tokens * ring.record_bytes();
  counters_.write_every_step_bytes += (report.live_rows + report.draft_tokens) * state;
}

absl::StatusOr<std::optional<CommitResult>> Store::Verify(OwnerId owner,
                                                          const VerifyRequest& request) {
  std::shared_ptr<Step> step;
  {
    absl::MutexLock lock(&mu_);
    SSMD_ASSIGN_OR_RETURN(step, FindStep(owner, request.step));
    if (request.layer >= options_.geometry.layers.size()) {
      return InvalidField("layer_id", absl::StrCat("layer index ", request.layer, " of ",
                                                   options_.geometry.layers.size(), " layers"));
    }
    if (request.token_count != step->report.draft_tokens) {
      return InvalidField("q", absl::StrCat("expected ", step->report.draft_tokens,
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
                               .output = request.output});
  }

  absl::MutexLock lock(&mu_);
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
  for (Sequence* sequence : step->sequences) sequence->open.reset();
  step->sequences.clear();
  free_steps_.push_back(step->index);
  open_steps_.erase(step->id);
  ended_steps_.emplace(step->id, step);
}

absl::StatusOr<CommitResult> Store::CommitLocked(const std::shared_ptr<Step>& step,
                                                 absl::Span<const uint32_t> accepted) {
  absl::Status committed = backend_->Commit({.step = step->index, .accepted = accepted});
  if (!committed.ok()) return Annotate(committed, Name(step->id));
  CommitResult result;
  for (size_t i = 0; i < accepted.size(); ++i) {
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
  counters_.tokens_drafted += step->report.draft_tokens;
  counters_.flushes_fused += step->report.folds;
  counters_.flushes_deferred += step->report.folds_deferred;
  step->phase = Step::Phase::kCommitted;
  step->accepted.assign(accepted.begin(), accepted.end());
  step->result = result;
  CloseStep(step);
  return result;
}

absl::StatusOr<CommitResult> Store::Commit(OwnerId owner, StepId id,
                                           absl::Span<const uint32_t> accepted) {
  absl::MutexLock lock(&mu_);
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
  // A step without tokens has nothing to verify.
  if (step->report.draft_tokens > 0 && step->layers_done < step->layer_done.size()) {
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
    Record(sequence->last_abort, step);
  }
  CloseStep(step);
}

absl::Status Store::Abort(OwnerId owner, StepId id) {
  absl::MutexLock lock(&mu_);
  SSMD_ASSIGN_OR_RETURN(const std::shared_ptr<Step> step, FindStep(owner, id));
  if (step->phase == Step::Phase::kOpen) AbortLocked(step, "AbortStep was called");
  if (step->phase == Step::Phase::kCommitted) {
    return absl::FailedPreconditionError(absl::StrCat(Name(id), " is committed; use Rollback"));
  }
  return absl::OkStatus();
}

uint32_t Store::AbortExpired(absl::Time now) {
  absl::MutexLock lock(&mu_);
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
