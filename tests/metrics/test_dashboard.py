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

    assert all(re.search(r"{{(pod|gpu)}}", name) for name in names)
    assert len(set(names)) == len(names)
    assert panel["type"] == "bargauge" or panel["options"]["legend"]["displayMode"] == "table"


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
