"""What every panel and rule must show after fleet.Run, computed from the loads' own counts.

Counts and gauges are exact. Rates have a tolerance: over a range that is longer than the run, rate() adds up to half a scrape
interval before the first sample and 1.1 after the last, 1.6 / (n - 1) of n samples; 2 / (n - 1) leaves room for rules
evaluated some scrapes ago. Durations cannot be known beforehand: they lie between 0 and the longest the load saw.
"""
import math

RANGE_S = 300  # of every rate: panels are asked with 5m, as the rules are
OCCUPANCY_BOUNDS = [0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1, 1.5, math.inf]
SECONDS_BOUNDS = [m * 10.0**e for e in range(-5, 1) for m in (1, 2, 5)][1:] + [10.0]
MODEL = "small"
KINDS = {"checkpoint_hp_read": "hp_read", "checkpoint_hp_write": "hp_write", "checkpoint_lp_read": None,
         "checkpoint_lp_write": None, "ring_read": "ring_read", "ring_write": "ring_write", "ring_copy": "ring_copy"}
# Capacities that the load registers (SmallCapacity): 6 sequences and 3 spare pages, 2 snapshots, 1 export slot.
SEQUENCES_MAX, SNAPSHOTS_MAX, SLOTS, PAGES = 6, 2, 9, 12
LIVE, SESSIONS_MAX, QUEUE_MAX, STATE_BYTES_MAX = 2, 1024, 256, 16 << 20


class Between:
    """A closed interval of numbers, with arithmetic."""

    def __init__(self, low, high=None):
        self.low, self.high = low, low if high is None else high

    def __contains__(self, value):
        slack = 1e-9 * max(abs(self.low), abs(self.high))  # double rounding of sums
        return self.low - slack <= value <= self.high + slack

    def __repr__(self):
        return f"{self.low:.6g}" if self.low == self.high else f"{self.low:.6g}..{self.high:.6g}"

    def combine(self, other, operation):
        other = other if isinstance(other, Between) else Between(other)
        found = [operation(x, y) for x in (self.low, self.high) for y in (other.low, other.high)]
        return Between(min(found), max(found))

    def __add__(self, other):
        return self.combine(other, lambda x, y: x + y)

    def __sub__(self, other):
        return self.combine(other, lambda x, y: x - y)

    def __rsub__(self, other):
        return Between(other) - self

    def __mul__(self, other):
        return self.combine(other, lambda x, y: x * y)

    def __truediv__(self, other):
        return self.combine(other, lambda x, y: x / y)


def quantile(q, counts):
    """histogram_quantile of {bound: count in this bucket alone}, linear inside a bucket, as Prometheus has it."""
    rank, below, lower = q * sum(counts.values()), 0, 0.0
    for bound, count in sorted(counts.items()):
        if below + count >= rank and count:
            return lower + (bound - lower) * (rank - below) / count
        below, lower = below + count, bound
    return lower


