"""Recorded CUDA programs on NVIDIA's own modules, as far as they come without a card: what succeeds is the same.

Calls on a card's file are left out, for it does not open. What needs a device is answered by RM's and UVM's errors.
"""

from __future__ import annotations

import contextlib

import modules
import pytest
import qg
from replay import TRACES, UVM, Replay, name_of, records_of


def play(_state, records):
    """Replay calls; every answer."""
    replay = Replay()
    for record in records:
        replay.step(record)
    return replay.answers


def succeeded(answer):
    """Result and errno, and whether RM's status is an error."""
    result, error, status = answer
    return result, error, bool(status)


@contextlib.contextmanager
def process():
    """A process in no pod, for as long as this lasts."""
    made = qg.Process(None)
    try:
        yield made
    finally:
        made.kill()


@pytest.fixture(autouse=True)
def _uvm(_driver):
    with modules.uvm():
        yield


@pytest.mark.skipif(not TRACES, reason="QGPU_TRACES names no folder of traces")
@pytest.mark.parametrize("trace", TRACES, ids=name_of)
def test_recorded_programs_are_told_the_same_in_a_pod(web, qgpu, figure, trace):
    records = [record for record in records_of(trace) if record["dev"] in (UVM, "/dev/nvidiactl")]
    with process() as other:
        outside = other.run(play, records)
    inside = web.process().run(play, records)
    web.processes[0].stop()
    figure(f"real_replay_calls_{name_of(trace)}", len(inside))

    # the module knows the object table, and at times says in other words than RM what is wrong with a call
    figure(f"real_replay_other_errors_{name_of(trace)}", sum(a != b for a, b in zip(outside, inside, strict=True)))
    assert list(map(succeeded, inside)) == list(map(succeeded, outside))
    assert qgpu.info().nr_objects == 0
