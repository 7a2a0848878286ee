"""Page tables lie on the card and have no handle: under a limit, address space that brings its own is not for pods."""

from __future__ import annotations

import errno
import struct

import pytest

from qgpu.rm import abi
from tests.guardian.asked import alloc, alloc_status, heap, heap_status

VIRTUAL, LAZY, MANAGED_ELSEWHERE, SPARSE = 0x80000, 0x400, 0x400000, 0x4000000


def space(pod, flags):
    """Ask for address space, as an object and of the old heap; return RM's two answers."""
    params = struct.pack("<III", 7, 0, flags) + bytes(116)
    new = pod.call(abi.NV_ESC_RM_ALLOC, alloc(10, 2, abi.NV50_MEMORY_VIRTUAL), params)
    old = pod.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, heap(11, flags=flags))
    return alloc_status(new[2]), heap_status(old[2])


def test_address_space_with_its_tables_is_refused_under_a_limit(on_card):
    refused = (abi.NV_ERR_NOT_SUPPORTED,) * 2

    assert space(on_card, VIRTUAL) == refused
    assert space(on_card, VIRTUAL | LAZY | SPARSE) == refused


@pytest.mark.parametrize(
    "flags", [VIRTUAL | LAZY, VIRTUAL | MANAGED_ELSEWHERE, 0x8C415], ids=["lazy", "managed", "cuda"]
)
def test_address_space_whose_tables_come_later_is_made(on_card, flags):
    assert space(on_card, flags) == (abi.NV_OK,) * 2


def test_without_a_limit_all_of_it_is_made(on_card):
    on_card.limits = {}

    assert space(on_card, VIRTUAL) == (abi.NV_OK,) * 2


@pytest.mark.parametrize("size", abi.MAP_MEMORY_DMA_BYTES)
def test_rms_own_mappings_are_refused_under_a_limit_and_let_through_without_one(on_card, size):
    under = on_card.call(abi.NV_ESC_RM_MAP_MEMORY_DMA, bytes(size))[:2]
    on_card.limits = {}

    assert under == (-1, errno.EOPNOTSUPP)
    assert on_card.call(abi.NV_ESC_RM_MAP_MEMORY_DMA, bytes(size))[:2] == (-1, errno.EINVAL)  # /dev/random's own answer
