"""deploy/kustomize and deploy/helm: valid, the same objects, and true to what deploy/README.md promises.

    build/deploy-tools/bin/python tests/manifests/manifests_test.py build/dev/service/ssmd-server [unittest arguments]
"""
import copy, os, re, sys, tempfile, unittest

import rendering
from rendering import BIN, CHART, DEPLOY, KUBERNETES, ROOT, TOPOLOGIES, find, helm, kustomize, output, tool, validate, workload

SERVER = sys.argv.pop(1)
# Of the form that is reached over the network; passed over as long as the server has no such settings.
SECURITY = ("tls-cert", "tls-key", "tls-client-ca", "tokens")


def renderings():
    """(what, objects), of each topology both ways."""
    for topology in TOPOLOGIES:
        yield f"kustomize {topology}", kustomize(topology)
        yield f"helm {topology}", helm(f"topology={topology}")


def pod_of(rendered):
    return workload(rendered)["spec"]["template"]["spec"]


def server_of(rendered):
    (server,) = pod_of(rendered)["containers"]
    return server


def conf_of(rendered):
    return find(rendered, "ConfigMap", "ssmd-config")["data"]["ssmd.conf"]


class Schemas(unittest.TestCase):
    def test_every_object_is_valid(self):
        variants = [("helm on the CPU", helm("topology=statefulset", "gpu.count=0", "autoscaling.enabled=false", "tls.clientCa=true")),
                    ("helm, all off", helm("monitoring.enabled=false", "dashboards.enabled=false", "networkPolicy.enabled=false"))]
        for what, rendered in [*renderings(), *variants]:
            for kubernetes in KUBERNETES:
                for thing in rendered:
                    with self.subTest(what, kubernetes=kubernetes, kind=thing["kind"], name=thing["metadata"]["name"]):
                        validate(thing, kubernetes)

    def test_a_mistake_is_noticed_in_every_kind(self):
        for what, rendered in renderings():
            for thing in rendered:
                with self.subTest(what, kind=thing["kind"]):
                    broken = copy.deepcopy(thing)
                    inner = broken.get("spec", broken)
                    inner["nonsense"] = 1
                    with self.assertRaises(Exception) as refused:
                        validate(broken, KUBERNETES[-1])
                    self.assertIn("nonsense", str(refused.exception))

    def test_the_chart_lints(self):
        for topology in TOPOLOGIES:
            output(BIN / "helm", "lint", "--strict", "--set", f"topology={topology}", CHART)

    def test_the_values_schema_refuses(self):
        for wrong in ("topology=deployment", "gpu.count=2", "gpus.count=1", "config.listen=0.0.0.0:1", "config.Bad_Key=1",
                      "drainSeconds=-1", "drainSeconds=soon", "socketFolder=run", "models.x=y"):
            with self.subTest(wrong):
                status, _, error = tool(BIN / "helm", "template", "ssmd", CHART, "--set", wrong)
                self.assertNotEqual(status, 0)
                self.assertIn("values don't meet the specifications of the schema", error)


