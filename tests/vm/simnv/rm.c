// SPDX-License-Identifier: GPL-2.0
/*
 * rm.c - clients, objects and memory as the resource manager keeps them: handles are a client's own, freeing takes
 * the subtree, a client belongs to the file it was made on, a Device needs its card's file to be open.
 */
#include <linux/delay.h>
#include <linux/fdtable.h>
#include <linux/file.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "sim.h"

#define NV_ERR_INSERT_DUPLICATE_NAME	0x19
#define NV_ERR_INSUFFICIENT_RESOURCES	0x1a
#define NV_ERR_INVALID_ADDRESS		0x1e
#define PAGE_64K			0x10000ull

DEFINE_MUTEX(sim_lock);
unsigned int sim_nr_clients, sim_nr_objects, sim_nr_waits;
static LIST_HEAD(clients);
static u32 last_client = 0xc1d00000, last_handle = 0xcaf00000;
static u64 used[SIM_GPUS_MAX];
static u32 fb_mib = 143771;
module_param(fb_mib, uint, 0444);
/* A race made wide: how long a call lingers between being copied in and being acted on. */
static u32 linger_us;
module_param(linger_us, uint, 0644);

u64 sim_memory_total(void)
{
	return (u64)fb_mib << 20;
}

u64 sim_memory_free(int gpu)
{
	return sim_memory_total() - used[gpu];
}

int sim_copy_in(const struct sim_file *file, void *to, u64 from, size_t size)
{
	if (file)
		return copy_from_user(to, (void __user *)(uintptr_t)from, size) ? -EFAULT : 0;
	memcpy(to, (void *)(uintptr_t)from, size);
	return 0;
}

int sim_copy_out(const struct sim_file *file, u64 to, const void *from, size_t size)
{
	if (file)
		return copy_to_user((void __user *)(uintptr_t)to, from, size) ? -EFAULT : 0;
	memcpy((void *)(uintptr_t)to, from, size);
	return 0;
}

/* rmclientValidate_IMPL: by file, unless the caller is the kernel. */
struct sim_client *sim_client(u32 handle, const struct sim_file *file)
{
	struct sim_client *client;

	list_for_each_entry(client, &clients, node) {
		if (client->handle == handle)
			return !file || client->owner == (file->control ?: file) ? client : NULL;
	}
	return NULL;
}

struct sim_object *sim_object(struct sim_client *client, u32 handle)
{
	return xa_load(&client->objects, handle);
}

static int is_card(const void *minor, struct file *filp, unsigned int fd)
{
	const struct sim_file *file = filp->private_data;

	/* nv.c:nv_match_dev_state: the table's identity from 550.40.07 on, the major before */
	if (sim_major >= 550 ? filp->f_op != sim_fops : MAJOR(file_inode(filp)->i_rdev) != NV_MAJOR_DEVICE_NUMBER)
		return 0;
	return file->minor == *(const u32 *)minor;
}

static u32 alloc_mem(struct sim_object *object, u64 *size)
{
	struct sim_mem *mem;

	*size = (*size + PAGE_64K - 1) & ~(PAGE_64K - 1);
	if (object->gpu < 0)
		return NV_ERR_INVALID_OBJECT_PARENT;
	if (!*size || *size > sim_memory_free(object->gpu))
		return NV_ERR_NO_MEMORY;
	mem = kzalloc(sizeof(*mem), GFP_KERNEL);
	if (!mem)
		return NV_ERR_NO_MEMORY;
	mem->size = *size;
	mem->refs = 1;
	mem->gpu = object->gpu;
	used[object->gpu] += *size;
	object->mem = mem;
	return NV_OK;
}

