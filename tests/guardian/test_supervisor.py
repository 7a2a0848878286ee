"""The judge over a real seccomp filter: a real process, stopped by the kernel, its calls carried out for it.

There is no NVIDIA driver here: the pod's descriptor is /dev/null, whose major the judge is told to watch, and
RM is a table (``fake_rm.py``) that reads and writes what the guardian hands it.
"""

from __future__ import annotations

import ctypes
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

from qgpu.guardian import managed, supervisor
from qgpu.guardian.charges import Allowance
from qgpu.guardian.journal import Journal
from qgpu.guardian.judge import Judge
from qgpu.guardian.mappings import Mappings
from qgpu.guardian.register import Register, RmObject
from qgpu.guardian.supervisor import Supervisor
from qgpu.rm import abi, uvm
from tests.guardian.fake_rm import PAGE, FakeRm
from tests.traces import TRACES, allocated, rows

NULL_MAJOR, NULL_MINOR = 1, 3
LIMIT = 1 << 40


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
        self.rm = FakeRm(objects)
        self.limits = {0: LIMIT}
        self.supervisor = self.fresh(Journal())
        self.supervisor.note({"fact": "pod", "name": "web", "grants": {}})
        self.number = self.supervisor.listen("web", self.listener)
        self.judge = self.judge_of(self.supervisor, self.number)

    def fresh(self, journal):
        return Supervisor(
            Register(),
            journal,
            self.rm,
            self.left.extend,
            self.stayed.extend,
            lambda pid, pidfd: None,
            time.monotonic_ns,
            lambda pod: Allowance({0: NULL_MINOR}, self.limits),
            major=NULL_MAJOR,
            uvm_layouts=uvm.layouts("580.1"),
            perform=self.rm.perform,
            uuids={bytes(16): 0},
        )

    def judge_of(self, supervisor, number):
        return Judge(supervisor, supervisor.listeners[number][0])

    def settle(self):
        """Let everything come due."""
        for second in range(20):
            self.supervisor.dues.settle(time.monotonic_ns() + second * 10**9)

    def tell(self, line):
        self.lines.write(line + "\n")
        self.lines.flush()

    def uvm(self, request, argument):
        """Make a call of UVM's on a file that is taken for UVM's meanwhile."""
        self.supervisor.major, self.supervisor.uvm_major = None, NULL_MAJOR
        self.tell(json.dumps({"request": request, "argument": argument.hex(), "params": ""}))
        try:
            return self.answer()
        finally:
            self.supervisor.major, self.supervisor.uvm_major = NULL_MAJOR, None

    def begin(self, number, argument, params=b"", **more):
        request = abi.request(number, len(argument))
        self.tell(json.dumps({"request": request, "argument": argument.hex(), "params": params.hex()} | more))

    def call(self, number, argument, params=b"", **more):
        """Make one call in the pod, serving whatever the filter stops, and return its answer."""
        self.begin(number, argument, params, **more)
        return self.answer()

    def call_for_params(self, number, argument, params, **more):
        """As call, with the parameters as they are after it."""
        return (*self.call(number, argument, params, **more), self.params)

    def call_nested(self, number, argument, params, pointer_at, nested):
        """As call, where the parameters point to more; return that as it is after."""
        self.call(number, argument, params, nested=nested.hex(), nested_at=pointer_at)
        return self.nested

    def answer(self):
        while True:
            ready, _, _ = select.select([self.sock, self.listener], [], [], 20)
            assert ready, "the pod is stuck"
            if self.sock in ready:
                answer = json.loads(self.lines.readline())
                self.params, self.nested = (bytes.fromhex(answer.get(part, "")) for part in ("params", "nested"))
                return answer["result"], answer["errno"], bytes.fromhex(answer["argument"])
            call = self.supervisor.listeners[self.number][1].receive()
            if call is not None:
                self.judge.serve(self.supervisor.listeners[self.number][1], call)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.sock.close()


def control(command, target=0x5C000015, size=8, client=7):
    return struct.pack("<IIIIQII", client, target, command, 0, 0, size, 0xFFFF)


def status(argument):
    return struct.unpack_from("<I", argument, 28)[0]


def alloc(handle, parent, rm_class, client=7):
    return struct.pack("<IIIIQQIIII", client, parent, handle, rm_class, 0, 0, 0, 0, 0xFFFF, 0)


def alloc_status(argument):
    return struct.unpack_from("<I", argument, 40)[0]


def memory_params(size):
    return bytes(64) + struct.pack("<Q", size) + bytes(56)


def free(handle, client=7):
    return struct.pack("<IIII", client, 0, handle, 0xFFFF)


def dup(handle, source, parent=2, client=7, source_client=7):
    return struct.pack("<7I", client, parent, handle, source_client, source, 0, 0xFFFF)


TSG = 0x5C000015
TSG_PARAMS = struct.pack("<IIIII", 0, 0, 0, 1, 0)
DEVICE_PARAMS = bytes(56)


@pytest.fixture
def pod(request):
    made = Pod(getattr(request, "param", {}))
    yield made
    made.end()


