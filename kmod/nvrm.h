/* SPDX-License-Identifier: GPL-2.0 */
/*
 * nvrm.h - the part of NVIDIA's resource manager interface that qgpu reads: numbers, classes, structures.
 *
 * All of it is NVIDIA's and keeps NVIDIA's names where they have one. Sources, in the open kernel modules: SDK =
 * src/common/sdk/nvidia/inc, KO = kernel-open. Layouts are those of 535.43.02 and later. What differs between branches
 * is a row in rm.c. This file decides nothing.
 */
#ifndef _QGPU_NVRM_H
#define _QGPU_NVRM_H

#include <linux/build_bug.h>
#include <linux/types.h>

#define NV_MAJOR_DEVICE_NUMBER		195
#define NV_MINOR_CONTROL		255
#define NV_MINOR_MODESET		254

/* KO/common/inc/nv-ioctl-numbers.h, SDK/../nv_escape.h. RM looks at _IOC_NR and _IOC_SIZE only. */
#define NV_ESC_RM_ALLOC_MEMORY		0x27
#define NV_ESC_RM_ALLOC_OBJECT		0x28
#define NV_ESC_RM_FREE			0x29
#define NV_ESC_RM_CONTROL		0x2a
#define NV_ESC_RM_ALLOC			0x2b
#define NV_ESC_RM_DUP_OBJECT		0x34
#define NV_ESC_RM_SHARE			0x35
#define NV_ESC_RM_VID_HEAP_CONTROL	0x4a
#define NV_ESC_RM_MAP_MEMORY		0x4e
#define NV_ESC_RM_UNMAP_MEMORY		0x4f
#define NV_ESC_RM_MAP_MEMORY_DMA	0x57
#define NV_ESC_RM_UNMAP_MEMORY_DMA	0x58
#define NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO	0x5e
#define NV_ESC_REGISTER_FD		201
#define NV_ESC_ALLOC_OS_EVENT		206
#define NV_ESC_FREE_OS_EVENT		207
#define NV_ESC_IOCTL_XFER_CMD		211
#define NV_IOCTL_XFER_MAX_SIZE		16384

/* SDK/nvstatuscodes.h */
#define NV_OK				0x00
#define NV_ERR_BUSY_RETRY		0x03
#define NV_ERR_GPU_IS_LOST		0x0f
#define NV_ERR_IN_USE			0x17
#define NV_ERR_INSERT_DUPLICATE_NAME	0x19
#define NV_ERR_INSUFFICIENT_RESOURCES	0x1a
#define NV_ERR_INSUFFICIENT_PERMISSIONS	0x1b
#define NV_ERR_INVALID_ADDRESS		0x1e
#define NV_ERR_INVALID_ARGUMENT		0x1f
#define NV_ERR_INVALID_CLASS		0x22
#define NV_ERR_INVALID_CLIENT		0x23
#define NV_ERR_INVALID_OBJECT		0x31
#define NV_ERR_INVALID_OBJECT_HANDLE	0x33
#define NV_ERR_INVALID_OBJECT_OLD	0x35
#define NV_ERR_INVALID_OBJECT_PARENT	0x36
#define NV_ERR_INVALID_STATE		0x40
#define NV_ERR_NO_MEMORY		0x51
#define NV_ERR_NOT_SUPPORTED		0x56
#define NV_ERR_OBJECT_NOT_FOUND		0x57
#define NV_ERR_RESET_REQUIRED		0x62
#define NV_ERR_STATE_IN_USE		0x63
#define NV_ERR_TIMEOUT			0x65
#define NV_ERR_TIMEOUT_RETRY		0x66
#define NV_ERR_GENERIC			0xffff