static u32 alloc_video(const struct sim_file *file, struct sim_object *object, u64 params)
{
	u8 block[128] = {};
	size_t length = sim_major >= 545 ? 128 : 120;
	u64 *size = (u64 *)(block + NV_MEMORY_PARAMS_SIZE_AT);
	u32 status;

	if (sim_copy_in(file, block, params, length))
		return NV_ERR_INVALID_ARGUMENT;
	status = alloc_mem(object, size);
	if (status)
		return status;
	*(u64 *)(block + 88) = *size - 1;
	sim_copy_out(file, params, block, length);
	return NV_OK;
}

static u32 alloc_tsg(struct sim_client *client, struct sim_object *object)
{
	struct sim_tsg *tsg = kzalloc(sizeof(*tsg), GFP_KERNEL);

	if (!tsg)
		return NV_ERR_NO_MEMORY;
	INIT_LIST_HEAD(&tsg->channels);
	tsg->slice_ns = NV_DEFAULT_TIMESLICE_US * 1000ull;
	tsg->client = client->handle;
	tsg->handle = object->handle;
	object->tsg = tsg;
	sim_gpu_add_tsg(object->gpu, tsg);
	return NV_OK;
}

static u32 alloc_channel(const struct sim_file *file, struct sim_client *client, struct sim_object *object,
			 struct sim_object *parent, u64 params)
{
	struct sim_object *memory;
	u32 status, userd = 0;

	if (object->gpu < 0 || (parent->class == KEPLER_CHANNEL_GROUP_A && !parent->tsg))	/* the latter: a duplicate */
		return NV_ERR_INVALID_OBJECT_PARENT;
	if (parent->class != KEPLER_CHANNEL_GROUP_A) {
		status = alloc_tsg(client, object);
		if (status)
			return status;
	} else {
		object->tsg = parent->tsg;
	}
	if (sim_gpu_channels(object->gpu) >= SIM_CHANNELS_MAX)
		return NV_ERR_INSUFFICIENT_RESOURCES;
	object->channel = kzalloc(sizeof(*object->channel), GFP_KERNEL);
	if (!object->channel)
		return NV_ERR_NO_MEMORY;
	list_add_tail(&object->channel->node, &object->tsg->channels);
	if (params)
		sim_copy_in(file, &userd, params + 32, sizeof(userd));
	memory = userd ? sim_object(client, userd) : NULL;
	if (memory && memory->class == NV01_MEMORY_SYSTEM_OS_DESCRIPTOR)	/* kernel_channel_gv100.c */
		object->userd = userd;
	return NV_OK;
}

static u32 construct(const struct sim_file *file, struct sim_client *client, struct sim_object *object, u64 params)
{
	struct sim_object *parent = sim_object(client, object->parent);
	u32 instance = 0;

	if (object->class == NV01_DEVICE_0) {
		if (params && sim_copy_in(file, &instance, params, sizeof(instance)))
			return NV_ERR_INVALID_ARGUMENT;
		if (instance >= sim_nr_gpus)
			return NV_ERR_INVALID_ARGUMENT;
		if (file && !iterate_fd(current->files, 0, is_card, &instance))
			return NV_ERR_INSUFFICIENT_PERMISSIONS;
		object->gpu = instance;
		return NV_OK;
	}
	if (object->parent != client->handle && !parent)
		return NV_ERR_INVALID_OBJECT_PARENT;
	object->gpu = parent ? parent->gpu : -1;
	if (object->class == NV01_MEMORY_LOCAL_USER)
		return alloc_video(file, object, params);
	if (object->class == KEPLER_CHANNEL_GROUP_A && params)
		sim_copy_in(file, &object->vaspace, params + 8, sizeof(object->vaspace));
	if (object->class == KEPLER_CHANNEL_GROUP_A)
		return parent && parent->class == NV01_DEVICE_0 ? alloc_tsg(client, object) :
								 NV_ERR_INVALID_OBJECT_PARENT;
	if (NV_IS_GPFIFO(object->class))
		return parent ? alloc_channel(file, client, object, parent, params) : NV_ERR_INVALID_OBJECT_PARENT;
	if (object->class == 0x73)	/* no display, as on the recorded card */
		return NV_ERR_NOT_SUPPORTED;
	return NV_OK;
}