@pytest.fixture
def on_card(pod):
    """A pod that has made a device, and a subdevice."""
    make_device(pod)
    answer = pod.call(abi.NV_ESC_RM_ALLOC, alloc(3, 2, abi.NV20_SUBDEVICE_0), bytes(4))
    assert alloc_status(answer[2]) == abi.NV_OK
    return pod


def make_device(pod, handle=2):
    """Let the kernel carry a device's allocation out, which goes to /dev/null; RM has it then."""
    asked = alloc(handle, 7, abi.NV01_DEVICE_0)
    assert pod.call(abi.NV_ESC_RM_ALLOC, asked, DEVICE_PARAMS)[:2] == (-1, errno.ENOTTY)
    pod.rm.objects[7, handle] = (abi.NV01_DEVICE_0, 7)


def allocate(pod, handle, size):
    return alloc_status(pod.call(abi.NV_ESC_RM_ALLOC, alloc(handle, 2, 0x40), memory_params(size))[2])


def memory(pod):
    """What a pod is charged for memory alone, without page tables."""
    return pod.supervisor.register.memory("web").get(0, 0)


def held(pod):
    return pod.supervisor.charges.used("web", 0)


pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


# -- controls ---------------------------------------------------------------------------------------------------------


def test_a_scheduling_control_is_refused_in_rms_own_words(pod):
    result, _, argument = pod.call(abi.NV_ESC_RM_CONTROL, control(abi.NV2080_FIFO_DISABLE_CHANNELS))

    assert (result, status(argument)) == (0, abi.NV_ERR_INSUFFICIENT_PERMISSIONS)
    assert pod.supervisor.refusals["web", "NV2080 FIFO_DISABLE_CHANNELS"] == 1
    assert pod.rm.seen == []


def test_a_control_that_nobody_knows_is_one_the_driver_does_not_have(pod):
    result, _, argument = pod.call(abi.NV_ESC_RM_CONTROL, control(0x2080FFF1))

    assert (result, status(argument)) == (0, abi.NV_ERR_NOT_SUPPORTED)
    assert pod.supervisor.refusals["web", "control 0x2080fff1"] == 1


def test_a_control_is_asked_of_rm_for_the_pod_and_answered_to_it(pod):
    def answer(params):
        params[0:4] = b"RM's"

    pod.rm.answers[0x20800110] = answer
    result, _, argument, params = pod.call_for_params(abi.NV_ESC_RM_CONTROL, control(0x20800110, size=8), b"pod's...")

    assert (result, status(argument)) == (0, abi.NV_OK)
    assert params == b"RM'ss..."


def test_a_control_whose_parameters_hold_pointers_finds_them(pod):
    """GR_GET_INFO: a count, a pointer to so many pairs."""

    def answer(params):
        (address,) = struct.unpack_from("<Q", params, 8)
        (ctypes.c_char * 8).from_address(address)[:] = b"answered"

    pod.rm.answers[0x20801201] = answer
    params = struct.pack("<IIQQQ", 1, 0, 0, 0, 0)
    answer = pod.call_nested(abi.NV_ESC_RM_CONTROL, control(0x20801201, size=len(params)), params, 8, b"question")

    assert answer == b"answered"


def test_a_legacy_control_on_anothers_client_is_refused(on_card):
    mine = on_card.call(abi.NV_ESC_RM_CONTROL, control(0x20808159))
    other = on_card.call(abi.NV_ESC_RM_CONTROL, control(0x20808159, client=8))

    assert status(mine[2]) == abi.NV_OK
    assert status(other[2]) == abi.NV_ERR_INVALID_CLIENT


def test_libcudas_own_timeslice_is_remembered_once_and_refused_after(on_card):
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    wish = struct.pack("<Q", 2048)

    first = on_card.call(abi.NV_ESC_RM_CONTROL, control(abi.NVA06C_SET_TIMESLICE), wish)
    second = on_card.call(abi.NV_ESC_RM_CONTROL, control(abi.NVA06C_SET_TIMESLICE), struct.pack("<Q", 4096))

    assert (first[0], status(first[2])) == (0, abi.NV_OK)
    assert (second[0], status(second[2])) == (0, abi.NV_ERR_INSUFFICIENT_PERMISSIONS)
    assert on_card.supervisor.register.objects[7, TSG].wish_us == 2048


def test_a_timeslice_wish_may_not_be_a_way_to_a_larger_share(on_card):
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)

    answer = on_card.call(abi.NV_ESC_RM_CONTROL, control(abi.NVA06C_SET_TIMESLICE), struct.pack("<Q", 10**6))

    assert status(answer[2]) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS


def test_the_card_is_as_large_as_the_limit_and_as_full_as_the_pod(on_card):
    def answer(params):
        for i, index in enumerate((0x08, 0x16, 0x10)):
            struct.pack_into("<II", params, 4 + 8 * i, index, 1 << 31)

    on_card.rm.answers[abi.NV2080_FB_GET_INFO_V2] = answer
    allocate(on_card, 10, 1 << 30)
    call = control(abi.NV2080_FB_GET_INFO_V2, target=3, size=28)
    *_, params = on_card.call_for_params(abi.NV_ESC_RM_CONTROL, call, struct.pack("<I", 3) + bytes(24))

    figures = dict(struct.iter_unpack("<II", params[4:]))
    assert figures == {0x08: LIMIT >> 10, 0x16: (LIMIT - (1 << 30)) >> 10, 0x10: 1 << 31}


