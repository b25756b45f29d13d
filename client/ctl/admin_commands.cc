// The commands that speak AdminService.
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/ctl/common.h"

namespace ssmd::ctl {
namespace {

constexpr uint32_t kSessionsPage = 1000;
constexpr absl::Duration kDrainPoll = absl::Milliseconds(200);
constexpr absl::Duration kEvictTimeout = absl::Minutes(5);  // waits for calls in flight

}  // namespace

absl::Status Drain(const Options& options) {
  CTL_ASSIGN_OR_RETURN(auto client, Connect(options));
  CTL_ASSIGN_OR_RETURN(v1::DrainResponse drained, client->Drain(options.resume));
  const absl::Time end = absl::Now() + absl::Seconds(options.wait_seconds);
  while (!options.resume && drained.sequences() > 0 && absl::Now() < end) {
    absl::SleepFor(kDrainPoll);
    CTL_ASSIGN_OR_RETURN(drained, client->Drain());
  }
  Print(options,
        absl::StrFormat("%s: %d sequences live or kept, %d sessions open\n",
                        drained.draining() ? "draining" : "serving", drained.sequences(),
                        drained.sessions()),
        {{"draining", drained.draining()},
         {"sequences", drained.sequences()},
         {"sessions", drained.sessions()}});
  if (options.wait_seconds > 0 && drained.sequences() > 0)
    return absl::DeadlineExceededError(absl::StrFormat("%d sequences are left after %d s",
                                                       drained.sequences(), options.wait_seconds));
  return absl::OkStatus();
}

absl::Status LogLevel(const Options& options) {
  CTL_ASSIGN_OR_RETURN(auto client, Connect(options));
  CTL_ASSIGN_OR_RETURN(const v1::SetLogLevelResponse reply, client->SetLogLevel(options.level));
  Print(options, absl::StrFormat("log level %s, was %s\n", options.level, reply.previous()),
        {{"level", options.level}, {"previous", reply.previous()}});
  return absl::OkStatus();
}

absl::Status EvictSession(const Options& options) {
  const std::optional<uint64_t> id = ParseId(options.session);
  if (!id.has_value())
    return absl::InvalidArgumentError(
        absl::StrCat("'", options.session, "' is not a session id of 16 hex digits"));
  CTL_ASSIGN_OR_RETURN(auto client, Connect(options));
  CTL_ASSIGN_OR_RETURN(const v1::EvictSessionResponse reply,
                       client->EvictSession(*id, {.timeout = kEvictTimeout}));
  Print(options,
        absl::StrFormat("session %s ended: %d sequences released, %d steps aborted\n", IdText(*id),
                        reply.sequences_released(), reply.steps_aborted()),
        {{"session_id", IdText(*id)},
         {"sequences_released", reply.sequences_released()},
         {"steps_aborted", reply.steps_aborted()}});
  return absl::OkStatus();
}

absl::Status EvictSnapshots(const Options& options) {
  v1::EvictSnapshotsRequest request;
  request.set_all(options.all);
  if (!options.all) {
    CTL_ASSIGN_OR_RETURN(*request.add_keys()->mutable_digest(), ParseDigest(options.digest));
    request.mutable_keys(0)->set_position(options.position);
  }
  CTL_ASSIGN_OR_RETURN(auto client, Connect(options));
  CTL_ASSIGN_OR_RETURN(const v1::GetStatusResponse status, client->GetStatus());
  CTL_ASSIGN_OR_RETURN(const Model model, FindModel(status, options.model));
  request.set_model_id(model.id);
  CTL_ASSIGN_OR_RETURN(const v1::EvictSnapshotsResponse reply, client->EvictSnapshots(request));
  Print(options, absl::StrFormat("%s: %d snapshots evicted\n", model.name, reply.evicted()),
        {{"model_id", IdText(model.id)}, {"evicted", reply.evicted()}, {"absent", reply.absent()}});
  if (reply.absent() > 0)
    return absl::NotFoundError(absl::StrCat("no snapshot ", options.digest, " at position ",
                                            options.position, " (ssmctl snapshots lists them)"));
  return absl::OkStatus();
}

absl::Status Sessions(const Options& options) {
  CTL_ASSIGN_OR_RETURN(auto client, Connect(options));
  std::vector<v1::SessionInfo> sessions;
  uint64_t after = 0;
  do {
    CTL_ASSIGN_OR_RETURN(const v1::ListSessionsResponse page,
                         client->ListSessions(after, kSessionsPage));
    sessions.insert(sessions.end(), page.sessions().begin(), page.sessions().end());
    after = page.next_after();
  } while (after != 0);
  Print(options, SessionsText(sessions), SessionsJson(sessions));
  return absl::OkStatus();
}

}  // namespace ssmd::ctl
