"""A guardian that is killed at any line of its code while it serves a call: the pod never knows.

What the call answers, what RM has in the end and what is charged is what it would have been. The pod's process and its
filter are real, and so are the guardians that die; RM is a table that outlives them. ``QGPU_EVERY_LINE=1`` tries every
line, and what becomes of the next guardian when it dies as well at any; else some of them are.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from random import Random

import pytest

from qgpu.nvidia import abi, uvm
from tests.guardian.asked import (
    TSG,
    TSG_PARAMS,
    alloc,
    control,
    dup,
    free,
    heap,
    memory_params,
    uvm_mapping,
    uvm_range,
)
from tests.guardian.fake_rm import PAGE
from tests.guardian.lasting import REGISTER_VIDMEM, UNREGISTER_VIDMEM, MortalPod
from tests.guardian.pod import MAJOR, make_device, make_subdevice

EVERY = bool(os.environ.get("QGPU_EVERY_LINE"))
#: How many lines are left out between two that are tried.
STEP = 1 if EVERY else 17
CARD = bytes(16)


@dataclass(frozen=True)
class Call:
    """A call to die in: RM's by its number or UVM's, and those that come before it."""

    number: int
    argument: bytes
    params: bytes = b""
    before: tuple[Call, ...] = ()
    of_uvm: bool = False


def uvm_call(request, argument, *before):
    return Call(request, argument, of_uvm=True, before=before)


MEMORY = Call(abi.NV_ESC_RM_ALLOC, alloc(10, 2, abi.NV01_MEMORY_LOCAL_USER), memory_params(PAGE + 1))
A_TSG = Call(abi.NV_ESC_RM_ALLOC, alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
REGISTERED = uvm_call(uvm.REGISTER_GPU, CARD + bytes(24))
MAPPED = uvm_call(uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(1 << 32, PAGE, 10), MEMORY)
EXPORTED = Call(
    abi.NV_ESC_RM_CONTROL,
    control(abi.NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD, 7, 28),
    struct.pack("<IIIIiII", 1, 2, 2, 10, -1, 0, 0),
    (MEMORY,),
)

REGISTERED_MEMORY = Call(
    abi.NV_ESC_RM_CONTROL, control(REGISTER_VIDMEM, 3, 32), struct.pack("<IIQQQ", 10, 0, 0, PAGE, 0), (MEMORY,)
)

CALLS = {
    "memory": MEMORY,
    "TSG": A_TSG,
    "channel": Call(abi.NV_ESC_RM_ALLOC, alloc(21, TSG, 0xC86F), bytes(368), (A_TSG,)),
    "object that is not kept": Call(abi.NV_ESC_RM_ALLOC, alloc(30, 2, 0x90F1), bytes(64)),
    "memory of the old heap": Call(abi.NV_ESC_RM_VID_HEAP_CONTROL, heap(11, PAGE + 1)),
    "free": Call(abi.NV_ESC_RM_FREE, free(10), before=(MEMORY,)),
    "free of a TSG": Call(abi.NV_ESC_RM_FREE, free(TSG), before=(A_TSG,)),
    "free of a device": Call(abi.NV_ESC_RM_FREE, free(2), before=(MEMORY, A_TSG)),
    "second handle": Call(abi.NV_ESC_RM_DUP_OBJECT, dup(12, 10), before=(MEMORY,)),
    "free of a second handle": Call(
        abi.NV_ESC_RM_FREE, free(12), before=(MEMORY, Call(abi.NV_ESC_RM_DUP_OBJECT, dup(12, 10)))
    ),
    "export": EXPORTED,
    "import": Call(
        abi.NV_ESC_RM_CONTROL,
        control(abi.NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD, 7, 24),
        struct.pack("<iIIIII", -1, 1, 2, 2, 13, 0),
        (EXPORTED,),
    ),
    "control": Call(abi.NV_ESC_RM_CONTROL, control(abi.NV2080_FB_GET_INFO_V2, 3, 436), bytes(436)),
    "plain control": Call(abi.NV_ESC_RM_CONTROL, control(0x20800110, 3, 64), bytes(64)),
    "refused control": Call(abi.NV_ESC_RM_CONTROL, control(abi.NV2080_FIFO_DISABLE_CHANNELS)),
    "memory's registration with peers": REGISTERED_MEMORY,
    "end of that": Call(
        abi.NV_ESC_RM_CONTROL, control(UNREGISTER_VIDMEM, 3, 4), struct.pack("<I", 10), (REGISTERED_MEMORY,)
    ),
    "file's registration": Call(abi.NV_ESC_REGISTER_FD, struct.pack("<i", -1)),
    "card's registration with UVM": REGISTERED,
    "free of what is mapped": Call(abi.NV_ESC_RM_FREE, free(10), before=(MAPPED,)),
    "unmapping": uvm_call(uvm.UNMAP_EXTERNAL, uvm_range(1 << 32, PAGE) + bytes(8), MAPPED),
    "unmapping of what is freed": uvm_call(
        uvm.FREE, uvm_range(1 << 32, PAGE)[:24], Call(abi.NV_ESC_RM_FREE, free(10), before=(MAPPED,))
    ),
}


@pytest.fixture
def pod():
    made = MortalPod({})
    yield made
    made.end()


def prepare(pod, call):
    """Bring everything to where the call is to be made."""
    for earlier in call.before:
        prepare(pod, earlier)
        ask(pod, earlier)
        pod.answer()
    pod.shared.major, pod.shared.uvm_major = MAJOR, None


def ask(pod, call):
    if call.of_uvm:
        pod.shared.major, pod.shared.uvm_major = None, MAJOR
        pod.child.ask(call.number, call.argument)
    else:
        pod.shared.major, pod.shared.uvm_major = MAJOR, None
        pod.begin(call.number, call.argument, call.params)


def start(pod, call):
    pod.begin_anew()
    make_device(pod)
    pod.rm.keep()
    make_subdevice(pod)
    prepare(pod, call)
    ask(pod, call)


def outcome(pod):
    """Return the call's answer, and all that is known when everything has come due."""
    result, error, argument = pod.answer()
    answer = result, error, argument[:16] + argument[24:], pod.params  # without the pointer to the parameters
    pod.shared.clients.recheck_pods(["web"])
    pod.settle()
    table = pod.shared.table
    objects = {key: (rm.rm_class, rm.parent, rm.detail, rm.confirmed) for key, rm in table.objects.items()}
    return answer, pod.rm.state(), objects, pod.shared.quota.used("web", 0)


@pytest.mark.parametrize("what", CALLS)
def test_a_guardian_may_die_at_any_line_and_the_pod_never_knows(pod, what):
    call, random = CALLS[what], Random(what)
    start(pod, call)
    undisturbed = outcome(pod)
    line = random.randrange(STEP) + 1
    while True:
        start(pod, call)
        if pod.guardian_that_dies(line) == 0:
            break
        if EVERY or random.randrange(3) == 0:
            pod.guardian_that_dies(random.randrange(1, 200))
        pod.succeed()
        pod.resume()

        assert outcome(pod) == undisturbed, f"it died at line {line}"
        line += STEP
    assert line > STEP
