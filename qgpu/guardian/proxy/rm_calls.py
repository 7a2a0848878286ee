"""Decodes a pod's RM calls: bytes of an ioctl in, a value out. Pure; the caller reads the memory.

RM accepts two forms of RM_ALLOC (told apart by size) and one level of wrapping (IOCTL_XFER_CMD). A call with any other
size is not decoded here: RM refuses it (escape.c:RmIoctl compares sizes exactly).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple

from qgpu.guardian.rules import classes
from qgpu.nvidia import abi

#: Reads ``size`` bytes at an address of the calling process; None if they are not readable.
Reader = Callable[[int, int], bytes | None]

_XFER_BYTES = abi.sizeof("nv_ioctl_xfer_t")
#: NVB0B5_ALLOCATION_PARAMETERS: whether the engine is given by its type or its number, and the engine.
_NVB0B5 = struct.Struct("<II")


def _offsets(structure: str, members: str) -> tuple[int, ...]:
    return tuple(abi.offsetof(structure, member) for member in members.split())


#: Offsets of the class, the handle and the descriptor in the old call for memory.
MEMORY_CLASS_AT, MEMORY_HANDLE_AT, MEMORY_FD_AT = _offsets("NVOS02_PARAMETERS_WITH_FD", "hClass hObjectNew fd")


class Escape(NamedTuple):
    """An RM ioctl: number, size and address of its structure, and whether IOCTL_XFER_CMD wraps it."""

    number: int
    size: int
    address: int
    wrapped: bool = False


class Alloc(NamedTuple):
    """Allocate an object; ``params`` and ``rights`` are addresses, ``status_at`` is the offset of RM's status."""

    status_at: int
    client: int
    parent: int
    handle: int
    rm_class: int
    params: int = 0
    rights: int = 0
    flags: int = 0


class AllocMemory(NamedTuple):
    """Allocate memory by the old call; ``fd`` is the descriptor to map it through, if any."""

    status_at: int
    client: int
    parent: int
    handle: int
    rm_class: int
    fd: int


class Free(NamedTuple):
    """Free an object and all below it."""

    status_at: int
    client: int
    handle: int


class Dup(NamedTuple):
    """Give an object a second handle, in the same client or another one."""

    status_at: int
    client: int
    parent: int
    handle: int
    source_client: int
    source: int


class Control(NamedTuple):
    """Issue a control on an object; ``params`` is the address of its ``size`` bytes of parameters."""

    status_at: int
    client: int
    target: int
    command: int
    flags: int
    params: int
    size: int


class VidHeap(NamedTuple):
    """Call the old heap interface; ``function`` is one of NVOS32's, ``space`` the address space of what is virtual."""

    status_at: int
    client: int
    parent: int
    function: int
    space: int
    handle: int
    flags: int
    attributes: int
    size: int
    attributes2: int


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


_OBJECT = "hRoot hObjectParent hObjectNew hClass"
_HEAP = "hRoot hObjectParent function hVASpace hMemory flags attr size attr2"
#: The structure of each call, and its members that are decoded, in their order.
_CALLS: tuple[tuple[int, str, type[Call], str], ...] = (
    (abi.NV_ESC_RM_CONTROL, "NVOS54_PARAMETERS", Control, "hClient hObject cmd flags params paramsSize"),
    (abi.NV_ESC_RM_ALLOC, "NVOS64_PARAMETERS", Alloc, f"{_OBJECT} pAllocParms pRightsRequested flags"),
    (abi.NV_ESC_RM_ALLOC, "NVOS21_PARAMETERS", Alloc, f"{_OBJECT} pAllocParms"),
    (abi.NV_ESC_RM_ALLOC_OBJECT, "NVOS05_PARAMETERS", Alloc, _OBJECT),
    (abi.NV_ESC_RM_FREE, "NVOS00_PARAMETERS", Free, "hRoot hObjectOld"),
    (abi.NV_ESC_RM_DUP_OBJECT, "NVOS55_PARAMETERS", Dup, "hClient hParent hObject hClientSrc hObjectSrc"),
    (abi.NV_ESC_RM_VID_HEAP_CONTROL, "NVOS32_PARAMETERS", VidHeap, _HEAP),
    (abi.NV_ESC_RM_ALLOC_MEMORY, "NVOS02_PARAMETERS_WITH_FD", AllocMemory, f"{_OBJECT} fd"),
)
#: What ``struct`` calls the members' types.
_CODES = {"uint32_t": "I", "int32_t": "i", "uint64_t": "Q"}