static void mem_put(struct sim_mem *mem)
{
	if (!mem || --mem->refs)
		return;
	used[mem->gpu] -= mem->size;
	kfree(mem);
}

static void destroy(struct sim_client *client, struct sim_object *object)
{
	xa_erase(&client->objects, object->handle);
	mem_put(object->mem);
	if (object->channel) {
		sim_gpu_advance(object->gpu);
		if (object->channel->disabled && object->channel->left)
			sim_nr_waits++;	/* the real one would wait here until the channel runs dry, or time out */
		list_del(&object->channel->node);
		kfree(object->channel);
	}
	if (object->tsg && object->tsg->handle == object->handle) {
		sim_gpu_remove_tsg(object->gpu, object->tsg);
		kfree(object->tsg);
	}
	kfree(object);
	sim_nr_objects--;
}

static u32 insert(struct sim_client *client, u32 parent, u32 *handle, u32 class, struct sim_object **ret)
{
	struct sim_object *object;

	if (!*handle)
		*handle = ++last_handle;
	if (*handle == client->handle || *handle == parent || sim_object(client, *handle))
		return NV_ERR_INSERT_DUPLICATE_NAME;
	object = kzalloc(sizeof(*object), GFP_KERNEL);
	if (!object)
		return NV_ERR_NO_MEMORY;
	object->handle = *handle;
	object->parent = parent;
	object->class = class;
	object->gpu = -1;
	if (xa_err(xa_store(&client->objects, *handle, object, GFP_KERNEL))) {
		kfree(object);
		return NV_ERR_NO_MEMORY;
	}
	sim_nr_objects++;
	*ret = object;
	return NV_OK;
}

static u32 alloc_client(struct sim_file *file, u32 *handle)
{
	struct sim_client *client = kzalloc(sizeof(*client), GFP_KERNEL);

	if (!client)
		return NV_ERR_NO_MEMORY;
	xa_init(&client->objects);
	client->handle = ++last_client;
	client->owner = file->control ?: file;
	list_add(&client->node, &clients);
	sim_nr_clients++;
	*handle = client->handle;
	return NV_OK;
}

/* alloc_free.c:serverAllocApiCopyOut: where the parameters cannot be written back RM says so, and what it made stays. */
static u32 write_back(const struct sim_file *file, u64 params)
{
	u32 first;

	if (!params || (!sim_copy_in(file, &first, params, sizeof(first)) &&
			!sim_copy_out(file, params, &first, sizeof(first))))
		return NV_OK;
	return NV_ERR_INVALID_ADDRESS;
}

static u32 alloc(struct sim_file *file, u32 root, u32 parent, u32 *handle, u32 class, u64 params)
{
	struct sim_client *client;
	struct sim_object *object;
	u32 status;

	if (class == NV01_ROOT || class == NV01_ROOT_NON_PRIV || class == NV01_ROOT_CLIENT) {
		if (file->minor != NV_MINOR_CONTROL)
			return NV_ERR_INVALID_ARGUMENT;
		return alloc_client(file, handle) ?: write_back(file, params);
	}
	client = sim_client(root, file);
	if (!client)
		return NV_ERR_INVALID_CLIENT;
	parent = parent ?: root;
	status = insert(client, parent, handle, class, &object);
	if (status)
		return status;
	status = construct(file, client, object, params);
	if (!status)
		return write_back(file, params);
	destroy(client, object);
	return status;
}

static bool is_below(struct sim_client *client, struct sim_object *object, u32 handle)
{
	int depth;

	if (handle == client->handle)	/* whatever the chain of parents says */
		return true;
	/* a handle can be given out again below what hung from it: then the chain of parents is a ring */
	for (depth = 0; object && depth < 32; depth++, object = sim_object(client, object->parent)) {
		if (object->handle == handle || object->parent == handle || (object->vaspace && object->vaspace == handle) ||
		    (object->userd && object->userd == handle))
			return true;
	}
	return false;
}