/* SDK/class/cl*.h */
#define NV01_ROOT			0x0000
#define NV01_ROOT_NON_PRIV		0x0001
#define NV01_ROOT_CLIENT		0x0041
#define NV01_CONTEXT_DMA		0x0002
#define NV01_EVENT			0x0005
#define NV01_EVENT_OS_EVENT		0x0079
#define NV01_MEMORY_SYSTEM		0x003e
#define NV01_MEMORY_LOCAL_USER		0x0040
#define NV01_MEMORY_VIRTUAL		0x0070
#define NV01_MEMORY_SYSTEM_OS_DESCRIPTOR	0x0071
#define NV01_DEVICE_0			0x0080
#define NV01_MEMORY_LIST_FBMEM		0x0082
#define NV01_MEMORY_LIST_OBJECT		0x0083
#define KERNEL_GRAPHICS_CONTEXT		0x0090
#define NV01_MEMORY_LOCAL_PHYSICAL	0x00c2
#define NV_SEMAPHORE_SURFACE		0x00da
#define RM_USER_SHARED_DATA		0x00de
#define NV_MEMORY_FABRIC		0x00f8
#define NV_MEMORY_MULTICAST_FABRIC	0x00fd
#define NV20_SUBDEVICE_0		0x2080
#define NV50_MEMORY_VIRTUAL		0x50a0
#define GT200_DEBUGGER			0x83de
#define FERMI_CONTEXT_SHARE_A		0x9067
#define FERMI_VASPACE_A			0x90f1
#define KEPLER_CHANNEL_GROUP_A		0xa06c
/* Every GPFIFO class ends in 6f, up to ca6f (Blackwell B); 906f (Fermi) still makes channels on every card. */
#define NV_IS_GPFIFO(class)		(((class) & 0xff) == 0x6f && (class) >= 0x506f && (class) <= 0xffff)

#define NV2080_ENGINE_TYPE_GR0		1
#define NV2080_ENGINE_TYPE_GR7		8
#define NV_IS_COMPUTE(engine)		((engine) >= NV2080_ENGINE_TYPE_GR0 && (engine) <= NV2080_ENGINE_TYPE_GR7)
/* COPY0 to COPY9, COPY10 to COPY19, and a second name of each for compression; those from COPY10 on since 560. */
#define NV_IS_COPY(engine)		(((engine) >= 0x09 && (engine) <= 0x12) || \
					 ((engine) >= 0x34 && (engine) <= 0x3d) || ((engine) >= 0x40 && (engine) <= 0x53))

#define NV2080_ENGINE_TYPE_COPY(n)	((n) < 10 ? 0x09 + (n) : (n) < 20 ? 0x2a + (n) : ~0u)
/* Every class of copy objects ends in b5. */
#define NV_IS_DMA_COPY(class)		(((class) & 0xff) == 0xb5)

/* SDK/nvos.h; each struct has a member for the status of RM's answer. */
struct nvos00 {			/* RM_FREE */
	u32 root, parent, object, status;
};

struct nvos05 {			/* RM_ALLOC_OBJECT */
	u32 root, parent, object, class, status;
};

struct nvos21 {			/* RM_ALLOC, short form */
	u32 root, parent, object, class;
	u64 params;
	u32 params_size, status;
};

struct nvos64 {			/* RM_ALLOC, long form */
	u32 root, parent, object, class;
	u64 params, rights;
	u32 params_size, flags, status, pad;
};

#define NVOS64_FLAGS_FINN_SERIALIZED	0x1

struct nvos54 {			/* RM_CONTROL */
	u32 client, object, cmd, flags;
	u64 params;
	u32 params_size, status;
};

#define NVOS54_FLAGS_FINN_SERIALIZED	0x4

struct nvos55 {			/* RM_DUP_OBJECT */
	u32 client, parent, object, client_src, object_src, flags, status;
};

struct nvos56 {			/* RM_UPDATE_DEVICE_MAPPING_INFO: where a process has a mapping for the CPU */
	u32 client, device, memory, pad0;
	u64 was, is;
	u32 status, pad1;
};

#define RS_SHARE_TYPE_CLIENT	3	/* in the lower half of the word "how" */
struct rs_share_policy {
	u32 target, access, how;
};

