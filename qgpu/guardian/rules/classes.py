"""RM's classes: one row for each class that any process may allocate, and whether a pod may.

The guardian hands the parameters to RM from its own address space, so a class whose parameters hold addresses of the
pod is refused. A client named in the parameters must belong to the pod, because RM grants access by it: to shared
address spaces (device_share.c), to events of its objects (event.c) and to profiling. A class without a row is refused.

Numbers, names and offsets are those of NVIDIA's open kernel modules from 535 to 595 (rmapi/resource_list.h and
SDK/class, recorded in tests/data/rm), and of gVisor's nvproxy (NVD2B0, NVD2D1 and NVD2FA).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from qgpu.guardian.rules.rows import Handle, InModule, Scope, Why, table
from qgpu.nvidia import abi

SEEN, LIBRARY, KERNEL = Why.SEEN, Why.LIBRARY, Why.KERNEL
MEMORY, OTHERS, INTERNAL = Why.MEMORY, Why.OTHERS, Why.INTERNAL
VGPU, DISPLAY, UNUSED = Why.VGPU, Why.DISPLAY, Why.UNUSED
PROFILING, GRAPHICS = Why.PROFILING, Why.GRAPHICS
NAMED, EVENT, ANSWER = Scope.NAMED, Scope.EVENT, Scope.ANSWER


class Class(NamedTuple):
    """One class of RM."""

    number: int
    name: str
    why: Why
    #: Handles of clients in the parameters; they must be the pod's own (0 for none).
    clients: tuple[Handle, ...] = ()
    #: All other handles, by where RM looks them up.
    handles: tuple[Handle, ...] = ()
    #: Members of pointer type that are not addresses for RM to read.
    addresses: tuple[Handle, ...] = ()
    #: The parameters begin with a file descriptor of the caller (8 bytes): a MIG capability.
    capability: bool = False
    #: The object keeps memory allocated, as another handle of it would; the memory's handle lies at this offset.
    holds_memory_at: int | None = None
    #: The object makes its channel run on the compute engine: compute, 3D, 2D and inline copies.
    on_compute_engine: bool = False
    #: A pod may make it by NV_ESC_RM_ALLOC_MEMORY: RM pins the process's own pages, or allocates system memory.
    by_alloc_memory: bool = False
    #: Made by NV_ESC_RM_ALLOC_MEMORY it would reach the whole card; a pod gets an object without memory instead.
    empty_by_alloc_memory: bool = False
    #: What the kernel module does in addition to passing or refusing it.
    module: InModule | None = None


SEMAPHORE_SURFACE, DEBUGGER = 0x00DA, 0x83DE
#: Error notifiers, instance buffer, context share, address space, USERD, TSG: NV_CHANNEL_ALLOC_PARAMS.
_OF_CHANNELS = (Handle(0), Handle(4), Handle(24), Handle(28), Handle(32, 8), Handle(140), Handle(240))
#: Address space, and the address that RM tells: NV_MEMORY_ALLOCATION_PARAMS.
_SPACE, _ADDRESS = (Handle(108),), (Handle(96, scope=ANSWER),)
#: Client and object of an event, and its descriptor: NV0005_ALLOC_PARAMETERS.
_CLIENT, _OBJECT, _NOTIFIED = (Handle(0),), (Handle(4, scope=NAMED),), (Handle(16, scope=EVENT),)

#: Those about which there is nothing more to say, listed as ``table`` says.
_BY_REASON = {
    SEEN: """
        0x0073 NV04_DISPLAY_COMMON  0x00DE RM_USER_SHARED_DATA  0x2080 NV20_SUBDEVICE_0  0x2081 NV2081_BINAPI
        0x208F NV20_SUBDEVICE_DIAG  0x503C NV50_THIRD_PARTY_P2P  0x90CC GF100_PROFILER  0x90E6 GF100_SUBDEVICE_MASTER
        0x90E7 GF100_SUBDEVICE_INFOROM  0x90F1 FERMI_VASPACE_A  0xB8B0 NVB8B0_VIDEO_DECODER  0xB8D1 NVB8D1_VIDEO_NVJPG
        0xC661 HOPPER_USERMODE_A  0xC8B5 HOPPER_DMA_COPY_A
    """,
    LIBRARY: """
        0x900E MPS_COMPUTE  0xB0B5 MAXWELL_DMA_COPY_A  0xB4B7 NVB4B7_VIDEO_ENCODER  0xB8FA NVB8FA_VIDEO_OFA
        0xC0B5 PASCAL_DMA_COPY_A  0xC361 VOLTA_USERMODE_A  0xC461 TURING_USERMODE_A  0xC4B0 NVC4B0_VIDEO_DECODER
        0xC4B7 NVC4B7_VIDEO_ENCODER  0xC4D1 NVC4D1_VIDEO_NVJPG  0xC561 AMPERE_USERMODE_A  0xC5B5 TURING_DMA_COPY_A
        0xC6B0 NVC6B0_VIDEO_DECODER  0xC6B5 AMPERE_DMA_COPY_A  0xC6FA NVC6FA_VIDEO_OFA  0xC761 BLACKWELL_USERMODE_A
        0xC7B0 NVC7B0_VIDEO_DECODER  0xC7B5 AMPERE_DMA_COPY_B  0xC7B7 NVC7B7_VIDEO_ENCODER  0xC7FA NVC7FA_VIDEO_OFA
        0xC9B0 NVC9B0_VIDEO_DECODER  0xC9B5 BLACKWELL_DMA_COPY_A  0xC9B7 NVC9B7_VIDEO_ENCODER  0xC9D1 NVC9D1_VIDEO_NVJPG
        0xC9FA NVC9FA_VIDEO_OFA  0xCAB5 BLACKWELL_DMA_COPY_B  0xCBA2 HOPPER_SEC2_WORK_LAUNCH_A
        0xCDB0 NVCDB0_VIDEO_DECODER  0xCDD1 NVCDD1_VIDEO_NVJPG  0xCDFA NVCDFA_VIDEO_OFA  0xCEB0 NVCEB0_VIDEO_DECODER
        0xCEB7 NVCEB7_VIDEO_ENCODER  0xCED0 NVCED0_VIDEO_NVJPG  0xCEFA NVCEFA_VIDEO_OFA  0xCFB0 NVCFB0_VIDEO_DECODER
        0xCFB7 NVCFB7_VIDEO_ENCODER  0xCFD1 NVCFD1_VIDEO_NVJPG  0xCFFA NVCFFA_VIDEO_OFA  0xD1B0 NVD1B0_VIDEO_DECODER
        0xD1B7 NVD1B7_VIDEO_ENCODER  0xD1FA NVD1FA_VIDEO_OFA  0xD2B0 NVD2B0_VIDEO_DECODER  0xD2D1 NVD2D1_VIDEO_NVJPG
        0xD2FA NVD2FA_VIDEO_OFA
    """,
    GRAPHICS: "0x9096 GF100_ZBC_CLEAR",
    KERNEL: "0x0000 NV01_ROOT  0x0001 NV01_ROOT_NON_PRIV  0x0041 NV01_ROOT_CLIENT",
    MEMORY: """
        0x0081 NV01_MEMORY_LIST_SYSTEM  0x0082 NV01_MEMORY_LIST_FBMEM  0x0083 NV01_MEMORY_LIST_OBJECT
        0x00B1 NV01_MEMORY_HW_RESOURCES  0x00C2 NV01_MEMORY_LOCAL_PHYSICAL  0x00E0 NV_MEMORY_EXPORT
        0x00F1 NV_IMEX_SESSION  0x00F3 NV01_MEMORY_FLA  0xC763 MMU_VIDMEM_ACCESS_BIT_BUFFER
        0xC863 HOPPER_MMU_VIDMEM_ACCESS_BIT_BUFFER
    """,
    OTHERS: "0x5080 NV50_DEFERRED_API_CLASS  0x90CD NV_EVENT_BUFFER",
    INTERNAL: """
        0x0078 NV01_EVENT_KERNEL_CALLBACK  0x007D NV04_SOFTWARE_TEST  0x007E NV01_EVENT_KERNEL_CALLBACK_EX
        0x008F KERNEL_WATCHDOG  0x0100 LOCK_STRESS_OBJECT  0x0101 LOCK_TEST_RELAXED_DUP_OBJECT
    """,
    VGPU: "0xA080 KEPLER_DEVICE_VGPU  0xA081 NVA081_VGPU_CONFIG  0xA084 NVA084_KERNEL_HOST_VGPU_DEVICE",
    DISPLAY: "0x30F1 NV30_GSYNC  0x9072 GF100_DISP_SW  0xA083 NVA083_GRID_DISPLAYLESS",
    UNUSED: """
        0x0004 NV01_TIMER  0x000F FABRIC_MANAGER_SESSION  0x0020 NV0020_GPU_MANAGEMENT  0x0042 NV_MEMORY_EXTENDED_USER
        0x0060 NV0060_SYNC_GPU_BOOST  0x0090 KERNEL_GRAPHICS_CONTEXT  0x00C3 NV01_MEMORY_SYNCPOINT
        0x00DB NV40_DEBUG_BUFFER  0x00F9 NV_MEMORY_FABRIC_IMPORT_V2  0x00FB NV_MEMORY_FABRIC_IMPORTED_REF
        0x402C NV40_I2C  0x844C G84_PERFBUFFER  0x906F GF100_CHANNEL_GPFIFO  0x9074 GF100_TIMED_SEMAPHORE_SW
        0x90CE NV01_MEMORY_DEVICELESS  0x90EC GF100_HDACODEC  0xA0BC NVENC_SW_SESSION  0xA0BD NVFBC_SW_SESSION
        0xB1CC MAXWELL_PROFILER_CONTEXT  0xC365 ACCESS_COUNTER_NOTIFY_BUFFER  0xCBCA NV_COUNTER_COLLECTION_UNIT
    """,
}
_CHANNELS = {
    SEEN: "0xC56F AMPERE_CHANNEL_GPFIFO_A  0xC86F HOPPER_CHANNEL_GPFIFO_A",
    LIBRARY: """
        0xA06F KEPLER_CHANNEL_GPFIFO_A  0xA16F KEPLER_CHANNEL_GPFIFO_B  0xB06F MAXWELL_CHANNEL_GPFIFO_A
        0xC06F PASCAL_CHANNEL_GPFIFO_A  0xC36F VOLTA_CHANNEL_GPFIFO_A  0xC46F TURING_CHANNEL_GPFIFO_A
        0xC96F BLACKWELL_CHANNEL_GPFIFO_A  0xCA6F BLACKWELL_CHANNEL_GPFIFO_B
    """,
}
_ON_COMPUTE_ENGINE = {
    SEEN: "0xA140 KEPLER_INLINE_TO_MEMORY_B  0xCBC0 HOPPER_COMPUTE_A",
    LIBRARY: """
        0xC5C0 TURING_COMPUTE_A  0xC6C0 AMPERE_COMPUTE_A  0xC7C0 AMPERE_COMPUTE_B  0xC9C0 ADA_COMPUTE_A
        0xCD40 BLACKWELL_INLINE_TO_MEMORY_A  0xCDC0 BLACKWELL_COMPUTE_A  0xCEC0 BLACKWELL_COMPUTE_B
    """,
    GRAPHICS: """
        0x902D FERMI_TWOD_A  0xC597 TURING_A  0xC697 AMPERE_A  0xC797 AMPERE_B  0xC997 ADA_A  0xCB97 HOPPER_A
        0xCD97 BLACKWELL_A  0xCE97 BLACKWELL_B
    """,
}
#: The others, in order of their numbers.
_OTHERS = (
    Class(0x0002, "NV01_CONTEXT_DMA", SEEN, handles=(Handle(0), Handle(8))),
    Class(0x0005, "NV01_EVENT", SEEN, clients=_CLIENT, handles=_OBJECT, addresses=_NOTIFIED),
    Class(0x003E, "NV01_MEMORY_SYSTEM", SEEN, handles=_SPACE, addresses=_ADDRESS, by_alloc_memory=True),
    Class(0x003F, "NV01_MEMORY_LOCAL_PRIVILEGED", MEMORY, empty_by_alloc_memory=True),
    Class(0x0040, "NV01_MEMORY_LOCAL_USER", SEEN, handles=_SPACE, addresses=_ADDRESS, empty_by_alloc_memory=True),
    Class(0x0070, "NV01_MEMORY_VIRTUAL", SEEN, handles=(Handle(16),)),
    Class(0x0071, "NV01_MEMORY_SYSTEM_OS_DESCRIPTOR", KERNEL, by_alloc_memory=True),
    Class(0x0079, "NV01_EVENT_OS_EVENT", SEEN, clients=_CLIENT, handles=_OBJECT, addresses=_NOTIFIED),
    Class(0x0080, "NV01_DEVICE_0", SEEN, clients=(Handle(4), Handle(8)), handles=(Handle(12, scope=NAMED),)),
    Class(
        SEMAPHORE_SURFACE, "NV_SEMAPHORE_SURFACE", SEEN, handles=(Handle(0), Handle(4)), module=InModule.HOLDS_MEMORY
    ),
    Class(0x00F8, "NV_MEMORY_FABRIC", SEEN, handles=(Handle(40),), holds_memory_at=40, module=InModule.FURTHER_HANDLE),
    Class(0x00FD, "NV_MEMORY_MULTICAST_FABRIC", LIBRARY, addresses=(Handle(32, scope=EVENT), Handle(72, scope=EVENT))),
    Class(0x00FE, "NV_MEMORY_MAPPER", GRAPHICS, handles=(Handle(0), Handle(8))),
    Class(0x503B, "NV50_P2P", LIBRARY, handles=(Handle(0), Handle(4))),
    Class(0x50A0, "NV50_MEMORY_VIRTUAL", SEEN, handles=_SPACE, addresses=_ADDRESS),
    Class(DEBUGGER, "GT200_DEBUGGER", SEEN, clients=(Handle(0), Handle(4)), handles=(Handle(8, scope=NAMED),)),
    Class(0x9067, "FERMI_CONTEXT_SHARE_A", SEEN, handles=(Handle(0),)),
    Class(0xA06C, "KEPLER_CHANNEL_GROUP_A", SEEN, handles=(Handle(0), Handle(4), Handle(8))),
    Class(0xB2CC, "MAXWELL_PROFILER_DEVICE", PROFILING, clients=(Handle(0),), handles=(Handle(4, scope=NAMED),)),
    Class(0xC637, "AMPERE_SMC_PARTITION_REF", LIBRARY, capability=True),
    Class(0xC638, "AMPERE_SMC_EXEC_PARTITION_REF", LIBRARY, capability=True),
    Class(0xC639, "AMPERE_SMC_CONFIG_SESSION", SEEN, capability=True),
    Class(0xC640, "AMPERE_SMC_MONITOR_SESSION", SEEN, capability=True),
    Class(0xCB33, "NV_CONFIDENTIAL_COMPUTE", SEEN, clients=(Handle(0),)),
)
ROWS = table(
    Class,
    _BY_REASON,
    _OTHERS,
    table(partial(Class, handles=_OF_CHANNELS), _CHANNELS),
    table(partial(Class, on_compute_engine=True), _ON_COMPUTE_ENGINE),
)

#: The rows by number.
CLASSES = {row.number: row for row in ROWS}

ALLOWED = {row.number: row for row in ROWS if row.why.allowed}

#: And what pods may make whose grants allow profiling or graphics.
ALLOWED_TO_SOME = ALLOWED | {row.number: row for row in ROWS if row.why in (PROFILING, GRAPHICS)}

#: Objects that carry a gate; they may have only one name.
GATED = frozenset({abi.KEPLER_CHANNEL_GROUP_A, abi.FERMI_CONTEXT_SHARE_A}) | abi.GPFIFO_CLASSES

#: Objects that RM frees channels with, and of which it makes some by itself for a pod's TSG: also graphics contexts.
MADE_FOR_CHANNELS = GATED | {0x0090}

#: Memory of the card by physical address: a caller could name the memory of any pod.
PHYSICAL = frozenset({0x0082, 0x0083, 0x00C2, 0x00F3})

#: Subscriptions to a GPU instance and to a compute instance in it. On a card that MIG divides, a pod may have its own.
MIG_SUBSCRIPTIONS = (abi.AMPERE_SMC_PARTITION_REF, abi.AMPERE_SMC_EXEC_PARTITION_REF)

#: What copies on a channel. It names the engine.
COPIES = frozenset(row.number for row in ROWS if "_DMA_COPY_" in row.name)

#: Events: RM notifies each of them in an interrupt.
EVENTS = frozenset({abi.NV01_EVENT, abi.NV01_EVENT_OS_EVENT})

#: Classes whose objects the object table keeps.
KEPT = GATED | {
    *(abi.NV01_DEVICE_0, abi.NV20_SUBDEVICE_0, abi.NV01_MEMORY_LOCAL_USER, abi.FERMI_VASPACE_A),
    *(abi.AMPERE_SMC_PARTITION_REF, abi.NV_MEMORY_FABRIC, abi.NV_MEMORY_MULTICAST_FABRIC),
    *(abi.RM_USER_SHARED_DATA, DEBUGGER),
}

#: Classes that are charged before the object is made: memory, and objects for which RM allocates memory.
CHARGED = frozenset({abi.NV01_MEMORY_LOCAL_USER, abi.KEPLER_CHANNEL_GROUP_A, abi.FERMI_VASPACE_A})


def name(number: int) -> str:
    """Return the name under which a class is counted."""
    row = CLASSES.get(number)
    return row.name if row is not None else f"class {number:#x}"


def refusal(number: int) -> int:
    """Return the status with which a class is refused: a profiler tells its user that a permission is missing."""
    row = CLASSES.get(number)
    missing = row is not None and row.why in (PROFILING, GRAPHICS)
    return abi.NV_ERR_INSUFFICIENT_PERMISSIONS if missing else abi.NV_ERR_INVALID_CLASS


def on_compute_engine(rm_class: int) -> bool:
    """Tell whether objects of a class make a channel run on the compute engine."""
    row = ALLOWED_TO_SOME.get(rm_class)
    return row is not None and row.on_compute_engine
