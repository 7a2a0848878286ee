// SPDX-License-Identifier: GPL-2.0
/*
 * calls.c - calls by number: which struct each has, and how user memory is read and written. What they do is left to
 * rm.c, memory.c, control.c and gpu.c.
 */
#include <linux/delay.h>
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "sim.h"

/* Races made wide: how long a call lingers between being copied in and being acted on, and after that. */
static u32 linger_us, late_us;
module_param(linger_us, uint, 0644);
module_param(late_us, uint, 0644);

#define SIM_NO_MAP	(1u << 30)	/* NVOS02_FLAGS_MAPPING_NO_MAP */

/* How many calls of processes were in the driver at the same time, at most. */
static u32 at_once;
module_param(at_once, uint, 0644);
static atomic_t inside = ATOMIC_INIT(0);

/* os-interface.c: all that RM reads and writes behind pointers goes through these. */
u32 os_memcpy_from_user(void *to, const void *from, u32 size);
noinline u32 os_memcpy_from_user(void *to, const void *from, u32 size)
{
	return copy_from_user(to, (const void __user *)from, size) ? NV_ERR_INVALID_ADDRESS : NV_OK;
}

u32 os_memcpy_to_user(void *to, const void *from, u32 size);
noinline u32 os_memcpy_to_user(void *to, const void *from, u32 size)
{
	return copy_to_user((void __user *)to, from, size) ? NV_ERR_INVALID_ADDRESS : NV_OK;
}

int sim_copy_in(const struct sim_file *file, void *to, u64 from, size_t size)
{
	if (file)
		return os_memcpy_from_user(to, (void *)(uintptr_t)from, size) ? -EFAULT : 0;
	memcpy(to, (void *)(uintptr_t)from, size);
	return 0;
}

int sim_copy_out(const struct sim_file *file, u64 to, const void *from, size_t size)
{
	if (file)
		return os_memcpy_to_user((void *)(uintptr_t)to, from, size) ? -EFAULT : 0;
	memcpy((void *)(uintptr_t)to, from, size);
	return 0;
}

static u32 submit(struct sim_file *file, const struct sim_submit *arg)
{
	struct sim_client *client = sim_client(arg->client, file);
	struct sim_object *object = client ? sim_object(client, arg->channel) : NULL;

	if (!object || !object->channel)
		return NV_ERR_OBJECT_NOT_FOUND;
	sim_gpu_submit(object->gpu, object->channel, arg);
	return NV_OK;
}

static u32 query(struct sim_file *file, struct sim_query *arg)
{
	struct sim_client *client = sim_client(arg->client, file);
	struct sim_object *object = client ? sim_object(client, arg->channel) : NULL;

	if (!object || !object->channel)
		return NV_ERR_OBJECT_NOT_FOUND;
	sim_gpu_advance(object->gpu);
	arg->now_ns = ktime_get_ns();
	arg->kernels = object->channel->kernels;
	arg->run_ns = object->tsg->run_ns;
	arg->starts = object->tsg->starts;
	arg->nr_latencies = object->channel->nr_latencies;
	memcpy(arg->latency_ns, object->channel->latency_ns, sizeof(arg->latency_ns));
	return NV_OK;
}

/* rs_server.c:serverAllocClient: a client has its handle before RM looks at the rights it asks for; refused, it goes. */
static u32 deny(const struct sim_file *file, u32 client)
{
	struct nvos00 arg = { .root = client, .object = client };

	sim_free(file, &arg);
	return NV_ERR_INSUFFICIENT_PERMISSIONS;
}

/*
 * escape.c: the call does not say which handle RM chose, and where system memory is to be mapped, a file that cannot
 * have the mapping fails the call when the memory is made. _rmAllocMemoryLocalUser: all of the card's memory, for an
 * administrator.
 */
static u32 alloc_memory(struct sim_file *file, struct nvos02_fd *memory)
{
	u32 handle = memory->object;

	if (memory->class == NV01_MEMORY_LOCAL_USER)
		memory->class = NV01_MEMORY_LOCAL_PHYSICAL;
	memory->status = sim_alloc(file, memory->root, memory->parent, &handle, memory->class, 0);
	return memory->status == NV_OK && memory->class == NV01_MEMORY_SYSTEM && !(memory->flags & SIM_NO_MAP) &&
			       memory->fd < 0 ?
		       NV_ERR_INVALID_ARGUMENT :
		       NV_OK;
}

