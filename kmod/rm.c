// SPDX-License-Identifier: GPL-2.0
/*
 * rm.c - the only file that calls RM. It knows the driver branches and how to reach the driver's kernel interface; its
 * callers decide what to ask and when.
 *
 * RM lets a kernel caller use every client handle (rmclientValidate_IMPL with no clientOSInfo), so this file can name a
 * pod's own handles. If a handle has been freed in the meantime, RM answers with a status.
 */
#include <linux/kernel.h>
#include <linux/module.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/string.h>

#include "compat.h"
#include "driver_versions.h"
#include "rm.h"
#include "uapi/qgpu.h"

struct rm_branch {
	u16 major;
	u16 fb_entries;		/* list length of FB_GET_INFO_V2: ctrl2080fb.h */
};

/*
 * Newest first. To add a row, compare nvrm.h with the branch's headers first. On a branch without a row the module does
 * not interpose at all. The interface is exported GPL-only from 565.57.01 on; before, rm_glue.c must offer it.
 */
static const struct rm_branch rm_branches[] = {
	{ 595, 128 },
	{ 590, 128 },
	{ 580, 128 },
	{ 575, 57 },
	{ 570, 57 },
	{ 565, 57 },
	{ 560, 57 },
	{ 555, 55 },
	{ 550, 55 },
	{ 545, 55 },
	{ 535, 54 },
};

#define RM_FB_ENTRIES_MAX 128

DEFINE_MUTEX(qgpu_attach_lock);

static struct nv_rm_ops rm_ops;
static const struct rm_branch *rm_branch;
static nv_get_rm_ops_t rm_offered;	/* under qgpu_attach_lock */
static bool rm_symbol_held;

/* While the driver sleeps a process's calls wait for its suspend lock. Those of the kernel do not, so they wait here. */
static atomic_t rm_calls = ATOMIC_INIT(0);
static bool rm_asleep;
static DECLARE_WAIT_QUEUE_HEAD(rm_wait);

static void leave(void)
{
	if (atomic_dec_and_test(&rm_calls))
		wake_up_all(&rm_wait);
}

static void enter(void)
{
	for (;;) {
		atomic_inc(&rm_calls);
		smp_mb__after_atomic();	/* pairs with qgpu_rm_sleep(): one of the two sees the other */
		if (!READ_ONCE(rm_asleep))
			return;
		leave();
		qgpu_wait_freezable(rm_wait, !READ_ONCE(rm_asleep));
	}
}

void qgpu_rm_sleep(bool asleep)
{
	WRITE_ONCE(rm_asleep, asleep);
	smp_mb();	/* pairs with enter() */
	wake_up_all(&rm_wait);
	if (asleep)
		wait_event_idle(rm_wait, !atomic_read(&rm_calls));
}

static u32 rm_op(struct nv_kernel_op *op)
{
	struct nvidia_stack_s *stack = NULL;

	if (rm_ops.alloc_stack(&stack))
		return NV_ERR_NO_MEMORY;
	enter();
	rm_ops.op(stack, op);
	leave();
	rm_ops.free_stack(stack);
	return NV_OK;
}

u32 qgpu_rm_control(u32 client, u32 object, u32 cmd, void *params, u32 size)
{
	struct nv_kernel_op op = {
		.op = NV04_CONTROL,
		.params.control = {
			.client = client,
			.object = object,
			.cmd = cmd,
			.params = (uintptr_t)params,
			.params_size = size,
			.status = NV_ERR_GENERIC,
		},
	};

	return rm_op(&op) ?: op.params.control.status;
}

u32 qgpu_rm_free(u32 client, u32 parent, u32 object)
{
	struct nv_kernel_op op = {
		.op = NV01_FREE,
		.params.free = { client, parent, object, NV_ERR_GENERIC },
	};

	return rm_op(&op) ?: op.params.free.status;
}

