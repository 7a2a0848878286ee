"""The policies under test: each alone, and every composition online x offline; and snapshots for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qgpu.model import PodClass, Policy, Snapshot
from qgpu.policies import POLICIES, compose
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
    def everybody(self) -> bool:
        """Tell whether admission demands quotas here."""
        return any(POLICIES[name].needs_quota for name in (self.offline, self.online) if name)


def _cases() -> Iterator[Case]:
    for offline, info in POLICIES.items():
        yield Case(offline, info.plan, offline)
        for online in POLICIES:
            yield Case(f"{online}-over-{offline}", compose(offline, online), offline, online)


CASES = tuple(_cases())
COMPOSED = [case for case in CASES if case.online is not None]
#: Nobody is held back here while the pGPU idles.
LENDING = [case for case in CASES if "fixed-share" not in (case.offline, case.online)]
#: A quota is a guarantee here.
GUARANTEEING = [case for case in CASES if case.online is None and case.offline != "best-effort"]
#: A quota is an upper bound of offline pods here.
FIXED = [case for case in CASES if case.offline == "fixed-share"]


def over(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """Run a test for each of these."""
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


each = over(CASES)
each_composed = over(COMPOSED)
anything = given(data=st.data())
thrifty = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much]
)


def drawn(data: st.DataObject, case: Case, *classes: PodClass) -> Snapshot:
    """Draw an admitted snapshot for this case.

    Under Fixed Share a program starts beside others' windows, with a few ms that no forecast of shares knows of.
    """
    snapshot = data.draw(snapshots(everybody=case.everybody, classes=classes or tuple(PodClass)))
    return started(snapshot) if case.everybody else snapshot


def started(snapshot: Snapshot) -> Snapshot:
    """Have all pods got going."""
    return replace(snapshot, pods=tuple(replace(pod, starting=False) for pod in snapshot.pods))