def test_only_a_pods_own_processes_are_listed(on_card):
    def answer(params):
        struct.pack_into("<IIII", params, 8, 3, 1, on_card.process.pid, 4242)

    on_card.rm.answers[abi.NV2080_GPU_GET_PIDS] = answer
    call = control(abi.NV2080_GPU_GET_PIDS, size=3812)
    *_, params = on_card.call_for_params(abi.NV_ESC_RM_CONTROL, call, bytes(3812))

    assert struct.unpack_from("<III", params, 8) == (1, on_card.process.pid, 0)


# -- objects ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["long", "short"])
def test_what_rm_makes_is_in_the_register_and_what_it_frees_is_not(on_card, form):
    asked = alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A)
    on_card.call(abi.NV_ESC_RM_ALLOC, asked if form == "long" else asked[:24] + bytes(8), TSG_PARAMS)
    made = [tsg.key for tsg in on_card.supervisor.register.compute_tsgs(0)]
    on_card.call(abi.NV_ESC_RM_FREE, free(TSG))

    assert made == [(7, TSG)]
    assert on_card.supervisor.register.compute_tsgs(0) == []


def test_a_card_without_a_grant_gives_no_device(pod):
    answer = pod.call(abi.NV_ESC_RM_ALLOC, alloc(2, 7, abi.NV01_DEVICE_0), struct.pack("<I", 1) + bytes(52))

    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_ERR_INSUFFICIENT_PERMISSIONS)
    assert pod.rm.seen == []


def test_the_first_device_of_a_file_is_made_by_the_kernel_and_its_card_is_asked_of_rm(pod):
    make_device(pod)
    pod.rm.instances[7, 2] = 1  # it was made on another card than was checked
    answer = pod.call(abi.NV_ESC_RM_ALLOC, alloc(3, 2, abi.NV20_SUBDEVICE_0), bytes(4))

    assert alloc_status(answer[2]) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS
    assert (7, 2) not in pod.rm.objects
    assert pod.supervisor.refusals["web", "card without a grant"] == 1


def test_below_a_device_whose_card_is_not_known_there_is_no_memory(pod):
    make_device(pod)

    assert allocate(pod, 10, PAGE) == abi.NV_ERR_INVALID_STATE


def test_a_device_that_was_not_made_may_have_been_made_under_another_name(pod):
    make_device(pod)
    pod.rm.objects[7, 66] = pod.rm.objects.pop((7, 2))
    second = pod.call(abi.NV_ESC_RM_ALLOC, alloc(4, 7, abi.NV01_DEVICE_0), DEVICE_PARAMS)
    root = pod.call(abi.NV_ESC_RM_ALLOC, alloc(0, 0, abi.NV01_ROOT, client=0))

    assert alloc_status(second[2]) == abi.NV_OK  # carried out for the pod
    assert alloc_status(root[2]) == abi.NV_ERR_INVALID_STATE


def test_a_channel_outside_a_tsg_is_refused_for_no_gate_would_hold_it(on_card):
    answer = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(9, 2, 0xC86F), bytes(368))

    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_ERR_INVALID_ARGUMENT)


def test_a_class_that_nobody_knows_is_refused(on_card):
    answer = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(9, 2, 0x0071), bytes(64))

    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_ERR_INVALID_CLASS)


def test_what_carries_a_gate_has_one_name(on_card):
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    answer = on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(20, TSG))

    assert struct.unpack_from("<I", answer[2], 24)[0] == abi.NV_ERR_NOT_SUPPORTED


def test_an_object_whose_handle_rm_would_choose_is_refused(on_card):
    answer = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(0, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)

    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_ERR_INVALID_ARGUMENT)


def test_a_client_that_rm_does_not_know_on_this_file_is_nobodys(pod):
    pod.call(abi.NV_ESC_RM_ALLOC, alloc(2, 8, abi.NV01_DEVICE_0, client=8), DEVICE_PARAMS)

    assert pod.supervisor.register.clients == {}


def test_a_root_client_is_made_by_the_kernel_for_the_pod_itself(pod):
    before = alloc(0, 0, abi.NV01_ROOT, client=0)
    result, error, after = pod.call(abi.NV_ESC_RM_ALLOC, before)

    assert (result, error, after) == (-1, errno.ENOTTY, before)  # /dev/null's answer
    assert pod.rm.seen == []


def test_a_root_client_beside_a_device_is_refused_for_something_else_could_be_made_in_its_stead(on_card):
    answer = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(0, 0, abi.NV01_ROOT, client=0))

    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_ERR_INVALID_STATE)


@pytest.mark.parametrize("own_table", [False, True])
def test_what_is_let_through_goes_to_the_file_that_was_looked_at(on_card, own_table):
    """A thread puts another file in the descriptor's place all the time, or the caller has another one there."""
    on_card.rm.bare = True  # /dev/null has no device, so a root client may be made there
    on_card.tell(f"exchange 60 {int(own_table)}")
    asked, on_the_other, _ = on_card.answer()

    assert (asked, on_the_other) == (60, 0)


