"""The loop through whatever happens to it; after every tick its promises hold.

Pods come, idle, flood and die, operators change their minds, daemons restart: the real loop on the simulated
pGPU, in virtual time.
"""

from __future__ import annotations

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qgpu import admission
from qgpu.config import GpuSettings
from qgpu.errors import RefusedError
from qgpu.load.workload import Workload
from qgpu.model import NS_PER_MS, NS_PER_S, Grant, Plan, PodClass, Policy, Sample, Snapshot
from qgpu.model.plane_api import Backend
from qgpu.planes.sim.host import SimHost
from qgpu.policies.registry import POLICIES, compose
from qgpu.sched import loop
from qgpu.sched.ledger import Ledger

FLOOD = Workload(kernel_us=1000.0, batch=0)
WORKLOADS = st.sampled_from(
    [
        FLOOD,
        Workload(kernel_us=50.0, batch=8, gap_us=200.0),
        Workload(kernel_us=100.0, batch=1, period_us=10_000.0),
        Workload(kernel_us=100_000.0, batch=1),
        Workload(kernel_us=1000.0, batch=1, count=20),
    ]
)
GRANTS = st.builds(Grant, st.sampled_from(PodClass), st.integers(1, 40) | st.sampled_from([None, 50]))
SETTINGS = st.builds(
    GpuSettings,
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from([50 * NS_PER_MS, 100 * NS_PER_MS, 10 * NS_PER_S]),
)
WHICH = st.integers(0, 11)

#: A gate takes up to a millisecond a turn, which a period of 100 ms pays for with this much of a share.
GATE = 0.03


class LoopMachine(RuleBasedStateMachine):
    """One daemon's loop on one simulated pGPU, and everybody who bothers it."""

    def __init__(self) -> None:
        super().__init__()
        self.host = SimHost()
        self.backend: Backend = self.host.backend(0)
        self.ledger = Ledger(0)
        self.settings = GpuSettings()
        self.loads: dict[str, list[tuple[int, Workload]]] = {}
        self.numbers = 0
        self.plan: Plan | None = None

    def policy(self) -> Policy:
        """Return the composed policy, noting what it plans."""
        chosen = compose(self.settings.policy, self.settings.online_policy)

        def noted(snapshot: Snapshot) -> Plan:
            self.plan = chosen(snapshot)
            return self.plan

        return noted

    def tick(self) -> None:
        """Do one round, and hold it to what must be true of any."""
        before = self.ledger
        self.ledger = loop.tick(self.backend, loop.Settings(self.policy(), self.settings.period_ns), before)
        assert self.plan is not None
        assert {part.pod for part in self.plan.pods} == set(self.loads)
        used = {name: account.used_ns for name, account in self.ledger.accounts.items()}
        for name, account in before.accounts.items():
            assert used.get(name, account.used_ns) >= account.used_ns

    def advance(self, duration_ns: int) -> None:
        """Tick for some of the simulator's time."""
        self.tick()
        assert self.ledger.now_ns is not None
        end_ns = self.ledger.now_ns + duration_ns
        while self.ledger.now_ns is not None and self.ledger.now_ns < end_ns:
            self.tick()

    def settled(self) -> dict[str, float]:
        """Measure shares after everything has settled."""
        self.advance(NS_PER_S)
        before = self.ledger
        self.advance(NS_PER_S)
        assert before.now_ns is not None
        assert self.ledger.now_ns is not None
        elapsed_ns = self.ledger.now_ns - before.now_ns
        return {
            name: (account.used_ns - before.accounts[name].used_ns) / elapsed_ns
            for name, account in self.ledger.accounts.items()
        }

    def name(self, which: int) -> str:
        """Return one of the pods there are."""
        return sorted(self.loads)[which % len(self.loads)]

    @initialize(wanted=SETTINGS, grants=st.lists(GRANTS, min_size=1, max_size=4))
    def start(self, wanted: GpuSettings, grants: list[Grant]) -> None:
        """Some pods are there and busy from the beginning."""
        self.settings = wanted
        for which, grant in enumerate(grants):
            self.come(grant)
            if self.loads:
                self.work(which, FLOOD)

    @rule(grant=GRANTS)
    def come(self, grant: Grant) -> None:
        """A pod comes, if admission lets it in."""
        self.numbers += 1
        name = f"pod{self.numbers}"
        try:
            admission.check_new(
                name, {0: grant}, admission.Occupancy(self.host.pods(), self.host.pgpus(), {0: self.settings})
            )
        except RefusedError:
            return
        self.host.admit(name, {0: grant})
        self.loads[name] = []

    @precondition(lambda self: self.loads)
    @rule(which=WHICH, workload=WORKLOADS)
    def work(self, which: int, workload: Workload) -> None:
        """A process of a pod begins to work."""
        name = self.name(which)
        if len(self.loads[name]) < 3:
            self.loads[name].append((self.host.start_load(name, 0, workload), workload))

    @precondition(lambda self: self.loads)
    @rule(which=WHICH)
    def idle(self, which: int) -> None:
        """A process of a pod ends."""
        name = self.name(which)
        if self.loads[name]:
            self.host.stop_load(self.loads[name].pop()[0])

    @precondition(lambda self: self.loads)
    @rule(which=WHICH)
    def die(self, which: int) -> None:
        """A pod dies with all its processes."""
        name = self.name(which)
        for load, _ in self.loads.pop(name):
            self.host.stop_load(load)
        self.host.retire(name)

    @precondition(lambda self: self.loads)
    @rule(which=WHICH)
    def die_between_sample_and_apply(self, which: int) -> None:
        """A pod dies while the loop is thinking of it."""
        self.ledger = self.ledger.advance(self.backend.sample())
        plan = self.policy()(self.ledger.snapshot(self.settings.period_ns))
        self.die(which)
        self.backend.apply(plan)

    @precondition(lambda self: self.loads)
    @rule(which=WHICH, grant=GRANTS)
    def regrant(self, which: int, grant: Grant) -> None:
        """An operator changes a grant."""
        name = self.name(which)
        try:
            admission.check_amended(
                name, {0: grant}, admission.Occupancy(self.host.pods(), self.host.pgpus(), {0: self.settings})
            )
        except RefusedError:
            return
        self.host.amend(name, {0: grant})

    @rule(wanted=SETTINGS)
    def repolicy(self, wanted: GpuSettings) -> None:
        """An operator changes how the pGPU is shared."""
        try:
            admission.check_settings(0, self.host.pods(), wanted)
        except RefusedError:
            return
        self.settings = wanted

    @rule(orderly=st.booleans())
    def restart(self, orderly: bool) -> None:
        """The daemon ends, by itself or not, and another one starts knowing nothing."""
        if orderly:
            self.backend.close()
        self.backend = self.host.backend(0)
        self.ledger = Ledger(0)

    @rule(periods=st.integers(1, 5))
    def run(self, periods: int) -> None:
        """Time passes."""
        for _ in range(periods):
            self.tick()

    @rule()
    def settle(self) -> None:
        """Whatever was before: once settled, quotas that cap are bounds, and where policies lend nothing lies idle."""
        shares = self.settled()
        if POLICIES[self.settings.policy].caps and self.settings.period_ns < NS_PER_S:
            for pod in self.host.pods():
                if pod.grants[0].pod_class is PodClass.OFFLINE:
                    assert shares[pod.name] <= (pod.grants[0].cores or 0) / 100 + GATE
        at_work = [workload for loads in self.loads.values() for _, workload in loads]
        lend = not any(POLICIES[name].caps for name in (self.settings.policy, self.settings.online_policy))
        if FLOOD in at_work and lend:
            assert sum(shares.values()) > self.least_use(at_work)

    def least_use(self, at_work: list[Workload]) -> float:
        """Return what part of the card is used at least beside a flood: docs/feedback.md, Limits, says what it is."""
        online = any(pod.grants[0].pod_class is PodClass.ONLINE and self.loads[pod.name] for pod in self.host.pods())
        if online:
            return 0.25
        return 0.5 if any(workload.gap_us for workload in at_work) else 0.8

    def teardown(self) -> None:
        """However it went, in the end it settles."""
        self.settle()

    @invariant()
    def no_pod_is_lost(self) -> None:
        """The host knows exactly the pods that came and did not die."""
        assert {pod.name for pod in self.host.pods()} == set(self.loads)