struct nvos57 {			/* RM_SHARE */
	u32 client, object;
	struct rs_share_policy policy;
	u32 status;
};

struct nv_os_event {		/* to allocate, and to free */
	u32 client, device, number, status;
};

struct nvos02_fd {		/* RM_ALLOC_MEMORY, as nv_ioctl_nvos02_parameters_with_fd */
	u32 root, parent, object, class, flags, pad0;
	u64 memory, limit;
	u32 status, pad1;
	s32 fd;
	u32 pad2;
};

struct nvos32 {			/* RM_VID_HEAP_CONTROL; the union after free differs by function */
	u32 root, parent, function, vaspace;
	s16 heap;
	u16 pad0;
	u32 status;
	u64 total, free;
	u8 data[144];
};

#define NVOS32_FUNCTION_ALLOC_SIZE		2
#define NVOS32_FUNCTION_FREE			3
#define NVOS32_FUNCTION_INFO			5
/* Members of the union, by offset in the struct; to free, only the object's handle. */
#define NVOS32_OBJECT_AT			44
#define NVOS32_FLAGS_AT				52
#define NVOS32_ATTR_AT				56
#define NVOS32_SIZE_AT				88
#define NVOS32_ATTR2_AT				144
#define NVOS32_ALLOC_FLAGS_FIXED_ADDRESS_ALLOCATE 0x00000010
#define NVOS32_ALLOC_FLAGS_LAZY			0x00000400
#define NVOS32_ALLOC_FLAGS_VIRTUAL		0x00080000
#define NVOS32_ALLOC_FLAGS_EXTERNALLY_MANAGED	0x00400000
#define NVOS32_ALLOC_FLAGS_SPARSE		0x04000000
#define NVOS32_ATTR_LOCATION(attr)		((attr) >> 25 & 3)
#define NVOS32_ATTR_LOCATION_VIDMEM		0
#define NVOS32_ATTR_LOCATION_ANY		3
#define NVOS32_ATTR2_LOCALIZED_MEMORY		(3u << 29)	/* from 575 on: in one half of the card */

struct nvos33_fd {		/* RM_MAP_MEMORY, as nv_ioctl_nvos33_parameters_with_fd */
	u32 client, device, memory, pad0;
	u64 offset, length, linear;
	u32 status, flags;
	s32 fd;
	u32 pad1;
};

struct nvos34 {			/* RM_UNMAP_MEMORY */
	u32 client, device, memory, pad0;
	u64 linear;
	u32 status, flags;
};

struct nvos46 {			/* RM_MAP_MEMORY_DMA, as far as it is the same from 535 on */
	u32 client, device, dma, memory;
	u64 offset, length;
	u32 flags;
};

#define NVOS46_FLAGS_P2P_ENABLE(flags)	((flags) >> 20 & 3)
#define NVOS46_FLAGS_P2P_ENABLE_NOSLI	2	/* the memory is a peer's; 1: of another card of the same device */

/* From its end, in 56 bytes and since 580 in 64: where the memory is mapped, and the status. */
#define NVOS46_DMA_OFFSET_BEFORE_END	16
#define NVOS46_STATUS_BEFORE_END	8

struct nvos47 {			/* RM_UNMAP_MEMORY_DMA, since 550; before without the size */
	u32 client, device, dma, memory, flags, pad0;
	u64 dma_offset, size;
	u32 status, pad1;
};
#define NVOS47_BYTES_BEFORE_550		40
#define NVOS47_STATUS_BEFORE_END	8

struct nv_xfer {
	u32 cmd, size;
	u64 ptr;
};

static_assert(sizeof(struct nvos00) == 16);
static_assert(sizeof(struct nvos05) == 20);
static_assert(sizeof(struct nvos21) == 32);
static_assert(sizeof(struct nvos64) == 48);
static_assert(sizeof(struct nvos33_fd) == 56);
static_assert(sizeof(struct nvos34) == 32);
static_assert(sizeof(struct nvos47) == 48);
static_assert(sizeof(struct nvos54) == 32);
static_assert(sizeof(struct nvos55) == 28);
static_assert(sizeof(struct nvos56) == 40);
static_assert(sizeof(struct nvos57) == 24);
static_assert(sizeof(struct nv_os_event) == 16);
static_assert(sizeof(struct nvos02_fd) == 56);
static_assert(sizeof(struct nvos32) == 184);