def test_a_refusal_that_cannot_be_written_is_not_carried_out_either(pod):
    pod.tell("readonly")
    result, error, _ = pod.call(abi.NV_ESC_RM_CONTROL, control(abi.NV2080_FIFO_DISABLE_CHANNELS))

    assert (result, error) == (-1, errno.EFAULT)


def test_a_call_that_breaks_the_judge_is_answered_all_the_same(pod):
    pod.supervisor.register = None
    result, error, _ = pod.call(abi.NV_ESC_RM_FREE, free(3))

    assert (result, error) == (-1, errno.EIO)


def test_children_of_a_pod_are_in_the_pod(pod):
    pod.tell("fork")
    child = int(pod.lines.readline())
    make_device(pod)

    assert pod.supervisor.register.processes == {child: "web"}


# -- memory -----------------------------------------------------------------------------------------------------------

MOST = 3 << 38  # three quarters of the limit: one fits, two do not


def test_memory_over_the_limit_is_refused_as_no_memory_and_not_charged(on_card):
    assert allocate(on_card, 10, MOST) == abi.NV_OK
    assert allocate(on_card, 11, MOST) == abi.NV_ERR_NO_MEMORY
    assert held(on_card) == MOST
    assert on_card.supervisor.refusals["web", "memory over the limit"] == 1
    assert (7, 11) not in on_card.rm.objects


def test_memory_is_charged_as_rm_rounds_it(on_card):
    allocate(on_card, 10, PAGE + 1)

    assert held(on_card) == 2 * PAGE


def test_memory_that_rm_rounds_over_the_limit_is_freed_again(on_card):
    on_card.limits[0] = PAGE + PAGE // 2

    assert allocate(on_card, 10, PAGE + 1) == abi.NV_ERR_NO_MEMORY
    assert held(on_card) == 0
    assert (7, 10) not in on_card.rm.objects


def test_the_last_byte_of_a_limit_can_be_had(on_card):
    on_card.limits[0] = 3 * PAGE

    assert [allocate(on_card, handle, PAGE) for handle in range(10, 14)] == [0, 0, 0, abi.NV_ERR_NO_MEMORY]


def test_memory_that_is_freed_can_be_had_again(on_card):
    allocate(on_card, 10, MOST)
    on_card.call(abi.NV_ESC_RM_FREE, free(10))

    assert held(on_card) == 0
    assert allocate(on_card, 11, MOST) == abi.NV_OK


def test_a_limit_below_what_is_held_takes_nothing_and_gives_nothing(on_card):
    allocate(on_card, 10, MOST)
    on_card.limits[0] = PAGE

    assert allocate(on_card, 11, PAGE) == abi.NV_ERR_NO_MEMORY
    assert held(on_card) == MOST


def test_duplicated_memory_is_charged_once_until_the_last_handle_goes(on_card):
    allocate(on_card, 10, MOST)
    on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(20, 10))
    both = held(on_card)
    on_card.call(abi.NV_ESC_RM_FREE, free(10))
    one = held(on_card)
    on_card.call(abi.NV_ESC_RM_FREE, free(20))

    assert (both, one, held(on_card)) == (MOST, MOST, 0)


def uvm_mapping(base, length, memory, client=7):
    call = struct.pack("<QQQ", base, length, 0) + bytes(16) + bytes(9264 - 40)
    return call[:9240] + struct.pack("<QiIII", 1, -1, client, memory, 0xFFFF) + bytes(4)


def uvm_range(base, length):
    return struct.pack("<QQ", base, length) + bytes(16) + struct.pack("<II", 0xFFFF, 0)


def test_memory_that_is_freed_while_it_is_mapped_counts_until_it_is_unmapped(on_card):
    allocate(on_card, 10, MOST)
    on_card.uvm(uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(1 << 40, PAGE, 10))
    on_card.rm.mapped.add((7, 10))
    on_card.call(abi.NV_ESC_RM_FREE, free(10))
    mapped = memory(on_card)
    on_card.rm.unmaps = True
    on_card.uvm(uvm.UNMAP_EXTERNAL, uvm_range(1 << 40, PAGE))

    assert (mapped, memory(on_card)) == (MOST, 0)
    assert not on_card.rm.sizes.keys() & on_card.rm.objects.keys()


def test_page_tables_of_what_is_mapped_count_and_must_fit(on_card):
    """The same memory mapped here and there costs no memory, but tables for each place."""
    allocate(on_card, 10, PAGE)
    on_card.limits[0] = PAGE + 3 * 12288
    answers = [on_card.uvm(uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(at << 29, PAGE, 10))[2] for at in range(1, 6)]
    full = held(on_card)
    on_card.uvm(uvm.UNMAP_EXTERNAL, uvm_range(1 << 29, PAGE))

    assert [struct.unpack_from("<I", answer, 9260)[0] for answer in answers] == [0xFFFF] * 3 + [
        abi.NV_ERR_NO_MEMORY
    ] * 2
    assert (full, held(on_card)) == (PAGE + 3 * 12288, PAGE + 2 * 12288)


