"""Memory as a dma-buf: the guardian makes it, of the pod's own clients, and gives the pod its descriptor."""

from __future__ import annotations

import errno
import os
import struct

import pytest

from qgpu.nvidia import abi

OWN, NEIGHBOURS = 7, 9
EXPORT = abi.NV_ESC_EXPORT_TO_DMABUF_FD


@pytest.fixture(params=abi.EXPORT_TO_DMABUF_FD_BYTES, ids=["before 570", "from 570"])
def exported(on_card, request):
    """Calls the export on a pod without a limit; returns the errno, the descriptor and RM's status."""
    on_card.limits.clear()

    def call(fd, client):
        size = request.param
        code, error, answer = on_card.call(EXPORT, struct.pack("<iI", fd, client) + bytes(size - 8))[:3]
        return error if code else 0, *struct.unpack_from("<i", answer), *struct.unpack_from("<I", answer, size - 8)

    return call


def test_pod_gets_the_descriptor_that_rm_made(on_card, exported):
    before = set(os.listdir("/proc/self/fd"))
    error, fd, status = exported(-1, OWN)

    assert (error, status) == (0, abi.NV_OK)
    assert os.readlink(f"/proc/{on_card.process.pid}/fd/{fd}").startswith("/memfd:dma-buf")
    assert set(os.listdir("/proc/self/fd")) == before  # the guardian keeps none


def test_memory_is_added_to_the_pods_own_descriptor(on_card, exported):
    fd = exported(-1, OWN)[1]

    assert exported(fd, OWN) == (0, fd, abi.NV_OK)
    assert on_card.rm.dma_bufs[-1].startswith("/memfd:dma-buf")


def test_anothers_memory_becomes_no_dma_buf(on_card, exported):
    """RM takes it from whatever client is named."""
    on_card.rm.seen.clear()

    assert exported(-1, NEIGHBOURS)[2] == abi.NV_ERR_INVALID_CLIENT
    assert on_card.rm.seen == []


def test_no_dma_buf_under_a_limit(on_card):
    size = abi.EXPORT_TO_DMABUF_FD_BYTES[0]

    assert on_card.call(EXPORT, struct.pack("<iI", -1, OWN) + bytes(size - 8))[:2] == (-1, errno.EOPNOTSUPP)
