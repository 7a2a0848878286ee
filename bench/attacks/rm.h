/* SPDX-License-Identifier: GPL-2.0 */
/*
 * rm.h - RM without a library: one client on one card, objects by handle, and six ways to bring a call to the driver.
 *
 * abi.h is generated from qgpu/nvidia/abi.py when the attackers are built; nothing of NVIDIA's is retyped here. Every call
 * lies in memory below 4 GiB, so that it can be made as a 32-bit program makes it.
 */
#ifndef _RM_H
#define _RM_H

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "abi.h"
#include "attack.h"

struct rm {
	int ctl, card;
	uint32_t client, device, subdevice, last;
};

typedef long (*rm_way)(int fd, uint32_t number, void *data, uint32_t size);

#define RM_WORD(direction, type, number, size) \
	((uint32_t)(direction) << 30 | (uint32_t)(size) << 16 | (uint32_t)(type) << 8 | (number))

static inline long rm_plain(int fd, uint32_t number, void *data, uint32_t size)
{
	return syscall(SYS_ioctl, fd, (unsigned long)RM_WORD(3, 'F', number, size), data);
}

/* The driver looks at number and size alone. */
static inline long rm_odd(int fd, uint32_t number, void *data, uint32_t size)
{
	return syscall(SYS_ioctl, fd, (unsigned long)RM_WORD(number & 3, 'q', number, size), data);
}

/* The kernel takes 32 bits of the request, whatever else is in the register. */
static inline long rm_high(int fd, uint32_t number, void *data, uint32_t size)
{
	return syscall(SYS_ioctl, fd | 0x100000000ul, 0xdead00000000ul | RM_WORD(3, 'F', number, size), data);
}

static inline long rm_wrapped(int fd, uint32_t number, void *data, uint32_t size)
{
	nv_ioctl_xfer_t outer = { .cmd = number, .size = size, .ptr = (uintptr_t)data };

	return rm_plain(fd, NV_ESC_IOCTL_XFER_CMD, &outer, sizeof(outer));
}

static sigjmp_buf no_such_call;

static inline void not_there(int signal)
{
	(void)signal;
	siglongjmp(no_such_call, 1);
}

static inline long rm_i386(int fd, uint32_t number, void *data, uint32_t size)
{
	long result = -ENOSYS;

	signal(SIGSEGV, not_there);
	if (!sigsetjmp(no_such_call, 1))
		__asm__ volatile("int $0x80" : "=a"(result)
				 : "0"(54), "b"((long)fd), "c"((unsigned long)RM_WORD(3, 'F', number, size)), "d"(data)
				 : "r8", "r9", "r10", "r11", "memory");
	signal(SIGSEGV, SIG_DFL);
	errno = result < 0 ? -(int)result : 0;
	return result < 0 ? -1 : result;
}

static inline long rm_x32(int fd, uint32_t number, void *data, uint32_t size)
{
	return syscall(0x40000000 + 514, fd, (unsigned long)RM_WORD(3, 'F', number, size), data);
}

/* Memory that all the ways can name. */
static inline void *rm_low(size_t size)
{
	void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);

	if (at == MAP_FAILED)
		exit(4);
	return at;
}

/* Make an object; what RM says, or -1 where the call itself failed. */
static inline long rm_alloc(struct rm *rm, rm_way way, uint32_t parent, uint32_t class, void *params, uint32_t *handle)
{
	static NVOS64_PARAMETERS *call;

	call = call ?: rm_low(sizeof(*call));
	*call = (NVOS64_PARAMETERS){ .hRoot = rm->client, .hObjectParent = parent, .hObjectNew = *handle,
				     .hClass = class, .pAllocParms = (uintptr_t)params, .status = ~0u };
	if (way(rm->ctl, NV_ESC_RM_ALLOC, call, sizeof(*call)) < 0)
		return -1;
	if (call->status == NV_OK)
		*handle = call->hObjectNew;
	return call->status;
}

static inline long rm_control(const struct rm *rm, rm_way way, uint32_t client, uint32_t object, uint32_t cmd,
			      void *params, uint32_t size)
{
	static __thread NVOS54_PARAMETERS *call;

	call = call ?: rm_low(sizeof(*call));
	*call = (NVOS54_PARAMETERS){ .hClient = client, .hObject = object, .cmd = cmd, .params = (uintptr_t)params,
				     .paramsSize = size, .status = ~0u };
	return way(rm->ctl, NV_ESC_RM_CONTROL, call, sizeof(*call)) < 0 ? -1 : (long)call->status;
}