static void destroy_below(struct sim_client *client, u32 handle)
{
	struct sim_object *object;
	unsigned long index;

	xa_for_each(&client->objects, index, object)
		object->doomed = is_below(client, object, handle);
	xa_for_each(&client->objects, index, object) {
		if (object->doomed && object->channel)
			destroy(client, object);
	}
	xa_for_each(&client->objects, index, object) {
		if (object->doomed)
			destroy(client, object);
	}
}

static void destroy_client(struct sim_client *client)
{
	destroy_below(client, client->handle);
	list_del(&client->node);
	xa_destroy(&client->objects);
	kfree(client);
	sim_nr_clients--;
}

u32 sim_free(const struct sim_file *file, struct nvos00 *arg)
{
	struct sim_client *client = sim_client(arg->root, file);

	if (!client)
		return NV_ERR_INVALID_CLIENT;
	if (arg->object == client->handle)
		destroy_client(client);
	else if (sim_object(client, arg->object))
		destroy_below(client, arg->object);
	/* the recorded driver answers OK for a handle that is not there */
	return NV_OK;
}

static u32 dup(struct sim_file *file, struct nvos55 *arg)
{
	struct sim_client *client = sim_client(arg->client, file), *from = sim_client(arg->client_src, NULL);
	struct sim_object *source = from ? sim_object(from, arg->object_src) : NULL, *object;
	u32 status;

	if (!client)
		return NV_ERR_INVALID_CLIENT;
	if (!source)
		return NV_ERR_OBJECT_NOT_FOUND;
	status = insert(client, arg->parent, &arg->object, source->class, &object);
	if (status)
		return status;
	object->gpu = source->gpu;
	object->mem = source->mem;
	if (object->mem)
		object->mem->refs++;
	return NV_OK;
}

