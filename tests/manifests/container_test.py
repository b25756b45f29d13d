"""Dockerfile and compose.yaml: linted, and consistent with the repository. `make container-check` carries out the former.

    build/deploy-tools/bin/python tests/manifests/container_test.py
"""
import re, unittest

import compose_spec, yaml

from rendering import BIN, ROOT, kustomize, output, workload

DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = (ROOT / "compose.yaml").read_text()
STAGES = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.M)


class Dockerfile(unittest.TestCase):
    def test_lints(self):
        output(BIN / "hadolint", "--failure-threshold", "info", ROOT / "Dockerfile")

    def test_images_run_as_the_user_of_the_pods(self):
        users = re.findall(r"^USER (\S+)$", DOCKERFILE, re.M)
        pod = workload(kustomize("node-local"))["spec"]["template"]["spec"]["securityContext"]
        self.assertEqual(set(users), {f"{pod['runAsUser']}:{pod['runAsGroup']}"})
        self.assertEqual(len(users), 2)  # cpu, which demo stands on, and cuda
        self.assertIn(f"--uid {pod['runAsUser']} ", (ROOT / "deploy/container/runtime.sh").read_text())

    def test_what_it_copies_is_in_the_repository(self):
        for source in re.findall(r"^COPY (?!--from)(\S+) ", DOCKERFILE, re.M):
            self.assertTrue((ROOT / source).exists(), source)
        for script in re.findall(r"^RUN (?!--)(\S+)", DOCKERFILE, re.M):
            self.assertTrue((ROOT / script).is_file(), script)

    def test_labels_and_a_health_check(self):
        for label in ("title", "description", "version", "revision", "base.name"):
            self.assertEqual(DOCKERFILE.count(f"org.opencontainers.image.{label}="), 2, label)
        self.assertEqual(DOCKERFILE.count('CMD ["healthcheck", "/healthz"]'), 2)


class Compose(unittest.TestCase):
    def test_is_a_compose_file(self):
        compose_spec.PyCompose.from_yaml(COMPOSE)
        with self.assertRaises(Exception):
            compose_spec.PyCompose.from_yaml(COMPOSE.replace("stop_grace_period:", "stop_grace_perod:"))

    def test_names_what_exists(self):
        compose = yaml.safe_load(COMPOSE)
        for name, service in compose["services"].items():
            with self.subTest(name):
                if "build" in service:
                    self.assertIn(service["build"]["target"], STAGES)
                for volume in service.get("volumes", []):
                    source = volume.split(":")[0]
                    self.assertTrue((ROOT / source).exists() if source.startswith(".") else source in compose["volumes"], source)
                for port in service.get("ports", []):
                    self.assertTrue(port.startswith("127.0.0.1:"), port)
                self.assertRegex(service["image"], r"^[a-z/]+:[v0-9][A-Za-z0-9.-]+$")  # a tag, and no registry's host


if __name__ == "__main__":
    unittest.main()
