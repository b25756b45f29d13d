"""Renders deploy/kustomize and deploy/helm, checks objects against schemas, and makes the two renderings comparable."""
import functools, pathlib, re, subprocess, sys

import jsonschema, kubernetes_validate, yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
BIN = pathlib.Path(sys.prefix) / "bin"
CHART = DEPLOY / "helm" / "ssmd"
TOPOLOGIES = ("node-local", "statefulset")
# The oldest release that the chart allows, and the newest that the validator knows.
KUBERNETES = ("1.30", "1.37")


def tool(*command):
    """(exit status, stdout, stderr)."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def output(*command):
    status, out, err = tool(*command)
    if status != 0:
        raise AssertionError(f"{' '.join(map(str, command))}: exit status {status}\n{err}")
    return out


def objects(text):
    return [document for document in yaml.safe_load_all(text) if document]


@functools.cache
def kustomize(overlay):
    return objects(output(BIN / "kubectl", "kustomize", DEPLOY / "kustomize" / "overlays" / overlay))


@functools.cache
def helm(*settings):
    flags = [word for setting in settings for word in ("--set", setting)]
    return objects(output(BIN / "helm", "template", "ssmd", CHART, "--namespace", "ssmd", *flags))


def find(rendered, kind, name="ssmd"):
    (found,) = [o for o in rendered if o["kind"] == kind and re.fullmatch(name + r"(-[0-9a-z]{10})?", o["metadata"]["name"])]
    return found


def workload(rendered):
    (found,) = [o for o in rendered if o["kind"] in ("DaemonSet", "StatefulSet")]
    return found


def settings(text):
    """The lines of an ssmd.conf as sorted (key, value) pairs."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return sorted(tuple(part.strip() for part in line.split("=", 1)) for line in lines)


@functools.cache
def operator_validator(kind):
    """Of the Prometheus operator's kinds; closed, so that a misspelt field is a mistake."""
    from cloudcoil.models.prometheus_operator import v1 as prometheus_operator  # two seconds

    def close(node):
        if isinstance(node, dict):
            if "properties" in node:
                node.setdefault("additionalProperties", False)
            if str(node.get("pattern", "")).startswith("^(?i)"):
                node["pattern"] = "(?i)^" + node["pattern"].removeprefix("^(?i)")  # Go's spelling; Python wants flags first
            for child in node.values():
                close(child)
        elif isinstance(node, list):
            for child in node:
                close(child)

    schema = getattr(prometheus_operator, kind).model_json_schema(by_alias=True)
    close(schema)
    return jsonschema.Draft202012Validator(schema)


def validate(thing, kubernetes):
    """Raises when the API server would refuse the object or drop a field of it."""
    if thing["apiVersion"] == "monitoring.coreos.com/v1":
        operator_validator(thing["kind"]).validate(thing)
    else:
        kubernetes_validate.validate(thing, kubernetes, strict=True)


def normalised(rendered):
    """{(kind, name): object} without what the tools add of their own: hashes, and labels of a chart."""
    own_labels = ("helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version")
    hashed = {o["metadata"]["name"]: re.sub(r"-[0-9a-z]{10}$", "", o["metadata"]["name"])
              for o in rendered if o["kind"] == "ConfigMap"}

    def clean(node):
        if isinstance(node, dict):
            return {key: clean(value) for key, value in node.items()
                    if key not in own_labels and key != "checksum/config" and key != "imagePullPolicy"}
        if isinstance(node, list):
            return [clean(child) for child in node]
        return hashed.get(node, node) if isinstance(node, str) else node

    found = {}
    for thing in map(clean, rendered):
        if "ssmd.conf" in thing.get("data", {}):
            thing["data"]["ssmd.conf"] = settings(thing["data"]["ssmd.conf"])
        for metadata in (thing["metadata"], thing.get("spec", {}).get("template", {}).get("metadata", {})):
            if metadata.get("annotations") == {}:
                del metadata["annotations"]
        key = (thing["kind"], thing["metadata"]["name"])
        assert key not in found, key
        found[key] = thing
    return found
