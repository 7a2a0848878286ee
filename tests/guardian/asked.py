"""The bytes of a pod's calls, and where in them RM's status stands. Handles are the tests': client 7, its device 2."""

from __future__ import annotations

import struct

from qgpu.nvidia import abi

TSG = 0x5C000015
TSG_PARAMS = struct.pack("<IIIII", 0, 0, 0, 1, 0)
DEVICE_PARAMS = bytes(56)


def control(command, target=TSG, size=8, client=7):
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


def dup_status(argument):
    return struct.unpack_from("<I", argument, 24)[0]


def heap(handle, size=0, client=7, kind=0, flags=0):
    """Ask for memory below device 2 by the old heap interface."""
    call = bytearray(184)
    struct.pack_into("<IIIIiI", call, 0, client, 2, 2, 0, 0, 0xFFFF)
    struct.pack_into("<IIII", call, 44, handle, kind, flags, 0)
    struct.pack_into("<Q", call, 88, size)
    return bytes(call)


def heap_status(argument):
    return struct.unpack_from("<I", argument, 20)[0]


def uvm_mapping(base, length, memory, client=7):
    call = struct.pack("<QQQ", base, length, 0) + bytes(16) + bytes(9264 - 40)
    return call[:9240] + struct.pack("<QiIII", 1, -1, client, memory, 0xFFFF) + bytes(4)


def uvm_mapping_status(argument):
    return struct.unpack_from("<I", argument, 9260)[0]


def uvm_range(base, length):
    return struct.pack("<QQ", base, length) + bytes(16) + struct.pack("<II", 0xFFFF, 0)


def device(handle=2, client=7):
    return alloc(handle, client, abi.NV01_DEVICE_0, client)


def subdevice(handle=3, client=7, parent=2):
    return alloc(handle, parent, abi.NV20_SUBDEVICE_0, client)