/* Members of allocation parameters, by offset: SDK/nvos.h, SDK/alloc/alloc_channel.h */
/* Of a copy object, as NVB0B5_ALLOCATION_PARAMETERS: whether the engine is a type or a number, and the engine. */
#define NV_COPIES_PARAMS_BY_TYPE_AT	0
#define NV_COPIES_PARAMS_ENGINE_AT	4
#define NV_DEVICE_PARAMS_NUMBER_AT	0
#define NV_VASPACE_PARAMS_INDEX_AT	0
#define NV_VASPACE_NEW			0
#define NV_VASPACE_OF_DEVICE		3
#define NV_VASPACE_PARAMS_FLAGS_AT	4
#define NV_VASPACE_ALLOCATION_FLAGS_IS_FLA	0x200
#define NV_MEMORY_PARAMS_FLAGS_AT	8
#define NV_MEMORY_PARAMS_ATTR2_AT	28
#define NV_MEMORY_PARAMS_SIZE_AT	64
#define NV_TSG_PARAMS_ENGINE_AT		12
#define NV_CHANNEL_PARAMS_ENGINE_AT	128
/* Memory that the card or its firmware writes: error notifiers of both kinds, USERD. */
#define NV_TSG_PARAMS_WRITTEN_AT	{ 0, 4 }
#define NV_CHANNEL_PARAMS_WRITTEN_AT	{ 0, 140, 32 }
#define NV_CHANNEL_PARAMS_USERD_AT	32
#define NV_CHANNEL_PARAMS_USERD_OFFSET_AT 64
#define NV_USERD_BYTES			512	/* kernel_fifo_gv100.c */
/* Memory of a semaphore surface: the semaphores, and their greatest values. */
#define NV_SURFACE_PARAMS_MEMORY_AT	{ 0, 4 }
/* The address space that is used. */
#define NV_TSG_PARAMS_SPACE_AT		8
#define NV_CHANNEL_PARAMS_SPACE_AT	28
#define NV_CONTEXT_SHARE_PARAMS_SPACE_AT 0
#define NV_MEMORY_PARAMS_SPACE_AT	108
#define NV_VIRTUAL_PARAMS_SPACE_AT	16
#define NV_SPACE_DYNAMIC		0xffffffff	/* of NV01_MEMORY_VIRTUAL: none */
/* Which figures the page that RM shares with all is to have, as a mask of 64 bits. */
#define NV_SHARED_DATA_PARAMS_MASK_AT	0
/* The module copies at most this much of any parameters. */
#define NV_PARAMS_LOOKED_AT		144

/* SDK/ctrl/ctrl0000/ctrl0000client.h */
#define NV0000_CLIENT_GET_HANDLE_INFO	0xd02
struct nv0000_handle_info {
	u32 object, index;
	u64 result;
};

#define NV0000_HANDLE_INFO_PARENT	1
#define NV0000_HANDLE_INFO_CLASS	2

#define NV0000_CLIENT_OBJECTS_ARE_DUPLICATES	0xd07
struct nv0000_duplicates {
	u32 objects[2];
	u8 duplicates, pad[3];
};

/* SDK/ctrl/ctrl0000/ctrl0000unix.h */
#define NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD	0x3d05
struct nv0000_export_object {
	u32 type, device, parent, object;
	s32 fd;
	u32 flags;
};

#define NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD	0x3d06
struct nv0000_import_object {
	s32 fd;
	u32 type, device, parent, object;
};

#define NV0000_OS_UNIX_EXPORT_OBJECTS_TO_FD	0x3d0b
#define NV_EXPORTS_MAX			512
struct nv0000_export_objects {
	s32 fd;
	u32 device;
	u16 max;
	u8 metadata[64], pad[2];
	u32 objects[NV_EXPORTS_MAX];
	u16 num, index;
};