TestLoop = LoopMachine.TestCase
TestLoop.settings = hypothesis_settings(max_examples=150, stateful_step_count=40, deadline=None)


class Failing:
    """A backend whose plane goes away after some calls; real code sees the error, not a stand-in of ours."""

    def __init__(self, inner: Backend, calls: int) -> None:
        self._inner = inner
        self._calls = calls

    def sample(self) -> Sample:
        """Sample for as long as there is a plane."""
        self._calls -= 1
        if self._calls < 0:
            raise RefusedError("the plane is gone")
        return self._inner.sample()

    def apply(self, plan: Plan) -> None:
        """Apply."""
        self._inner.apply(plan)

    def wait(self, timeout_ns: int) -> None:
        """Wait."""
        self._inner.wait(timeout_ns)

    def close(self) -> None:
        """Close."""
        self._inner.close()


def test_loop_raises_backend_error_after_showing_every_ledger() -> None:
    seen: list[Ledger] = []
    how = loop.Settings(compose("best-effort", "best-effort"), 100 * NS_PER_MS)

    with pytest.raises(RefusedError):
        loop.run(Failing(SimHost().backend(0), 3), lambda: how, Ledger(0), lambda: False, seen.append)
    assert [ledger.now_ns for ledger in seen] == [0, 100 * NS_PER_MS, 200 * NS_PER_MS]


def test_the_loop_stops_when_told() -> None:
    how = loop.Settings(compose("best-effort", "best-effort"), 100 * NS_PER_MS)
    seen: list[Ledger] = []
    loop.run(SimHost().backend(0), lambda: how, Ledger(0), lambda: len(seen) == 2, seen.append)

    assert len(seen) == 2


def test_plan_is_renewed_within_lease_at_any_period() -> None:
    how = loop.Settings(compose("best-effort", "best-effort"), 10 * NS_PER_S)
    backend = SimHost().backend(0)
    ledger = loop.tick(backend, how, Ledger(0))
    after = loop.tick(backend, how, ledger)

    assert ledger.now_ns is not None
    assert after.now_ns == ledger.now_ns + loop.RENEW_NS
