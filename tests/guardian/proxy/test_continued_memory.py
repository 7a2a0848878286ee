"""The guardian looks at what the kernel made of a continued call for memory, before another call can name it."""

from __future__ import annotations

import errno
import struct

import pytest

from qgpu.guardian.proxy.continued_memory import BY_ADDRESS
from qgpu.linux.inflight_syscalls import InflightSyscalls
from qgpu.nvidia import abi
from tests.guardian.asked import control, dup

MEMORY_BY_ADDRESS = 0xF3


def pin(pod, rm_class=abi.NV01_MEMORY_SYSTEM_OS_DESCRIPTOR, fd=-1):
    """Ask for memory by the old call; /dev/random answers in the kernel's place."""
    asked = struct.pack("<IIII", 7, 2, 9, rm_class) + bytes(32) + struct.pack("<ii", fd, 0)
    pod.call(abi.NV_ESC_RM_ALLOC_MEMORY, asked)


@pytest.mark.parametrize("args", [(), (abi.NV01_MEMORY_SYSTEM, 0)], ids=["own pages", "with a mapping"])
@pytest.mark.parametrize(
    ("number", "call"),
    [(abi.NV_ESC_RM_DUP_OBJECT, dup(31, 30)), (abi.NV_ESC_RM_CONTROL, control(0x20800110))],
    ids=["dup", "control"],
)
def test_memory_by_address_is_freed_before_a_call(on_card, args, number, call):
    pin(on_card, *args)
    on_card.rm.objects[7, 30] = (MEMORY_BY_ADDRESS, 2)
    on_card.call(number, call)

    assert (7, 30) not in on_card.rm.objects
    assert (7, 31) not in on_card.rm.objects
    assert on_card.shared.refusals.counts["web", BY_ADDRESS] == 1


def test_devices_are_looked_through_once_after_a_call(on_card):
    before = on_card.rm.looks
    on_card.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))
    assert on_card.rm.looks == before

    pin(on_card)
    for _ in range(3):
        on_card.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))
    assert on_card.rm.looks == before + 1


@pytest.fixture
def lost(on_card):
    """The pod, with a second client whose file the guardian cannot find, and which has memory by address."""
    on_card.shared.note({"fact": "client", "client": 8, "pid": on_card.process.pid, "fd": 9})
    for handle, rm_class, parent in ((8, abi.NV01_ROOT_CLIENT, 0), (2, abi.NV01_DEVICE_0, 8)):
        on_card.rm.objects[8, handle] = (rm_class, parent)
    on_card.shared.note(
        {"fact": "object", "client": 8, "handle": 2, "parent": 8, "class": abi.NV01_DEVICE_0, "detail": 0}
    )
    on_card.rm.stale.add(8)
    on_card.rm.elsewhere.add(8)
    pin(on_card)
    on_card.rm.objects[8, 30] = (MEMORY_BY_ADDRESS, 2)
    return on_card


def test_nothing_is_duplicated_from_a_client_not_looked_at(lost):
    lost.call(abi.NV_ESC_RM_DUP_OBJECT, dup(31, 30, source_client=8))

    assert (8, 30) in lost.rm.objects
    assert (7, 31) not in lost.rm.objects


def test_a_call_on_its_file_brings_the_look(lost):
    lost.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))
    assert (8, 30) in lost.rm.objects

    lost.rm.elsewhere.clear()
    lost.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))
    assert (8, 30) not in lost.rm.objects


def test_pods_calls_wait_until_the_call_for_memory_is_over(on_card, monkeypatch):
    pin(on_card)
    monkeypatch.setattr(InflightSyscalls, "wait", lambda self, patience_s: False)

    assert on_card.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))[:2] == (-1, errno.EBUSY)
