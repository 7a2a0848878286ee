"""The Grafana dashboard as a list of panels. This writes dashboards/qgpu.json.

    python dashboards/dashboard.py

From top to bottom it answers: is anything wrong, and is the card used; who gets what of what was promised, now; then,
host by host and card by card, who used it; what sharing costs, memory and online latency. The rest, for whoever looks
for a cause, is folded away. Every series is the daemon's own (qgpu/metrics/native.py); the tests ask a real Prometheus
each of these questions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("qgpu.json")
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}

#: What a query looks at: pGPUs, pods on pGPUs, and pods where no pGPU is known.
GPU = '{instance=~"$instance", gpu=~"$gpu"}'
POD = '{instance=~"$instance", gpu=~"$gpu", namespace=~"$namespace", pod=~"$pod"}'
REFUSED = '{instance=~"$instance", namespace=~"$namespace", pod=~"$pod"}'


def _rate(counter: str) -> str:
    return f"rate({counter}[$__rate_interval])"


_SHARE = _rate(f"qgpu_pod_gpu_seconds_total{POD}")
#: A pod on a pGPU. Where pod is Kubernetes' name, two containers may have it, and qgpu_pod tells them apart; elsewhere
#: there is no qgpu_pod (docs/metrics.md).
_OF = "on (instance, gpu, pod, qgpu_pod)"
_GOT = f"{_SHARE} / {_OF} group_left qgpu_pod_cores_quota_ratio{POD}"
#: The daemon says so of its last seconds; the share is of a minute. Both must agree.
_WAITS = f'({_GOT}) < 1 and {_OF} qgpu_pod_below_quota{POD[:-1]}, reason="waits"}}'

#: Colours from a value on: green while all is well.
BAD_FROM_1 = ((None, "green"), (1, "red"))
FULL = ((None, "green"), (0.9, "orange"), (0.98, "red"))
PLAIN = ((None, "blue"),)

#: Pods outside Kubernetes have no container, which Grafana leaves out.
_NAME = "{{pod}} {{container}}"
_POD_NAME = f"{_NAME} on {{{{gpu}}}}"


@dataclass(frozen=True, slots=True)
class Query:
    """A question to Prometheus, and how its answers are named and drawn.

    A limit is a dashed line in the colour of the series of the same name, and left out of legend and tooltip.
    """

    expression: str
    name: str = ""
    limit: bool = False
    colour: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: ``kind`` is Grafana's type, ``size`` its width (of 24) and height."""

    title: str
    about: str
    kind: str
    size: tuple[int, int]
    queries: tuple[Query, ...]
    unit: str = "short"
    steps: tuple[tuple[float | None, str], ...] = PLAIN
    most: float | None = None
    stacked: bool = False
    signed: bool = False
    #: Repeated for each pGPU of a host.
    each_gpu: bool = False
    #: The panel's text while it has no data.
    nothing: str = ""


def _stat(title: str, about: str, expression: str, unit: str = "short", **more: Any) -> Panel:
    return Panel(title, about, "stat", (4, 4), (Query(expression),), unit, **more)


def _graph(title: str, about: str, *queries: Query, unit: str = "short", height: int = 8, **more: Any) -> Panel:
    return Panel(title, about, "timeseries", (12, height), queries, unit, **more)


