"""A pod with many TSGs: each costs a plan a control, and the daemon a look."""

from __future__ import annotations

from pathlib import Path

import nv
import pytest
import qg
from faults import cleared, fault, inject
from programs import program, status_of

MS = qg.MS

TSGS_MAX, DEVICES_MAX = 512, 128


def make_tsgs(state, count):
    """So many TSGs of a copy engine; RM's status for the last."""
    return [status_of(state, "tsg", 9) for _ in range(count)][-1]


def test_a_pod_has_so_many_tsgs_at_most(pod):
    """A plan and a daemon go through all of them."""
    web = pod("web")
    process = web.process()
    process.run(program)
    assert [process.run(make_tsgs, count) for count in (TSGS_MAX, 1)] == [0, nv.NO_MEMORY]
    assert (web.usage().nr_tsgs, len(qg.sim_tsgs())) == (TSGS_MAX, TSGS_MAX)
    process.run(lambda state: state["p"].free(state["p"].last - 1))

    assert [process.run(make_tsgs, 1) for _ in range(2)] == [0, nv.NO_MEMORY]


def make_devices(state, count):
    """So many devices on the card; RM's status for each."""
    p = state["p"]
    return [status_of(state, "alloc", p.client, nv.DEVICE, bytes(56)) for _ in range(count)]


def test_a_client_has_so_many_devices_at_most(pod):
    """RM looks through all of a process's objects for each of them, when somebody asks about the process."""
    process = pod("web").process()
    process.run(program)  # has one

    assert process.run(make_devices, DEVICES_MAX) == [0] * (DEVICES_MAX - 1) + [nv.NO_RESOURCES]
    process.run(lambda state: state["p"].free(state["p"].last - 1))
    assert process.run(make_devices, 2) == [0, nv.NO_RESOURCES]
    process.run(program)
    assert process.run(make_devices, 1) == [0]


def test_timeslices_cost_a_daemon_no_lease(qgpu, pod):
    """RM takes its time over each of them, and the daemon renews its plan meanwhile."""
    web = pod("web")
    process = web.process()
    process.run(program)
    process.run(make_tsgs, 40)
    qgpu.events()
    inject([fault("slice", 0, stall_ms=50)])
    qgpu.plan((web.id, 5000, []), lease_ns=1000 * MS)
    qgpu.ioctl("RENEW", gpu=0)
    set_then = [tsg["slice_ns"] for tsg in qg.sim_tsgs()].count(5_000_000)
    cleared()

    qg.until(lambda: [tsg["slice_ns"] for tsg in qg.sim_tsgs()] == [5_000_000] * 40)
    assert set_then < 40
    assert qg.N["QGPU_EVENT_LEASE_LAPSED"] not in [event.type for event in qgpu.events()]


@pytest.fixture
def few_channels():
    parameter = Path("/sys/module/qgpu/parameters/channels_max")
    before = parameter.read_text()
    parameter.write_text("20")
    yield
    parameter.write_text(before)


def channels(state, tsgs, each):
    """RM's status for each of so many channels in each of so many TSGs; the channels are kept."""
    p = state["p"]
    statuses = []
    for _ in range(tsgs):
        tsg = p.tsg()
        for _ in range(each):
            try:
                state.setdefault("channels", []).append(p.channel(tsg))
                statuses.append(0)
            except nv.RmError as error:
                statuses.append(error.status)
    return statuses


def test_channels_beyond_the_maximum_of_a_pod_are_refused(pod, few_channels):
    web = pod("web")
    first, second = web.process(), pod("other").process()
    first.run(program)
    second.run(program)

    assert first.run(channels, 4, 6) == [0] * 20 + [nv.NO_MEMORY] * 4
    assert second.run(channels, 1, 6) == [0] * 6
    first.run(lambda state: state["p"].free(state["channels"].pop()))
    assert first.run(channels, 1, 2) == [0, nv.NO_MEMORY]
    assert web.usage().nr_channels == 20


def test_a_pod_is_removed_before_timeslices_of_others_are_set(qgpu, pod):
    """A pod can make TSGs faster than RM sets their timeslices; the daemon must not hang meanwhile."""
    web, other = pod("web"), pod("other")
    process = web.process()
    process.run(program)
    process.run(make_tsgs, 400)
    inject([fault("slice", 0, stall_ms=20)])  # 8 seconds for all
    qgpu.plan((web.id, 5000, []), lease_ns=30_000 * MS)
    qgpu.ioctl("POD_REMOVE", pod=other.id)
    set_then = [tsg["slice_ns"] for tsg in qg.sim_tsgs()].count(5_000_000)
    cleared()

    assert set_then < 400
