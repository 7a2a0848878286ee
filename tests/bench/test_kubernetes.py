"""The restart orders of bench/kubernetes.py run on every node, and are written whatever comes of them."""

from __future__ import annotations

import json
import sys

import kubernetes as bench
import pytest

from tests.k8s.order_nodes import NODES
from tests.k8s.orders import MOST_FAILED
from tests.k8s.test_orders import Broken, Node, Nothing


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Run orders of these kinds; return the exit code and what is written."""

    def run(orders, **kinds):
        monkeypatch.setattr(bench, "RESULTS", tmp_path / "kubernetes.json")
        monkeypatch.setattr(bench, "NODES", {name: (kind, Node) for name, kind in kinds.items()})
        monkeypatch.setattr(bench, "SHARE_OF_ORDERS", dict.fromkeys(kinds, 1))
        monkeypatch.setattr(
            bench,
            "SECTIONS",
            {f"restarts of {name}": lambda options, name=name: bench.restarts(options, name) for name in kinds},
        )
        monkeypatch.setattr(sys, "argv", ["kubernetes.py", "--only", ",".join(bench.SECTIONS), "--orders", str(orders)])
        with pytest.raises(SystemExit) as ended:
            bench.main()
        return ended.value.code, json.loads(bench.RESULTS.read_text())

    return run


def test_every_node_has_a_share_of_the_orders():
    assert bench.SHARE_OF_ORDERS.keys() == NODES.keys()
    assert sum(bench.SHARE_OF_ORDERS.values()) == pytest.approx(1)


def test_violations_are_written_with_what_was_said(written):
    code, found = written(30, broken=Broken)

    assert code == 1
    assert found["figures"]["leaks"] == found["figures"]["failed_orders"] == MOST_FAILED
    assert "something" in found["figures"]["restarts"]["broken"]["said"][0]


def test_what_failed_is_written_with_the_sources(written, capsys):
    code, found = written(30, one=Nothing, other=Nothing)

    assert code == 0
    assert found["figures"]["restart_orders"] >= 60
    assert found["figures"]["restart_kills"] == sum(
        count for node in found["figures"]["restarts"].values() for count in node["parts"].values()
    )
    assert {section["sources"] for section in found["sections"].values()} == {bench.sources()}
    assert "one: pairs that never failed together: " in capsys.readouterr().out


def test_orders_of_other_sources_do_not_count(written, monkeypatch):
    written(30, one=Nothing)
    monkeypatch.setattr(bench, "sources", lambda: "others")
    _, found = written(30, other=Nothing)

    assert found["figures"]["restarts"].keys() == {"other"}