#define NV0000_OS_UNIX_IMPORT_OBJECTS_FROM_FD	0x3d0c
#define NV_IMPORTS_MAX			128
struct nv0000_import_objects {
	s32 fd;
	u32 parent, objects[NV_IMPORTS_MAX];
	u8 types[NV_IMPORTS_MAX];
	u16 num, index;
};

static_assert(sizeof(struct nv0000_export_objects) == 2128);
static_assert(sizeof(struct nv0000_import_objects) == 652);

/* SDK/ctrl/ctrl0041.h */
#define NV0041_GET_SURFACE_INFO		0x410110
struct nv0041_surface_info {
	u32 size, pad;
	u64 list;
};

struct nv0041_surface_entry {
	u32 index, data;
};

#define NV0041_INDEX_PHYS_SIZE		7	/* in pages; 2 and 3, in bytes, came with 580 */
#define NV0041_PHYS_SIZE_UNIT		4096

/* SDK/ctrl/ctrl0080/ctrl0080gpu.h */
#define NV0080_GPU_FIND_SUBDEVICE_HANDLE 0x800293
struct nv0080_find_subdevice {
	u32 instance, subdevice;
};

/* SDK/ctrl/ctrl2080/ctrl2080gpu.h */
#define NV2080_GPU_GET_ID		0x20800142
struct nv2080_gpu_id {
	u32 gpu_id;
};

#define NV2080_GPU_GET_PID_INFO		0x2080018e
#define NV2080_PID_INFO_INDEX_NONE	1	/* RM knows index 0 only */
struct nv2080_pid_infos {
	u32 num, pad;
	struct {
		u32 pid, index, result, pad;
		u64 memory[6];
		u32 instances[2];
	} infos[200];
};

static_assert(sizeof(struct nv2080_pid_infos) == 14408);

/* SDK/ctrl/ctrl2080/ctrl2080fb.h */
#define NV2080_FB_GET_INFO		0x20801301
#define NV2080_FB_GET_INFO_V2		0x20801303
#define NV2080_FB_INFO_ENTRY_AT		4
struct nv2080_fb_entry {
	u32 index, data;
};

#define NV2080_FB_INFO_RAM_SIZE		0x07
#define NV2080_FB_INFO_TOTAL_RAM_SIZE	0x08
#define NV2080_FB_INFO_HEAP_SIZE	0x09
#define NV2080_FB_INFO_MAPPABLE_HEAP	0x0a
#define NV2080_FB_INFO_LARGEST_FREE	0x12
#define NV2080_FB_INFO_HEAP_FREE	0x16
#define NV2080_FB_INFO_USABLE_RAM	0x20
#define NV2080_FB_INFO_PROTECTED_TOTAL	0x33
#define NV2080_FB_INFO_PROTECTED_FREE	0x34

/* SDK/ctrl/ctrl2080/ctrl2080fifo.h */
#define NV2080_FIFO_DISABLE_CHANNELS	0x2080110b
#define NV_DISABLE_CHANNELS_MAX		64
struct nv2080_disable_channels {
	u8 disable, pad0[3];
	u32 num;
	u8 only_scheduling, rewind, pad1[6];
	u64 event;
	u32 clients[NV_DISABLE_CHANNELS_MAX];
	u32 channels[NV_DISABLE_CHANNELS_MAX];
};

static_assert(sizeof(struct nv2080_disable_channels) == 536);

/* SDK/ctrl/ctrl2080/ctrl2080gr.h */
#define NV2080_GR_SET_CTXSW_PREEMPTION_MODE	0x20801210
struct nv2080_preemption_mode {
	u32 flags, channel, graphics, compute;
	u32 route_flags, pad;
	u64 route;
};