def test_an_unmapping_that_unmaps_something_else_gives_nothing_back(on_card):
    allocate(on_card, 10, MOST)
    on_card.uvm(uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(1 << 40, PAGE, 10))
    on_card.rm.mapped.add((7, 10))
    on_card.call(abi.NV_ESC_RM_FREE, free(10))
    on_card.uvm(uvm.UNMAP_EXTERNAL, uvm_range(1 << 40, PAGE))  # RM says that it is still mapped
    still = memory(on_card)
    on_card.supervisor.exited(on_card.process.pid)
    on_card.rm._free(7, 7)
    on_card.settle()
    on_card.supervisor.hung_up(on_card.number)

    assert (still, memory(on_card)) == (MOST, 0)


def test_a_mapping_that_was_not_told_of_keeps_its_memory_charged_until_the_pods_last_process_has_ended(on_card):
    allocate(on_card, 10, MOST)
    on_card.rm.mapped.add((7, 10))
    on_card.call(abi.NV_ESC_RM_FREE, free(10))
    on_card.supervisor.exited(on_card.process.pid)  # a child that was never heard of may have its files
    mapped = held(on_card)
    on_card.supervisor.hung_up(on_card.number)

    assert (mapped, held(on_card)) == (MOST, 0)


def test_exported_memory_counts_while_a_process_that_made_no_call_may_hold_its_descriptor(on_card):
    allocate(on_card, 10, MOST)
    on_card.supervisor.charges.export(7, [10])
    on_card.call(abi.NV_ESC_RM_FREE, free(10))
    on_card.supervisor.exited(on_card.process.pid)
    slept = held(on_card)
    on_card.supervisor.hung_up(on_card.number)

    assert (slept, held(on_card)) == (MOST, 0)


def test_a_pod_with_another_filter_has_not_ended_with_the_first(on_card):
    allocate(on_card, 10, MOST)
    on_card.supervisor.charges.export(7, [10])
    on_card.call(abi.NV_ESC_RM_FREE, free(10))
    on_card.supervisor.listen("web", os.dup(on_card.listener))
    on_card.supervisor.hung_up(on_card.number)

    assert held(on_card) == MOST


def test_memory_that_is_kept_does_not_look_gone_because_another_file_was_closed(on_card):
    allocate(on_card, 10, MOST)
    on_card.rm.mapped.add((7, 10))
    on_card.rm.objects[8, 8] = (abi.NV01_ROOT_CLIENT, 0)
    on_card.supervisor.note({"fact": "client", "client": 8, "pid": on_card.process.pid, "fd": 99})
    on_card.rm._make(8, 1, abi.NV01_MEMORY_LOCAL_USER, 8, MOST)
    on_card.rm.meanwhile = lambda: on_card.rm._free(8, 8)  # its file is closed while the memory is freed
    on_card.call(abi.NV_ESC_RM_FREE, free(10))

    assert held(on_card) == MOST


def test_a_mapping_that_was_not_told_of_keeps_memory_whose_file_was_closed_while_uvms_is_there(on_card):
    allocate(on_card, 10, MOST)
    on_card.uvm(uvm.REGISTER_GPU, bytes(40))
    on_card.rm._free(7, 7)  # what was mapped stays with UVM, which has a name of its own for it
    on_card.supervisor.dues.doubt([(7, 7)])
    on_card.settle()
    kept = held(on_card)
    files = on_card.supervisor.uvm_files
    files.release(files.take(on_card.process.pid))  # as when another program is executed, which closes both
    on_card.supervisor.emptied(on_card.process.pid)

    assert (kept, held(on_card)) == (MOST, 0)


@pytest.mark.parametrize("limited", [True, False])
def test_uvms_file_is_held_from_the_first_card_on_under_a_limit(on_card, limited):
    if not limited:
        on_card.limits.clear()
    on_card.supervisor.uuids = {bytes(16): 0}
    on_card.uvm(uvm.REGISTER_GPU, bytes(40))
    files = on_card.supervisor.uvm_files.take(on_card.process.pid)
    on_card.supervisor.uvm_files.release(files)

    assert [file.cards for file in files] == ([{bytes(16)}] if limited else [])


def someone_elses(pod, client=9):
    """A client of another pod's, with memory on the card, whose file has come to this pod."""
    pod.rm.objects[client, client] = (abi.NV01_ROOT_CLIENT, 0)
    for fact in (
        {"fact": "pod", "name": "other", "grants": {}},
        {"fact": "process", "pid": 1, "pod": "other"},
        {"fact": "client", "client": client, "pid": 1, "fd": 3},
        {"fact": "object", "client": client, "handle": 2, "parent": client, "class": abi.NV01_DEVICE_0, "detail": 0},
        {"fact": "confirm", "client": client, "handle": 2},
        {"fact": "object", "client": client, "handle": 10, "parent": 2, "class": 0x40, "detail": MOST, "memory": 90},
        {"fact": "confirm", "client": client, "handle": 10},
    ):
        pod.supervisor.note(fact)
    pod.rm._make(client, 2, abi.NV01_DEVICE_0, client)
    pod.rm._make(client, 10, 0x40, 2, MOST)


