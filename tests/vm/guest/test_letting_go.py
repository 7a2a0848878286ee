"""What a plan did to a card is undone as soon as RM lets it be, and before the driver is let go of."""

from __future__ import annotations

import contextlib
import threading

import nv
import pytest
import qg
from faults import ENFORCE, FAULTS, cleared, fault, inject

#: Of the card; and of the object alone, so that RM takes other calls meanwhile.
GPU_IS_LOST, INVALID_STATE = 0x0F, 0x40


def flood(state):
    p = state["p"] = nv.Program()
    _, channels = p.compute(2)
    p.submit(channels[0], 1000)


def schedule(state):
    with contextlib.suppress(nv.RmError):
        state["p"].control(state["p"].subdevice, 0x80170F)


def met(call):
    return int(dict(line.split() for line in FAULTS.read_text().splitlines())[call])


def is_free():
    return [(tsg["off"], tsg["slice_ns"]) for tsg in qg.sim_tsgs()] == [(0, 1_024_000)]


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
    assert is_free()


def test_a_lost_card_that_answers_again_is_asked_soon(gated, qgpu):
    before = met("open")
    inject([fault("open", GPU_IS_LOST)])
    qgpu.plan()
    qg.until(lambda: met("open") > before)
    cleared()

    qg.until(is_free, 5)
