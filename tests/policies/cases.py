"""The policies under test: each alone, and every composition online x offline; and snapshots for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qgpu.model import Plan, PodClass, Policy, Snapshot
from qgpu.policies.registry import POLICIES, PolicyInfo, compose
from tests.simulation import MORE
from tests.strategies import snapshots

#: Slices are whole µs and at least 50 of them, so shares are met to this much of the pGPU.
TOLERANCE = 0.005


@dataclass(frozen=True)
class Case:
    """A policy under test: plain, or composed of one for online and one for offline pods."""

    name: str
    plan: Policy
    offline: str
    online: str | None = None

    @property
    def policies(self) -> tuple[PolicyInfo, ...]:
        """Say what its policies promise."""
        return tuple(POLICIES[name] for name in (self.offline, self.online) if name)

    @property
    def everybody(self) -> bool:
        """Tell whether admission demands quotas here."""
        return any(info.needs_quota for info in self.policies)


def _cases() -> Iterator[Case]:
    for offline, info in POLICIES.items():
        yield Case(offline, info.plan, offline)
        for online in POLICIES:
            yield Case(f"{online}-over-{offline}", compose(offline, online), offline, online)


CASES = tuple(_cases())
COMPOSED = [case for case in CASES if case.online is not None]
#: Nobody is held back here while the pGPU idles.
LENDING = [case for case in CASES if not any(info.caps for info in case.policies)]
#: A quota is a guarantee here.
GUARANTEEING = [case for case in CASES if case.online is None and POLICIES[case.offline].guarantees]
#: A quota is an upper bound of offline pods here.
CAPPING = [case for case in CASES if POLICIES[case.offline].caps]


def over(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """Run a test for each of these."""
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


each = over(CASES)
each_composed = over(COMPOSED)
anything = given(data=st.data())
#: Fresh examples on every run, on a CI machine too; what fails is printed so that it can be had again.
fresh = settings(
    max_examples=40 * MORE,
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.filter_too_much],
)


def drawn(data: st.DataObject, case: Case, *classes: PodClass) -> Snapshot:
    """Draw an admitted snapshot for this case.

    Where quotas cap, a program starts beside others' windows, with a few ms that no forecast of shares knows of.
    """
    snapshot = data.draw(snapshots(everybody=case.everybody, classes=classes or tuple(PodClass)))
    return started(snapshot) if case.everybody else snapshot


def has_round(plan: Plan) -> bool:
    """Tell whether pods of some class take turns by slices in a round shorter than the period."""
    return any(sharing.round_ns for sharing in (plan.offline, plan.online) if sharing is not None)


def lends_no_window(case: Case, snapshot: Snapshot) -> bool:
    """Tell whether all online pods that have windows use them.

    Their windows lie in the turns of offline pods: an idle one lends to whose turn it is. Feedback evens that out.
    """
    held = case.online is not None and POLICIES[case.online].caps
    return not held or all(pod.busy for pod in snapshot.pods if pod.online and pod.tsgs)


def started(snapshot: Snapshot) -> Snapshot:
    """Have all pods got going."""
    return replace(snapshot, pods=tuple(pod._replace(starting=False) for pod in snapshot.pods))