def test_memory_of_another_pod_counts_for_who_takes_a_handle_on_it_too(on_card):
    someone_elses(on_card)
    allocate(on_card, 10, MOST)
    answer = on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(20, 10, source_client=9))

    assert struct.unpack_from("<I", answer[2], 24)[0] == abi.NV_ERR_NO_MEMORY
    assert (7, 20) not in on_card.rm.objects
    assert on_card.supervisor.register.memory("other") == {0: MOST}


@pytest.mark.parametrize("way", ["alloc", "heap"])
def test_another_pods_client_makes_no_memory_here_whoever_has_its_file(on_card, way):
    someone_elses(on_card)
    if way == "alloc":
        answer = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(11, 2, 0x40, client=9), memory_params(PAGE))
        status_ = alloc_status(answer[2])
    else:
        call = struct.pack("<IIIIiI", 9, 2, 2, 0, 0, 0xFFFF) + bytes(20) + struct.pack("<I", 11)
        call = call + bytes(88 - len(call)) + struct.pack("<Q", PAGE) + bytes(88)
        status_ = struct.unpack_from("<I", on_card.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, call)[2], 20)[0]

    assert status_ == abi.NV_ERR_INVALID_CLIENT
    assert (9, 11) not in on_card.rm.objects


def test_a_pod_that_was_retired_gets_no_memory_through_what_is_left_of_it(on_card):
    on_card.supervisor.allowance = lambda pod: Allowance()

    assert allocate(on_card, 10, PAGE) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS
    assert (7, 10) not in on_card.rm.objects


def test_memory_that_goes_with_its_device_but_is_mapped_stays_charged(on_card):
    allocate(on_card, 10, MOST)
    on_card.rm.mapped.add((7, 10))
    on_card.call(abi.NV_ESC_RM_FREE, free(2))

    assert on_card.supervisor.register.memory("web") == {0: MOST}


def test_memory_of_the_old_heap_interface_counts_too(on_card):
    call = struct.pack("<IIIIiI", 7, 2, 2, 0, 0, 0xFFFF) + bytes(20) + struct.pack("<I", 30)
    call = call + bytes(88 - len(call)) + struct.pack("<Q", MOST) + bytes(88)
    first = on_card.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, call)
    second = on_card.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, call[:44] + struct.pack("<I", 31) + call[48:])

    statuses = [struct.unpack_from("<I", answer[2], 20)[0] for answer in (first, second)]
    assert statuses == [abi.NV_OK, abi.NV_ERR_NO_MEMORY]
    assert held(on_card) == MOST
    assert struct.unpack_from("<QQ", first[2], 24) == (LIMIT, LIMIT - MOST)


def test_a_process_that_dies_gives_back_what_rm_says_is_gone(on_card):
    allocate(on_card, 10, MOST)
    on_card.supervisor.exited(on_card.process.pid)
    on_card.rm._free(7, 7)
    before = held(on_card)
    on_card.settle()

    assert (before, held(on_card)) == (MOST, 0)


def test_a_process_that_dies_gives_back_nothing_that_somebody_else_holds_on_to(on_card):
    allocate(on_card, 10, MOST)
    on_card.supervisor.exited(on_card.process.pid)
    on_card.settle()

    assert held(on_card) == MOST


def test_a_pod_has_so_many_objects_and_the_next_is_refused(on_card, monkeypatch):
    monkeypatch.setattr(supervisor, "_MOST_OBJECTS", 5)
    statuses = [allocate(on_card, handle, PAGE) for handle in range(10, 15)]

    assert statuses == [abi.NV_OK] * 3 + [abi.NV_ERR_INSUFFICIENT_RESOURCES] * 2
    on_card.call(abi.NV_ESC_RM_FREE, free(10))
    assert allocate(on_card, 16, PAGE) == abi.NV_OK


def test_rm_is_asked_about_a_pods_clients_for_a_tenth_of_the_time_at_most(on_card):
    """Nobody else is served meanwhile, and a pod can have as many clients as it likes and be refused as often."""
    now, asked = [0], []
    on_card.supervisor.clock = lambda: now[0]

    def slow(key):
        asked.append(now[0])
        now[0] += 1000
        return True

    on_card.supervisor.hands.exists = slow
    for _ in range(500):
        now[0] += 100
        on_card.supervisor.charges.over_limit("web", 0, 2 * LIMIT)

    assert len(asked) * 1000 <= now[0] // 8
    assert len(asked) > 1


def test_a_pod_that_asks_thousands_of_things_has_few_of_them_named(pod, monkeypatch):
    monkeypatch.setattr(supervisor, "_MOST_KINDS", 3)
    for number in range(8):
        pod.call(abi.NV_ESC_RM_CONTROL, control(0x2080F000 + number))

    assert len(pod.supervisor.refusals) == 4
    assert pod.supervisor.refusals["web", "other calls"] == 5


