"""Pods that ended while another process has files of theirs: through the daemon's host and backend, on the module."""

from __future__ import annotations

import os

import nv
import pytest
import qg
import simcard
from programs import MIB, ROOM, program, take

from qgpu.errors import RefusedError
from qgpu.linux import cgroup
from qgpu.model import NS_PER_MS, Grant, Plan, PodClass, PodPlan


@pytest.fixture
def host(module):
    opened = simcard.open_host()
    yield opened
    for pod in opened.pods():
        opened.retire(pod.name)
    opened.close()


@pytest.fixture
def two(host):
    """A process of each of two pods; they end with the test."""
    made = []
    for name, memory in (("ended", 256 * MIB), ("other", 16 * MIB)):
        host.admit(name, {0: Grant(memory=memory + ROOM)})
        made.append(qg.Process(None))
        host.attach(name, made[-1].pid, ())
    yield made
    for process in made:
        process.kill()
    qg.until(lambda: not host.orphaned_memory())


def work(state):
    state["channel"] = state["p"].compute()[1][0]
    state["p"].submit(state["channel"], 1000)
    return os.getpid(), state["p"].ctl


def keep(state, pid, fd):
    state["kept"] = qg.take_descriptor(pid, fd)


def let_go(state):
    os.close(state.pop("kept"))


def take_by(state, client, parent):
    """Memory in a client of the kept file; RM's status."""
    p = object.__new__(nv.Program)
    p.send, p.ctl, p.client, p.device, p.last = nv.call, state["kept"], client, parent, 0x5CDD0000
    try:
        p.memory(MIB)
    except nv.RmError as error:
        return error.status
    return 0


def names_of(state):
    return state["p"].client, state["p"].device


def idle(state):
    state["ctl"] = os.open(nv.CTL, os.O_RDWR)
    return os.getpid(), state["ctl"]


def export(state, size):
    """Export memory into a file, and end the client that had it."""
    p = state["p"]
    fd = p.export(p.memory(size))
    p.close()
    return os.getpid(), fd


def plan(*pods):
    return Plan(0, 100 * NS_PER_MS, tuple(PodPlan(name, PodClass.OFFLINE, 2000) for name in pods))


def test_memory_of_a_pod_that_ended_is_not_granted_again(host, two):
    first, second = two
    first.run(program)
    assert first.run(take, 200 * MIB) > 0
    second.run(keep, *first.run(work))
    names = first.run(names_of)
    first.kill()
    host.retire("ended")

    held = host.orphaned_memory()[0]
    assert held >= qg.used() >= 200 * MIB
    assert [pod.name for pod in host.pods()] == ["other"]
    assert list(host.names_in_use()) == ["ended"]
    with pytest.raises(RefusedError, match="files or memory of an earlier pod"):
        host.admit("ended", {0: Grant()})
    assert second.run(take_by, *names) == nv.NO_MEMORY  # far from its limit before
    second.run(let_go)
    assert (host.orphaned_memory(), list(host.names_in_use()), qg.used()) == ({}, [], 0)
    host.admit("ended", {0: Grant()})


def test_tsgs_of_a_pod_that_ended_are_off_while_a_plan_holds(host, two):
    first, second = two
    first.run(program)
    second.run(keep, *first.run(work))
    backend = host.backend(0)
    try:
        backend.apply(plan("ended", "other"))
        assert [row["off"] for row in qg.sim_tsgs()] == [0]
        first.kill()
        host.retire("ended")
        assert [pod.pod for pod in backend.sample().pods] == ["other"]
        backend.apply(plan("ended", "other"))
        qg.until(lambda: [row["off"] for row in qg.sim_tsgs()] == [1])
        backend.apply(plan("other"))
        assert [row["off"] for row in qg.sim_tsgs()] == [1]
    finally:
        backend.close()
    qg.until(lambda: [row["off"] for row in qg.sim_tsgs()] == [0])


def test_a_restarted_daemon_finds_what_is_left_again(host, two):
    first, second = two
    first.run(program)
    assert first.run(take, 64 * MIB) > 0
    second.run(keep, *first.run(work))
    first.kill()
    host.retire("ended")
    held = host.orphaned_memory()
    again = simcard.open_host()
    try:
        (found,) = [pod for pod in again.pods() if pod.name == "ended"]
        assert (found.alive, found.pids, found.memory) == (False, (), held)
        again.retire("ended")  # as the daemon retires any pod without processes
        assert (again.orphaned_memory(), list(again.names_in_use())) == (held, ["ended"])
        second.run(let_go)
        assert not again.orphaned_memory()
    finally:
        again.close()


def test_exported_memory_is_left_without_a_client(host, two):
    first, second = two
    first.run(program)
    second.run(keep, *first.run(export, 32 * MIB))
    first.kill()
    host.retire("ended")

    assert host.orphaned_memory() == {0: 32 * MIB}
    second.run(let_go)
    assert (host.orphaned_memory(), qg.used()) == ({}, 0)


def test_a_file_without_clients_keeps_no_pod(host, two, qgpu):
    first, second = two
    second.run(keep, *first.run(idle))
    first.kill()
    host.retire("ended")

    assert (list(host.names_in_use()), qgpu.info().nr_pods) == ([], 1)


def test_a_pod_in_the_same_cgroup_has_what_is_left(host, two):
    """As a container's next run in its cgroup."""
    first, second = two
    first.run(program)
    assert first.run(take, 64 * MIB) > 0
    second.run(keep, *first.run(work))
    at = next(pod.cgroup for pod in host.pods() if pod.name == "ended")
    stays = qg.Process(None)
    host.attach("ended", stays.pid, ())  # its cgroup stays
    first.kill()
    host.retire("ended")
    held = host.orphaned_memory()
    stays.kill()
    host.admit("next", {0: Grant(memory=128 * MIB)}, at)

    assert (host.orphaned_memory(), list(host.names_in_use())) == ({}, [])
    assert next(pod.memory for pod in host.pods() if pod.name == "next") == held
    host.retire("next")
    assert host.orphaned_memory() == held
    cgroup.remove("ended")