def _layout(structure: str, members: str) -> struct.Struct:
    """Return what unpacks some members of a declared structure, given in their order."""
    fields, layout, end = dict(abi.ffi.typeof(structure).fields), "<", 0
    for field in (fields[member] for member in members.split()):
        layout += f"{field.offset - end}x{_CODES[field.type.cname]}"
        end = field.offset + abi.ffi.sizeof(field.type)
    return struct.Struct(layout)


#: The same by number and size, with the offset of the status.
_FORMS = {
    (number, abi.sizeof(structure)): (kind, abi.offsetof(structure, "status"), _layout(structure, members))
    for number, structure, kind, members in _CALLS
}


def parse(number: int, data: bytes | bytearray) -> Call | None:
    """Decode a call's structure; None if it is no call that is tracked or checked."""
    if (found := _FORMS.get((number, len(data)))) is None:
        return None
    kind, status_at, layout = found
    return kind(status_at, *layout.unpack_from(data))


_TSG, _CHANNEL = "NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS", "NV_CHANNEL_ALLOC_PARAMS"
#: Offset and size of the one parameter that is needed of each class.
_DETAILS = {
    abi.NV01_DEVICE_0: (abi.offsetof("NV0080_ALLOC_PARAMETERS", "deviceId"), 4),
    abi.KEPLER_CHANNEL_GROUP_A: (abi.offsetof(_TSG, "engineType"), 4),
    **dict.fromkeys(abi.GPFIFO_CLASSES, (abi.offsetof(_CHANNEL, "engineType"), 4)),
    abi.NV01_MEMORY_LOCAL_USER: (abi.offsetof("NV_MEMORY_ALLOCATION_PARAMS", "size"), 8),
    abi.NV01_CONTEXT_DMA: (abi.offsetof("NV_CONTEXT_DMA_ALLOCATION_PARAMS", "hMemory"), 4),
    abi.NV50_MEMORY_VIRTUAL: (abi.offsetof("NV_MEMORY_ALLOCATION_PARAMS", "flags"), 4),
    abi.NV_MEMORY_MAPPER: (abi.offsetof("NV_MEMORY_MAPPER_ALLOCATION_PARAMS", "maxQueueSize"), 4),
    abi.AMPERE_SMC_PARTITION_REF: (abi.offsetof("NVC637_ALLOCATION_PARAMETERS", "swizzId"), 4),
    abi.AMPERE_SMC_EXEC_PARTITION_REF: (abi.offsetof("NVC637_ALLOCATION_PARAMETERS", "swizzId"), 4),
}


def detail(rm_class: int, params: bytes | bytearray) -> int:
    """Read one parameter of an allocation: device or MIG instance, engine type, bytes, flags or memory, by class."""
    if rm_class in classes.COPIES:
        by_type, engine = _NVB0B5.unpack_from(params)
        return engine if by_type else next(iter(abi.COPY_ENGINE_TYPES[engine : engine + 1]), (0,))[0]
    at, size = _DETAILS.get(rm_class, (0, 0))
    return int.from_bytes(params[at : at + size], "little")


def holds_notifier(offset: int, limit: int) -> bool:
    """Tell whether a context DMA over a part of memory has room for an error notifier, within one page.

    RM tells the firmware only where it begins (kchannelGetNotifierInfo): the next page may be anybody's.
    """
    return limit >= _NOTIFIER_BYTES - 1 and offset % _PAGE <= _PAGE - _NOTIFIER_BYTES


