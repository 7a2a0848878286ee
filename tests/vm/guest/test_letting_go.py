"""The driver is let go of once nothing of a plan is left in it: neither gates nor timeslices, each on its own."""

from __future__ import annotations

import threading

import nv
import pytest
import qg
from faults import ENFORCE, FAULTS, cleared, fault, inject

#: Of its object, not of the card: RM takes other calls meanwhile.
INVALID_STATE = 0x40


def flood(state):
    p = state["p"] = nv.Program()
    _, channels = p.compute(2)
    p.submit(channels[0], 1000)


def met(call):
    return int(dict(line.split() for line in FAULTS.read_text().splitlines())[call])


@pytest.fixture
def off(qgpu, pod):
    """Switch off in a thread, while a pod with a timeslice of the plan's is behind its gate."""
    web = pod("web")
    web.process().run(flood)
    qgpu.plan((web.id, 5000, []))
    yield threading.Thread(target=ENFORCE.write_text, args=("0",))
    cleared()
    qgpu.plan()
    ENFORCE.write_text("1")


@pytest.mark.parametrize("call", ["open", "slice"])
def test_switching_off_waits_for_all_that_a_plan_did(off, call):
    before = met(call)
    inject([fault(call, INVALID_STATE)])
    off.start()
    qg.until(lambda: met(call) > before + 30)  # by then a driver that is let go of would be gone
    waits = off.is_alive()
    cleared()
    off.join()

    assert waits
    assert [(tsg["off"], tsg["slice_ns"]) for tsg in qg.sim_tsgs()] == [(0, 1_024_000)]