static inline long rm_free(const struct rm *rm, uint32_t handle)
{
	NVOS00_PARAMETERS call = { .hRoot = rm->client, .hObjectOld = handle, .status = ~0u };

	return rm_plain(rm->ctl, NV_ESC_RM_FREE, &call, sizeof(call)) < 0 ? -1 : (long)call.status;
}

/* As libcuda asks for it (recorded), but for the alignment; an owner of 0 is none to RM (stdmemValidateParams). */
#define RM_FLAGS 0x1c001
#define RM_ATTR 0x18000000

static inline NV_MEMORY_ALLOCATION_PARAMS rm_memory_params(const struct rm *rm, uint64_t size)
{
	return (NV_MEMORY_ALLOCATION_PARAMS){ .owner = rm->client, .flags = RM_FLAGS, .attr = RM_ATTR, .size = size };
}

static inline long rm_memory(struct rm *rm, rm_way way, uint64_t size, uint32_t *handle)
{
	static NV_MEMORY_ALLOCATION_PARAMS *params;

	params = params ?: rm_low(sizeof(*params));
	*params = rm_memory_params(rm, size);
	return rm_alloc(rm, way, rm->device, NV01_MEMORY_LOCAL_USER, params, handle);
}

/*
 * Make a client on a control file that is open, and the first card's device below it; what RM says, or -1. A simulated
 * driver lists no cards: then it is minor 0.
 */
static inline long rm_make(struct rm *rm)
{
	static nv_ioctl_card_info_t cards[32];
	NV0000_CTRL_GPU_ATTACH_IDS_PARAMS ids = { .gpuIds = { 0, ~0u } };
	NV0000_CTRL_GPU_GET_ID_INFO_V2_PARAMS info = { 0 };
	NV0080_ALLOC_PARAMETERS device = { 0 };
	NV2080_ALLOC_PARAMETERS subdevice = { 0 };
	int minor = 0;
	char path[32];
	long status = rm_alloc(rm, rm_plain, 0, NV01_ROOT_CLIENT, NULL, &rm->client);

	if (status != NV_OK)
		return status;
	rm_plain(rm->ctl, NV_ESC_CARD_INFO, cards, sizeof(cards));
	for (int i = 31; i >= 0; i--) {
		if (cards[i].valid) {
			info.gpuId = ids.gpuIds[0] = cards[i].gpu_id;
			minor = cards[i].minor_number;
		}
	}
	snprintf(path, sizeof(path), "/dev/nvidia%d", minor);
	rm->card = open(path, O_RDWR);
	if (rm->card < 0)
		return -1;
	rm_plain(rm->card, NV_ESC_REGISTER_FD, &rm->ctl, sizeof(rm->ctl));
	rm_control(rm, rm_plain, rm->client, rm->client, NV0000_GPU_ATTACH_IDS, &ids, sizeof(ids));
	rm_control(rm, rm_plain, rm->client, rm->client, NV0000_GPU_GET_ID_INFO_V2, &info, sizeof(info));
	device.deviceId = info.deviceInstance;
	device.hClientShare = rm->client;
	rm->device = ++rm->last;
	rm->subdevice = ++rm->last;
	status = rm_alloc(rm, rm_plain, rm->client, NV01_DEVICE_0, &device, &rm->device);
	return status ?: rm_alloc(rm, rm_plain, rm->device, NV20_SUBDEVICE_0, &subdevice, &rm->subdevice);
}

/* Open the first card as any program does; what RM says, or -1. */
static inline long rm_try_open(struct rm *rm)
{
	*rm = (struct rm){ .last = 0x5c000000 };
	rm->ctl = open("/dev/nvidiactl", O_RDWR);
	return rm->ctl < 0 ? -1 : rm_make(rm);
}

static inline void rm_open(struct rm *rm)
{
	long status = rm_try_open(rm);

	if (status != NV_OK)
		report("cannot start: no device (RM says %#lx, errno %d)", status, errno), exit(4);
}

/* Who is granted nothing proves nothing when it is refused: within its quota a program must get memory, plainly. */
static inline uint64_t rm_granted(struct rm *rm)
{
	uint32_t handle = ++rm->last;
	long status = rm_memory(rm, rm_plain, quota / 4, &handle);

	if (status != NV_OK)
		report("cannot start: no memory within the limit (RM says %#lx, errno %d)", status, errno), exit(4);
	rm_free(rm, handle);
	return quota / 4;
}

#endif
