"""Writes the Helm chart deploy/helm/qgpu from the manifests in deploy/kubernetes: both install the same objects.

    python deploy/chart.py          # after every change of a manifest

A manifest is a template whose default is its text: a line that ends in ``# chart: NAME`` has its value from
``.Values.NAME``, a line ``# chart: more NAME`` is for the items of that list, and the words in WORDS come from Helm,
except in a line ``# chart: fixed``.
``values.yaml`` gets the manifests' own values, so the chart renders what kustomize builds unless somebody sets others.
Values in REQUIRED are nobody's but the user's: Helm refuses to render without them.
The Prometheus rules are written here too, for both.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import qgpu

ROOT = Path(__file__).resolve().parent.parent
MANIFESTS, CHART = ROOT / "deploy/kubernetes", ROOT / "deploy/helm/qgpu"
RULES = ROOT / "dashboards/qgpu.rules.yml"

_DRA, _MONITORING, _SECCOMP = 'eq .Values.mode "dra"', ".Values.monitoring", ".Values.seccomp"
#: The manifests in the chart, each with the condition under which Helm renders it.
TEMPLATES = {
    "driver/driver.yaml": "",
    "pods/pods.yaml": "",
    "rbac.yaml": _DRA,
    "classes.yaml": _DRA,
    "admission.yaml": _DRA,
    "components/seccomp/profile.yaml": _SECCOMP,
    "components/monitoring/service.yaml": _MONITORING,
    "components/monitoring/rules.yaml": _MONITORING,
}
#: Words in manifests that Helm knows better.
WORDS = {"qgpu-system": ".Release.Namespace", "/var/lib/kubelet": ".Values.kubeletDir"}
#: What values.yaml says about each value: those of marked lines, then those that only the chart has.
VALUES = {
    "image": "required: the driver's image, which you build: docs/kubernetes.md",
    "imagePullPolicy": "",
    "imagePullSecrets": "names of secrets for the image's registry: [{name: ...}]",
    "mode": "dra, or device-plugin for clusters without resource.k8s.io/v1",
    "nodeSelector": "which nodes run qgpud",
    "tolerations": "",
    "resources": "",
}
CHART_ONLY = {
    "options": ("[]", "more options of the mode, such as --reserve=1GiB: qgpu-k8s dra --help"),
    "kubeletDir": ("/var/lib/kubelet", "the kubelet's folder on the nodes"),
    "seccomp": ("false", "nodes on plane seccomp: give pods its profile; Kubernetes 1.36 or newer"),
    "monitoring": ("false", "ServiceMonitor, rules and dashboard; needs the Prometheus operator"),
}
#: What Helm says where a value is missing.
REQUIRED = {
    "image": "image: name the driver's image with --set image=NAME; the project publishes none, so build it (podman "
    "build --file deploy/Containerfile --tag NAME .), then push it or import it on each node: docs/kubernetes.md"
}
_MARK = re.compile(r"^(\s*(?:- )?(?:\w+: )?)(\S.*) # chart: (?!fixed)(\w+)$", re.MULTILINE)
_FIXED = re.compile(r" # chart: fixed$")
_MORE = re.compile(r"^( *)# chart: more (\w+)$", re.MULTILINE)
_HEADER = "# Written by deploy/chart.py from {}; change that file.\n"


def files() -> Iterator[tuple[Path, str]]:
    """Yield every generated file with its content."""
    yield MANIFESTS / "components/monitoring/rules.yaml", rules()
    for name, condition in TEMPLATES.items():
        text = rules() if name.endswith("rules.yaml") else (MANIFESTS / name).read_text()
        yield CHART / "templates" / Path(name).name, template(name, text, condition)
    yield CHART / "templates/dashboard.yaml", dashboard()
    yield CHART / "values.yaml", values()
    yield CHART / "Chart.yaml", chart()


def rules() -> str:
    """Return the alerts as the Prometheus operator reads them."""
    body = "".join(f"  {line}" for line in RULES.read_text().splitlines(keepends=True) if not line.startswith("#"))
    return (
        _HEADER.format("dashboards/qgpu.rules.yml")
        + "apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: qgpu\n"
        + f"  namespace: qgpu-system\n  labels:\n    app.kubernetes.io/name: qgpu\nspec:\n{body}"
    )


def template(name: str, text: str, condition: str) -> str:
    """Return a manifest as a template of the chart."""
    body = re.sub(r"\{\{|\}\}", lambda braces: f'{{{{ "{braces.group()}" }}}}', text)
    body = _MARK.sub(lambda mark: f"{mark[1]}{{{{ toJson {_value(mark[3])} }}}}", body)
    body = _MORE.sub(r"\1{{- range .Values.\2 }}\n\1- {{ toJson . }}\n\1{{- end }}", body)
    body = "".join(_words(line) for line in body.splitlines(keepends=True))
    if condition:
        body = f"{{{{- if {condition} }}}}\n{body}{{{{- end }}}}\n"
    return _HEADER.format(f"deploy/kubernetes/{name}") + body


def _value(name: str) -> str:
    """Return a value as a template writes it."""
    return f'(required "{REQUIRED[name]}" .Values.{name})' if name in REQUIRED else f".Values.{name}"


def _words(line: str) -> str:
    if _FIXED.search(line):
        return _FIXED.sub("", line)
    for word, value in WORDS.items():
        line = line.replace(word, f"{{{{ {value} }}}}")
    return line


def dashboard() -> str:
    """Return the template of the ConfigMap that dashboards/kustomization.yaml generates for kustomize."""
    return (
        _HEADER.format("deploy/chart.py")
        + f"{{{{- if {_MONITORING} }}}}\napiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: qgpu-dashboard\n"
        + "  namespace: {{ .Release.Namespace }}\n  labels:\n    app.kubernetes.io/name: qgpu\n"
        + '    grafana_dashboard: "1"\ndata:\n{{ (.Files.Glob "files/qgpu.json").AsConfig | indent 2 }}\n{{- end }}\n'
    )


def values() -> str:
    """Return the chart's values, with what the manifests say."""
    marked = {name: value for path in TEMPLATES for _, value, name in _MARK.findall(_source(path))}
    if marked.keys() != VALUES.keys():
        raise SystemExit(f"VALUES and the marks of the manifests differ: {sorted(marked.keys() ^ VALUES.keys())}")
    lines = [_line(name, '""' if name in REQUIRED else marked[name], about) for name, about in VALUES.items()]
    lines += [_line(name, value, about) for name, (value, about) in CHART_ONLY.items()]
    return _HEADER.format("deploy/kubernetes") + "".join(lines)


def chart() -> str:
    """Return the chart's description."""
    return (
        _HEADER.format("deploy/chart.py")
        + f'apiVersion: v2\nname: qgpu\nversion: {qgpu.__version__}\nappVersion: "{qgpu.__version__}"\n'
        + "description: Share NVIDIA GPUs among pods by policy; the driver for nodes that run qgpud\n"
        + "type: application\nkubeVersion: '>=1.30.0-0'\n"
    )


def _source(name: str) -> str:
    path = MANIFESTS / name
    return path.read_text() if path.exists() else ""


def _line(name: str, value: str, about: str) -> str:
    return f"{name}: {value}" + (f" # {about}" if about else "") + "\n"


def main() -> None:
    """Write the files that are out of date, and name them."""
    for path, text in files():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
