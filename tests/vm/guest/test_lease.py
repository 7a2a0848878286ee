"""A plan is a lease: however its owner ends, gates are open and timeslices back within a second of it."""

from __future__ import annotations

import os
import signal
import time

import nv
import pytest
import qg

MS = qg.MS

pytestmark = pytest.mark.quiet


def flood(state):
    p = state["p"] = nv.Program()
    _, (channel,) = p.compute()
    p.submit(channel, 1000)


def own(state, pod, lease_ns):
    state["q"] = qg.Qgpu()
    state["q"].plan((pod, 5000, []), lease_ns=lease_ns)


@pytest.fixture
def gated(qgpu, pod):
    """A pod behind a closed gate, and the process that owns the plan."""
    a = pod("a")
    a.process().run(flood)
    daemon = qg.Process(None)

    def close(lease_ns):
        daemon.run(own, a.id, lease_ns)
        qg.until(lambda: [(tsg["off"], tsg["slice_ns"]) for tsg in qg.sim_tsgs()] == [(1, 5_000_000)])
        return daemon

    yield close
    daemon.kill()


def is_free():
    return [(tsg["off"], tsg["slice_ns"]) for tsg in qg.sim_tsgs()] == [(0, 1_024_000)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_daemon_leaves_no_gate_closed(gated, how, figure):
    daemon = gated(60_000 * MS)
    started = time.monotonic()
    os.kill(daemon.pid, how)
    qg.until(is_free)
    figure(f"daemon_{how.name.lower()}_recovery_s", time.monotonic() - started)

    assert time.monotonic() - started < 1


def test_a_hung_daemon_leaves_no_gate_closed(gated, qgpu, figure):
    daemon = gated(500 * MS)
    started = time.monotonic()
    os.kill(daemon.pid, signal.SIGSTOP)
    qg.until(is_free)
    figure("daemon_sigstop_recovery_s", time.monotonic() - started)

    assert time.monotonic() - started < 0.5 + 1
    assert qg.uapi.NUMBERS["QGPU_EVENT_LEASE_LAPSED"] in [event.type for event in qgpu.events()]


def test_a_renewed_plan_holds(gated):
    daemon = gated(3000 * MS)
    for _ in range(10):
        time.sleep(0.5)
        daemon.run(lambda state: state["q"].ioctl("RENEW", gpu=0) and None)

    assert not is_free()


def test_a_lapsed_plan_cannot_be_renewed(gated):
    daemon = gated(500 * MS)
    qg.until(is_free)
    with pytest.raises(FileNotFoundError):
        daemon.run(lambda state: state["q"].ioctl("RENEW", gpu=0) and None)


def test_a_plan_has_one_owner(gated, qgpu):
    daemon = gated(60_000 * MS)
    with pytest.raises(OSError, match="busy"):
        qgpu.plan()
    with pytest.raises(FileNotFoundError):
        qgpu.ioctl("RENEW", gpu=0)
    daemon.run(lambda state: state["q"].close())
    qgpu.plan()

    assert is_free()


def test_a_refused_plan_leaves_the_old_one_in_force(gated):
    daemon = gated(60_000 * MS)

    def refused(state):
        try:
            state["q"].plan((999, 5000))
        except OSError as error:
            return error.errno
        return 0

    assert daemon.run(refused) == 22
    assert not is_free()


def test_module_stays_while_a_daemon_is_connected(gated):
    gated(60_000 * MS)
    with pytest.raises(BlockingIOError):
        qg.rmmod("qgpu")

    assert not is_free()