static u32 vid_heap(struct sim_file *file, struct nvos32 *arg)
{
	u32 *handle = (u32 *)(arg->data + 4), *flags = (u32 *)(arg->data + 12), *attr = (u32 *)(arg->data + 16);
	struct sim_client *client = sim_client(arg->root, file);
	struct nvos00 free = { arg->root, arg->parent, *handle };
	struct sim_object *object;
	u32 status, class;

	if (!client)
		return NV_ERR_INVALID_CLIENT;
	arg->total = sim_memory_total();
	arg->free = sim_memory_free(0);
	if (arg->function == NVOS32_FUNCTION_INFO)
		return NV_OK;
	if (arg->function == NVOS32_FUNCTION_FREE)
		return sim_free(file, &free);
	if (arg->function != NVOS32_FUNCTION_ALLOC_SIZE)
		return NV_ERR_NOT_SUPPORTED;
	class = *flags & NVOS32_ALLOC_FLAGS_VIRTUAL ? 0x50a0 :
		NVOS32_ATTR_LOCATION(*attr) == NVOS32_ATTR_LOCATION_VIDMEM ? NV01_MEMORY_LOCAL_USER : 0x3e;
	status = insert(client, arg->parent, handle, class, &object);
	if (status)
		return status;
	object->gpu = sim_object(client, arg->parent) ? sim_object(client, arg->parent)->gpu : -1;
	status = class == NV01_MEMORY_LOCAL_USER ? alloc_mem(object, (u64 *)(arg->data + 48)) : NV_OK;
	if (status)
		destroy(client, object);
	return status;
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

/* nv_uvm_interface.c: duplicates of memory in a client that is UVM's own, of which only the memory is kept here. */
static DEFINE_XARRAY_ALLOC1(held);

u32 nvUvmInterfaceDupMemory(void *device, u32 client, u32 memory, u32 *made, void *info);
u32 nvUvmInterfaceDupMemory(void *device, u32 client, u32 memory, u32 *made, void *info)
{
	struct sim_object *object;
	u32 status = NV_ERR_OBJECT_NOT_FOUND;

	mutex_lock(&sim_lock);
	object = sim_client(client, NULL) ? sim_object(sim_client(client, NULL), memory) : NULL;
	if (object && object->mem) {
		status = xa_alloc(&held, made, object->mem, xa_limit_32b, GFP_KERNEL) ? NV_ERR_NO_MEMORY : NV_OK;
		object->mem->refs += !status;
	}
	mutex_unlock(&sim_lock);
	return status;
}
EXPORT_SYMBOL(nvUvmInterfaceDupMemory);

u32 nvUvmInterfaceFreeDupedHandle(void *device, u32 handle);
u32 nvUvmInterfaceFreeDupedHandle(void *device, u32 handle)
{
	mutex_lock(&sim_lock);
	mem_put(xa_erase(&held, handle));
	mutex_unlock(&sim_lock);
	return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceFreeDupedHandle);

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
		if (size == sizeof(*wide))
			wide->status = alloc(file, wide->root, wide->parent, &wide->object, wide->class, wide->params);
		else if (size == sizeof(*narrow))
			narrow->status = alloc(file, narrow->root, narrow->parent, &narrow->object, narrow->class,
					       narrow->params);
		else
			return NV_ERR_INVALID_ARGUMENT;
		return NV_OK;
	case NV_ESC_RM_ALLOC_OBJECT:
		if (size != sizeof(*bare))
			return NV_ERR_INVALID_ARGUMENT;
		bare->status = alloc(file, bare->root, bare->parent, &bare->object, bare->class, 0);
		return NV_OK;
	case NV_ESC_RM_ALLOC_MEMORY:
		if (size != sizeof(*memory))
			return NV_ERR_INVALID_ARGUMENT;
		/* _rmAllocMemoryLocalUser: all of the card's memory, for an administrator */
		if (memory->class == NV01_MEMORY_LOCAL_USER)
			memory->class = NV01_MEMORY_LOCAL_PHYSICAL;
		memory->status = alloc(file, memory->root, memory->parent, &memory->object, memory->class, 0);
		return NV_OK;
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
		((struct nvos55 *)data)->status = dup(file, data);
		return NV_OK;
	case NV_ESC_RM_VID_HEAP_CONTROL:
		if (size != sizeof(struct nvos32))
			return NV_ERR_INVALID_ARGUMENT;
		((struct nvos32 *)data)->status = vid_heap(file, data);
		return NV_OK;
	case SIM_ESC_SUBMIT:
		return size == sizeof(struct sim_submit) ? submit(file, data) : NV_ERR_INVALID_ARGUMENT;
	case SIM_ESC_QUERY:
		return size == sizeof(struct sim_query) ? query(file, data) : NV_ERR_INVALID_ARGUMENT;
	/* answered, without effect: mappings, events, versions, card lists */
	case 0x35: case 0x41: case 0x4e: case 0x4f: case 0x52: case 0x54: case 0x57: case 0x58: case 0x59: case 0x5e:
	case 200: case 206: case 207: case 210: case 212: case 213: case 214: case 215: case 218:
		return NV_OK;
	}
	return NV_ERR_INVALID_ARGUMENT;
}

u32 sim_escape(struct sim_file *file, u32 nr, void *data, u32 size)
{
	u32 status;

	if (READ_ONCE(linger_us))
		usleep_range(linger_us, linger_us + 10);
	mutex_lock(&sim_lock);
	status = dispatch(file, nr, data, size);
	mutex_unlock(&sim_lock);
	return status;
}

void sim_close(struct sim_file *file)
{
	struct sim_client *client, *next;

	mutex_lock(&sim_lock);
	list_for_each_entry_safe(client, next, &clients, node) {
		if (client->owner == file)
			destroy_client(client);
	}
	mutex_unlock(&sim_lock);
}
