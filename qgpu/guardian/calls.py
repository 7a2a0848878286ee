"""What a pod's RM call says: bytes of an ioctl in, a value out. Pure; reading memory is the caller's.

RM accepts two forms of RM_ALLOC (told apart by size) and one level of wrapping (IOCTL_XFER_CMD). A call whose
size RM would refuse is nobody's business here: RM refuses it (escape.c:RmIoctl compares sizes exactly).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from qgpu.rm import abi

#: Reads ``size`` bytes at an address of the calling process; None when they are not there.
Reader = Callable[[int, int], bytes | None]

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_FOUR = struct.Struct("<IIII")

_OFFSET_STATUS = {
    "NVOS54_PARAMETERS": abi.ffi.offsetof("NVOS54_PARAMETERS", "status"),
    "NVOS64_PARAMETERS": abi.ffi.offsetof("NVOS64_PARAMETERS", "status"),
    "NVOS21_PARAMETERS": abi.ffi.offsetof("NVOS21_PARAMETERS", "status"),
}
_XFER_BYTES = abi.sizeof("nv_ioctl_xfer_t")

# Where the one fact we need of an allocation lies: (offset, size), by kind of class.
_DEVICE_INSTANCE = (abi.ffi.offsetof("NV0080_ALLOC_PARAMETERS", "deviceId"), 4)
_ENGINE_TYPE = (abi.ffi.offsetof("NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS", "engineType"), 4)
_MEMORY_SIZE = (abi.ffi.offsetof("NV_MEMORY_ALLOCATION_PARAMS", "size"), 8)


@dataclass(frozen=True, slots=True)
class Alloc:
    """An object is asked for. ``detail`` is the device instance, engine type or size in bytes, by class."""

    client: int
    parent: int
    handle: int
    rm_class: int
    detail: int
    status_at: int


@dataclass(frozen=True, slots=True)
class Free:
    """An object, with all below it, is given back."""

    client: int
    handle: int


@dataclass(frozen=True, slots=True)
class Dup:
    """An object of one client gets a second handle in another."""

    client: int
    parent: int
    handle: int
    source_client: int
    source: int


@dataclass(frozen=True, slots=True)
class Control:
    """A control is issued on an object; ``params`` is the address of its ``size`` bytes of parameters."""

    client: int
    target: int
    command: int
    params: int
    size: int
    status_at: int


Call = Alloc | Free | Dup | Control


def decode(request: int, argument: int, read: Reader) -> Call | None:
    """Make out what an ioctl asks of RM; None when it is nothing that is kept or judged."""
    number, size = request & 0xFF, request >> 16 & 0x3FFF
    if number == abi.NV_ESC_IOCTL_XFER_CMD:
        if size != _XFER_BYTES or (outer := read(argument, size)) is None:
            return None
        number, size, argument = struct.unpack("<IIQ", outer)
    return _decode(number, size, argument, read)


def _decode(number: int, size: int, argument: int, read: Reader) -> Call | None:
    match number:
        case abi.NV_ESC_RM_CONTROL if size == abi.sizeof("NVOS54_PARAMETERS"):
            if (data := read(argument, size)) is None:
                return None
            client, target, command, _, params, length, _ = struct.unpack("<IIIIQII", data)
            return Control(client, target, command, params, length, argument + _OFFSET_STATUS["NVOS54_PARAMETERS"])
        case abi.NV_ESC_RM_ALLOC if size in (abi.sizeof("NVOS64_PARAMETERS"), abi.sizeof("NVOS21_PARAMETERS")):
            form = "NVOS64_PARAMETERS" if size == abi.sizeof("NVOS64_PARAMETERS") else "NVOS21_PARAMETERS"
            if (data := read(argument, 24)) is None:
                return None
            client, parent, handle, rm_class = _FOUR.unpack_from(data)
            (params,) = _U64.unpack_from(data, 16)
            detail = _detail(rm_class, params, read)
            return Alloc(client, parent, handle, rm_class, detail, argument + _OFFSET_STATUS[form])
        case abi.NV_ESC_RM_FREE if size == abi.sizeof("NVOS00_PARAMETERS"):
            if (data := read(argument, size)) is None:
                return None
            client, _, handle, _ = _FOUR.unpack(data)
            return Free(client, handle)
        case abi.NV_ESC_RM_DUP_OBJECT if size == abi.sizeof("NVOS55_PARAMETERS"):
            if (data := read(argument, size)) is None:
                return None
            client, parent, handle, source_client, source, _, _ = struct.unpack("<7I", data)
            return Dup(client, parent, handle, source_client, source)
        case abi.NV_ESC_RM_VID_HEAP_CONTROL if size == abi.sizeof("NVOS32_PARAMETERS"):
            return _vid_heap(read(argument, size), argument)
        case abi.NV_ESC_RM_ALLOC_MEMORY if size == abi.sizeof("NVOS02_PARAMETERS_WITH_FD"):
            if (data := read(argument, size)) is None:
                return None
            client, parent, handle, rm_class = _FOUR.unpack_from(data)
            (limit,) = _U64.unpack_from(data, abi.ffi.offsetof("NVOS02_PARAMETERS_WITH_FD", "limit"))
            status_at = argument + abi.ffi.offsetof("NVOS02_PARAMETERS_WITH_FD", "status")
            return Alloc(client, parent, handle, rm_class, limit + 1, status_at)
        case _:
            return None


def _detail(rm_class: int, params: int, read: Reader) -> int:
    if rm_class == abi.NV01_DEVICE_0:
        where = _DEVICE_INSTANCE
    elif rm_class == abi.KEPLER_CHANNEL_GROUP_A:
        where = _ENGINE_TYPE
    elif rm_class == abi.NV01_MEMORY_LOCAL_USER:
        where = _MEMORY_SIZE
    else:
        return 0
    offset, size = where
    data = read(params + offset, size) if params else None
    return int.from_bytes(data, "little") if data is not None else 0


_VID_HEAP_ALLOC_SIZE, _VID_HEAP_FREE = 2, 3
_FLAG_VIRTUAL = 0x00080000
_ATTR_LOCATION = 3 << 25


def _vid_heap(data: bytes | None, argument: int) -> Call | None:
    """Read the two functions of the old heap interface that make and free video memory (nvos.h: NVOS32)."""
    if data is None:
        return None
    heap = abi.ffi.from_buffer("NVOS32_PARAMETERS *", data)
    if heap.function == _VID_HEAP_FREE:
        return Free(heap.hRoot, heap.hMemory)
    if heap.function == _VID_HEAP_ALLOC_SIZE and not heap.flags & _FLAG_VIRTUAL and not heap.attr & _ATTR_LOCATION:
        status_at = argument + abi.ffi.offsetof("NVOS32_PARAMETERS", "status")
        return Alloc(heap.hRoot, heap.hObjectParent, heap.hMemory, abi.NV01_MEMORY_LOCAL_USER, heap.size, status_at)
    return None