def test_what_rm_is_asked_when_an_address_space_goes_does_not_grow_with_memory(on_card):
    for handle in range(10, 30):
        allocate(on_card, handle, PAGE)
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(40, 2, abi.FERMI_VASPACE_A), bytes(64))
    on_card.call(abi.NV_ESC_RM_FREE, free(40))
    asked = []
    on_card.supervisor.hands.exists = lambda key: asked.append(key) or True
    on_card.settle()

    assert asked
    assert not [key for key in asked if 10 <= key[1] < 30]


# -- ways around ------------------------------------------------------------------------------------------------------


def test_a_wrapped_call_is_carried_out_as_what_it_wraps(on_card):
    inner = control(abi.NV2080_FIFO_DISABLE_CHANNELS)
    *_, answered = on_card.call_for_params(
        abi.NV_ESC_IOCTL_XFER_CMD, struct.pack("<IIQ", abi.NV_ESC_RM_CONTROL, len(inner), 0), inner, pointer_at=8
    )

    assert status(answered) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS


def test_only_calls_that_are_judged_may_be_wrapped(pod):
    call = struct.pack("<IIQ", abi.NV_ESC_RM_MAP_MEMORY, 56, 0)

    assert pod.call(abi.NV_ESC_IOCTL_XFER_CMD, call, bytes(56), pointer_at=8)[:2] == (-1, errno.EINVAL)


def test_a_call_on_another_kind_of_file_does_not_reach_it(pod):
    pod.supervisor.major = 195

    assert pod.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))[:2] == (-1, errno.ENOTTY)


def test_a_dma_buf_is_not_made_under_a_limit(pod):
    assert pod.call(abi.NV_ESC_EXPORT_TO_DMABUF_FD, bytes(2608))[:2] == (-1, errno.EOPNOTSUPP)


def test_arguments_that_change_during_the_check_gain_nothing(on_card):
    """A thread of the pod writes another size and another handle all the time; RM gets what was charged."""
    on_card.limits[0] = 64 * PAGE
    on_card.tell("hammer 30")  # each of 30 allocations is rewritten to ask for 1 TiB under handle 0x99
    statuses = on_card.answer()[2]

    assert statuses
    assert sum(on_card.rm.sizes[key] for key in on_card.rm.objects if key in on_card.rm.sizes) <= 64 * PAGE
    assert held(on_card) == sum(on_card.rm.sizes[key] for key in on_card.rm.objects if key in on_card.rm.sizes)


def test_a_32_bit_call_is_judged_like_any_other(pod):
    pod.tell(f"int80 {abi.NV2080_FIFO_DISABLE_CHANNELS}")
    result, _, argument = pod.answer()
    if result == -errno.ENOSYS:
        pytest.skip("this kernel runs no 32-bit calls")

    assert (result, status(argument)) == (0, abi.NV_ERR_INSUFFICIENT_PERMISSIONS)


def test_a_second_numbering_of_the_calls_does_not_exist(pod):
    pod.tell("x32")

    assert pod.answer()[:2] == (-1, errno.ENOSYS)


# -- managed memory ---------------------------------------------------------------------------------------------------

SMALL, LARGE = 1 << 20, 1 << 29


@pytest.fixture
def mapping(on_card, monkeypatch):
    """A pod with room for a small mapping; what it maps of UVM is what ``mapped`` says."""
    on_card.limits[0] = LARGE // 2
    on_card.mapped = 0
    on_card.of_uvm = True
    monkeypatch.setattr(managed, "mapped", lambda pid: on_card.mapped)
    monkeypatch.setattr(Mappings, "_is_uvm", lambda self, pid, fd: on_card.of_uvm)

    def map_(size, offset=4096):
        on_card.tell(f"mapfile {size} {offset}")
        return on_card.answer()[:2]

    on_card.map = map_
    return on_card


def test_what_could_be_managed_memory_must_fit(mapping):
    mapping.supervisor.charges.will_use_uvm(mapping.process.pid)

    mapping.of_uvm = False
    assert mapping.map(LARGE) == (-1, errno.ENOMEM)
    assert mapping.map(SMALL) == (0, 0)
    assert mapping.supervisor.refusals["web", "managed memory over the limit"] == 1


def test_managed_memory_that_does_not_fit_is_not_permitted_and_what_fits_is_made_after(mapping):
    mapping.supervisor.charges.will_use_uvm(mapping.process.pid)
    answers = []
    for size in (LARGE, SMALL):
        mapping.tell(f"mapfixed {size} {0x204A00000}")
        answers.append(mapping.answer()[:2])

    assert answers[0] == (-1, errno.EPERM)
    assert answers[1][0] == 0


def test_managed_memory_and_other_memory_are_one_limit(mapping):
    mapping.supervisor.charges.will_use_uvm(mapping.process.pid)
    mapping.map(SMALL)
    mapping.mapped = LARGE // 2
    full = allocate(mapping, 10, SMALL)
    mapping.mapped = 0  # it has been unmapped

    assert full == abi.NV_ERR_NO_MEMORY
    assert allocate(mapping, 10, SMALL) == abi.NV_OK


def test_a_mapping_that_turns_out_to_be_no_managed_memory_is_not_charged(mapping):
    mapping.supervisor.charges.will_use_uvm(mapping.process.pid)
    mapping.map(SMALL)
    during = held(mapping)
    mapping.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))

    assert (during, held(mapping)) == (managed.cost_of(None, SMALL), 0)


