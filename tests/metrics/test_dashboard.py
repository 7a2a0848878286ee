"""The Grafana dashboard, read by Grafana's own types. The metrics endpoint's tests ask Prometheus its questions."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

BOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "dashboards" / "qgpu.json").read_text())
PANELS = [
    panel for each in BOARD["panels"] for panel in (each, *each.get("panels", ())) if panel["type"] != "row"
]  # those of the folded row too
#: What Grafana reads, but its types do not list: what it keeps of a variable's query, and an annotation of Prometheus.
_UNLISTED = {"definition", "titleFormat"}


def titled(panel: dict[str, Any]) -> str:
    return str(panel["title"])


def sdk(name: str) -> Any:
    """Return a module of Grafana's types."""
    pytest.importorskip("grafana_foundation_sdk", reason="needs grafana-foundation-sdk (make check installs it)")
    return importlib.import_module(f"grafana_foundation_sdk.{name}")


def lost(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Yield what is not in ``theirs`` as it is in ``ours``."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            if key not in _UNLISTED:
                yield from lost(value, theirs.get(key), f"{path}/{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from lost(one, other, f"{path}/{at}")
    elif ours != theirs:
        yield f"{path}: {ours!r}, {theirs!r}"


def read_back(kind: Any, value: dict[str, Any]) -> Any:
    """Return what Grafana's type makes of a part of the dashboard."""
    return json.loads(sdk("cog.encoder").JSONEncoder().encode(kind.from_json(value)))


def test_grafanas_types_lose_nothing_of_the_dashboard() -> None:
    assert list(lost(BOARD, read_back(sdk("models.dashboard").Dashboard, BOARD))) == []


@pytest.mark.parametrize("panel", PANELS, ids=titled)
def test_grafanas_types_lose_nothing_of_a_panel(panel: dict[str, Any]) -> None:
    kind = sdk(f"models.{panel['type']}")
    parts = [(sdk("models.prometheus").Dataquery, target) for target in panel["targets"]]
    parts.append((kind.Options, panel["options"]))
    if custom := panel["fieldConfig"]["defaults"].get("custom"):
        parts.append((kind.FieldConfig, custom))

    assert [each for type_, part in parts for each in lost(part, read_back(type_, part))] == []


@pytest.mark.parametrize("panel", PANELS, ids=titled)
def test_a_panel_says_what_it_shows_and_in_which_unit(panel: dict[str, Any]) -> None:
    units = {value for value in vars(sdk("models.units")).values() if isinstance(value, str)}

    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in units


@pytest.mark.parametrize("panel", [each for each in PANELS if each["type"] in ("timeseries", "bargauge")], ids=titled)
def test_lines_and_bars_are_told_apart_by_their_names(panel: dict[str, Any]) -> None:
    names = [target["legendFormat"] for target in panel["targets"]]
    shown = [
        name for target, name in zip(panel["targets"], names, strict=True) if target["refId"] not in unnamed(panel)
    ]

    assert all(re.search(r"{{(pod|gpu)}}", name) for name in names)
    assert len(set(shown)) == len(shown)
    assert panel["type"] == "bargauge" or panel["options"]["legend"]["displayMode"] == "table"


def settings(panel: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a panel says of single queries beside its defaults, by query."""
    return {
        override["matcher"]["options"]: {each["id"]: each["value"] for each in override["properties"]}
        for override in panel["fieldConfig"]["overrides"]
    }


def unnamed(panel: dict[str, Any]) -> set[str]:
    """The queries that the legend leaves out."""
    return {query for query, found in settings(panel).items() if found.get("custom.hideFrom", {}).get("legend")}


def test_a_limit_has_the_colour_of_the_pod_it_limits() -> None:
    dashed = [
        (panel, query) for panel in PANELS for query in settings(panel) if "custom.lineStyle" in settings(panel)[query]
    ]

    assert dashed
    for panel, query in dashed:
        names = {target["refId"]: target["legendFormat"] for target in panel["targets"]}
        assert panel["fieldConfig"]["defaults"]["color"]["mode"] == "palette-classic-by-name"
        if "color" not in settings(panel)[query]:  # the name gives the colour, and the legend has it once
            assert names.pop(query) in names.values()
            assert query in unnamed(panel)


def test_red_bars_of_quotas_are_pods_that_wait() -> None:
    (panel,) = [each for each in PANELS if each["title"] == "Got, of its quota"]
    red = {query for query, found in settings(panel).items() if found["color"]["fixedColor"] == "red"}

    assert [step["color"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]] == ["blue"]
    (waits,) = [each["expr"] for each in panel["targets"] if each["refId"] in red]
    (others,) = [each["expr"] for each in panel["targets"] if each["refId"] not in red]
    assert re.search(r"< 1 and on .*qgpu_pod_below_quota{.*reason=\"waits\"}$", waits)
    assert others.endswith(f"unless on (instance, gpu, pod, qgpu_pod) ({waits})")


def test_each_pgpu_of_each_host_has_a_panel_of_its_shares() -> None:
    repeated = [each for each in PANELS if each.get("repeat") == "gpu"]
    stacked = [each for each in PANELS if "qgpu_pod_gpu_seconds_total" in each["targets"][0]["expr"]]
    places = [each["gridPos"]["y"] for each in repeated]
    (row,) = [each for each in BOARD["panels"] if each.get("repeat") == "instance"]
    following = [each["gridPos"]["y"] for each in BOARD["panels"] if each["type"] == "row" and each is not row]

    assert [each for each in stacked if each["type"] == "timeseries"] == repeated
    assert row["gridPos"]["y"] < min(places) < max(places) < min(following)


def test_panels_have_titles_of_their_own_and_do_not_overlap() -> None:
    places = [(panel["title"], panel["gridPos"]) for panel in PANELS]

    assert len({title for title, _ in places}) == len(PANELS)
    for (_, one), (_, other) in combinations(places, 2):
        assert any(
            a[axis] + a[size] <= b[axis]
            for a, b in ((one, other), (other, one))
            for axis, size in (("x", "w"), ("y", "h"))
        )
    assert all(place["x"] + place["w"] <= 24 for _, place in places)
