"""What the filter makes of calls, run by a naive machine: which stop and ask, which go on, which do not exist."""

from __future__ import annotations

import errno
import struct
import termios

import pytest

from qgpu.guardian.proxy.seccomp_filter import ARCHES, MAP_FIXED, WATCHED_PREFIXES, program
from qgpu.nvidia import abi, uvm

ASK, GO_ON, NO_SUCH_CALL = 0x7FC00000, 0x7FFF0000, 0x00050000 | errno.ENOSYS
NATIVE, COMPAT = ARCHES["x86_64"]
READ_WRITE, SHARED, ANONYMOUS, NOREPLACE = 3, 1, 0x20, 0x100000
CONTROL = abi.request(abi.NV_ESC_RM_CONTROL, 32)


def filtered(number, *arguments, arch=NATIVE.audit):
    """Run the filter on a call as the kernel does, one instruction after another."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    assembled = program("x86_64")
    code = [struct.unpack_from("<HBBI", assembled, at) for at in range(0, len(assembled), 8)]
    at = accumulator = 0
    while True:
        what, yes, no, k = code[at]
        at += 1
        match what:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, k)
            case 0x15:
                at += yes if accumulator == k else no
            case 0x45:
                at += yes if accumulator & k else no
            case 0x54:
                accumulator &= k
            case 0x06:
                return k


@pytest.mark.parametrize(
    "request_",
    [
        CONTROL,
        CONTROL ^ 0xFF00,  # another type byte, which RM does not look at
        CONTROL & 0x3FFFFFFF,  # another direction
        CONTROL | 1 << 40,  # more than the kernel takes
        uvm.INITIALIZE,
        uvm.MAP_EXTERNAL_ALLOCATION,
        abi.request(abi.NV_ESC_IOCTL_XFER_CMD, 16),
    ],
)
@pytest.mark.parametrize("way", [NATIVE, COMPAT])
def test_calls_of_rm_and_uvm_ask_whatever_they_look_like(request_, way):
    assert filtered(way.ioctl, 5, request_, arch=way.audit) == ASK


@pytest.mark.parametrize("size", [0, 4, 128, 0x3FFC])
def test_calls_of_any_size_ask_by_their_number(size):
    assert filtered(NATIVE.ioctl, 5, abi.request(abi.NV_ESC_ATTACH_GPUS_TO_FD, size)) == ASK
    assert filtered(NATIVE.ioctl, 5, size << 16 | abi.NV_ESC_ATTACH_GPUS_TO_FD) == ASK


@pytest.mark.parametrize("request_", [0x5401, abi.request(abi.NV_ESC_RM_CONTROL, 33), 0x40086409])
def test_other_ioctls_go_on(request_):
    assert filtered(NATIVE.ioctl, 5, request_) == GO_ON


def test_a_containers_filter_stops_no_frequent_call():
    """A runtime's filter goes by parts of requests; the low byte of FIONREAD is a number of UVM's."""
    assert not any(termios.FIONREAD & mask == value for mask, value in WATCHED_PREFIXES)
    assert all(any(number & mask == value for mask, value in WATCHED_PREFIXES) for number in uvm.WATCHED)


def test_second_ways_into_the_kernel_do_not_exist():
    assert filtered(0x40000000 | 514, 5, CONTROL) == NO_SUCH_CALL  # x32's ioctl
    assert filtered(90, 0, arch=COMPAT.audit) == NO_SUCH_CALL  # mmap behind one pointer
    assert filtered(16, 5, CONTROL, arch=0xC00000B7) == NO_SUCH_CALL


@pytest.mark.parametrize(
    ("address", "flags", "offset", "said"),
    [
        (0, SHARED, 4096, ASK),
        (0, SHARED, 1 << 40, ASK),
        (0, 3, 4096, ASK),  # MAP_SHARED_VALIDATE
        (0, SHARED | ANONYMOUS, 4096, GO_ON),
        (0, 2, 4096, GO_ON),  # private
        (1 << 20, SHARED | MAP_FIXED, 0, GO_ON),
        (0, SHARED | MAP_FIXED, 0, ASK),  # whose offset is its address
        (0, SHARED | NOREPLACE, 0, ASK),
        (0, SHARED, 0, GO_ON),  # the kernel gives nobody the address 0 unasked
    ],
)
def test_mappings_that_could_be_managed_memory_ask(address, flags, offset, said):
    assert filtered(NATIVE.mmap, address, 4096, READ_WRITE, flags, 5, offset) == said
    assert filtered(NATIVE.mmap, address, 4096, 1, flags, 5, offset) == GO_ON  # not writable
