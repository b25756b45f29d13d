#!/usr/bin/python3
"""What can be said of deploy/prometheus, deploy/grafana and deploy/runbooks without running a server."""
import pathlib
import re
import subprocess
import sys
import unittest

import yaml

import fleet

DEPLOY = fleet.ROOT / "deploy"
sys.path.insert(0, str(DEPLOY / "grafana"))
sys.dont_write_bytecode = True
import dashboards  # noqa: E402

PROMETHEUS = DEPLOY / "prometheus"


def rules(file):
    return [rule for group in yaml.safe_load((PROMETHEUS / file).read_text())["groups"] for rule in group["rules"]]


def expressions():
    yield from (expression for *_, expression in fleet.panels())
    yield from (rule["expr"] for file in ("rules.yaml", "alerts.yaml") for rule in rules(file))


class Deploy(unittest.TestCase):
    def promtool(self, *arguments):
        done = subprocess.run(["/usr/bin/promtool", *arguments], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_promtool(self):
        self.promtool("check", "rules", str(PROMETHEUS / "rules.yaml"), str(PROMETHEUS / "alerts.yaml"))
        self.promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
        self.promtool("test", "rules", str(fleet.ROOT / "tests/deploy/alerts_test.yaml"))

    def test_dashboards_are_what_their_description_writes(self):
        files = {file.stem: file.read_text() for file in (DEPLOY / "grafana/dashboards").glob("*.json")}
        self.assertEqual(files.keys(), dashboards.DASHBOARDS.keys())
        for name, text in files.items():
            self.assertEqual(text, dashboards.text(name), "run: deploy/grafana/dashboards.py")

    def test_every_family_is_shown_and_nothing_else(self):
        families = set(re.findall(r"^\| `(ssmd_\w+)`", (fleet.ROOT / "service/METRICS.md").read_text(), re.M))
        records = {rule["record"] for rule in rules("rules.yaml")}
        used, recorded = set(), set()
        for expression in expressions():
            names = re.findall(r"(?<![\w:])[a-z_]+:[\w:]+", expression)  # level:metric:operation
            recorded.update(names)
            for name in names:
                expression = expression.replace(name, "")
            for name in re.findall(r"\bssmd_\w+", expression):
                used.add(name if name in families else re.sub(r"_(bucket|sum|count)$", "", name))
        self.assertEqual(used, families)
        self.assertEqual(recorded - records, set())

    def test_every_alert_has_a_runbook_and_a_test(self):
        tested = (fleet.ROOT / "tests/deploy/alerts_test.yaml").read_text()
        alerts = {rule["alert"]: rule for rule in rules("alerts.yaml")}
        self.assertEqual({file.stem for file in (DEPLOY / "runbooks").glob("*.md")}, alerts.keys())
        for name, rule in alerts.items():
            runbook = fleet.ROOT / rule["annotations"]["runbook"]
            self.assertEqual(runbook.name, f"{name}.md")
            text = runbook.read_text()
            head = f"# {name}\n\n`{rule['expr']}` for {rule['for']}; {rule['labels']['severity']}.\n"
            self.assertEqual(text[:len(head)], head)
            sections = ["## What it means", "## Where to look", "## What to do"]
            self.assertEqual(re.findall(r"^## .*", text, re.M), sections)
            for section in text.split("\n## ")[1:]:
                self.assertGreater(len(section.partition("\n")[2].strip()), 30, f"{name}: {section}")
            self.assertIn(f'alertname="{name}"', tested.replace("|", '"alertname="'))

    def test_runbooks_name_flags_and_alerts_that_exist(self):
        help_text = subprocess.run([SERVER, "--help"], capture_output=True, text=True, check=True).stdout
        alerts = {rule["alert"] for rule in rules("alerts.yaml")}
        for file in (DEPLOY / "runbooks").glob("*.md"):
            text = file.read_text().replace("--previous", "")  # kubectl's
            for flag in re.findall(r"--[a-z-]+", text):
                self.assertIn(flag + " ", help_text, file.name)
            for alert in re.findall(r"\bSsmd\w+", text):
                self.assertIn(alert, alerts, file.name)


if __name__ == "__main__":
    SERVER = sys.argv.pop(1)  # the ssmd-server binary
    unittest.main()
