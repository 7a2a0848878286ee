"""The supervisor over a real seccomp filter: a real process, stopped by the kernel, judged and answered.

There is no NVIDIA driver here: the pod's descriptor is /dev/null, whose major the supervisor is told to watch,
so a call that was let through comes back with ENOTTY. What RM would say of an object comes from a table.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qgpu.guardian.journal import Journal
from qgpu.guardian.register import Register
from qgpu.guardian.supervisor import Supervisor
from qgpu.rm import abi
from tests.traces import TRACES, allocated, rows

NULL_MAJOR = 1
LIMIT = 1 << 40
FOREVER_NS = 3600 * 10**9


class TableOfRm:
    """What RM says: which objects it has, by (client, handle)."""

    def __init__(self, objects):
        self.objects = objects
        self.pidfds = {}

    def watch(self, pid):
        self.pidfds[pid] = os.pidfd_open(pid)
        return self.pidfds[pid]

    def unwatch(self, pid):
        os.close(self.pidfds.pop(pid))

    def real(self, claims):
        return {rm.key: self.objects.get(rm.key) for rm in claims}

    def context(self, channel):
        return channel.handle


class Pod:
    """A child process behind a filter, and the supervisor that serves it."""

    def __init__(self, objects):
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.guardian.child", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=Path(__file__).parents[2],
        )
        theirs.close()
        _, fds, _, _ = socket.recv_fds(ours, 16, 1)
        self.listener = fds[0]
        self.lines = ours.makefile("rw")
        self.sock = ours
        self.left, self.stayed = [], []
        self.supervisor = self.fresh(objects, Journal())
        self.supervisor.note({"fact": "pod", "name": "web", "grants": {}})
        self.number = self.supervisor.listen("web", self.listener)

    def fresh(self, objects, journal):
        return Supervisor(
            Register(),
            journal,
            TableOfRm(objects),
            self.left.extend,
            self.stayed.extend,
            lambda pid, pidfd: None,
            time.monotonic_ns,
            lambda pod, instance: LIMIT,
            NULL_MAJOR,
        )

    def tell(self, line):
        self.lines.write(line + "\n")
        self.lines.flush()

    def begin(self, number, argument, params=b""):
        request = abi.request(number, len(argument))
        self.tell(json.dumps({"request": request, "argument": argument.hex(), "params": params.hex()}))

    def call(self, number, argument, params=b""):
        """Make one call in the pod, serving whatever the filter stops, and return its answer."""
        self.begin(number, argument, params)
        return self.answer()

    def answer(self):
        while True:
            ready, _, _ = select.select([self.sock, self.listener], [], [], 20)
            assert ready, "the pod is stuck"
            if self.sock in ready:
                answer = json.loads(self.lines.readline())
                return answer["result"], answer["errno"], bytes.fromhex(answer["argument"])
            self.supervisor.serve(self.number)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.sock.close()


def control(command, target=0x5C000015, size=8):
    return struct.pack("<IIIIQII", 7, target, command, 0, 0, size, 0xFFFF)


def status(argument):
    return struct.unpack_from("<I", argument, 28)[0]


def tsg_alloc(handle=0x5C000015):
    return struct.pack("<IIIIQQIIII", 7, 2, handle, abi.KEPLER_CHANNEL_GROUP_A, 0, 0, 0, 0, 0, 0)


TSG_PARAMS = struct.pack("<IIIII", 0, 0, 0, 1, 0)


@pytest.fixture
def pod(request):
    made = Pod(getattr(request, "param", {}))
    yield made
    made.end()


pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


def test_a_scheduling_control_is_refused_in_rms_own_words(pod):
    result, _, argument = pod.call(abi.NV_ESC_RM_CONTROL, control(abi.NV2080_FIFO_DISABLE_CHANNELS))

    assert (result, status(argument)) == (0, abi.NV_ERR_INSUFFICIENT_PERMISSIONS)
    assert pod.supervisor.refusals["web", "NV2080 FIFO_DISABLE_CHANNELS"] == 1


def test_any_other_control_reaches_the_driver_untouched(pod):
    before = control(0x20801303)

    result, error, after = pod.call(abi.NV_ESC_RM_CONTROL, before)

    assert (result, error, after) == (-1, errno.ENOTTY, before)


def test_libcudas_own_timeslice_is_remembered_once_and_refused_after(pod):
    pod.call(abi.NV_ESC_RM_ALLOC, tsg_alloc(), TSG_PARAMS)
    wish = struct.pack("<Q", 2048)

    first = pod.call(abi.NV_ESC_RM_CONTROL, control(abi.NVA06C_SET_TIMESLICE), wish)
    second = pod.call(abi.NV_ESC_RM_CONTROL, control(abi.NVA06C_SET_TIMESLICE), struct.pack("<Q", 4096))

    assert (first[0], status(first[2])) == (0, abi.NV_OK)
    assert (second[0], status(second[2])) == (0, abi.NV_ERR_INSUFFICIENT_PERMISSIONS)
    assert pod.supervisor.register.objects[7, 0x5C000015].wish_us == 2048


def test_a_timeslice_wish_may_not_be_a_way_to_a_larger_share(pod):
    pod.call(abi.NV_ESC_RM_ALLOC, tsg_alloc(), TSG_PARAMS)

    answer = pod.call(abi.NV_ESC_RM_CONTROL, control(abi.NVA06C_SET_TIMESLICE), struct.pack("<Q", 10**6))

    assert status(answer[2]) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS


def test_what_rm_does_not_confirm_is_never_scheduled(pod):
    pod.call(abi.NV_ESC_RM_ALLOC, tsg_alloc(), TSG_PARAMS)
    for second in range(20):
        pod.supervisor.settle(time.monotonic_ns() + second * 10**9)

    assert pod.supervisor.register.objects == {}


def test_what_is_its_own_ancestor_is_no_object(pod):
    pod.call(abi.NV_ESC_RM_ALLOC, alloc(10, 10, 0x40), MEMORY_PARAMS)
    pod.call(abi.NV_ESC_RM_ALLOC, alloc(11, 12, 0x80), bytes(56))
    pod.call(abi.NV_ESC_RM_ALLOC, alloc(12, 11, 0x40), MEMORY_PARAMS)

    assert set(pod.supervisor.register.objects) == {(7, 11)}
    assert pod.supervisor.register.memory("web") == {}


def test_an_object_whose_handle_rm_would_choose_is_refused(pod):
    answer = pod.call(abi.NV_ESC_RM_ALLOC, alloc(0, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)

    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_ERR_INVALID_ARGUMENT)


@pytest.mark.parametrize("pod", [{(7, 0x5C000015): (abi.KEPLER_CHANNEL_GROUP_A, 2)}], indirect=True)
def test_asking_for_something_else_under_a_tsgs_handle_does_not_hide_the_tsg(pod):
    pod.call(abi.NV_ESC_RM_ALLOC, tsg_alloc(), TSG_PARAMS)
    pod.supervisor.settle(time.monotonic_ns() + FOREVER_NS)
    pod.call(abi.NV_ESC_RM_ALLOC, alloc(0x5C000015, 2, 0x2080), bytes(4))
    pod.supervisor.settle(time.monotonic_ns() + FOREVER_NS)

    kept = pod.supervisor.register.objects[7, 0x5C000015]
    assert (kept.rm_class, kept.confirmed) == (abi.KEPLER_CHANNEL_GROUP_A, True)


def test_a_refusal_that_cannot_be_written_is_not_carried_out_either(pod):
    pod.tell("readonly")
    result, error, _ = pod.call(abi.NV_ESC_RM_CONTROL, control(abi.NV2080_FIFO_DISABLE_CHANNELS))

    assert (result, error) == (-1, errno.EFAULT)


def test_a_call_that_breaks_the_judge_is_answered_all_the_same(pod):
    pod.supervisor.register = None
    result, error, _ = pod.call(abi.NV_ESC_RM_FREE, struct.pack("<IIII", 7, 2, 3, 0))

    assert (result, error) == (-1, errno.EIO)


@pytest.mark.parametrize("pod", [{(7, 0x5C000015): (abi.KEPLER_CHANNEL_GROUP_A, 2)}], indirect=True)
def test_a_free_that_rm_did_not_carry_out_hides_nothing(pod):
    pod.call(abi.NV_ESC_RM_ALLOC, tsg_alloc(), TSG_PARAMS)
    pod.supervisor.settle(time.monotonic_ns() + FOREVER_NS)
    pod.call(abi.NV_ESC_RM_FREE, struct.pack("<IIII", 7, 2, 0x5C000015, 0))
    pod.supervisor.settle(time.monotonic_ns() + FOREVER_NS)

    assert pod.supervisor.register.objects[7, 0x5C000015].confirmed


MOST = 3 << 38  # three quarters of the limit: one fits, two do not
MEMORY_PARAMS = bytes(64) + struct.pack("<Q", MOST) + bytes(56)


def alloc(handle, parent, rm_class):
    return struct.pack("<IIIIQQIIII", 7, parent, handle, rm_class, 0, 0, 0, 0, 0, 0)


def alloc_status(argument):
    return struct.unpack_from("<I", argument, 40)[0]


@pytest.mark.parametrize("pod", [{(7, 2): (0x80, 7), (7, 10): (0x40, 2)}], indirect=True)
def test_memory_over_the_limit_is_refused_as_no_memory_and_not_charged(pod):
    pod.call(abi.NV_ESC_RM_ALLOC, alloc(2, 7, abi.NV01_DEVICE_0), bytes(56))
    fits = pod.call(abi.NV_ESC_RM_ALLOC, alloc(10, 2, 0x40), MEMORY_PARAMS)
    over = pod.call(abi.NV_ESC_RM_ALLOC, alloc(11, 2, 0x40), MEMORY_PARAMS)

    assert fits[:2] == (-1, errno.ENOTTY)  # it went on to the driver
    assert (over[0], alloc_status(over[2])) == (0, abi.NV_ERR_NO_MEMORY)
    assert pod.supervisor.register.memory("web") == {0: MOST}
    assert pod.supervisor.refusals["web", "memory over the limit"] == 1


@pytest.mark.parametrize("pod", [{(7, 2): (0x80, 7)}], indirect=True)
def test_memory_freed_or_refused_by_rm_a_moment_ago_does_not_count(pod):
    pod.call(abi.NV_ESC_RM_ALLOC, alloc(2, 7, abi.NV01_DEVICE_0), bytes(56))
    pod.call(abi.NV_ESC_RM_ALLOC, alloc(10, 2, 0x40), MEMORY_PARAMS)
    pod.call(abi.NV_ESC_RM_FREE, struct.pack("<IIII", 7, 2, 10, 0))
    again = pod.call(abi.NV_ESC_RM_ALLOC, alloc(11, 2, 0x40), MEMORY_PARAMS)

    assert again[:2] == (-1, errno.ENOTTY)


def test_children_of_a_pod_are_in_the_pod(pod):
    pod.tell("fork")
    child = int(pod.lines.readline())
    pod.call(abi.NV_ESC_RM_ALLOC, tsg_alloc(), TSG_PARAMS)

    assert pod.supervisor.register.processes == {child: "web"}


def test_a_call_that_a_dead_guardian_left_in_hand_is_answered_by_the_next(pod):
    pod.begin(abi.NV_ESC_RM_CONTROL, control(0x20801303))
    select.select([pod.listener], [], [], 20)
    number, listener = pod.number, pod.supervisor.listeners[pod.number][1]
    pod.supervisor.journal.in_hand(number)
    assert listener.receive() is not None  # and here it dies

    successor = pod.fresh({}, Journal(os.dup(pod.supervisor.journal.fd)))
    successor.listen("other", os.dup(pod.listener), number + 1)
    successor.listen("web", os.dup(pod.listener), number)
    successor.answer_orphan()

    assert pod.answer()[:2] == (-1, errno.ENOTTY)


@pytest.mark.parametrize("trace", [TRACES[-1], *(t for t in TRACES if "min" in t.name)], ids=lambda path: path.name)
def test_a_recorded_program_replayed_through_the_filter_is_registered_whole(trace):
    made = allocated(trace)
    pod = Pod(made)
    try:
        for row in rows(trace):
            pod.call(row.number, row.before, row.params)
        pod.supervisor.settle(time.monotonic_ns() + FOREVER_NS)
        register = pod.supervisor.register
        kept = {abi.NV01_DEVICE_0, abi.NV20_SUBDEVICE_0, abi.KEPLER_CHANNEL_GROUP_A, 0x40} | abi.GPFIFO_CLASSES

        assert {rm.key for rm in register.objects.values() if rm.confirmed} == {
            key for key, (rm_class, _) in made.items() if rm_class in kept
        }
        assert len(register.compute_tsgs(0)) == 1
        assert len(register.channels(register.compute_tsgs(0)[0])) == 8
    finally:
        pod.end()
