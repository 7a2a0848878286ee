"""A pod with many TSGs: each costs a plan a control, and the daemon a look."""

from __future__ import annotations

import nv
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
