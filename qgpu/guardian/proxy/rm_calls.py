"""Decodes a pod's RM calls: bytes of an ioctl in, a value out. Pure; the caller reads the memory.

RM accepts two forms of RM_ALLOC (told apart by size) and one level of wrapping (IOCTL_XFER_CMD). A call with any other
size is not decoded here: RM refuses it (escape.c:RmIoctl compares sizes exactly).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple

from qgpu.nvidia import abi

#: Reads ``size`` bytes at an address of the calling process; None if they are not readable.
Reader = Callable[[int, int], bytes | None]

_XFER_BYTES = abi.sizeof("nv_ioctl_xfer_t")
_OS64_FIELDS = struct.Struct("<IIIIQQIIII")
_OS21_FIELDS = struct.Struct("<IIIIQII")
_OS54_FIELDS = struct.Struct("<IIIIQII")
_OS55_FIELDS = struct.Struct("<7I")
#: Offsets of the class, the handle and the descriptor in the old call for memory.
MEMORY_CLASS_AT = abi.offsetof("NVOS02_PARAMETERS_WITH_FD", "hClass")
MEMORY_HANDLE_AT = abi.offsetof("NVOS02_PARAMETERS_WITH_FD", "hObjectNew")
MEMORY_FD_AT = abi.offsetof("NVOS02_PARAMETERS_WITH_FD", "fd")
_FOUR = struct.Struct("<IIII")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Escape(NamedTuple):
    """An RM ioctl: number, size and address of its structure, and whether IOCTL_XFER_CMD wraps it."""

    number: int
    size: int
    address: int
    wrapped: bool = False


class Alloc(NamedTuple):
    """Allocate an object; ``params`` and ``rights`` are addresses, ``status_at`` is the offset of RM's status."""

    client: int
    parent: int
    handle: int
    rm_class: int
    params: int
    rights: int
    serialized: bool
    status_at: int


class AllocMemory(NamedTuple):
    """Allocate memory by the old call; ``fd`` is the descriptor to map it through, if any."""

    client: int
    parent: int
    handle: int
    rm_class: int
    fd: int
    status_at: int


class Free(NamedTuple):
    """Free an object and all below it."""

    client: int
    handle: int
    status_at: int


class Dup(NamedTuple):
    """Give an object a second handle, in the same client or another one."""

    client: int
    parent: int
    handle: int
    source_client: int
    source: int
    status_at: int


class Control(NamedTuple):
    """Issue a control on an object; ``params`` is the address of its ``size`` bytes of parameters."""

    client: int
    target: int
    command: int
    params: int
    size: int
    serialized: bool
    status_at: int


class VidHeap(NamedTuple):
    """Call the old heap interface; ``function`` is one of NVOS32's."""

    client: int
    parent: int
    function: int
    handle: int
    flags: int
    attributes: int
    attributes2: int
    size: int
    status_at: int


Call = Alloc | AllocMemory | Free | Dup | Control | VidHeap


def unwrap(request: int, argument: int, read: Reader) -> Escape | None:
    """Find the RM call in an ioctl; None if the wrapped call is not readable."""
    number, size = request & 0xFF, request >> 16 & 0x3FFF
    if number != abi.NV_ESC_IOCTL_XFER_CMD or size != _XFER_BYTES:
        return Escape(number, size, argument)
    if (outer := read(argument, size)) is None:
        return None
    number, size, address = struct.unpack("<IIQ", outer)
    return Escape(number, size, address, wrapped=True)


def parse(number: int, data: bytes | bytearray) -> Call | None:
    """Decode a call's structure; None if it is no call that is tracked or checked."""
    found = _READERS.get((number, len(data)))
    return found[0](data, found[1]) if found is not None else None


def _control(data: bytes | bytearray, status_at: int) -> Control:
    client, target, command, flags, params, length, _ = _OS54_FIELDS.unpack(data)
    return Control(client, target, command, params, length, bool(flags & abi.NVOS54_FLAGS_SERIALIZED), status_at)


def _alloc(data: bytes | bytearray, status_at: int) -> Alloc:
    client, parent, handle, rm_class, params, rights, _, flags, _, _ = _OS64_FIELDS.unpack(data)
    return Alloc(client, parent, handle, rm_class, params, rights, bool(flags & abi.NVOS64_FLAGS_SERIALIZED), status_at)


def _short_alloc(data: bytes | bytearray, status_at: int) -> Alloc:
    client, parent, handle, rm_class, params, _, _ = _OS21_FIELDS.unpack(data)
    return Alloc(client, parent, handle, rm_class, params, 0, False, status_at)


def _bare_alloc(data: bytes | bytearray, status_at: int) -> Alloc:
    client, parent, handle, rm_class = _FOUR.unpack_from(data)
    return Alloc(client, parent, handle, rm_class, 0, 0, False, status_at)


