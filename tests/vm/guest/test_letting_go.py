"""The driver is let go of once nothing of a plan is left in it: neither gates nor timeslices, each on its own."""

from __future__ import annotations

import contextlib
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


def schedule(state):
    with contextlib.suppress(nv.RmError):
        state["p"].control(state["p"].subdevice, 0x80170F)


def met(call):
    return int(dict(line.split() for line in FAULTS.read_text().splitlines())[call])


@pytest.fixture
def gated(qgpu, pod):
    """A pod with a timeslice of the plan's, behind its gate."""
    web = pod("web")
    web.process().run(flood)
    qgpu.plan((web.id, 5000, []))
    yield web
    cleared()
    qgpu.plan()
    ENFORCE.write_text("1")


@pytest.mark.parametrize("call", ["open", "slice"])
def test_switching_off_waits_for_all_that_a_plan_did(gated, call):
    before = met(call)
    inject([fault(call, INVALID_STATE)])
    off = threading.Thread(target=ENFORCE.write_text, args=("0",))
    off.start()
    qg.until(lambda: met(call) > before + 30)
    gated.processes[0].run(schedule)
    waits, refused = off.is_alive(), gated.info().refused_controls
    cleared()
    off.join()

    assert (waits, refused) == (True, 1)
    assert [(tsg["off"], tsg["slice_ns"]) for tsg in qg.sim_tsgs()] == [(0, 1_024_000)]