PANELS = (
    _stat(
        "Problems",
        "pGPUs whose plane fails, and hosts whose daemon does not answer. Their pods run ungated.",
        f"(sum(qgpu_gpu_problem{GPU}) or vector(0)) "
        '+ (count(up{job=~"qgpu.*", instance=~"$instance"} == 0) or vector(0))',
        steps=BAD_FROM_1,
    ),
    _stat(
        "Pods below quota",
        "Busy pods that wait for part of their quota. Those that ask for less are not counted.",
        f"count({_WAITS}) or vector(0)",
        steps=BAD_FROM_1,
    ),
    _stat(
        "GPU time used",
        "The time in which a pod was on the engine.",
        f"avg(qgpu_gpu_engine_active_ratio{GPU})",
        "percentunit",
        most=1,
    ),
    _stat(
        "Utilization",
        "NVML's: the time in which any kernel ran.",
        f"avg(qgpu_gpu_utilization_ratio{GPU})",
        "percentunit",
        most=1,
    ),
    _stat(
        "Memory held",
        "What pods hold of the cards' memory.",
        f"sum(qgpu_gpu_memory_used_bytes{GPU}) / sum(qgpu_gpu_memory_total_bytes{GPU})",
        "percentunit",
        most=1,
        steps=FULL,
    ),
    _stat(
        "Refused in an hour",
        "Allocations over a limit, and driver calls that would have changed a share.",
        f"(sum(increase(qgpu_pod_calls_denied_total{REFUSED}[1h])) or vector(0)) "
        f"+ (sum(increase(qgpu_pod_memory_denied_total{REFUSED}[1h])) or vector(0))",
        steps=((None, "green"), (1, "orange")),
    ),
    Panel(
        "Got, of its quota",
        "100 % is the quota. Above it, idle time was lent. Red: the pod waits for the rest. Blue below 100 %: it asks "
        "for less.",
        "bargauge",
        (12, 9),
        (
            Query(_WAITS, f"waits: {_POD_NAME}", colour="red"),
            Query(f"({_GOT}) unless {_OF} ({_WAITS})", _POD_NAME),
        ),
        "percentunit",
        most=1.5,
        nothing="No pod has a quota",
    ),
    Panel(
        "Memory held, of its limit",
        "At 100 % the next allocation is refused.",
        "bargauge",
        (12, 9),
        (Query(f"qgpu_pod_memory_used_bytes{POD} / {_OF} group_left qgpu_pod_memory_limit_bytes{POD}", _POD_NAME),),
        "percentunit",
        steps=FULL,
        most=1,
        nothing="No pod has a limit",
    ),
)

#: For each host; each of them for each of its pGPUs.
CARDS = (
    Panel(
        "pGPU $gpu: who uses it",
        "True GPU time of each pod, from the hardware's context switches. Dashed: NVML's utilization, the time in "
        "which a kernel ran. Where it is lower, pods hold the GPU while they wait for their own host code.",
        "timeseries",
        (24, 11),
        (
            Query(_SHARE, _NAME),
            Query(f"qgpu_gpu_utilization_ratio{GPU}", "utilization of {{gpu}}", limit=True, colour="text"),
        ),
        "percentunit",
        stacked=True,
        each_gpu=True,
    ),
    Panel(
        "pGPU $gpu: share and quota (dashed)",
        "Above its quota a pod uses what others leave. Below it, it waits or asks for less: see the bars.",
        "timeseries",
        (24, 8),
        (Query(_SHARE, _NAME), Query(f"qgpu_pod_cores_quota_ratio{POD}", _NAME, limit=True)),
        "percentunit",
        each_gpu=True,
    ),
)

COSTS = (
    _graph(
        "Gate closed",
        "How much of the time each pod was kept off the GPU.",
        Query(_rate(f"qgpu_pod_throttled_seconds_total{POD}"), _POD_NAME),
        unit="percentunit",
        most=1,
        height=7,
    ),
    _graph(
        "Lost to switches",
        "GPU time that switches between pods took, estimated by the card's model.",
        Query(f"sum by (instance, gpu) ({_rate(f'qgpu_pod_switch_seconds_total{POD}')})", "{{instance}} {{gpu}}"),
        unit="percentunit",
        height=7,
    ),
    _graph(
        "Memory held by each pod",
        "The bars above show how much of its limit that is.",
        Query(f"qgpu_pod_memory_used_bytes{POD}", _POD_NAME),
        unit="bytes",
        stacked=True,
    ),
    _graph(
        "Online pods: what sharing should add to their p99",
        "By the slices in force and the card's measured table; dashed: the latency target. It is not measured: nobody "
        "outside a program sees how long its work waited.",
        Query(f"qgpu_pod_expected_wait_p99_seconds{POD}", _POD_NAME),
        Query(f"qgpu_pod_latency_target_seconds{POD}", _POD_NAME, limit=True),
        unit="s",
        nothing="No online pod",
    ),
)

