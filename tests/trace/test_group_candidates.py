"""Who would gain from a share group: bounds that hold whoever's kernels ran, and silence where nothing is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.load.workload import Workload
from qgpu.model import NS_PER_MS, NS_PER_S, Grant
from qgpu.planes.sim.host import SimHost
from qgpu.policies.registry import compose
from qgpu.sched import loop
from qgpu.sched.ledger import Ledger
from qgpu.trace.group_candidates import LEAST_HELD, LEAST_UNUSED, Candidates, candidates, of_track
from qgpu.trace.recorder import Recorder
from qgpu.trace.recording import GpuTrack
from tests.contract.rig import FLOOD

SETTINGS = loop.Settings(compose("fixed-share", "best-effort"), 100 * NS_PER_MS)
#: A kernel of 0.1 ms a millisecond: the host is what it waits for.
EAGER = Workload(kernel_us=100.0, batch=1, gap_us=900.0)

#: Parts of a second: what each pod held, and which part of that a kernel ran.
PARTS = st.lists(st.tuples(st.floats(0.001, 1), st.floats(0, 1)), min_size=1, max_size=6)


@given(PARTS)
def test_bounds_hold_whoever_ran_the_kernels(parts):
    total = sum(held for held, _ in parts) or 1.0
    held = {str(n): part / total for n, (part, _) in enumerate(parts)}
    ran = {str(n): part / total * busy for n, (part, busy) in enumerate(parts)}
    found = candidates(held, sum(ran.values()))

    for each in found.pods if found else ():
        unused = held[each.pod] - ran[each.pod]
        assert each.unused_least - 1e-9 <= unused <= each.unused_most + 1e-9


@given(st.dictionaries(st.text(min_size=1), st.floats(0, 1), max_size=6), st.none() | st.floats(0, 1))
def test_nobody_is_named_without_two_pods_and_unused_time(held, used):
    found = candidates(held, used)
    sharing = [pod for pod, part in held.items() if part >= LEAST_HELD]
    expected = used is not None and len(sharing) >= 2 and sum(held.values()) - used >= LEAST_UNUSED

    assert (found is not None) == expected
    assert sorted(each.pod for each in found.pods) == sorted(sharing) if found else True


def test_line_names_pods_with_their_figures():
    line = str(candidates({"a": 0.7, "b": 0.3}, 0.4))

    assert "pods held it 100% of the time, kernels ran 40%" in line
    assert "a (held it 70%, without a kernel 30 to 60%), b (held it 30%, without a kernel 0 to 30%)" in line


def recorded(*loads: Workload, told: bool = True) -> GpuTrack:
    """Record pods with these loads under fixed shares for three simulated seconds."""
    host = SimHost()
    for number, load in enumerate(loads):
        host.admit(f"pod-{number}", {0: Grant(cores=100 // len(loads))})
        host.start_load(f"pod-{number}", 0, load)
    backend, ledger, recorder, track = host.backend(0), Ledger(0), Recorder(0), GpuTrack(0)
    backend.detailed = True
    while (ledger.now_ns or 0) < 3 * NS_PER_S:
        ledger = loop.tick(backend, SETTINGS, ledger)
        recorder.watch(ledger, 0)
        for tick in recorder.fetch():
            track.add(tick if told else tick | {"utilization": None})
    return track


def test_pods_that_hold_the_card_without_kernels_are_named():
    found = of_track(recorded(EAGER, EAGER))

    assert isinstance(found, Candidates)
    assert {each.pod for each in found.pods} == {"pod-0", "pod-1"}
    assert found.held > 0.8
    assert found.used < 0.3


@pytest.mark.parametrize("loads", [(FLOOD, FLOOD), (EAGER,)])
def test_pods_whose_time_is_used_or_theirs_alone_are_not_named(loads):
    assert of_track(recorded(*loads)) is None


def test_without_utilisation_nothing_is_said():
    assert of_track(recorded(EAGER, EAGER, told=False)) is None
