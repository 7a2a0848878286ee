"""Restart orders count what fails, and a failure is counted where it does not end the test."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.k8s.orders import MOST_FAILED, Choice, Orders, machine
from tests.k8s.tally import Tally


class Node:
    """A node on which all is as it should be."""

    perils = ("driver", "qgpud", "node")
    parts = ("driver", "qgpud")
    cards, memory, log, driver = 1, 1 << 34, "", None
    closed = 0

    def __init__(self) -> None:
        self.failed: list[str] = []

    def start(self) -> Node:
        return self

    def runs(self, *parts: str) -> bool:
        return True

    def fail(self, part: str) -> None:
        self.failed.append(part)

    def grants(self) -> dict[str, Any]:
        return {}

    def files(self) -> set[str]:
        return set()

    def on_disk(self) -> dict[str, set[str]]:
        return {}

    def ask(self, operation: str) -> dict[str, list[Any]]:
        return {"pods": [], "gpus": []}

    def close(self) -> None:
        Node.closed += 1


class Nothing(Orders):
    """Orders in which nothing is held."""

    actions = ("kill", "beside_failure")
    under_way = ("hold",)

    def open(self) -> None: ...

    def hold(self, choice: Choice) -> None: ...

    def start_container(self, choice: Choice) -> None: ...

    def kubelet_works(self, choice: Choice | None = None) -> None: ...

    def end_containers(self) -> None: ...

    def check(self, grants, files) -> None: ...

    def holdings(self) -> list[Any]:
        return []

    def settled(self) -> bool:
        return True

    def close(self) -> None: ...


class Broken(Nothing):
    """Orders in which a promise is broken."""

    def check(self, grants, files) -> None:
        self.broken("leaks", "something")


def run(kind, tally, another=None):
    run_state_machine_as_test(
        machine(kind, Node(), tally, another),
        settings=settings(
            max_examples=30,
            stateful_step_count=10,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )


def choice(*perils: int, pair: bool = True) -> Choice:
    return Choice(0, False, 0, 1, False, 1, 0, (perils[0], perils[-1]), pair)


def test_the_other_part_of_a_pair_fails_before_the_node():
    assert choice(2, 0).failing(Node.perils) == ["driver", "node"]
    assert choice(0, 2).failing(Node.perils) == ["driver", "node"]
    assert choice(2, 0, pair=False).failing(Node.perils) == ["node"]


@pytest.mark.parametrize("how", ["kill", "beside_failure"])
def test_a_pair_with_the_node_fails_whole_and_is_counted(how):
    node, tally = Node(), Tally()
    order = machine(Nothing, node, tally)()
    getattr(order, how)(choice(2, 1))

    assert node.failed == ["qgpud", "node"]
    assert tally.pairs == {"node and qgpud": 1}
    assert tally.parts == {"qgpud": 1, "node": 1}
    assert tally.parts_beside == (tally.parts if how == "beside_failure" else {})


def test_pairs_that_never_occurred_are_known():
    tally = Tally()
    tally.expect(Node.perils)
    tally.fail(["driver", "node"], beside=False)

    assert tally.never == ["driver and qgpud", "node and qgpud"]


def test_orders_without_a_violation_count_none():
    tally = Tally()
    run(Nothing, tally)

    assert tally.orders >= 30
    assert not tally.violations
    assert not tally.failed_orders


def test_a_violation_ends_a_test():
    with pytest.raises(AssertionError, match="leaks: something"):
        run(Broken, Tally())


def test_violations_are_counted_and_the_node_replaced():
    tally, before = Tally(), Node.closed
    run(Broken, tally, Node)

    assert tally.failed_orders == tally.leaks == len(tally.said) == MOST_FAILED
    assert "leaks: something" in tally.said[0]
    assert Node.closed - before == MOST_FAILED