#: Folded away: for whoever looks for a cause.
CAUSES = (
    _graph(
        "Refused",
        "Allocations over the memory limit; driver calls that would have changed the share.",
        Query(f"increase(qgpu_pod_memory_denied_total{REFUSED}[$__rate_interval])", f"{_NAME}: memory"),
        Query(f"increase(qgpu_pod_calls_denied_total{REFUSED}[$__rate_interval])", f"{_NAME}: calls"),
        nothing="Nothing was refused",
    ),
    _graph(
        "Switches and preemptions",
        "A preemption is a switch from an offline pod straight to an online one.",
        Query(_rate(f"qgpu_pod_switches_total{POD}"), f"{_POD_NAME}: switched in"),
        Query(_rate(f'qgpu_pod_preemptions_total{POD[:-1]}, role="of"}}'), f"{_POD_NAME}: preempted"),
        unit="ops",
    ),
    _graph(
        "Debt",
        "GPU time beyond (positive) or short of what plans aimed at; the next plans correct it.",
        Query(f"qgpu_pod_debt_seconds{POD}", _POD_NAME),
        unit="s",
        signed=True,
    ),
    _graph(
        "Scheduling",
        "Rounds of the loop, plans that changed something, and whether gates move.",
        Query(_rate(f"qgpu_gpu_ticks_total{GPU}"), "{{instance}} {{gpu}}: rounds"),
        Query(_rate(f"qgpu_gpu_plans_total{GPU}"), "{{instance}} {{gpu}}: plans"),
        Query(f"qgpu_gpu_plan_gated{GPU}", "{{instance}} {{gpu}}: gates move (1: yes)"),
        unit="ops",
    ),
    Panel("pGPUs", "How each pGPU is shared.", "table", (24, 6), (Query(f"qgpu_gpu_info{GPU}"),)),
)