_NOTIFIERS, _NOTIFIER_BYTES, _PAGE = "hObjectError hObjectEccError", 16, 4096
#: Offsets of the handles of what an object uses: RM frees it with each of these (refAddDependant).
USES: Mapping[int, tuple[int, ...]] = {
    abi.KEPLER_CHANNEL_GROUP_A: _offsets(_TSG, "hVASpace"),
    abi.FERMI_CONTEXT_SHARE_A: _offsets("NV_CTXSHARE_ALLOCATION_PARAMETERS", "hVASpace"),
    **dict.fromkeys(abi.GPFIFO_CLASSES, _offsets(_CHANNEL, "hContextShare hVASpace")),
    abi.NV50_MEMORY_VIRTUAL: _offsets("NV_MEMORY_ALLOCATION_PARAMS", "hVASpace"),
    abi.NV01_MEMORY_VIRTUAL: tuple(each.at for each in classes.CLASSES[abi.NV01_MEMORY_VIRTUAL].handles),
}
#: What stands for no address space there (cl0070.h).
_NO_SPACE = {abi.NV01_MEMORY_VIRTUAL: 0xFFFFFFFF}
#: And of memory that the card, its firmware or RM writes for an object: error notifiers, a channel's USERD, of which RM
#: reads the first handle alone, without SLI, and semaphores. RM keeps only the last for their object
#: (kchannelGetNotifierInfo, vidmemPmaFree, _semsurfDupMemory).
WRITTEN: Mapping[int, tuple[int, ...]] = {
    abi.KEPLER_CHANNEL_GROUP_A: _offsets(_TSG, _NOTIFIERS),
    **dict.fromkeys(abi.GPFIFO_CLASSES, _offsets(_CHANNEL, f"{_NOTIFIERS} hUserdMemory")),
    classes.SEMAPHORE_SURFACE: tuple(each.at for each in classes.CLASSES[classes.SEMAPHORE_SURFACE].handles),
}


def handles(places: Mapping[int, tuple[int, ...]], rm_class: int, params: bytes | bytearray) -> tuple[int, ...]:
    """Return the handles that an allocation names in the places of its class; they are of the same client."""
    words = (int.from_bytes(params[at : at + 4], "little") for at in places.get(rm_class, ()))
    return tuple(word for word in words if word not in (0, _NO_SPACE.get(rm_class)))


MEMORY_FLAGS_AT, MEMORY_ATTR2_AT = _offsets("NV_MEMORY_ALLOCATION_PARAMS", "flags attr2")

#: Functions of NVOS32 (nvos.h) that pods may use. Others allocate, too, by sizes of their own; nothing uses them.
HEAP_ALLOC_SIZE, HEAP_FREE, HEAP_INFO = 2, 3, 5
#: Offset of the card's total and free bytes in every answer, and of an allocation's handle, flags and size.
HEAP_TOTAL_AT, HEAP_HANDLE_AT, HEAP_FLAGS_AT, HEAP_SIZE_AT = _offsets("NVOS32_PARAMETERS", "total hMemory flags size")
#: Without it RM ignores the handle that is asked for and chooses one.
HEAP_FLAG_HANDLE_PROVIDED = 0x00004000
_HEAP_FLAG_VIRTUAL = 0x00080000
_FLAG_FIXED_ADDRESS = 0x00000010
_FLAG_LAZY, _FLAG_EXTERNALLY_MANAGED, _FLAG_SPARSE = 0x00000400, 0x00400000, 0x04000000
_HEAP_ATTR_LOCATION = 3 << 25
_LOCATION_PCI = 1 << 25


def is_virtual(heap: VidHeap) -> bool:
    """Tell whether an allocation asks for address space without memory."""
    return bool(heap.flags & _HEAP_FLAG_VIRTUAL)


def chooses_place(flags: int, attributes2: int) -> bool:
    """Tell whether a call asks for memory in a place on the card, for which RM takes more than it tells.

    At a fixed address that is the alignment around it; in one half of the card, 64 MiB that no other memory can be in.
    """
    return bool(flags & _FLAG_FIXED_ADDRESS or attributes2 & abi.NVOS32_ATTR2_LOCALIZED_MEMORY)


def takes_tables(flags: int) -> bool:
    """Tell whether address space gets its page tables, on the card, at once (gpu_vaspace.c:gvaspaceAlloc)."""
    return bool(flags & _FLAG_SPARSE) or not flags & (_FLAG_LAZY | _FLAG_EXTERNALLY_MANAGED)


def may_be_video(heap: VidHeap) -> bool:
    """Tell whether an allocation from the old heap may lie on the card; location "any" may."""
    return not is_virtual(heap) and heap.attributes & _HEAP_ATTR_LOCATION != _LOCATION_PCI
