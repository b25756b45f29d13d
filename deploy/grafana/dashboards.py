#!/usr/bin/python3
"""The three dashboards, as data. Writes dashboards/*.json beside this file; a test compares.

A panel is (title, unit, description, {legend: expression}). `$i` stands for the instance selector and `$m` for instance and
model; `$r` is the range of rates. Units are Grafana's names.
"""
import json
import pathlib
import sys

INSTANCE = 'job="ssmd",instance=~"$instance"'
MODEL = INSTANCE + ',model=~"$model"'
RANGE = "[$__rate_interval]"

MOVED = "sum(rate(ssmd_state_bytes_total{$m}$r))"
BASELINE = "sum(rate(ssmd_write_every_step_bytes_total{$m}$r))"
FAULTS = "INTERNAL|UNKNOWN|DATA_LOSS"

OVERVIEW = ("ssmd overview", "What an operator looks at first", [
    ("Servers up", "short", "Targets that Prometheus can scrape", {"up": "sum(up{$i})", "draining": "sum(ssmd_draining{$i})"}),
    ("Sessions and sequences", "short", "Open sessions; sequences that live",
     {"sessions": "sum(ssmd_sessions{$i})", "sequences": 'sum(ssmd_slots{$m,kind="sequences"})'}),
    ("Tokens per second", "short", "Tokens that entered the state, and tokens verified for them",
     {"accepted {{model}}": "sum by (model) (rate(ssmd_tokens_accepted_total{$m}$r))",
      "drafted {{model}}": "sum by (model) (rate(ssmd_tokens_drafted_total{$m}$r))"}),
    ("Steps per second by result", "short", "Expired: open longer than their timeout",
     {"{{result}}": "sum by (result) (rate(ssmd_steps_total{$m}$r))"}),
    ("Calls per second by method", "short", "Answered by a handler, whatever the code",
     {"{{method}}": "sum by (method) (rate(ssmd_rpcs_total{$i}$r)) > 0"}),
    ("Refused calls per second by code", "short", "ABORTED: stale versions and aborted steps. RESOURCE_EXHAUSTED: a limit",
     {"{{code}}": 'sum by (code) (rate(ssmd_rpcs_total{$i,code!="OK"}$r)) > 0'}),
    ("Duration of Verify", "s", "From the parsed request to the reply; quantiles are read off buckets",
     {"p50": 'histogram_quantile(0.5, sum by (le) (rate(ssmd_rpc_duration_seconds_bucket{$i,method="Verify"}$r)))',
      "p99": 'histogram_quantile(0.99, sum by (le) (rate(ssmd_rpc_duration_seconds_bucket{$i,method="Verify"}$r)))'}),
    ("Where a Verify spends its time", "s", "Mean of each phase",
     {"{{phase}}": "sum by (phase) (rate(ssmd_verify_phase_seconds_sum{$i}$r))"
                   " / sum by (phase) (rate(ssmd_verify_phase_seconds_count{$i}$r))"}),
    ("Verify queue", "short", "Calls that wait and that run, and how many may wait",
     {"waiting": "sum(ssmd_verify_queue_depth{$i})", "running": "sum(ssmd_verify_running{$i})",
      "may wait": "sum(ssmd_verify_queue_depth_max{$i})"}),
    ("Calls not waited for", "short", "Cancelled by the client or its deadline, a second",
     {"cancelled": "sum(rate(ssmd_rpcs_cancelled_total{$i}$r))"}),
    ("Memory", "bytes", "Pools of all models, what they may take, and the process as a whole",
     {"pools": "sum(ssmd_state_bytes_reserved{$i})", "limit": "sum(ssmd_state_bytes_max{$i})",
      "resident": "sum(ssmd_process_resident_bytes{$i})"}),
    ("Waiting requests", "bytes", "Memory of queued Verify requests", {"queued": "sum(ssmd_verify_queue_bytes{$i})"}),
])

