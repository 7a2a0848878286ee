"""Page tables lie on the card and have no handle: under a limit, address space that brings its own is not for pods."""

from __future__ import annotations

import errno
import struct

import pytest

from qgpu.rm import abi
from tests.guardian.test_supervisor import Pod, alloc, alloc_status, make_device

VIRTUAL, LAZY, MANAGED_ELSEWHERE, SPARSE = 0x80000, 0x400, 0x400000, 0x4000000


@pytest.fixture
def limited():
    """A pod with a limit and a card."""
    made = Pod({})
    make_device(made)
    made.call(abi.NV_ESC_RM_ALLOC, alloc(3, 2, abi.NV20_SUBDEVICE_0), bytes(4))
    yield made
    made.end()


def space(pod, flags):
    """Ask for address space, as an object and of the old heap; return RM's two answers."""
    params = struct.pack("<III", 7, 0, flags) + bytes(116)
    new = pod.call(abi.NV_ESC_RM_ALLOC, alloc(10, 2, abi.NV50_MEMORY_VIRTUAL), params)
    data = bytearray(184)
    struct.pack_into("<III", data, 0, 7, 2, 2)
    struct.pack_into("<II", data, 44, 11, 0)
    struct.pack_into("<I", data, 52, flags)
    old = pod.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, bytes(data))
    return alloc_status(new[2]), struct.unpack_from("<I", old[2], 20)[0]


def test_address_space_with_its_tables_is_refused_under_a_limit(limited):
    refused = (abi.NV_ERR_NOT_SUPPORTED,) * 2

    assert space(limited, VIRTUAL) == refused
    assert space(limited, VIRTUAL | LAZY | SPARSE) == refused


@pytest.mark.parametrize(
    "flags", [VIRTUAL | LAZY, VIRTUAL | MANAGED_ELSEWHERE, 0x8C415], ids=["lazy", "managed", "cuda"]
)
def test_address_space_whose_tables_come_later_is_made(limited, flags):
    assert space(limited, flags) == (abi.NV_OK,) * 2


def test_without_a_limit_all_of_it_is_made(limited):
    limited.limits = {}

    assert space(limited, VIRTUAL) == (abi.NV_OK,) * 2


@pytest.mark.parametrize("size", abi.MAP_MEMORY_DMA_BYTES)
def test_rms_own_mappings_are_refused_under_a_limit_and_let_through_without_one(limited, size):
    under = limited.call(abi.NV_ESC_RM_MAP_MEMORY_DMA, bytes(size))[:2]
    limited.limits = {}

    assert under == (-1, errno.EOPNOTSUPP)
    assert limited.call(abi.NV_ESC_RM_MAP_MEMORY_DMA, bytes(size))[:2] == (-1, errno.ENOTTY)  # /dev/null's own answer
