"""RM's ABI, declared once: ioctl numbers, object classes, controls, status codes and structures.

Everything is NVIDIA's and keeps NVIDIA's names. Each group cites its source in the open kernel modules (SDK =
src/common/sdk/nvidia/inc, KO = kernel-open). ``versions.py`` has the differences between driver branches.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from cffi import FFI

from qgpu.errors import RmError

ffi: Any = FFI()
ffi.cdef(
    """
    /* SDK/nvos.h, from 535.43 on */
    typedef struct { uint32_t hRoot, hObjectParent, hObjectOld, status; } NVOS00_PARAMETERS;
    typedef struct { uint32_t hRoot, hObjectParent, hObjectNew, hClass, status; } NVOS05_PARAMETERS;
    typedef struct { uint32_t hRoot, hObjectParent, hObjectNew, hClass; uint64_t pAllocParms;
                     uint32_t paramsSize, status; } NVOS21_PARAMETERS;
    typedef struct { uint32_t hRoot, hObjectParent, hObjectNew, hClass; uint64_t pAllocParms, pRightsRequested;
                     uint32_t paramsSize, flags, status, pad; } NVOS64_PARAMETERS;
    typedef struct { uint32_t hClient, hObject, cmd, flags; uint64_t params; uint32_t paramsSize, status; }
                     NVOS54_PARAMETERS;
    typedef struct { uint32_t hClient, hParent, hObject, hClientSrc, hObjectSrc, flags, status; } NVOS55_PARAMETERS;
    typedef struct { uint32_t hRoot, hObjectParent, hObjectNew, hClass, flags, pad0; uint64_t pMemory, limit;
                     uint32_t status, pad1; int32_t fd; uint32_t pad2; } NVOS02_PARAMETERS_WITH_FD;
    typedef struct { uint32_t hClient, hDevice, hMemory, pad; uint64_t offset, length, pLinearAddress;
                     uint32_t status, flags; int32_t fd; uint32_t pad1; } NVOS33_PARAMETERS_WITH_FD;
    typedef struct { uint32_t hClient, hDevice, hMemory, pad; uint64_t pLinearAddress; uint32_t status, flags; }
                     NVOS34_PARAMETERS;
    typedef struct { uint32_t hObjectParent, hSubDevice, hObjectNew, hClass, flags, selector, hMemory, pad;
                     uint64_t offset, limit; uint32_t status, pad1; } NVOS39_PARAMETERS;
    typedef struct { uint32_t hSubDevice, flags, hMemory, pad; uint64_t offset, limit; }
                     NV_CONTEXT_DMA_ALLOCATION_PARAMS;
    typedef struct { uint32_t hClient, hDevice, hDma, hMemory; uint64_t offset, length; uint32_t flags, pad0;
                     uint64_t dmaOffset; uint32_t status, pad1; } NVOS46_PARAMETERS_BEFORE_580;
    typedef struct { uint32_t hClient, hDevice, hDma, hMemory; uint64_t offset, length; uint32_t flags, flags2,
                     kindOverride, pad0; uint64_t dmaOffset; uint32_t status, pad1; } NVOS46_PARAMETERS;
    typedef struct { uint32_t hClient, hDevice, hDma, hMemory, flags, pad0; uint64_t dmaOffset; uint32_t status, pad1; }
                     NVOS47_PARAMETERS_BEFORE_550;
    typedef struct { uint32_t hClient, hDevice, hDma, hMemory, flags, pad0; uint64_t dmaOffset, size;
                     uint32_t status, pad1; } NVOS47_PARAMETERS;
    typedef struct { uint32_t hClient, hDevice, hMemory, pad; uint64_t pOldCpuAddress, pNewCpuAddress;
                     uint32_t status, pad1; } NVOS56_PARAMETERS;
    typedef struct { uint32_t hRoot, hObjectParent, function, hVASpace; int16_t ivcHeapNumber; uint32_t status;
                     uint64_t total, free; uint32_t owner, hMemory, type, flags, attr, format, comprCovg, zcullCovg,
                     partitionStride, width, height, pad; uint64_t size; uint8_t more[48]; uint32_t attr2;
                     uint8_t rest[36]; } NVOS32_PARAMETERS;

    /* SDK/rs_access.h, nvos.h */
    typedef struct { uint32_t target, accessMask; uint16_t type; uint8_t action, pad; } RS_SHARE_POLICY;
    typedef struct { uint32_t hClient, hObject; RS_SHARE_POLICY sharePolicy; uint32_t status; } NVOS57_PARAMETERS;

    /* KO/common/inc/nv-ioctl.h */
    typedef struct { uint32_t cmd, size; uint64_t ptr; } nv_ioctl_xfer_t;
    typedef struct { uint32_t hClient, hDevice, fd, Status; } nv_ioctl_os_event_t; /* to allocate, and to free */
    typedef struct { uint8_t valid; uint32_t domain; uint8_t bus, slot, function; uint16_t vendor_id, device_id;
                     uint32_t gpu_id; uint16_t interrupt_line; uint64_t reg_address, reg_size, fb_address, fb_size;
                     uint32_t minor_number; uint8_t dev_name[10]; } nv_ioctl_card_info_t;

    /* SDK/class/cl0080.h, cl2080.h, cla06c.h, nvos.h */
    typedef struct { uint32_t deviceId, hClientShare, hTargetClient, hTargetDevice, flags, pad0;
                     uint64_t vaSpaceSize, vaStartInternal, vaLimitInternal; uint32_t vaMode, pad1; }
                     NV0080_ALLOC_PARAMETERS;
    typedef struct { uint32_t subDeviceId; } NV2080_ALLOC_PARAMETERS;
    typedef struct { uint32_t hObjectError, hObjectEccError, hVASpace, engineType; uint8_t bIsCallingContextVgpuPlugin;
                     } NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS;
    typedef struct { uint32_t hVASpace, flags, subctxId; } NV_CTXSHARE_ALLOCATION_PARAMETERS;
    typedef struct { uint32_t hObjectError, hObjectBuffer; uint64_t gpFifoOffset; uint32_t gpFifoEntries, flags,
                     hContextShare, hVASpace, hUserdMemory[8]; uint64_t userdOffset[8]; uint32_t engineType, cid,
                     subDeviceId, hObjectEccError; uint64_t memory[12]; uint32_t hPhysChannelGroup, internalFlags;
                     } NV_CHANNEL_ALLOC_PARAMS;
    typedef struct { uint32_t owner, type, flags, width, height; int32_t pitch; uint32_t attr, attr2, format,
                     comprCovg, zcullCovg, pad0; uint64_t rangeLo, rangeHi, size, alignment, offset, limit, address;
                     uint32_t ctagOffset, hVASpace, internalflags, tag, numaNode, pad1; } NV_MEMORY_ALLOCATION_PARAMS;

    /* SDK/class/cl00fe.h */
    typedef struct { uint32_t hSemaphoreSurface, maxQueueSize, hNotificationMemory, pad; uint64_t notificationOffset; }
                     NV_MEMORY_MAPPER_ALLOCATION_PARAMS;

    /* SDK/ctrl/ctrl0000/ctrl0000gpu.h, ctrl0000client.h */
    typedef struct { uint32_t gpuIds[32], failedId; } NV0000_CTRL_GPU_ATTACH_IDS_PARAMS;
    typedef struct { uint32_t gpuId, gpuFlags, deviceInstance, subDeviceInstance, sliStatus, boardId, gpuInstance;
                     int32_t numaId; } NV0000_CTRL_GPU_GET_ID_INFO_V2_PARAMS;
    typedef struct { uint32_t hObject, index; uint64_t data; } NV0000_CTRL_CLIENT_GET_HANDLE_INFO_PARAMS;
    typedef struct { uint32_t hObject, hClient, maskResult; } NV0000_CTRL_CLIENT_GET_ACCESS_RIGHTS_PARAMS;

    /* SDK/ctrl/ctrl0041.h */
    typedef struct { uint32_t index, data; } NV0041_CTRL_SURFACE_INFO;
    typedef struct { uint32_t surfaceInfoListSize, pad; uint64_t surfaceInfoList; } NV0041_CTRL_GET_SURFACE_INFO_PARAMS;

    /* SDK/ctrl/ctrl00f8.h */
    typedef struct { uint64_t size, pageSize; uint32_t allocFlags, addressSpace, compressionCoverage, pad; }
                     NV00F8_CTRL_GET_INFO_PARAMS;

    /* SDK/ctrl/ctrl2080/ctrl2080fifo.h, ctrl2080gr.h, ctrl2080tmr.h; ctrla06c.h; ctrla06f/ctrla06fgpfifo.h */
    typedef struct { uint8_t bDisable, pad0[3]; uint32_t numChannels; uint8_t bOnlyDisableScheduling, bRewindGpPut;
                     uint16_t pad1; uint32_t pad2; uint64_t pRunlistPreemptEvent; uint32_t hClientList[64],
                     hChannelList[64]; } NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS;
    typedef struct { uint32_t flags, hChannel, gfxpPreemptMode, cilpPreemptMode, routeFlags, pad; uint64_t route; }
                     NV2080_CTRL_GR_SET_CTXSW_PREEMPTION_MODE_PARAMS;
    typedef struct { uint32_t gpuId; } NV2080_CTRL_GPU_GET_ID_PARAMS;
    typedef struct { uint32_t ceEngineType; uint8_t capsTbl[2], pad[2]; } NV2080_CTRL_CE_GET_CAPS_V2_PARAMS;
    typedef struct { uint32_t pidInfoListCount, pad0, pid, index, result, pad1; uint64_t memPrivate, memSharedOwned,
                     memSharedDuped; uint8_t rest[14360]; } NV2080_CTRL_GPU_GET_PID_INFO_PARAMS;
    typedef struct { uint32_t hClient; } NV503C_CTRL_REGISTER_PID_PARAMS;
    typedef struct { uint32_t index, flags, length; uint8_t data[256]; } NV2080_CTRL_GPU_GET_GID_INFO_PARAMS;
    typedef struct { uint64_t time_nsec; } NV2080_CTRL_TIMER_GET_TIME_PARAMS;
    typedef struct { uint64_t addressArray[500]; uint32_t addressArraySize, addressAlign; uint64_t memBlockSizeBytes;
                     uint32_t flags, pad; } NV2080_CTRL_FB_FLUSH_GPU_CACHE_PARAMS;
    typedef struct { uint64_t timesliceUs; } NVA06C_CTRL_TIMESLICE_PARAMS;
    typedef struct { uint8_t bWait, bManualTimeout; uint16_t pad; uint32_t timeoutUs; } NVA06C_CTRL_PREEMPT_PARAMS;
    typedef struct { uint32_t contextId; } NVA06F_CTRL_GET_CONTEXT_ID_PARAMS;
    typedef struct { uint32_t hEventBuffer, recordSize, levelOfDetail, eventFilter; uint8_t bAllUsers, pad[3];
                     uint32_t reasonCode; } NV2080_CTRL_GR_FECS_BIND_EVTBUF_FOR_UID_V2_PARAMS;

    /* SDK/ctrl/ctrl0000/ctrl0000unix.h (the exported object's union is of one kind), ctrl0000client.h */
    typedef struct { uint32_t type, hDevice, hParent, hObject; int32_t fd; uint32_t flags; }
                     NV0000_CTRL_OS_UNIX_EXPORT_OBJECT_TO_FD_PARAMS;
    typedef struct { int32_t fd; uint32_t type, hDevice, hParent, hObject; }
                     NV0000_CTRL_OS_UNIX_IMPORT_OBJECT_FROM_FD_PARAMS;
    typedef struct { uint32_t hParent, classId, hObject; } NV0000_CTRL_CMD_CLIENT_GET_CHILD_HANDLE_PARAMS;
    typedef struct { uint32_t hObject1, hObject2; uint8_t bDuplicates, pad[3]; }
                     NV0000_CTRL_CLIENT_OBJECTS_ARE_DUPLICATES_PARAMS;

    /* SDK/ctrl/ctrl2080/ctrl2080gpu.h, SDK/ctrl/ctrlb0cc/ctrlb0ccprofiler.h: the list may be shorter */
    typedef struct { uint8_t regOp, regType, regStatus, regQuad; uint32_t regGroupMask, regSubGroupMask, regOffset,
                     regValueHi, regValueLo, regAndNMaskHi, regAndNMaskLo; } NV2080_CTRL_GPU_REG_OP;
    typedef struct { uint32_t regOpCount, mode; uint8_t bPassed, bDirect, pad[2]; NV2080_CTRL_GPU_REG_OP regOps[124]; }
                     NVB0CC_CTRL_EXEC_REG_OPS_PARAMS;

    /* SDK/class/clc637.h, SDK/ctrl/ctrlc637.h */
    typedef struct { uint64_t capDescriptor; uint32_t swizzId, pad; } NVC637_ALLOCATION_PARAMETERS;
    typedef struct { uint8_t uuid[16]; char uuidStr[41]; } NVC637_CTRL_GET_UUID_PARAMS;

    /* SDK/class/cl90cd.h, cl90cdfecs.h; SDK/ctrl/ctrl90cd.h */
    typedef struct { uint64_t bufferHeader, recordBuffer; uint32_t recordSize, recordCount; uint64_t vardataBuffer;
                     uint32_t vardataBufferSize, recordsFreeThreshold; uint64_t notificationHandle;
                     uint32_t vardataFreeThreshold, hSubDevice, flags, hBufferHeader, hRecordBuffer, hVardataBuffer; }
                     NV_EVENT_BUFFER_ALLOC_PARAMETERS;
    typedef struct { uint8_t enable, pad[3]; uint32_t flags; } NV_EVENT_BUFFER_CTRL_CMD_ENABLE_EVENTS_PARAMS;
    typedef struct { uint32_t recordBufferGet, varDataBufferGet; } NV_EVENT_BUFFER_CTRL_CMD_UPDATE_GET_PARAMS;
    typedef struct { uint32_t recordGet, recordPut; uint64_t recordCount, recordDropcount, vardataDropcount; }
                     NV_EVENT_BUFFER_HEADER;
    typedef struct { uint16_t type, subtype; uint32_t varData; uint8_t tag, vmid; uint16_t seqno; uint32_t context_id,
                     pid; uint16_t reserved0; uint8_t migGpuInstanceId, migComputeInstanceId; uint64_t timestamp; }
                     NV_EVENT_BUFFER_FECS_RECORD;

    int ioctl(int fd, unsigned long request, void *argument);
    long syscall(long number, long a, long b, long c);
    """
)
_libc: Any = ffi.dlopen(None)
_SYS_PIDFD_GETFD = 438

#: Character devices (KO/common/inc/nv-chardev-numbers.h).
NV_MAJOR = 195
NV_MODESET_MINOR = 254
NV_CONTROL_MINOR = 255

# Escape numbers (KO/common/inc/nv_escape.h, nv-ioctl-numbers.h). RM compares the number and the size alone.
NV_ESC_RM_ALLOC_MEMORY = 0x27
NV_ESC_RM_ALLOC_OBJECT = 0x28
NV_ESC_RM_FREE = 0x29
NV_ESC_RM_CONTROL = 0x2A
NV_ESC_RM_ALLOC = 0x2B
NV_ESC_RM_DUP_OBJECT = 0x34
NV_ESC_RM_SHARE = 0x35
NV_ESC_RM_I2C_ACCESS = 0x39
NV_ESC_RM_IDLE_CHANNELS = 0x41
NV_ESC_RM_VID_HEAP_CONTROL = 0x4A
NV_ESC_RM_ACCESS_REGISTRY = 0x4D
NV_ESC_RM_MAP_MEMORY = 0x4E
NV_ESC_RM_UNMAP_MEMORY = 0x4F
NV_ESC_RM_ALLOC_CONTEXT_DMA2 = 0x54
NV_ESC_RM_MAP_MEMORY_DMA = 0x57
NV_ESC_RM_UNMAP_MEMORY_DMA = 0x58
NV_ESC_RM_BIND_CONTEXT_DMA = 0x59
NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO = 0x5E
NV_ESC_CARD_INFO = 200
NV_ESC_REGISTER_FD = 201
NV_ESC_ALLOC_OS_EVENT = 206
NV_ESC_FREE_OS_EVENT = 207
NV_ESC_IOCTL_XFER_CMD = 211
NV_ESC_ATTACH_GPUS_TO_FD = 212
NV_ESC_EXPORT_TO_DMABUF_FD = 217

#: Bytes of NVOS30_PARAMETERS, NVOS_I2C_ACCESS_PARAMS, NVOS38_PARAMETERS and NVOS49_PARAMETERS.
IDLE_CHANNELS_BYTES, I2C_ACCESS_BYTES, ACCESS_REGISTRY_BYTES, BIND_CONTEXT_DMA_BYTES = 56, 32, 72, 16
#: The structures of MAP_MEMORY_DMA and UNMAP_MEMORY_DMA by their bytes: branches differ.
MAP_MEMORY_DMA = {ffi.sizeof(each): each for each in ("NVOS46_PARAMETERS_BEFORE_580", "NVOS46_PARAMETERS")}
UNMAP_MEMORY_DMA = {ffi.sizeof(each): each for each in ("NVOS47_PARAMETERS_BEFORE_550", "NVOS47_PARAMETERS")}
#: Bytes of nv_ioctl_export_to_dma_buf_fd_t, before and from 570.
EXPORT_TO_DMABUF_FD_BYTES = (2600, 2608)

# Flags and values of calls (SDK/nvos.h).
NVOS54_FLAGS_SERIALIZED = 1 << 2
NVOS64_FLAGS_SERIALIZED = 1 << 0
NVOS32_ATTR_COHERENCY_CACHED = 1 << 29
NVOS32_ATTR2_PROTECTION_USER_READ_ONLY = 1 << 22
#: From 575 on, on cards of two halves: in one of them.
NVOS32_ATTR2_LOCALIZED_MEMORY = 3 << 29
NVOS33_FLAGS_ACCESS_READ_ONLY = 1

# Address spaces by their index (SDK/nvos.h): a new one, and that of the device above.
NV_VASPACE_ALLOCATION_INDEX_GPU_NEW = 0
NV_VASPACE_ALLOCATION_INDEX_GPU_DEVICE = 3
NV_VASPACE_PARAMS_FLAGS_AT = 4
NV_VASPACE_ALLOCATION_FLAGS_IS_FLA = 1 << 9

# Who may duplicate an object (SDK/rs_access.h).
RS_ACCESS_DUP_OBJECT = 1 << 0
RS_SHARE_TYPE_NONE = 0
RS_SHARE_TYPE_ALL = 1
RS_SHARE_TYPE_CLIENT = 3
RS_SHARE_TYPE_PID = 4
RS_SHARE_ACTION_FLAG_REVOKE = 1 << 0
RS_SHARE_ACTION_FLAG_COMPOSE = 1 << 2

# Classes (SDK/class/*.h).
NV01_ROOT = 0x0
NV01_ROOT_NON_PRIV = 0x1
NV01_ROOT_CLIENT = 0x41
NV01_CONTEXT_DMA = 0x2
NV01_EVENT = 0x5
NV01_EVENT_OS_EVENT = 0x79
NV01_MEMORY_LOCAL_USER = 0x40
NV01_MEMORY_SYSTEM = 0x3E
NV01_MEMORY_LOCAL_PRIVILEGED = 0x3F
NV01_MEMORY_VIRTUAL = 0x70
NV01_MEMORY_SYSTEM_OS_DESCRIPTOR = 0x71
NV50_MEMORY_VIRTUAL = 0x50A0
FERMI_VASPACE_A = 0x90F1
FERMI_CONTEXT_SHARE_A = 0x9067
NV01_DEVICE_0 = 0x80
NV20_SUBDEVICE_0 = 0x2080
NV50_P2P, NV50_THIRD_PARTY_P2P = 0x503B, 0x503C
RM_USER_SHARED_DATA = 0x00DE
#: What RM is asked to show there, from 590 on: the processes on the card, and how much each uses it.
NV00DE_RUSD_POLL_PROC_UTIL = 0x80
NV_MEMORY_FABRIC = 0x00F8
#: Such an object of the fabric has no memory when it is made, and gets and loses memory later (cl00f8.h).
NV00F8_ALLOC_FLAGS_FLEXIBLE_FLA = 1
NV_EVENT_BUFFER = 0x90CD
NV01_MEMORY_DEVICELESS = 0x90CE
NV_MEMORY_MULTICAST_FABRIC = 0xFD
NV_MEMORY_MAPPER = 0xFE
#: RM's own numbers of its classes FlaMemory, PhysicalMemory and RegisterMemory, from 535 on (generated/g_*_nvoc.h): all
#: classes of memory by address below a device, but for those that RM itself makes.
CLASS_IDS_BY_ADDRESS = (0xE61EE1, 0x5FCCF2, 0x40D457)
#: The same for devices.
CLASS_ID_DEVICE = 0xE0AC20
KEPLER_CHANNEL_GROUP_A = 0xA06C
AMPERE_SMC_PARTITION_REF, AMPERE_SMC_EXEC_PARTITION_REF = 0xC637, 0xC638
ROOT_CLASSES = frozenset({NV01_ROOT, NV01_ROOT_NON_PRIV, NV01_ROOT_CLIENT})
#: GPFIFO channels from Kepler to Blackwell; a new architecture adds one.
GPFIFO_CLASSES = frozenset({0xA06F, 0xA16F, 0xB06F, 0xC06F, 0xC36F, 0xC46F, 0xC56F, 0xC86F, 0xC96F, 0xCA6F})

#: A channel's USERD: its size (kernel_fifo_gv100.c), and where GP_GET stands in it, with GP_PUT behind (clc86f.h).
USERD_BYTES, USERD_GP_GET_AT = 512, 0x88

#: Engine types of graphics/compute: GR0..GR7 (SDK/class/cl2080_notification.h).
GR_ENGINES = range(1, 9)
#: Engine types of copy engines: COPY0..COPY9. Since 560 also COPY10..COPY19, and a second type of each for compression.
#: Both types of each, in order.
COPY_ENGINE_TYPES = tuple(zip((*range(0x09, 0x13), *range(0x34, 0x3E)), range(0x40, 0x54), strict=True))
COPY_ENGINES = frozenset(kind for kinds in COPY_ENGINE_TYPES for kind in kinds)

# Controls.
NV0000_GPU_ATTACH_IDS = 0x215
NV0000_GPU_GET_ATTACHED_IDS = 0x201
NV0000_GPU_GET_ID_INFO_V2 = 0x205
NV0000_GPU_GET_PROBED_IDS = 0x214
NV0000_CLIENT_GET_HANDLE_INFO = 0xD02
NV0000_CLIENT_GET_ACCESS_RIGHTS = 0xD03
NV0000_CLIENT_SET_INHERITED_SHARE_POLICY = 0xD04
NV0000_CLIENT_GET_CHILD_HANDLE = 0xD05
NV0000_CLIENT_OBJECTS_ARE_DUPLICATES = 0xD07
NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD = 0x3D05
NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD = 0x3D06
NV0000_OS_UNIX_EXPORT_OBJECTS_TO_FD = 0x3D0B
NV0000_OS_UNIX_IMPORT_OBJECTS_FROM_FD = 0x3D0C
NV0041_GET_SURFACE_INFO = 0x410110
NV00F8_GET_INFO = 0x00F80101
NV00FD_ATTACH_MEM = 0x00FD0102
NV2080_GPU_GET_ID = 0x20800142
NV2080_CE_GET_CAPS_V2 = 0x20802A03
NV2080_GPU_GET_GID_INFO = 0x2080014A
NVC637_GET_UUID = 0xC63701AA
#: A subscription to all GPU instances of a card, for profiling (clc637.h); RM gives one at a time.
NVC637_DEVICE_PROFILING_SWIZZID = 0xFFFFFFFE
NV503C_REGISTER_PID = 0x503C0106
NV2080_GPU_GET_PIDS = 0x2080018D
NV2080_GPU_GET_PID_INFO = 0x2080018E
NV2080_FB_GET_INFO = 0x20801301
NV2080_FB_GET_INFO_V2 = 0x20801303
NV00DE_REQUEST_DATA_POLL = 0x00DE0001
NV2080_FB_FLUSH_GPU_CACHE = 0x2080130E
#: Flags of that control: the whole cache is written back and invalidated; the aperture is system memory (ctrl2080fb.h).
FLUSH_WHOLE_CACHE, FLUSH_SYSTEM_MEMORY = 0x1C, 0x01
NV2080_TIMER_GET_TIME = 0x20800403
NV2080_FIFO_DISABLE_CHANNELS = 0x2080110B
NV2080_GR_SET_CTXSW_PREEMPTION_MODE = 0x20801210
NV2080_PERF_GET_UTIL_SAMPLES = 0x20802096
#: Parameters of that control: the flag for the mode, and the mode that preempts compute at any instruction
#: (ctrl2080gr.h).
PREEMPTION_MODE_FLAGS_CILP, PREEMPTION_MODE_COMPUTE_CILP = 1, 2
PREEMPTION_MODE_FLAGS_GFXP, PREEMPTION_MODE_GRAPHICS_WFI = 2, 0
NV2080_GR_FECS_BIND_EVTBUF_FOR_UID_V2 = 0x20801238
NVB0CC_RESERVE_HWPM_LEGACY = 0xB0CC0101
NVB0CC_RELEASE_HWPM_LEGACY = 0xB0CC0102
NVB0CC_BIND_PM_RESOURCES = 0xB0CC0107
NVB0CC_UNBIND_PM_RESOURCES = 0xB0CC0108
NVB0CC_EXEC_REG_OPS = 0xB0CC010A
NVA06C_SET_TIMESLICE = 0xA06C0103
#: For the attackers of bench/attacks, which include these numbers.
NVA06C_GET_TIMESLICE = 0xA06C0104
NVA06C_PREEMPT = 0xA06C0105
NVA06C_GPFIFO_SCHEDULE = 0xA06C0101
NVA06F_GPFIFO_SCHEDULE = 0xA06F0103
NVA06F_GET_CONTEXT_ID = 0xA06F0113
NVC56F_GET_KMB = 0xC56F010B
NV_EVENT_BUFFER_ENABLE_EVENTS = 0x90CD0101
NV_EVENT_BUFFER_UPDATE_GET = 0x90CD0102
NV_EVENT_BUFFER_FLUSH = 0x90CD0104

# Values in controls (SDK/ctrl/*.h).
NV0000_GPU_INVALID_ID = 0xFFFFFFFF
NV0000_CLIENT_HANDLE_INFO_PARENT, NV0000_CLIENT_HANDLE_INFO_CLASS = 1, 2
NV0000_OS_UNIX_EXPORT_OBJECT_TYPE_RM = 1
#: The size that branches before 580 know, too, and its unit in bytes.
NV0041_SURFACE_INFO_PHYS_SIZE, NV0041_SURFACE_INFO_PHYS_SIZE_UNIT = 7, 4096
NV2080_GPU_GID_FORMAT_BINARY = 2
#: In capsTbl[0]: a copy engine on the runlist of the compute engine.
NV2080_CE_CAPS_GRCE = 1
NV2080_GR_FECS_LEVEL_OF_DETAIL_SIMPLE = 1
NV_EVENT_BUFFER_OVERFLOW_KEEP_OLDEST = 1
NV_EVENT_BUFFER_FECS_SIMPLE_START, NV_EVENT_BUFFER_FECS_SIMPLE_END = 0x06, 0x07

#: The most channels of one FIFO_DISABLE_CHANNELS call.
MAX_DISABLE_CHANNELS = 64

# Status codes (SDK/nvstatuscodes.h).
NV_OK = 0x00
NV_ERR_BUSY_RETRY = 0x03
NV_ERR_INSERT_DUPLICATE_NAME = 0x19
NV_ERR_INSUFFICIENT_RESOURCES = 0x1A
NV_ERR_INSUFFICIENT_PERMISSIONS = 0x1B
NV_ERR_INVALID_ADDRESS = 0x1E
NV_ERR_INVALID_ARGUMENT = 0x1F
NV_ERR_INVALID_CHANNEL = 0x21
NV_ERR_INVALID_CLASS = 0x22
NV_ERR_INVALID_CLIENT = 0x23
NV_ERR_INVALID_OBJECT = 0x31
NV_ERR_INVALID_OBJECT_HANDLE = 0x33
NV_ERR_INVALID_OBJECT_OLD = 0x35
NV_ERR_INVALID_STATE = 0x40
NV_ERR_NO_MEMORY = 0x51
NV_ERR_NOT_SUPPORTED = 0x56
NV_ERR_OBJECT_NOT_FOUND = 0x57
NV_ERR_STATE_IN_USE = 0x63
#: RM's statuses for an unknown handle or client.
UNKNOWN_TO_RM = frozenset(
    {
        *(NV_ERR_INVALID_CLIENT, NV_ERR_INVALID_OBJECT, NV_ERR_INVALID_OBJECT_HANDLE, NV_ERR_INVALID_OBJECT_OLD),
        NV_ERR_OBJECT_NOT_FOUND,
    }
)

#: RM's timeslice for a new TSG (kfifoChannelGroupGetDefaultTimeslice_GV100). libcuda sets a longer one for compute
#: TSGs; copy TSGs keep this one.
RM_DEFAULT_TIMESLICE_US = 1024


def sizeof(name: str) -> int:
    """Return the size of a declared structure in bytes."""
    return int(ffi.sizeof(name))


def offsetof(name: str, member: str) -> int:
    """Return the offset of a member of a declared structure, in bytes."""
    return int(ffi.offsetof(name, member))


def request(number: int, size: int) -> int:
    """Build an escape's ioctl request as NVIDIA's libraries do: _IOWR('F', number, size)."""
    return 3 << 30 | size << 16 | ord("F") << 8 | number


def ioctl(fd: int, number: int, argument: Any) -> None:
    """Issue one escape; ``argument`` is a cffi pointer to its structure. Raises OSError."""
    size = ffi.sizeof(ffi.typeof(argument).item)
    raw_ioctl(fd, request(number, size), argument)


def raw_ioctl(fd: int, req: int, argument: Any) -> int:
    """Issue any ioctl with a cffi pointer, and restart it after a signal. Raises OSError."""
    while True:
        result = _libc.ioctl(fd, req, ffi.cast("void *", argument))
        if result >= 0:
            return int(result)
        if ffi.errno != errno.EINTR:
            raise OSError(ffi.errno, os.strerror(ffi.errno))


def perform(fd: int, req: int, argument: Any) -> int:
    """Issue any ioctl once and return its errno, 0 for success."""
    return int(ffi.errno) if _libc.ioctl(fd, req, argument) < 0 else 0


def parse_types() -> None:
    """Parse all structures now: cffi parses a name when it is first used, and a pod's call would wait a ms for each."""
    for name in ffi.list_types()[0]:
        ffi.typeof(f"{name} *")


def pidfd_getfd(pidfd: int, fd: int) -> int:
    """Take a descriptor of another process (pidfd_getfd(2)). Raises OSError."""
    taken = int(_libc.syscall(_SYS_PIDFD_GETFD, pidfd, fd, 0))
    if taken < 0:
        raise OSError(ffi.errno, os.strerror(ffi.errno))
    return taken


def check(status: int, what: str) -> None:
    """Raise RmError unless ``status`` is NV_OK."""
    if status != NV_OK:
        raise RmError(what, status)