STATE_ENGINE = ("ssmd state engine", "What the state engine moves, and what it saves", [
    ("State bandwidth by kind", "Bps", "Bytes of state that kernels moved, stacked; the line is an engine that writes the state every token",
     {"{{kind}}": "sum by (kind) (rate(ssmd_state_bytes_total{$m}$r))", "write every step": BASELINE}),
    ("Bytes saved", "percentunit", "Share of the write-every-step bytes that were not moved", {"saved": f"1 - {MOVED} / {BASELINE}"}),
    ("Bytes saved per second", "Bps", "Below zero: more was moved than a write-every-step engine moves", {"saved": f"{BASELINE} - {MOVED}"}),
    ("Flushes per second by reason", "short", "Fused: inside a verify. Background: ahead of time. Requested: FlushSequences",
     {"{{reason}}": "sum by (reason) (rate(ssmd_flushes_total{$m}$r))"}),
    ("Flushes per row", "percentunit", "Share of a committed step's rows whose checkpoint was folded; deferred: due but put off",
     {"folded": 'sum(rate(ssmd_flushes_total{$m,reason!="requested"}$r)) / sum(rate(ssmd_rows_committed_total{$m}$r))',
      "deferred": "sum(rate(ssmd_flushes_deferred_total{$m}$r)) / sum(rate(ssmd_rows_committed_total{$m}$r))"}),
    ("Ring occupancy", "percentunit", "Committed records over the window when a step is planned; above 100 % folds were put off",
     {"mean": "sum(rate(ssmd_ring_occupancy_ratio_sum{$m}$r)) / sum(rate(ssmd_ring_occupancy_ratio_count{$m}$r))",
      "p90": "histogram_quantile(0.9, sum by (le) (rate(ssmd_ring_occupancy_ratio_bucket{$m}$r)))"}),
    ("Acceptance length", "short", "Tokens a row of a committed step: verified and accepted",
     {"accepted {{model}}": "sum by (model) (rate(ssmd_tokens_accepted_total{$m}$r)) / sum by (model) (rate(ssmd_rows_committed_total{$m}$r))",
      "drafted {{model}}": "sum by (model) (rate(ssmd_tokens_drafted_total{$m}$r)) / sum by (model) (rate(ssmd_rows_committed_total{$m}$r))"}),
    ("Acceptance by position", "percentunit", "Share of rows that accepted the token at this position",
     {"token {{position}}": "sum by (position) (rate(ssmd_tokens_accepted_by_position_total{$m}$r))"
                      " / scalar(sum(rate(ssmd_rows_committed_total{$m}$r)))"}),
    ("Pages", "short", "Checkpoint pages by what holds them", {"{{kind}}": "sum by (kind) (ssmd_pages{$m})"}),
    ("Slots", "short", "Slots by what holds them", {"{{kind}}": "sum by (kind) (ssmd_slots{$m})"}),
    ("Steps, imports and streams that are open", "short", "Held: BeginSteps that wait for an open step of their stream",
     {"steps": "sum(ssmd_open_steps{$m})", "imports": "sum(ssmd_open_imports{$m})",
      "streams": "sum(ssmd_steps_streams{$i})", "held begins": "sum(ssmd_held_begins{$i})"}),
    ("Sequences moved per second", "short", "Without computing: rollbacks, forks, snapshots, imports, exports",
     {name: f"sum(rate(ssmd_{metric}_total{{$m}}$r))" for name, metric in
      (("rollbacks", "rollbacks"), ("forks", "forks"), ("snapshots", "snapshots_created"), ("imports", "imports"), ("exports", "exports"))}),
    ("Prefix lookups per second by result", "short", "Too long: only positions above the asked maximum",
     {"{{result}}": "sum by (result) (rate(ssmd_prefix_lookups_total{$i}$r))"}),
    ("Bad rows and stale requests per second", "short", "Poisoned: NaN, infinity or a positive log_alpha",
     {"poisoned rows": "sum(rate(ssmd_poisoned_rows_total{$m}$r))", "stale versions": "sum(rate(ssmd_stale_versions_total{$m}$r))"}),
    ("Steps planned and layers verified per second", "short", "Layers of committed and aborted steps alike",
     {"planned": "sum(rate(ssmd_steps_begun_total{$m}$r))", "layers": "sum(rate(ssmd_layers_verified_total{$m}$r))"}),
])

