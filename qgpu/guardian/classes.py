"""Which classes of objects a pod may make, and what of them is kept in the register.

An allow-list for the same reason as that of controls (``controls.py``): parameters are handed to RM from the
guardian's address space, so a class whose parameters hold pointers of the pod's is not for this list. The rows are
RM's own (rmapi/resource_list.h, 580.105.08), without displays, vGPU, what is for the privileged, and memory
named by its address; and without MemoryMapper, whose mappings take page tables of the card that nobody can count.
"""

from __future__ import annotations

from qgpu.rm import abi

#: By the lower byte, classes that every architecture has anew: channels, copy and compute engines, 3D, user-mode
#: doorbells, video decoders, encoders, JPEG and optical flow. Their parameters are plain data.
_CHANNELS = 0x6F
_FAMILIES = frozenset({_CHANNELS, 0xB5, 0xC0, 0x97, 0x61, 0xB0, 0xB7, 0xD0, 0xD1, 0xFA, 0x40, 0xA2})
_FIRST_OF_FAMILIES = 0xA000

_SINGLE = frozenset(
    {
        *(0x0002, 0x0005, 0x003E, 0x0040, 0x0042, 0x0070, 0x0079, 0x0080, 0x0090, 0x00C3, 0x00DA, 0x00DB, 0x00DE),
        *(0x00F3, 0x00F8, 0x00F9, 0x00FB, 0x00FD, 0x2080, 0x2081, 0x208F, 0x0073, 0x50A0, 0x503B, 0x503C),
        *(0x83DE, 0x844C, 0x900E, 0x902D, 0x9067, 0x9074, 0x9096, 0x90CC, 0x90CD, 0x90CE, 0x90E6, 0x90E7),
        *(0x90F1, 0xA06C, 0xA140, 0xB1CC, 0xB2CC, 0xC637, 0xC638, 0xC639, 0xC640, 0xCB33),
    }
)

#: What runs on the compute engine: compute, 3D, 2D and inline copies (the latter by the lower byte of a family).
_ON_COMPUTE_ENGINE, _ON_COMPUTE_ENGINE_ALONE = frozenset({0xC0, 0x97, 0x40}), frozenset({0x902D, 0xA140})

#: Parameters that begin with a descriptor of the caller's (8 bytes): the capabilities of MIG.
WITH_CAPABILITY = frozenset({0xC637, 0xC638, 0xC639, 0xC640})

#: What hangs on memory that it names, by where the handle stands in the parameters: it keeps that memory.
HOLDS_MEMORY_AT = {abi.NV_MEMORY_FABRIC: 40}

#: Objects that carry a gate: they have one name only.
GATED = frozenset({abi.KEPLER_CHANNEL_GROUP_A, abi.FERMI_CONTEXT_SHARE_A}) | abi.GPFIFO_CLASSES

#: Memory of the card by its address: whoever names it could name anybody's.
PHYSICAL = frozenset({0x0082, 0x0083, 0x00C2})

KEPT = GATED | {
    *(abi.NV01_DEVICE_0, abi.NV20_SUBDEVICE_0, abi.NV01_MEMORY_LOCAL_USER, abi.FERMI_VASPACE_A),
}


#: What must fit before it is made: memory, and what RM takes some for.
CHARGED = frozenset({abi.NV01_MEMORY_LOCAL_USER, abi.KEPLER_CHANNEL_GROUP_A, abi.FERMI_VASPACE_A})


def allowed(rm_class: int) -> bool:
    """Tell whether a pod may make objects of a class."""
    if rm_class & 0xFF == _CHANNELS:  # one that is not known would carry no gate
        return rm_class in abi.GPFIFO_CLASSES
    return rm_class in _SINGLE or (_FIRST_OF_FAMILIES <= rm_class <= 0xFFFF and rm_class & 0xFF in _FAMILIES)


def on_compute_engine(rm_class: int) -> bool:
    """Tell whether objects of a class make a channel run on the compute engine."""
    if rm_class in _SINGLE:
        return rm_class in _ON_COMPUTE_ENGINE_ALONE
    return _FIRST_OF_FAMILIES <= rm_class <= 0xFFFF and rm_class & 0xFF in _ON_COMPUTE_ENGINE