u32 qgpu_rm_dup(u32 client, u32 parent, u32 *handle, u32 client_src, u32 object_src)
{
	struct nv_kernel_op op = {
		.op = NV04_DUP_OBJECT,
		.params.dup = { client, parent, *handle, client_src, object_src, 0, NV_ERR_GENERIC },
	};
	u32 status = rm_op(&op) ?: op.params.dup.status;

	*handle = op.params.dup.object;
	return status;
}

bool qgpu_rm_is_duplicate(u32 client, u32 object, u32 other)
{
	struct nv0000_duplicates same = { .objects = { object, other } };

	return qgpu_rm_control(client, client, NV0000_CLIENT_OBJECTS_ARE_DUPLICATES, &same, sizeof(same)) == NV_OK &&
	       same.duplicates;
}

static u32 handle_info(u32 client, u32 object, u32 index, u32 *result)
{
	struct nv0000_handle_info info = { .object = object, .index = index };
	u32 status = qgpu_rm_control(client, client, NV0000_CLIENT_GET_HANDLE_INFO, &info, sizeof(info));

	*result = info.result;
	return status;
}

u32 qgpu_rm_class(u32 client, u32 object, u32 *class)
{
	return handle_info(client, object, NV0000_HANDLE_INFO_CLASS, class);
}

bool qgpu_rm_is_shared_page(u32 client, u32 object)
{
	u32 class;

	return qgpu_rm_class(client, object, &class) == NV_OK && class == RM_USER_SHARED_DATA;
}

u32 qgpu_rm_parent(u32 client, u32 object)
{
	u32 parent;

	return handle_info(client, object, NV0000_HANDLE_INFO_PARENT, &parent) == NV_OK ? parent : 0;
}

bool qgpu_rm_says_gone(u32 status)
{
	switch (status) {
	case NV_ERR_INVALID_CLIENT:
	case NV_ERR_INVALID_OBJECT:
	case NV_ERR_INVALID_OBJECT_HANDLE:
	case NV_ERR_INVALID_OBJECT_OLD:
	case NV_ERR_OBJECT_NOT_FOUND:
		return true;
	}
	return false;
}

bool qgpu_rm_has(u32 client, u32 object)
{
	u32 class;

	return qgpu_rm_class(client, object, &class) == NV_OK;
}

bool qgpu_rm_gone(u32 client, u32 object)
{
	u32 class;

	return qgpu_rm_says_gone(qgpu_rm_class(client, object, &class));
}

static u32 surface_size(u32 client, u32 memory, u64 *size)
{
	struct nv0041_surface_entry entry = { .index = NV0041_INDEX_PHYS_SIZE };
	struct nv0041_surface_info info = { .size = 1, .list = (uintptr_t)&entry };
	u32 status = qgpu_rm_control(client, memory, NV0041_GET_SURFACE_INFO, &info, sizeof(info));

	*size = (u64)entry.data * NV0041_PHYS_SIZE_UNIT;
	return status;
}

u64 qgpu_rm_memory_bytes(u32 client, u32 memory)
{
	u64 size;

	return surface_size(client, memory, &size) == NV_OK ? size : 0;
}

u32 qgpu_rm_memory_size(u32 client, u32 memory, u64 *size)
{
	u32 status = surface_size(client, memory, size);

	/*
	 * RM takes the card in pieces of this size, but reports only what was asked for
	 * (video_mem.c:_vidmemPmaAllocate).
	 */
	*size = round_up(*size, (u64)SZ_64K);
	return status;
}

u32 qgpu_rm_fb_total(u32 client, u32 subdevice, u64 *bytes)
{
	struct {
		u32 size;
		struct nv2080_fb_entry list[RM_FB_ENTRIES_MAX];
	} *info = kzalloc(sizeof(*info), GFP_KERNEL);
	u32 size = NV2080_FB_INFO_ENTRY_AT + rm_branch->fb_entries * sizeof(struct nv2080_fb_entry);
	u32 status;

	if (!info)
		return NV_ERR_NO_MEMORY;
	info->size = 1;
	info->list[0].index = NV2080_FB_INFO_TOTAL_RAM_SIZE;
	status = qgpu_rm_control(client, subdevice, NV2080_FB_GET_INFO_V2, info, size);
	*bytes = (u64)info->list[0].data << 10;
	kfree(info);
	return status;
}

