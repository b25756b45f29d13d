#!/usr/bin/python3
"""Evaluates every panel's, rule's and alert's expression through a real Prometheus and compares each with what the loads counted.

  live_test.py BUILD_FOLDER
"""
import contextlib
import operator
import pathlib
import re
import sys
import time

import yaml

import fleet
from predictions import Between, Predictions

# Panels whose prediction is a wide interval: times and memory, which no script can know.
WIDE = {"Duration of Verify", "Where a Verify spends its time", "Memory", "Uptime", "Duration of Verify, p99", "Processor",
        "Resident memory"}
COMPARISONS = {">": operator.gt, "<": operator.lt, "==": operator.eq}


def compare(where, found, expected):
    """Complaints (where, what) about {key: number} against {key: number or Between}."""
    for key in sorted(found.keys() - expected.keys()):
        yield where, f"{key} = {found[key]:g} was not predicted"
    for key, value in expected.items():
        value = value if isinstance(value, Between) else Between(value)
        if key not in found:
            yield where, f"{key} is missing, predicted {value}"
        elif found[key] not in value:
            yield where, f"{key} = {found[key]:.9g}, predicted {value}"


def series(results, name):
    """{name(labels): value}; two series of one name would hide one another."""
    found = {name(labels): value for labels, value in results}
    assert len(found) == len(results), results
    return found


def rules():
    for file in ("rules.yaml", "alerts.yaml"):
        for group in yaml.safe_load((fleet.ROOT / "deploy/prometheus" / file).read_text())["groups"]:
            yield from group["rules"]


def check_panels(ask, predictions):
    expected = predictions.panels()
    found = {}
    for dashboard, title, _, legend, expression in fleet.panels():
        of_panel = found.setdefault((dashboard, title), {})
        results = ask(fleet.fill_in(expression, "5m"))
        of_target = series(results, lambda labels, legend=legend: fleet.render_legend(legend, labels))
        assert not of_panel.keys() & of_target.keys(), title
        of_panel |= of_target
    assert found.keys() == {(d, t) for d in expected for t in expected[d]}, "each panel needs a prediction, and the reverse"
    for (dashboard, title), values in found.items():
        yield from compare(f"{dashboard}, {title}", values, expected[dashboard][title])


def check_rules(ask, predictions):
    by_instance = lambda labels: labels["instance"]
    expected, expected_alerts = predictions.rules(), predictions.alerts()
    described = list(rules())
    assert {r["record"] for r in described if "record" in r} == expected.keys()
    assert {r["alert"] for r in described if "alert" in r} == expected_alerts.keys()
    for rule in described:
        if "record" in rule:
            for expression in (rule["expr"], rule["record"]):
                yield from compare(expression, series(ask(expression), by_instance), expected[rule["record"]])
            continue
        left, comparison, limit = re.fullmatch(r"(.*) (>|<|==) ([0-9.]+)", rule["expr"]).groups()
        values = series(ask(left), by_instance)
        yield from compare(rule["alert"], values, expected_alerts[rule["alert"]])
        passes = {i: v for i, v in values.items() if COMPARISONS[comparison](v, float(limit))}
        yield from compare(rule["alert"] + " as a whole", series(ask(rule["expr"]), by_instance), passes)


def complaints(run):
    at = run.prometheus.last_scrape()
    ask = lambda expression: run.prometheus.query(expression, at)
    predictions = Predictions(run, at)
    assert at - run.begun < 290, "the run took longer than the range of the rates"
    yield from check_panels(ask, predictions)
    yield from check_rules(ask, predictions)


def blind_spots(run):
    """Panels and rules of which a tenth more would go unnoticed; there must be none."""
    at = run.prometheus.last_scrape()
    predictions = Predictions(run, at)
    ask = lambda expression: run.prometheus.query(f"({expression}) * 1.1 + 1e-6", at)
    noticed = {where for check in (check_panels, check_rules) for where, _ in check(ask, predictions)}
    every = {f"{dashboard}, {title}" for dashboard, title, *_ in fleet.panels() if title not in WIDE}
    every |= {rule["record"] for rule in rules() if "record" in rule and "seconds" not in rule["record"]}
    return every - noticed


def main(build):
    with contextlib.ExitStack() as stack:
        run = fleet.Run(stack, build)
        # Cancelled calls and workers that step down are counted a moment after the load has its answer. More than was
        # predicted never goes away by waiting.
        end = time.monotonic() + 30
        while (found := list(complaints(run))) and time.monotonic() < end:
            run.wait_for_scrapes(fleet.SCRAPES)
        for where, what in found:
            print(f"{where}: {what}")
        if blind := blind_spots(run):
            print("a tenth more would go unnoticed in:", *sorted(blind), sep="\n  ")
        if not found and not blind:
            print(f"{sum(1 for _ in fleet.panels())} panel expressions and {sum(1 for _ in rules())} rules show what the loads "
                  f"counted; {min(run.prometheus.scrapes().values())} scrapes")
        return 1 if found or blind else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
