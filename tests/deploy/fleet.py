"""Two servers, a load on each that counts what it does, and a real Prometheus with the files of deploy/prometheus.

Processes listen on loopback, on ports that the kernel chooses, and end with the `with` block.
"""
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRAPE_MS = 250
SCRAPES = 60  # of each server, so that what rate() extrapolates is small; see predictions.py
DEADLINE_S = 120  # of everything that is waited for


def wait(what, condition):
    """The first value of condition() that is not false; it is asked again and again, never assumed."""
    end = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {DEADLINE_S} s")
        time.sleep(0.02)
    return value


class Server:
    """An ssmd-server and its load. `counts` is what the load has counted so far."""

    def __init__(self, stack, build, folder):
        self.started_after = time.time()
        log = stack.enter_context(open(folder / "server.log", "w"))
        self.process = stack.enter_context(ended(subprocess.Popen(
            [build / "service/ssmd-server", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--backend", "cpu",
             "--state-memory", "16M", "--lease-min-ms", "100", "--sweep-interval-ms", "20", "--step-timeout-max-ms", "600000",
             "--drain-timeout-ms", "0"], stdout=subprocess.PIPE, stderr=log, text=True)))
        line = self.process.stdout.readline()
        address, self.instance = re.fullmatch(r"ssmd-server listening on (\S+), metrics on (\S+)\n", line).groups()
        self.started_before = time.time()
        self.load = stack.enter_context(ended(subprocess.Popen(
            [build / "tests/deploy/scripted_load", address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)))
        self.counts = json.loads(self.load.stdout.readline())

    def do(self, command):
        self.load.stdin.write(command + "\n")
        self.load.stdin.flush()
        line = self.load.stdout.readline()
        if not line:
            raise RuntimeError(f"the load ended in '{command}'")
        self.counts = json.loads(line)

    def cpu_seconds(self):
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self):
        return int(pathlib.Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


class Prometheus:
    def __init__(self, stack, folder, instances):
        for name in ("prometheus.yml", "rules.yaml", "alerts.yaml"):
            shutil.copy(ROOT / "deploy/prometheus" / name, folder)
        config = (folder / "prometheus.yml").read_text()
        config, changed = re.subn(r"_interval: 15s", f"_interval: {SCRAPE_MS}ms", config)
        assert changed == 2
        (folder / "prometheus.yml").write_text(config)
        (folder / "targets.yaml").write_text(json.dumps([{"targets": instances}]))
        log = folder / "prometheus.log"
        stack.enter_context(ended(subprocess.Popen(
            ["/usr/bin/prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             "--web.listen-address=127.0.0.1:0"], stdout=subprocess.DEVNULL, stderr=stack.enter_context(open(log, "w")))))
        found = wait("Prometheus listens", lambda: re.search(r'msg="Listening on" address=(\S+)', log.read_text()))
        self.url = f"http://{found[1]}"
        wait("Prometheus is ready", self.is_ready)

    def is_ready(self):
        with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/-/ready", timeout=DEADLINE_S) as reply:
            return reply.status == 200

    def api(self, path, **parameters):
        data = urllib.parse.urlencode(parameters).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}", data, timeout=DEADLINE_S) as reply:
                return json.load(reply)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters}: {error.read().decode()}") from error

    def query(self, expression, at):
        """[(labels, value)] at a time."""
        return [(r["metric"], float(r["value"][1])) for r in self.api("query", query=expression, time=f"{at:.3f}")]

    def query_range(self, expression, start, end, step):
        """[(labels, [(time, value)])]."""
        return [(r["metric"], [(float(t), float(v)) for t, v in r["values"]])
                for r in self.api("query_range", query=expression, start=f"{start:.3f}", end=f"{end:.3f}", step=f"{step}")]

    def scrapes(self):
        """The number of good scrapes of each server."""
        return {labels["instance"]: int(value) for labels, value in self.query("count_over_time(ssmd_models[5m])", time.time())}

    def last_scrape(self):
        """When the server that was scraped longest ago was scraped last."""
        found = self.query('timestamp(ssmd_models{job="ssmd"})', time.time())
        return min((value for _, value in found), default=0)


@contextlib.contextmanager
def ended(process):
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Run:
    """The scripted run. After it `before` and `after` are each server's counts at the first scrape and at the end."""

    def __init__(self, stack, build, rounds=(6, 2)):
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.folder = folder
        self.servers = [Server(stack, build, folder) for _ in rounds]
        for server in self.servers:
            server.do("round")  # before the first scrape: every series exists then
        self.before = {s.instance: dict(s.counts) for s in self.servers}
        self.cpu_before = {s.instance: s.cpu_seconds() for s in self.servers}
        self.begun = time.time()
        self.prometheus = Prometheus(stack, folder, [s.instance for s in self.servers])
        self.wait_for_scrapes(1)
        self.scraped = time.time()
        self.wait_for_scrapes(5)
        for i in range(max(rounds)):
            for server, count in zip(self.servers, rounds):
                if i < count:
                    server.do("round")
            self.wait_for_scrapes(5 + (SCRAPES - 10) * (i + 1) // max(rounds))
        for server in self.servers:
            server.do("hold")
        self.after = {s.instance: dict(s.counts) for s in self.servers}
        self.wait_for_scrapes(SCRAPES)

    def wait_for_scrapes(self, count):
        """At least `count` of each server so far, and one that began after this call."""
        now = time.time()
        wait(f"{count} scrapes", lambda: self.prometheus.last_scrape() > now and
             len(found := self.prometheus.scrapes()) == len(self.servers) and min(found.values()) >= count)


def panels():
    """(dashboard, title, unit, legend, expression) of every target of every dashboard."""
    for file in sorted((ROOT / "deploy/grafana/dashboards").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                yield file.stem, panel["title"], panel["fieldConfig"]["defaults"]["unit"], target["legendFormat"], target["expr"]


def fill_in(expression, rate_interval):
    """What Grafana does with the variables, all selected."""
    return (expression.replace("$__rate_interval", rate_interval).replace("$instance", ".*").replace("$model", ".*"))


def render_legend(legend, labels):
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend)