def _free(data: bytes | bytearray, status_at: int) -> Free:
    client, _, handle, _ = _FOUR.unpack(data)
    return Free(client, handle, status_at)


def _dup(data: bytes | bytearray, status_at: int) -> Dup:
    client, parent, handle, source_client, source, _, _ = _OS55_FIELDS.unpack(data)
    return Dup(client, parent, handle, source_client, source, status_at)


def _alloc_memory(data: bytes | bytearray, status_at: int) -> AllocMemory:
    client, parent, handle, rm_class = _FOUR.unpack_from(data)
    (fd,) = struct.unpack_from("<i", data, MEMORY_FD_AT)
    return AllocMemory(client, parent, handle, rm_class, fd, status_at)


#: Offset and size of the one parameter that is needed of each class.
_DETAILS = {
    abi.NV01_DEVICE_0: (abi.offsetof("NV0080_ALLOC_PARAMETERS", "deviceId"), 4),
    abi.KEPLER_CHANNEL_GROUP_A: (abi.offsetof("NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS", "engineType"), 4),
    **dict.fromkeys(abi.GPFIFO_CLASSES, (abi.offsetof("NV_CHANNEL_ALLOC_PARAMS", "engineType"), 4)),
    abi.NV01_MEMORY_LOCAL_USER: (abi.offsetof("NV_MEMORY_ALLOCATION_PARAMS", "size"), 8),
    abi.NV50_MEMORY_VIRTUAL: (abi.offsetof("NV_MEMORY_ALLOCATION_PARAMS", "flags"), 4),
    abi.NV_MEMORY_MAPPER: (abi.offsetof("NV_MEMORY_MAPPER_ALLOCATION_PARAMS", "maxQueueSize"), 4),
    abi.AMPERE_SMC_PARTITION_REF: (abi.offsetof("NVC637_ALLOCATION_PARAMETERS", "swizzId"), 4),
    abi.AMPERE_SMC_EXEC_PARTITION_REF: (abi.offsetof("NVC637_ALLOCATION_PARAMETERS", "swizzId"), 4),
}


def detail(rm_class: int, params: bytes | bytearray) -> int:
    """Read one parameter of an allocation: device or MIG instance, engine type, bytes or flags, by class."""
    at, size = _DETAILS.get(rm_class, (0, 0))
    return int.from_bytes(params[at : at + size], "little")


#: Offsets of the handles of what an object uses: RM frees it with each of these (refAddDependant).
_USES: Mapping[int, tuple[int, ...]] = {
    abi.KEPLER_CHANNEL_GROUP_A: (abi.offsetof("NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS", "hVASpace"),),
    abi.FERMI_CONTEXT_SHARE_A: (abi.offsetof("NV_CTXSHARE_ALLOCATION_PARAMETERS", "hVASpace"),),
    **dict.fromkeys(
        abi.GPFIFO_CLASSES,
        tuple(abi.offsetof("NV_CHANNEL_ALLOC_PARAMS", each) for each in ("hContextShare", "hVASpace")),
    ),
}
#: Those of memory that the card or its firmware writes for an object: error notifiers, and a channel's USERD, of which
#: RM reads the first handle alone, without SLI. RM keeps neither for the object (kchannelGetNotifierInfo,
#: vidmemPmaFree).
_NOTIFIERS = ("hObjectError", "hObjectEccError")
_WRITTEN: Mapping[int, tuple[int, ...]] = {
    abi.KEPLER_CHANNEL_GROUP_A: tuple(
        abi.offsetof("NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS", each) for each in _NOTIFIERS
    ),
    **dict.fromkeys(
        abi.GPFIFO_CLASSES,
        tuple(abi.offsetof("NV_CHANNEL_ALLOC_PARAMS", each) for each in (*_NOTIFIERS, "hUserdMemory")),
    ),
}


def uses(rm_class: int, params: bytes | bytearray) -> tuple[int, ...]:
    """Return the handles of what an object of the same client uses: address space, context share."""
    return _handles_at(_USES.get(rm_class, ()), params)


def written(rm_class: int, params: bytes | bytearray) -> tuple[int, ...]:
    """Return the handles of memory that the card writes for an object of the same client: notifiers, USERD."""
    return _handles_at(_WRITTEN.get(rm_class, ()), params)


def _handles_at(places: tuple[int, ...], params: bytes | bytearray) -> tuple[int, ...]:
    return tuple(filter(None, (int.from_bytes(params[at : at + 4], "little") for at in places)))


_MEMORY_FLAGS_AT, _MEMORY_ATTR2_AT = (abi.offsetof("NV_MEMORY_ALLOCATION_PARAMS", each) for each in ("flags", "attr2"))