#define NV2080_PREEMPTION_MODE_FLAGS_CILP	0x1
#define NV2080_PREEMPTION_MODE_FLAGS_GFXP	0x2
#define NV2080_PREEMPTION_MODE_GRAPHICS_WFI	0
#define NV2080_PREEMPTION_MODE_COMPUTE_CILP	2

/* SDK/ctrl/ctrl2080/ctrl2080ce.h */
#define NV2080_CE_GET_CAPS_V2		0x20802a03
struct nv2080_ce_caps {
	u32 engine;
	u8 caps[2], pad[2];
};

#define NV2080_CE_CAPS_GRCE		0x1	/* in caps[0]: it is on the runlist of the compute engine */

/* SDK/ctrl/ctrla06c.h, ctrla06f/ctrla06fgpfifo.h */
#define NVA06C_GPFIFO_SCHEDULE		0xa06c0101
#define NVA06C_SET_TIMESLICE		0xa06c0103
struct nva06c_timeslice {
	u64 timeslice_us;
};

#define NVA06C_PREEMPT			0xa06c0105
struct nva06c_preempt {
	u8 wait, manual_timeout, pad[2];
	u32 timeout_us;
};

#define NVA06F_GPFIFO_SCHEDULE		0xa06f0103
#define NVA06F_BIND			0xa06f0104

/* SDK/ctrl/ctrl906f.h */
#define NV906F_RESET_CHANNEL		0x906f0102
struct nv906f_reset_channel {
	u32 engine, subdevice, reason;
	u8 pending, pad[3];
};

/* SDK/ctrl/ctrl00da.h, ctrl00fd.h */
#define NV_SEMAPHORE_SURFACE_BIND_CHANNEL	0xda0002
#define NV_SEMAPHORE_SURFACE_UNBIND_CHANNEL	0xda0006
#define NV00FD_ATTACH_MEM		0xfd0102
#define NV00FD_DETACH_MEM		0xfd0105

/* kchannelgroup default: src/nvidia/.../kernel_fifo_gv100.c, 128 << 3 µs */
#define NV_DEFAULT_TIMESLICE_US		1024
/* What libcuda asks for its compute TSG at start; a pod's wish above it is not granted. */
#define NV_LONGEST_WISH_US		2048

/* RM sends controls with this bit to the GPU's firmware unread, and does not check whose client they name. */
#define NV_CONTROL_GSS_LEGACY		0x8000

/* KO/common/inc/nv_uvm_types.h: UvmGpuMemoryInfo, as far as it is the same from 535 to 595 */
struct nv_uvm_memory_info {
	u32 kind;
	u8 sysmem, pad[3];	/* two more members, which moved in 550 */
	u64 page_size;
	u8 contiguous, pad1[7];
	u64 physical, size;
};

/* KO/common/inc/nv-modeset-interface.h, nv-kernel-rmapi-ops.h: what kernel modules may ask of RM. */
struct nvidia_stack_s;

struct nv_gpu_info {
	u32 gpu_id, domain;
	u8 bus, slot, function, needs_numa_setup;
	void *os_device;
};

struct nv_rm_ops {
	const char *version_string;
	struct {
		u8 allow_write_combining;
	} system_info;
	int (*alloc_stack)(struct nvidia_stack_s **stack);
	void (*free_stack)(struct nvidia_stack_s *stack);
	u32 (*enumerate_gpus)(struct nv_gpu_info *infos);
	void *open_gpu;		/* its arguments differ by branch; never called here */
	void *close_gpu;
	void (*op)(struct nvidia_stack_s *stack, void *cmd);
	void *set_callbacks;
};

#define NV_MAX_GPUS			32

#define NV01_FREE			0x00
#define NV04_CONTROL			0x36
#define NV04_DUP_OBJECT			0x37
struct nv_kernel_op {
	u32 op, pad;
	union {
		struct nvos00 free;
		struct nvos54 control;
		struct nvos55 dup;
		u8 largest[256];
	} params;
};

typedef u32 (*nv_get_rm_ops_t)(struct nv_rm_ops *ops);

#endif /* _QGPU_NVRM_H */