u32 qgpu_rm_subdevice(u32 client, u32 device, u32 *subdevice)
{
	struct nv0080_find_subdevice find = {};
	u32 status = qgpu_rm_control(client, device, NV0080_GPU_FIND_SUBDEVICE_HANDLE, &find, sizeof(find));

	*subdevice = find.subdevice;
	return status;
}

bool qgpu_rm_copies_apart(u32 client, u32 subdevice, u32 engine)
{
	struct nv2080_ce_caps caps = { .engine = engine };

	return qgpu_rm_control(client, subdevice, NV2080_CE_GET_CAPS_V2, &caps, sizeof(caps)) == NV_OK &&
	       !(caps.caps[0] & NV2080_CE_CAPS_GRCE);
}

u32 qgpu_rm_gpu_id(u32 client, u32 subdevice, u32 *gpu_id)
{
	struct nv2080_gpu_id id = {};
	u32 status = qgpu_rm_control(client, subdevice, NV2080_GPU_GET_ID, &id, sizeof(id));

	*gpu_id = id.gpu_id;
	return status;
}

int qgpu_rm_enumerate(struct nv_gpu_info infos[NV_MAX_GPUS])
{
	return min_t(u32, rm_ops.enumerate_gpus(infos), NV_MAX_GPUS);
}

/*
 * Handlers of probes read the arguments of the driver's functions, so the exact version counts. accept_driver is for
 * one that is newer than the list: its branch must be known, and somebody has compared it (tests/record_prototypes.py).
 */
static char *accept_driver;
module_param(accept_driver, charp, 0444);
MODULE_PARM_DESC(accept_driver, "one more driver version to enforce on, of a known branch");

static bool is_compared(const char *version)
{
	size_t i;

	for (i = 0; i < ARRAY_SIZE(driver_versions); i++) {
		if (!strcmp(driver_versions[i], version))
			return true;
	}
	return accept_driver && !strcmp(accept_driver, version);
}

static const struct rm_branch *find_branch(const char *version)
{
	unsigned int major, i;

	if (sscanf(version, "%u.", &major) != 1 || !is_compared(version))
		return NULL;
	for (i = 0; i < ARRAY_SIZE(rm_branches); i++) {
		if (rm_branches[i].major == major)
			return &rm_branches[i];
	}
	return NULL;
}

u32 qgpu_rm_attach(char *version, size_t size)
{
	nv_get_rm_ops_t get_rm_ops = rm_offered;

	lockdep_assert_held(&qgpu_attach_lock);
	if (!get_rm_ops) {
		get_rm_ops = (nv_get_rm_ops_t)__symbol_get("nvidia_get_rm_ops");
		if (!get_rm_ops)
			return QGPU_STATE_NO_RM_INTERFACE;
		rm_symbol_held = true;
	}

	/* RM answers a wrong version with its own version, and accepts that one in the next call. */
	rm_ops.version_string = "";
	get_rm_ops(&rm_ops);
	strscpy(version, rm_ops.version_string, size);
	rm_branch = find_branch(rm_ops.version_string);
	if (rm_branch && get_rm_ops(&rm_ops) == NV_OK)
		return QGPU_STATE_ENFORCING;
	qgpu_rm_detach();
	return QGPU_STATE_UNKNOWN_DRIVER;
}

void qgpu_rm_detach(void)
{
	lockdep_assert_held(&qgpu_attach_lock);
	if (rm_symbol_held)
		__symbol_put("nvidia_get_rm_ops");
	rm_symbol_held = false;
	rm_branch = NULL;
}

bool qgpu_rm_offered(nv_get_rm_ops_t get_rm_ops)
{
	lockdep_assert_held(&qgpu_attach_lock);
	if (get_rm_ops && rm_offered)
		return false;
	rm_offered = get_rm_ops;
	return true;
}