/* The answer is the escape's own; what an object call came to stands in its status. */
static u32 dispatch(struct sim_file *file, u32 nr, void *data, u32 size)
{
	struct nvos02_fd *memory = data;
	struct nvos64 *wide = data;
	struct nvos21 *narrow = data;
	struct nvos05 *bare = data;

	switch (nr) {
	case NV_ESC_RM_ALLOC:
		if (size < sizeof(*narrow))
			return NV_ERR_INVALID_ARGUMENT;
		if (narrow->class <= NV01_ROOT_NON_PRIV)
			narrow->class = NV01_ROOT_CLIENT;	/* and so it is answered */
		if (size == sizeof(*wide)) {
			wide->status = sim_alloc(file, wide->root, wide->parent, &wide->object, wide->class, wide->params);
			if (wide->rights && wide->class == NV01_ROOT_CLIENT && wide->status == NV_OK)
				wide->status = deny(file, wide->object);
		} else if (size == sizeof(*narrow)) {
			narrow->status = sim_alloc(file, narrow->root, narrow->parent, &narrow->object, narrow->class,
					       narrow->params);
		} else {
			return NV_ERR_INVALID_ARGUMENT;
		}
		return NV_OK;
	case NV_ESC_RM_ALLOC_OBJECT:
		if (size != sizeof(*bare))
			return NV_ERR_INVALID_ARGUMENT;
		bare->status = sim_alloc(file, bare->root, bare->parent, &bare->object, bare->class, 0);
		return NV_OK;
	case NV_ESC_RM_ALLOC_MEMORY:
		if (size != sizeof(*memory))
			return NV_ERR_INVALID_ARGUMENT;
		return alloc_memory(file, memory);
	case NV_ESC_RM_FREE:
		if (size != sizeof(struct nvos00))
			return NV_ERR_INVALID_ARGUMENT;
		((struct nvos00 *)data)->status = sim_free(file, data);
		return NV_OK;
	case NV_ESC_RM_CONTROL:
		if (size != sizeof(struct nvos54))
			return NV_ERR_INVALID_ARGUMENT;
		((struct nvos54 *)data)->status = sim_control(file, data);
		return NV_OK;
	case NV_ESC_RM_DUP_OBJECT:
		if (size != sizeof(struct nvos55))
			return NV_ERR_INVALID_ARGUMENT;
		((struct nvos55 *)data)->status = sim_dup(file, data);
		return NV_OK;
	case NV_ESC_RM_VID_HEAP_CONTROL:
		if (size != sizeof(struct nvos32))
			return NV_ERR_INVALID_ARGUMENT;
		((struct nvos32 *)data)->status = sim_heap(file, data);
		return NV_OK;
	case NV_ESC_RM_MAP_MEMORY_DMA:
		return sim_map_dma(file, data, size);
	case SIM_ESC_SUBMIT:
		return size == sizeof(struct sim_submit) ? submit(file, data) : NV_ERR_INVALID_ARGUMENT;
	case SIM_ESC_QUERY:
		return size == sizeof(struct sim_query) ? query(file, data) : NV_ERR_INVALID_ARGUMENT;
	/* answered, without effect: mappings, events, versions, card lists */
	case 0x35: case 0x41: case 0x4e: case 0x4f: case 0x52: case 0x54: case 0x58: case 0x59: case 0x5e:
	case 200: case 206: case 207: case 210: case 212: case 213: case 214: case 215: case 218:
		return NV_OK;
	}
	return NV_ERR_INVALID_ARGUMENT;
}

u32 sim_escape(struct sim_file *file, u32 nr, void *data, u32 size)
{
	unsigned int effect;
	u32 status;

	at_once = max_t(u32, at_once, atomic_inc_return(&inside));
	if (READ_ONCE(linger_us))
		usleep_range(linger_us, linger_us + 10);
	mutex_lock(&sim_lock);
	sim_fault(NULL, &effect);
	status = dispatch(file, nr, data, size);
	mutex_unlock(&sim_lock);
	if (READ_ONCE(late_us))
		usleep_range(late_us, late_us + 10);
	atomic_dec(&inside);
	return status;
}