class Same(unittest.TestCase):
    maxDiff = None

    def test_both_renderings_have_the_same_objects(self):
        for topology in TOPOLOGIES:
            by_kustomize = rendering.normalised(kustomize(topology))
            by_helm = rendering.normalised(helm(f"topology={topology}"))
            self.assertEqual(sorted(by_kustomize), sorted(by_helm))
            for key, thing in by_kustomize.items():
                with self.subTest(topology, object=key):
                    self.assertEqual(thing, by_helm[key])

    def test_one_version(self):
        version = re.search(r"project\(ssmd VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
        chart = rendering.objects((CHART / "Chart.yaml").read_text())[0]
        self.assertEqual((chart["version"], chart["appVersion"]), (version, version))
        self.assertEqual(set(re.findall(r"^ARG VERSION=(.*)$", (ROOT / "Dockerfile").read_text(), re.M)), {version})
        for what, rendered in renderings():
            with self.subTest(what):
                self.assertEqual(server_of(rendered)["image"], f"ssmd:{version}-cuda")

    def test_rules_and_dashboards_are_the_files(self):
        output(ROOT / "tools" / "wrap_rules", "--check")
        groups = [group for name in ("rules", "alerts")
                  for group in rendering.objects((DEPLOY / "prometheus" / f"{name}.yaml").read_text())[0]["groups"]]
        dashboards = {path.name: path.read_text() for path in (DEPLOY / "grafana" / "dashboards").glob("*.json")}
        models = {path.name: path.read_text() for path in (DEPLOY / "models").glob("*.txtpb")}
        for what, rendered in renderings():
            with self.subTest(what):
                self.assertEqual(find(rendered, "PrometheusRule")["spec"]["groups"], groups)
                self.assertEqual(find(rendered, "ConfigMap", "ssmd-dashboards")["data"], dashboards)
                self.assertEqual(find(rendered, "ConfigMap", "ssmd-models")["data"], models)


class Promises(unittest.TestCase):
    def each(self, check):
        for what, rendered in renderings():
            with self.subTest(what):
                check(rendered)

    def test_the_grace_period_holds_the_drain(self):
        def check(rendered):
            drain_s = int(dict(rendering.settings(conf_of(rendered)))["drain-timeout-ms"]) / 1000
            pre_stop_s = server_of(rendered).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            self.assertGreaterEqual(pod_of(rendered)["terminationGracePeriodSeconds"], pre_stop_s + drain_s + 20)
        self.each(check)
        check(helm("drainSeconds=3600"))

    def test_three_probes_apart(self):
        def check(rendered):
            server = server_of(rendered)
            paths = [server[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
            self.assertEqual(paths, ["/startupz", "/readyz", "/healthz"])
            ports = {port["name"]: port["containerPort"] for port in server["ports"]}
            self.assertEqual(ports["metrics"], 9464)
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                self.assertEqual(server[probe]["httpGet"]["port"], "metrics")
        self.each(check)

    def test_containers_may_do_little(self):
        def check(rendered):
            pod = pod_of(rendered)
            self.assertEqual(pod["securityContext"]["seccompProfile"], {"type": "RuntimeDefault"})
            self.assertTrue(pod["securityContext"]["runAsNonRoot"])
            self.assertFalse(pod["automountServiceAccountToken"])
            for container in pod["containers"] + pod.get("initContainers", []):
                security = container["securityContext"]
                self.assertTrue(security["readOnlyRootFilesystem"])
                self.assertFalse(security["allowPrivilegeEscalation"])
                self.assertEqual(security["capabilities"]["drop"], ["ALL"])
                if container["name"] != "socket-folder":
                    self.assertNotIn("add", security["capabilities"])
                    self.assertTrue(security.get("runAsNonRoot", True) and "runAsUser" not in security)
        self.each(check)

    def test_selectors_find_the_pods(self):
        def check(rendered):
            labels = workload(rendered)["spec"]["template"]["metadata"]["labels"]
            selectors = [workload(rendered)["spec"]["selector"]["matchLabels"],
                         find(rendered, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]]
            for thing in rendered:
                if thing["kind"] in ("PodMonitor", "PodDisruptionBudget"):
                    selectors.append(thing["spec"]["selector"]["matchLabels"])
                elif thing["kind"] == "Service":
                    selectors.append(thing["spec"]["selector"])
                    monitored = find(rendered, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
                    self.assertLessEqual(monitored.items(), thing["metadata"]["labels"].items())
            for selector in selectors:
                self.assertLessEqual(selector.items(), labels.items())
        self.each(check)

    def test_names_of_ports_exist(self):
        def check(rendered):
            server_ports = {port["name"] for port in server_of(rendered)["ports"]}
            for rule in find(rendered, "NetworkPolicy")["spec"]["ingress"]:
                self.assertLessEqual({port["port"] for port in rule["ports"]}, server_ports)
            for thing in rendered:
                if thing["kind"] == "Service":
                    self.assertLessEqual({port["targetPort"] for port in thing["spec"]["ports"]}, server_ports)
                elif thing["kind"] == "PodMonitor":
                    self.assertLessEqual({point["port"] for point in thing["spec"]["podMetricsEndpoints"]}, server_ports)
        self.each(check)

    def test_scraped_as_the_job_that_the_rules_ask_for(self):
        def check(rendered):
            (monitor,) = [o for o in rendered if o["kind"] in ("PodMonitor", "ServiceMonitor")]
            self.assertEqual(workload(rendered)["spec"]["template"]["metadata"]["labels"][monitor["spec"]["jobLabel"]], "ssmd")
        self.each(check)

    def test_the_server_takes_the_configuration(self):
        def check(rendered):
            conf = conf_of(rendered)
            if "--tls-cert" not in output(SERVER, "--help"):
                conf = "\n".join(line for line in conf.splitlines() if line.split(" ")[0] not in SECURITY)
            with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
                file.write(conf)
                file.flush()
                printed = rendering.settings(re.sub(r"\s+#.*", "", output(SERVER, "--config", file.name, "--print-config")))
            for setting in rendering.settings(conf):
                if setting[0] != "state-memory":  # printed in bytes
                    self.assertIn(setting, printed)
            mounts = {mount["mountPath"] for mount in server_of(rendered)["volumeMounts"]}
            for key, value in rendering.settings(conf_of(rendered)):
                if value.startswith("/") or value.startswith("unix:"):
                    folder = os.path.dirname(value.removeprefix("unix:"))
                    self.assertIn(folder, mounts, key)
                if key == "model":
                    self.assertIn(os.path.basename(value), find(rendered, "ConfigMap", "ssmd-models")["data"])
        self.each(check)

    def test_where_the_server_may_be_reached(self):
        for rendered in (kustomize("node-local"), helm("topology=node-local")):
            self.assertEqual([p["name"] for p in server_of(rendered)["ports"]], ["metrics"])
            self.assertNotIn("Service", [o["kind"] for o in rendered])
        for rendered in (kustomize("statefulset"), helm("topology=statefulset")):
            self.assertEqual(find(rendered, "Service")["spec"]["clusterIP"], "None")
            self.assertIn("not for production decoding", workload(rendered)["metadata"]["annotations"]["ssmd/use"])
            for setting in ("tls-cert", "tls-key", "tokens"):
                self.assertIn(setting, dict(rendering.settings(conf_of(rendered))))

    def test_a_gpu_or_none(self):
        self.each(lambda rendered: self.assertEqual(server_of(rendered)["resources"]["limits"]["nvidia.com/gpu"], 1))
        on_cpu = helm("gpu.count=0")
        self.assertNotIn("nvidia.com/gpu", server_of(on_cpu)["resources"]["limits"])
        self.assertTrue(server_of(on_cpu)["image"].endswith("-cpu"))
        self.assertEqual(dict(rendering.settings(conf_of(on_cpu)))["backend"], "cpu")


if __name__ == "__main__":
    unittest.main()