SECTIONS = (
    ("", PANELS),
    ("Host $instance", CARDS),
    ("What sharing costs, memory and latency", COSTS),
    ("Causes", CAUSES),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for number, (title, placed) in enumerate(SECTIONS):
        more, below = _placed(placed, y + bool(title), 1 + 20 * number)
        folded = placed is CAUSES
        if title:
            row = {"id": 20 * number, "type": "row", "title": title, "collapsed": folded,
                   "panels": more if folded else [], "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}}  # fmt: skip
            panels.append(row | ({"repeat": "instance"} if placed is CARDS else {}))
        panels += [] if folded else more
        y = below
    return {
        "title": "qgpu",
        "uid": "qgpu",
        "description": "Shares, quotas, gates, memory and refusals of pods that share GPUs by qgpu.",
        "tags": ["gpu", "qgpu"],
        "schemaVersion": 39,
        "version": 3,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-30m", "to": "now"},
        "refresh": "10s",
        "templating": {"list": _variables()},
        "annotations": {"list": [_policy_changes()]},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}
    pods = 'qgpu_pod_info{instance=~"$instance", gpu=~"$gpu"'
    return [
        source,
        _variable("instance", "Host", "label_values(qgpu_build_info, instance)"),
        _variable("gpu", "pGPU", 'label_values(qgpu_gpu_info{instance=~"$instance"}, gpu)'),
        _variable("namespace", "Namespace", f"label_values({pods}}}, namespace)"),
        _variable("pod", "Pod", f'label_values({pods}, namespace=~"$namespace"}}, pod)'),
    ]


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",  # also series without the label: pods outside Kubernetes have no namespace
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "sort": 3,
    }


def _policy_changes() -> dict[str, Any]:
    now = f"count by (instance, gpu, policy) (qgpu_gpu_info{GPU})"
    return {
        "name": "policy changed",
        "datasource": _SOURCE,
        "enable": True,
        "expr": f"{now} unless count by (instance, gpu, policy) (qgpu_gpu_info{GPU} offset 1m)",
        "iconColor": "purple",
        "titleFormat": "pGPU {{gpu}}: {{policy}}",
    }


def _placed(panels: tuple[Panel, ...], y: int, first: int) -> tuple[list[dict[str, Any]], int]:
    """Return panels in rows of 24 from ``y`` on, numbered from ``first``, and where the next row begins."""
    found, x, height = [], 0, 0
    for number, panel in enumerate(panels, first):
        width, height = panel.size
        found.append(_panel(panel, number) | {"gridPos": {"x": x, "y": y, "w": width, "h": height}})
        x += width
        if x == 24:
            x, y = 0, y + height
    return found, y


def _panel(panel: Panel, number: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {
            "mode": "absolute",
            "steps": [{"value": value, "color": colour} for value, colour in panel.steps],
        },
        "color": {"mode": "palette-classic-by-name" if panel.kind == "timeseries" else "thresholds"},
    }
    if panel.signed:
        del defaults["min"]
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.nothing:
        defaults["noValue"] = panel.nothing
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 35 if panel.stacked else 5,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
        if panel.each_gpu:
            defaults["custom"]["axisSoftMax"] = 1
    made: dict[str, Any] = {
        "id": number,
        "title": panel.title,
        "description": panel.about,
        "type": panel.kind,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": _overrides(panel)},
        "targets": [_target(panel, query, chr(ord("A") + at)) for at, query in enumerate(panel.queries)],
        "options": _OPTIONS[panel.kind],
    }
    if panel.each_gpu:
        made |= {"repeat": "gpu", "repeatDirection": "h"}
        made["options"] = made["options"] | {
            "legend": {**made["options"]["legend"], "placement": "bottom", "calcs": ["lastNotNull"]}
        }
    if panel.kind == "table":
        hidden = dict.fromkeys(("Time", "Value", "__name__", "job", "UUID"), True)
        made["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden}}]
    return made


def _target(panel: Panel, query: Query, name: str) -> dict[str, Any]:
    target: dict[str, Any] = {
        "refId": name,
        "datasource": _SOURCE,
        "expr": query.expression,
        "legendFormat": query.name,
    }
    if panel.kind != "timeseries":
        target["instant"] = True
    if panel.kind == "table":
        target["format"] = "table"
    return target


def _overrides(panel: Panel) -> list[dict[str, Any]]:
    found = []
    for at, query in enumerate(panel.queries):
        properties: list[tuple[str, Any]] = []
        if query.limit:
            named = query.name in (each.name for each in panel.queries if not each.limit)
            properties = [
                ("custom.lineStyle", {"fill": "dash", "dash": [8, 8]}),
                ("custom.fillOpacity", 0),
                ("custom.stacking", {"mode": "none", "group": "limits"}),
                ("custom.hideFrom", {"legend": named, "tooltip": named, "viz": False}),
            ]
        if query.colour:
            properties.append(("color", {"mode": "fixed", "fixedColor": query.colour}))
        if properties:
            found.append(
                {
                    "matcher": {"id": "byFrameRefID", "options": chr(ord("A") + at)},
                    "properties": [{"id": name, "value": value} for name, value in properties],
                }
            )
    return found


_OPTIONS: dict[str, dict[str, Any]] = {
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background", "graphMode": "none"},
    "bargauge": {"reduceOptions": {"calcs": ["lastNotNull"]}, "orientation": "horizontal", "displayMode": "basic"},
    "timeseries": {
        "legend": {"displayMode": "table", "placement": "right", "calcs": ["lastNotNull", "mean"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "table": {},
}


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