def test_programs_without_cuda_map_what_they_like(mapping):
    assert mapping.map(LARGE) == (0, 0)


def test_whatever_descriptor_is_shown_could_be_uvms_when_the_mapping_is_made(mapping):
    """A process made with CLONE_FILES is no thread, and can put another file in the descriptor's place."""
    mapping.supervisor.charges.will_use_uvm(mapping.process.pid)
    mapping.of_uvm = False

    assert mapping.map(LARGE) == (-1, errno.ENOMEM)


@pytest.mark.parametrize("limited", [True, False])
def test_uvm_is_initialised_without_hmm_under_a_limit(on_card, limited):
    if not limited:
        on_card.limits.clear()
    answer = on_card.uvm(uvm.INITIALIZE, bytes(16))

    assert answer[2][:8] == struct.pack("<Q", uvm.INIT_FLAGS_DISABLE_HMM if limited else 0)


@pytest.mark.parametrize("said", [abi.NV_OK, abi.NV_ERR_INVALID_ARGUMENT])
def test_a_file_initialised_in_another_way_gets_no_card(on_card, said):
    on_card.supervisor.uuids = {bytes(16): 0}
    on_card.rm.answers["initialised"] = said
    answer = on_card.uvm(uvm.REGISTER_GPU, bytes(40))

    registered = struct.unpack_from("<I", answer[2], 36)[0]
    assert registered == (abi.NV_OK if said == abi.NV_OK else abi.NV_ERR_INVALID_STATE)


def test_uvm_gets_no_card_without_a_grant(on_card):
    on_card.supervisor.uuids = {}
    answer = on_card.uvm(uvm.REGISTER_GPU, bytes(40))

    assert struct.unpack_from("<I", answer[2], 36)[0] == abi.NV_ERR_INSUFFICIENT_PERMISSIONS


# -- successors -------------------------------------------------------------------------------------------------------


def test_a_call_that_a_dead_guardian_left_in_hand_is_judged_by_the_next(pod):
    pod.begin(abi.NV_ESC_RM_CONTROL, control(abi.NV2080_FIFO_DISABLE_CHANNELS))
    select.select([pod.listener], [], [], 20)
    assert pod.supervisor.listeners[pod.number][1].receive() is not None  # and here it dies

    successor = pod.fresh(Journal(os.dup(pod.supervisor.journal.fd)))
    successor.listen("web", os.dup(pod.listener), pod.number)
    left = successor.left_in_hand(pod.number)
    pod.judge_of(successor, pod.number).serve(successor.listeners[pod.number][1], left)

    assert status(pod.answer()[2]) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS
    assert successor.left_in_hand(pod.number) is None


def test_what_a_dead_guardian_was_making_is_found_by_the_next(on_card):
    rm = RmObject(7, 10, 2, abi.NV01_MEMORY_LOCAL_USER, MOST)
    on_card.supervisor.claim(rm)
    on_card.supervisor.claim(RmObject(7, 11, 2, abi.NV01_MEMORY_LOCAL_USER, PAGE))
    on_card.rm._make(7, 10, abi.NV01_MEMORY_LOCAL_USER, 2, MOST + 1)  # and here it dies

    successor = on_card.fresh(Journal(os.dup(on_card.supervisor.journal.fd)))
    for fact in successor.journal.replay():
        successor.register.note(fact)
    successor.resume()

    assert successor.charges.used("web", 0) == MOST + PAGE


@pytest.mark.parametrize("trace", [TRACES[-1], *(t for t in TRACES if "min" in t.name)], ids=lambda path: path.name)
def test_a_recorded_program_replayed_through_the_filter_is_registered_whole(trace):
    made = allocated(trace)
    pod = Pod({key: what for key, what in made.items() if what[0] in abi.ROOT_CLASSES})
    try:
        for row in rows(trace):
            if row.number == abi.NV_ESC_REGISTER_FD:  # names a descriptor of the recorded process
                continue
            pod.call(row.number, row.before, row.params)
            client, parent, handle, rm_class = struct.unpack_from("<IIII", row.before.ljust(16))
            if (row.number, rm_class) == (abi.NV_ESC_RM_ALLOC, abi.NV01_DEVICE_0):  # the kernel made it
                pod.rm.objects[client, handle] = (rm_class, parent)
        register = pod.supervisor.register
        kept = {abi.NV01_DEVICE_0, abi.NV20_SUBDEVICE_0, abi.KEPLER_CHANNEL_GROUP_A, 0x40} | abi.GPFIFO_CLASSES

        assert {rm.key for rm in register.objects.values() if rm.confirmed and rm.rm_class in kept} == {
            key for key, (rm_class, _) in made.items() if rm_class in kept
        }
        assert len(register.compute_tsgs(0)) == 1
        assert len(register.channels(register.compute_tsgs(0)[0])) == 8
        # Here a second client is made on the very same file; recorded programs have one of its own for it.
        assert set(pod.supervisor.refusals) <= {("web", "root client beside a device")}
    finally:
        pod.end()