FLEET = ("ssmd fleet", "All servers side by side", [
    ("Up", "short", "1: Prometheus can scrape it", {"{{instance}}": "up{$i}"}),
    ("Uptime", "s", "Since the process started", {"{{instance}}": "time() - ssmd_process_start_time_seconds{$i}"}),
    ("Versions", "short", "Servers by version and backend", {"{{version}} {{backend}}": "count by (version, backend) (ssmd_build_info{$i})"}),
    ("Draining", "short", "1: stopping, takes nothing new", {"{{instance}}": "ssmd_draining{$i}"}),
    ("Accepted tokens per second", "short", "Tokens that entered the state",
     {"{{instance}}": "sum by (instance) (rate(ssmd_tokens_accepted_total{$m}$r))"}),
    ("Duration of Verify, p99", "s", "From the parsed request to the reply",
     {"{{instance}}": 'histogram_quantile(0.99, sum by (instance, le) (rate(ssmd_rpc_duration_seconds_bucket{$i,method="Verify"}$r)))'}),
    ("Faults per second", "short", "INTERNAL, UNKNOWN and DATA_LOSS",
     {"{{instance}}": f'sum by (instance) (rate(ssmd_rpcs_total{{$i,code=~"{FAULTS}"}}$r))'}),
    ("Calls over a limit", "percentunit", "Share of calls answered RESOURCE_EXHAUSTED",
     {"{{instance}}": 'sum by (instance) (rate(ssmd_rpcs_total{$i,code="RESOURCE_EXHAUSTED"}$r))'
                      " / sum by (instance) (rate(ssmd_rpcs_total{$i}$r))"}),
    ("Free pages", "percentunit", "Share of checkpoint pages that nobody holds",
     {"{{instance}}": 'sum by (instance) (ssmd_pages{$m,kind="free"}) / sum by (instance) (ssmd_pages{$m})'}),
    ("Sequences", "percentunit", "Live ones, of sequences_max",
     {"{{instance}}": 'sum by (instance) (ssmd_slots{$m,kind="sequences"}) / sum by (instance) (ssmd_sequences_max{$m})'}),
    ("Snapshots", "percentunit", "Stored ones, of snapshots_max",
     {"{{instance}}": 'sum by (instance) (ssmd_slots{$m,kind="snapshots"}) / sum by (instance) (ssmd_snapshots_max{$m})'}),
    ("Sessions", "percentunit", "Open ones, of --sessions-max", {"{{instance}}": "ssmd_sessions{$i} / ssmd_sessions_max{$i}"}),
    ("Sessions opened, expired and kept", "short", "A second, evicted ones too; kept: ended, with sequences that wait for adoption",
     {"opened {{instance}}": "rate(ssmd_sessions_opened_total{$i}$r)",
      "expired {{instance}}": "rate(ssmd_lease_expirations_total{$i}$r)",
      "evicted {{instance}}": "rate(ssmd_sessions_evicted_total{$i}$r)", "kept {{instance}}": "ssmd_sessions_kept{$i}"}),
    ("Bytes saved", "percentunit", "Share of the write-every-step bytes that were not moved",
     {"{{instance}}": "1 - sum by (instance) (rate(ssmd_state_bytes_total{$m}$r))"
                      " / sum by (instance) (rate(ssmd_write_every_step_bytes_total{$m}$r))"}),
    ("Log messages held back", "short", "A second, above the limit of their kind",
     {"{{instance}}": "sum by (instance) (rate(ssmd_log_messages_suppressed_total{$i}$r))"}),
    ("Processor", "short", "Cores in use", {"{{instance}}": "rate(ssmd_process_cpu_seconds_total{$i}$r)"}),
    ("Resident memory", "bytes", "Of the process", {"{{instance}}": "ssmd_process_resident_bytes{$i}"}),
    ("Models", "short", "Registered ones", {"{{instance}}": "ssmd_models{$i}"}),
    ("Memory of models", "bytes", "Pools of each model",
     {"{{instance}} {{model}}": "sum by (instance, model) (ssmd_model_state_bytes_reserved{$m})"}),
])

DASHBOARDS = {"overview": OVERVIEW, "state-engine": STATE_ENGINE, "fleet": FLEET}


def expand(expression):
    return expression.replace("$m", MODEL).replace("$instance", "\0").replace("$i", INSTANCE).replace("\0", "$instance").replace("$r", RANGE)


def panel(number, title, unit, description, targets):
    stacked = title == "State bandwidth by kind"
    return {
        "id": number + 1, "type": "timeseries", "title": title, "description": description,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": 8 * (number % 3), "y": 8 * (number // 3), "w": 8, "h": 8},
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0 if title != "Bytes saved per second" and title != "Bytes saved" else None,
                         "custom": {"fillOpacity": 20 if stacked else 5, "stacking": {"mode": "normal" if stacked else "none"}}},
            "overrides": [{"matcher": {"id": "byName", "options": "write every step"},
                           "properties": [{"id": "custom.stacking", "value": {"mode": "none"}},
                                          {"id": "custom.fillOpacity", "value": 0}]}] if stacked else []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [{"refId": chr(ord("A") + i), "expr": expand(expression), "legendFormat": legend}
                    for i, (legend, expression) in enumerate(targets.items())],
    }


def variable(name, query):
    return {"name": name, "type": "query", "label": name, "query": query, "refresh": 2, "multi": True, "includeAll": True,
            "allValue": ".*", "current": {"text": "All", "value": "$__all"},
            "datasource": {"type": "prometheus", "uid": "${datasource}"}}


def dashboard(name):
    title, description, panels = DASHBOARDS[name]
    return {
        "uid": f"ssmd-{name}", "title": title, "description": description, "tags": ["ssmd"], "schemaVersion": 38,
        "editable": False, "refresh": "10s", "time": {"from": "now-1h", "to": "now"}, "timezone": "utc",
        "templating": {"list": [
            {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "datasource"},
            variable("instance", 'label_values(ssmd_build_info{job="ssmd"}, instance)'),
            variable("model", 'label_values(ssmd_steps_begun_total{job="ssmd",instance=~"$instance"}, model)')]},
        "panels": [panel(i, *described) for i, described in enumerate(panels)],
    }


def text(name):
    return json.dumps(dashboard(name), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "dashboards"
    for each in DASHBOARDS:
        (folder / f"{each}.json").write_text(text(each))
