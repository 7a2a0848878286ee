"""RM's own mappings for the card, and context DMAs: neither reaches what a pod may not have."""

from __future__ import annotations

import errno
import struct

import pytest

from qgpu.guardian.rules import classes
from qgpu.nvidia import abi

CLIENT, DEVICE, SPACE, MEMORY = 7, 2, 9, 30
MAP, CONTEXT = abi.NV_ESC_RM_MAP_MEMORY_DMA, abi.NV_ESC_RM_ALLOC_CONTEXT_DMA2


@pytest.fixture
def free(on_card):
    """The pod without a memory limit."""
    on_card.limits.clear()
    on_card.rm.seen.clear()
    return on_card


def asked_of_rm(pod):
    return [number for number, _ in pod.rm.seen]


@pytest.mark.parametrize("rm_class", sorted({*classes.PHYSICAL, abi.RM_USER_SHARED_DATA}))
def test_memory_by_address_is_not_mapped(free, rm_class):
    """The kernel makes some memory for the pod, and another thread may change its class meanwhile."""
    free.rm.objects[CLIENT, MEMORY] = (rm_class, DEVICE)
    call = struct.pack("<IIII", CLIENT, DEVICE, SPACE, MEMORY) + bytes(48)

    assert free.call(MAP, call)[:2] == (-1, errno.EPERM)
    assert asked_of_rm(free) == []
    assert free.shared.refusals.counts["web", classes.name(rm_class)] == 1


@pytest.mark.parametrize("known", [True, False])
def test_other_memory_is_mapped_by_the_guardian(free, known):
    free.rm.objects[CLIENT, SPACE] = (abi.NV01_MEMORY_VIRTUAL, DEVICE)
    if known:
        free.rm.objects[CLIENT, MEMORY] = (abi.NV01_MEMORY_SYSTEM, DEVICE)

    assert free.call(MAP, struct.pack("<IIII", CLIENT, DEVICE, SPACE, MEMORY) + bytes(48))[0] == 0
    assert asked_of_rm(free) == ([MAP] if known else [])


@pytest.mark.parametrize("rm_class", [abi.NV01_CONTEXT_DMA, 0, abi.NV01_DEVICE_0, abi.KEPLER_CHANNEL_GROUP_A, 0xCB97])
def test_context_dma_call_makes_context_dmas_alone(on_card, rm_class):
    """RM makes any class by it, from parameters that nobody has looked at."""
    on_card.rm.objects[CLIENT, MEMORY] = (abi.NV01_MEMORY_SYSTEM, 2)
    on_card.rm.seen.clear()
    call = struct.pack("<8IQQII", CLIENT, 3, 40, rm_class, 0, 0, MEMORY, 0, 0, 4095, 0, 0)
    answer = on_card.call(CONTEXT, call)[2]

    made = rm_class == abi.NV01_CONTEXT_DMA
    assert struct.unpack_from("<I", answer, 48)[0] == (abi.NV_OK if made else abi.NV_ERR_INVALID_CLASS)
    assert asked_of_rm(on_card) == ([CONTEXT] if made else [])
