"""What the kernel made where it continued a call for memory is looked at before any other call can name it."""

from __future__ import annotations

import struct

import pytest

from qgpu.guardian.proxy.continued_memory import BY_ADDRESS
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