#: Functions of NVOS32 (nvos.h) that pods may use. Others allocate, too, by sizes of their own; nothing uses them.
HEAP_ALLOC_SIZE, HEAP_FREE, HEAP_INFO = 2, 3, 5
#: Offset of the card's total and free bytes in every answer, and of an allocation's flags and size.
HEAP_TOTAL_AT, HEAP_FLAGS_AT, _HEAP_SIZE_AT, _HEAP_ATTR2_AT = 24, 52, 88, 144
HEAP_HANDLE_AT = 44
#: Without it RM ignores the handle that is asked for and chooses one.
HEAP_FLAG_HANDLE_PROVIDED = 0x00004000
_HEAP_FLAG_VIRTUAL = 0x00080000
_FLAG_FIXED_ADDRESS = 0x00000010
_FLAG_LAZY, _FLAG_EXTERNALLY_MANAGED, _FLAG_SPARSE = 0x00000400, 0x00400000, 0x04000000
_HEAP_ATTR_LOCATION = 3 << 25
_LOCATION_PCI = 1 << 25


def _heap(data: bytes | bytearray, status_at: int) -> VidHeap:
    client, parent, function = struct.unpack_from("<III", data)
    (handle,) = _U32.unpack_from(data, HEAP_HANDLE_AT)
    flags, attributes = struct.unpack_from("<II", data, HEAP_FLAGS_AT)
    (size,), (attributes2,) = _U64.unpack_from(data, _HEAP_SIZE_AT), _U32.unpack_from(data, _HEAP_ATTR2_AT)
    return VidHeap(client, parent, function, handle, flags, attributes, attributes2, size, status_at)


#: Decodes one call's structure, given the offset of its status.
_Reader = Callable[[bytes | bytearray, int], Call]


def _reader(number: int, structure: str, read: _Reader) -> tuple[tuple[int, int], tuple[_Reader, int]]:
    return (number, abi.sizeof(structure)), (read, abi.offsetof(structure, "status"))


#: Decoders by number and size.
_READERS = dict(
    (
        _reader(abi.NV_ESC_RM_CONTROL, "NVOS54_PARAMETERS", _control),
        _reader(abi.NV_ESC_RM_ALLOC, "NVOS64_PARAMETERS", _alloc),
        _reader(abi.NV_ESC_RM_ALLOC, "NVOS21_PARAMETERS", _short_alloc),
        _reader(abi.NV_ESC_RM_ALLOC_OBJECT, "NVOS05_PARAMETERS", _bare_alloc),
        _reader(abi.NV_ESC_RM_FREE, "NVOS00_PARAMETERS", _free),
        _reader(abi.NV_ESC_RM_DUP_OBJECT, "NVOS55_PARAMETERS", _dup),
        _reader(abi.NV_ESC_RM_VID_HEAP_CONTROL, "NVOS32_PARAMETERS", _heap),
        _reader(abi.NV_ESC_RM_ALLOC_MEMORY, "NVOS02_PARAMETERS_WITH_FD", _alloc_memory),
    )
)


def heap_size(data: bytes | bytearray) -> int:
    """Read the size in an allocation, or in its answer."""
    return int(_U64.unpack_from(data, _HEAP_SIZE_AT)[0])


def is_virtual(heap: VidHeap) -> bool:
    """Tell whether an allocation asks for address space without memory."""
    return bool(heap.flags & _HEAP_FLAG_VIRTUAL)


def chooses_place(params: bytes | bytearray) -> bool:
    """Tell whether a call asks for memory in a place on the card, for which RM takes more than it tells.

    At a fixed address that is the alignment around it; in one half of the card, 64 MiB that no other memory can be in.
    """
    (flags,), (attributes2,) = (_U32.unpack_from(params, at) for at in (_MEMORY_FLAGS_AT, _MEMORY_ATTR2_AT))
    return _chooses_place(flags, attributes2)


def heap_chooses_place(heap: VidHeap) -> bool:
    """Do as chooses_place, for the old heap."""
    return may_be_video(heap) and _chooses_place(heap.flags, heap.attributes2)


def _chooses_place(flags: int, attributes2: int) -> bool:
    return bool(flags & _FLAG_FIXED_ADDRESS or attributes2 & abi.NVOS32_ATTR2_LOCALIZED_MEMORY)


def takes_tables(flags: int) -> bool:
    """Tell whether address space gets its page tables, on the card, at once (gpu_vaspace.c:gvaspaceAlloc)."""
    return bool(flags & _FLAG_SPARSE) or not flags & (_FLAG_LAZY | _FLAG_EXTERNALLY_MANAGED)


def may_be_video(heap: VidHeap) -> bool:
    """Tell whether an allocation from the old heap may lie on the card; location "any" may."""
    return not is_virtual(heap) and heap.attributes & _HEAP_ATTR_LOCATION != _LOCATION_PCI
