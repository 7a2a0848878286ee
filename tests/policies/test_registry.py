"""A policy is its line in the registry: by that it is found, composed and configured, and says what it promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from qgpu import config
from qgpu.model import NS_PER_MS, Grant, Plan, Pod, PodClass, Snapshot, Tsg
from qgpu.policies.mechanism import by_weights
from qgpu.policies.registry import POLICIES, PolicyInfo, compose, find
from tests.forecast import forecast

DOCUMENT = Path(__file__).parents[2] / "docs/policies.md"


def proportional(snapshot: Snapshot) -> Plan:
    """Weigh pods by quota, those without one by 10."""
    return by_weights(snapshot, [pod.grant.cores or 10 for pod in snapshot.pods])


def test_a_strangers_policy_needs_its_line_in_the_registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(POLICIES, "proportional", PolicyInfo(9, proportional))
    pods = tuple(Pod(name, Grant(cores=cores), (Tsg(name, busy=True),)) for name, cores in (("a", 40), ("b", None)))
    path = tmp_path / "qgpu.toml"
    path.write_text('[defaults]\npolicy = "9"\nonline_policy = "proportional"\n')

    for online in POLICIES:
        snapshot = Snapshot(0, 100 * NS_PER_MS, pods)
        shares = forecast(compose("proportional", online)(snapshot), snapshot)
        assert shares == pytest.approx({"a": 0.8, "b": 0.2}, abs=0.005)
    online_pods = tuple(Pod(pod.name, Grant(PodClass.ONLINE, pod.grant.cores), pod.tsgs) for pod in pods)
    for offline in POLICIES:
        snapshot = Snapshot(0, 100 * NS_PER_MS, online_pods)
        shares = forecast(compose(offline, "proportional")(snapshot), snapshot)
        assert shares == pytest.approx({"a": 0.8, "b": 0.2}, abs=0.005)
    assert find("9") == "proportional"
    settings = config.load(path).defaults
    assert (settings.policy, settings.online_policy) == ("proportional", "proportional")


def test_each_pgpu_has_its_last_plan_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    counted = PolicyInfo(9, lambda snapshot: asked.append(snapshot.pgpu) or proportional(snapshot))
    monkeypatch.setitem(POLICIES, "counted", counted)
    policy = compose("counted", "best-effort")
    pods = [(Pod("a", Grant(cores=cores), (Tsg("a", busy=True),)),) for cores in (40, 50)]

    plans = [policy(Snapshot(pgpu, 100 * NS_PER_MS, pods[0])) for pgpu in (0, 1, 0, 1)]
    changed = policy(Snapshot(0, 100 * NS_PER_MS, pods[1]))

    assert asked == [0, 1, 0]
    assert plans[:2] == plans[2:]
    assert changed != plans[0]


def test_policies_have_numbers_of_their_own() -> None:
    assert len({info.number for info in POLICIES.values()}) == len(POLICIES)


def test_the_table_of_promises_says_what_the_registry_says() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in DOCUMENT.read_text().splitlines()
        if line.startswith("|") and line.endswith("|")
    ]
    told = {find(name.split("(")[1].rstrip(")")): [cell == "yes" for cell in cells] for name, *cells in rows[2:]}

    assert told == {name: [POLICIES[name].guarantees, POLICIES[name].caps, not POLICIES[name].caps] for name in told}
    assert len(told) >= 3