class Predictions:
    """`run`: a finished fleet.Run. `at`: the time of evaluation."""

    def __init__(self, run, at):
        self.run, self.at = run, at
        scrapes = min(run.prometheus.scrapes().values())
        self.factor = Between(1, 1 + 2 / (scrapes - 1))
        self.instances = [s.instance for s in run.servers]

    # Counted between the first scrape and the last, on one server or on all.
    def delta(self, name, instance=None):
        return sum(self.run.after[i].get(name, 0) - self.run.before[i].get(name, 0)
                   for i in ([instance] if instance else self.instances)) if name else 0

    def total(self, name, instance=None):
        return sum(self.run.after[i].get(name, 0) for i in ([instance] if instance else self.instances))

    def increase(self, count):
        return self.factor * count

    def rate(self, name, instance=None):
        return self.increase(self.delta(name, instance)) / RANGE_S

    def rate_of(self, count):
        return self.increase(count) / RANGE_S

    # {method or code: count} of calls.
    def calls(self, by, instance=None):
        found = {}
        for name in self.run.after[self.instances[0]]:
            if name.startswith("rpc/"):
                key = name.split("/")[by]
                found[key] = found.get(key, 0) + self.delta(name, instance)
        return found

    def moved(self, instance=None):
        return sum(self.delta(name, instance) for name in KINDS.values())

    def saved(self, instance=None):
        return 1 - self.rate_of(self.moved(instance)) / self.rate("baseline", instance)

    def longest_verify(self, instances):
        return max(self.run.after[i]["longest/Verify"] for i in instances)

    def verify_quantile(self, instances):
        longest = self.longest_verify(instances)
        return Between(1e-9, next((bound for bound in SECONDS_BOUNDS if bound >= longest), SECONDS_BOUNDS[-1]))

    def each(self, value):
        return {i: value(i) for i in self.instances}

    def occupancy_p90(self):
        buckets = {bound: 0 for bound in OCCUPANCY_BOUNDS}
        for name in self.run.after[self.instances[0]]:
            if name.startswith("occupancy/"):
                ratio = float(name.split("/")[1])
                buckets[next(bound for bound in OCCUPANCY_BOUNDS if ratio <= bound)] += self.delta(name)
        # The factor may differ from bucket to bucket, which moves the rank within its bucket.
        wide = self.factor.high
        return Between(*sorted(quantile(q, buckets) for q in (0.9 / wide, 1 - 0.1 / wide)))

    def cpu(self, instance):
        server = next(s for s in self.run.servers if s.instance == instance)
        used = server.cpu_seconds() - self.run.cpu_before[instance] + 0.02  # ticks of 10 ms, at both ends
        return Between(0, self.factor.high * used / RANGE_S)

    def resident(self, instance):
        now = next(s for s in self.run.servers if s.instance == instance).resident_bytes()
        return Between(0.8 * now, 1.2 * now)

    def resident_total(self):
        return sum((self.resident(i) for i in self.instances), Between(0))

    def uptime(self, instance):
        server = next(s for s in self.run.servers if s.instance == instance)
        return Between(self.at - server.started_before, self.at - server.started_after + 0.05)

    def panels(self):
        servers, r = len(self.instances), self.rate
        rows = r("rows")
        calls, codes = self.calls(1), self.calls(2)
        phase = Between(1e-9, self.longest_verify(self.instances))
        any_verify = self.verify_quantile(self.instances)
        return {
            "overview": {
                "Servers up": {"up": servers, "draining": 0},
                "Sessions and sequences": {"sessions": servers, "sequences": LIVE * servers},
                "Tokens per second": {f"accepted {MODEL}": r("accepted"), f"drafted {MODEL}": r("drafted")},
                "Steps per second by result": {result: r(result) for result in ("committed", "aborted", "expired")},
                "Calls per second by method": {m: self.rate_of(n) for m, n in calls.items() if n},
                "Refused calls per second by code": {c: self.rate_of(n) for c, n in codes.items() if n and c != "OK"},
                "Duration of Verify": {"p50": any_verify, "p99": any_verify},
                "Where a Verify spends its time": {"queue": phase, "compute": phase},
                "Verify queue": {"waiting": 0, "running": 0, "may wait": QUEUE_MAX * servers},
                "Calls not waited for": {"cancelled": r("cancelled")},
                "Memory": {"pools": self.total("reserved_bytes"), "limit": STATE_BYTES_MAX * servers,
                           "resident": self.resident_total()},
                "Waiting requests": {"queued": 0},
            },
            "state-engine": {
                "State bandwidth by kind": {kind: r(name) for kind, name in KINDS.items()} | {"write every step": r("baseline")},
                "Bytes saved": {"saved": self.saved()},
                "Bytes saved per second": {"saved": r("baseline") - self.rate_of(self.moved())},
                "Flushes per second by reason": {reason: r(reason) for reason in ("fused", "background", "requested")},
                "Flushes per row": {"folded": r("fused") / rows, "deferred": r("deferred") / rows},
                "Ring occupancy": {"mean": r("occupancy") / r("begun"), "p90": self.occupancy_p90()},
                "Acceptance length": {f"accepted {MODEL}": r("accepted") / rows, f"drafted {MODEL}": r("drafted") / rows},
                "Acceptance by position": {f"token {i}": r(f"accepted/{i}") / rows for i in range(4)},
                "Pages": {"live": LIVE * servers, "step_target": 0, "free": (PAGES - LIVE) * servers},
                "Slots": {"sequences": LIVE * servers, "snapshots": 0, "exports": 0, "free": (SLOTS - LIVE) * servers},
                "Steps, imports and streams that are open":
                    {"steps": self.total("open_steps"), "imports": 0, "streams": servers, "held begins": self.total("held_begins")},
                "Sequences moved per second":
                    {name: r(name) for name in ("rollbacks", "forks", "snapshots", "imports", "exports")},
                "Prefix lookups per second by result": {result: r(result) for result in ("hit", "absent", "too_long")},
                "Bad rows and stale requests per second": {"poisoned rows": r("poisoned"), "stale versions": r("stale")},
                "Steps planned and layers verified per second": {"planned": r("begun"), "layers": r("layers")},
            },
            "fleet": {
                "Up": self.each(lambda i: 1),
                "Uptime": self.each(self.uptime),
                "Versions": {"0.1.0 cpu": servers},
                "Draining": self.each(lambda i: 0),
                "Accepted tokens per second": self.each(lambda i: r("accepted", i)),
                "Duration of Verify, p99": self.each(lambda i: self.verify_quantile([i])),
                "Faults per second": self.each(lambda i: 0),
                "Calls over a limit": self.each(self.over_limit),
                "Free pages": self.each(lambda i: (PAGES - LIVE) / PAGES),
                "Sequences": self.each(lambda i: LIVE / SEQUENCES_MAX),
                "Snapshots": self.each(lambda i: 0),
                "Sessions": self.each(lambda i: 1 / SESSIONS_MAX),
                "Sessions opened, expired and kept":
                    {f"opened {i}": r("sessions_opened", i) for i in self.instances} |
                    {f"expired {i}": r("leases_expired", i) for i in self.instances} |
                    {f"evicted {i}": 0 for i in self.instances} | {f"kept {i}": 0 for i in self.instances},
                "Bytes saved": self.each(self.saved),
                "Log messages held back": self.each(lambda i: 0),
                "Processor": self.each(self.cpu),
                "Resident memory": self.each(self.resident),
                "Models": self.each(lambda i: 1),
                "Memory of models": {f"{i} {MODEL}": self.total("reserved_bytes", i) for i in self.instances},
            },
        }

    def over_limit(self, instance):
        return self.rate("refused", instance) / self.rate_of(sum(self.calls(1, instance).values()))

    def rules(self):
        r = self.rate
        return {
            "instance:ssmd_tokens_accepted:rate5m": self.each(lambda i: r("accepted", i)),
            "instance:ssmd_rpcs:rate5m": self.each(lambda i: self.rate_of(sum(self.calls(1, i).values()))),
            "instance:ssmd_rpcs_over_limit:ratio_rate5m": self.each(self.over_limit),
            "instance:ssmd_verify_seconds:p99_rate5m": self.each(lambda i: self.verify_quantile([i])),
            "instance_model:ssmd_acceptance_length:ratio_rate5m": self.each(lambda i: r("accepted", i) / r("rows", i)),
            "instance_model:ssmd_flushes_per_row:ratio_rate5m": self.each(lambda i: r("fused", i) / r("rows", i)),
            "instance_model:ssmd_flushes_deferred_per_row:ratio_rate5m": self.each(lambda i: r("deferred", i) / r("rows", i)),
            "instance_model:ssmd_state_bytes:rate5m": self.each(lambda i: self.rate_of(self.moved(i))),
            "instance_model:ssmd_write_every_step_bytes:rate5m": self.each(lambda i: r("baseline", i)),
            "instance_model:ssmd_steps_expired:ratio_rate5m": self.each(self.expired),
            "instance_model:ssmd_pages_free:ratio": self.each(lambda i: (PAGES - LIVE) / PAGES),
            "instance_model:ssmd_sequences:ratio": self.each(lambda i: LIVE / SEQUENCES_MAX),
            "instance_model:ssmd_bytes_saved:ratio_rate5m": self.each(self.saved),
        }

    def expired(self, instance):
        ended = sum(self.delta(result, instance) for result in ("committed", "aborted", "expired"))
        return self.rate("expired", instance) / self.rate_of(ended)

    def alerts(self):
        """Of the left side of each alert's comparison."""
        rules = self.rules()
        return {
            "SsmdDown": self.each(lambda i: 1),
            "SsmdRestarts": self.each(lambda i: 0),
            "SsmdFaults": self.each(lambda i: 0),
            "SsmdOverLimit": rules["instance:ssmd_rpcs_over_limit:ratio_rate5m"],
            "SsmdQueueFull": self.each(lambda i: 0),
            "SsmdVerifySlow": rules["instance:ssmd_verify_seconds:p99_rate5m"],
            "SsmdPagesLow": rules["instance_model:ssmd_pages_free:ratio"],
            "SsmdSequencesFull": rules["instance_model:ssmd_sequences:ratio"],
            "SsmdSessionsFull": self.each(lambda i: 1 / SESSIONS_MAX),
            "SsmdFlushesDeferred": rules["instance_model:ssmd_flushes_deferred_per_row:ratio_rate5m"],
            "SsmdPoisonedRows": self.each(lambda i: self.increase(self.delta("poisoned", i))),
            "SsmdStepsExpire": rules["instance_model:ssmd_steps_expired:ratio_rate5m"],
            "SsmdLeasesExpire": self.each(lambda i: self.increase(self.delta("leases_expired", i))),
            "SsmdDrainStuck": self.each(lambda i: 0),
            "SsmdSavesNothing": rules["instance_model:ssmd_bytes_saved:ratio_rate5m"],
        }
