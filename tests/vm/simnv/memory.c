// SPDX-License-Identifier: GPL-2.0
/*
 * memory.c - what lies on the cards: memory with a handle, in all the ways it is asked for, named again and kept, and
 * what has none: page tables.
 */
#include <linux/file.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/wait_bit.h>

#include "sim.h"

#define PAGE_64K		0x10000ull
#define PAGE_2M			0x200000ull
#define PAGES_HUGE		3
#define TABLE			0x1000ull	/* of the smallest pages: */
#define COVERED			0x200000ull
#define SIM_FABRIC_MEMORY_AT	40	/* SDK/class/cl00f8.h: map.hVidMem */

static u64 used[SIM_GPUS_MAX];
static u32 fb_mib = 143771;
module_param(fb_mib, uint, 0444);

/* Where UVM duplicates or frees something, the uvm_held-th task since that was set waits, and so do later ones. */
static u32 uvm_held;
static atomic_t uvm_came, uvm_waiting;

static int uvm_held_set(const char *value, const struct kernel_param *param)
{
	int ret;

	atomic_set(&uvm_came, 0);
	ret = param_set_uint(value, param);
	wake_up_var(&uvm_held);
	return ret;
}

static const struct kernel_param_ops uvm_held_ops = { .set = uvm_held_set, .get = param_get_uint };
module_param_cb(uvm_held, &uvm_held_ops, &uvm_held, 0644);

static int uvm_waiting_get(char *buffer, const struct kernel_param *param)
{
	return sprintf(buffer, "%d\n", atomic_read(&uvm_waiting));
}

static const struct kernel_param_ops uvm_waiting_ops = { .get = uvm_waiting_get };
module_param_cb(uvm_waiting, &uvm_waiting_ops, NULL, 0444);

/* ... and where it has duplicated something, every task while this is set. */
static u32 uvm_late;

static int uvm_late_set(const char *value, const struct kernel_param *param)
{
	int ret = param_set_uint(value, param);

	wake_up_var(&uvm_late);
	return ret;
}

static const struct kernel_param_ops uvm_late_ops = { .set = uvm_late_set, .get = param_get_uint };
module_param_cb(uvm_late, &uvm_late_ops, &uvm_late, 0644);

static void linger_after_dup(void)
{
	if (!READ_ONCE(uvm_late))
		return;
	atomic_add(2, &uvm_waiting);
	wait_var_event(&uvm_late, !READ_ONCE(uvm_late));
	atomic_sub(2, &uvm_waiting);
}

void sim_uvm_wait(void)
{
	u32 nr = atomic_inc_return(&uvm_came), held = READ_ONCE(uvm_held);

	if (!held || nr < held)
		return;
	atomic_inc(&uvm_waiting);
	wait_var_event(&uvm_held, !READ_ONCE(uvm_held));
	atomic_dec(&uvm_waiting);
}
EXPORT_SYMBOL(sim_uvm_wait);

u64 sim_memory_total(void)
{
	return (u64)fb_mib << 20;
}

u64 sim_memory_free(int gpu)
{
	return sim_memory_total() - used[gpu];
}

struct sim_mem *sim_mem_new(int gpu, u64 size)
{
	struct sim_mem *mem;

	if (size > sim_memory_free(gpu))
		return NULL;
	mem = kzalloc(sizeof(*mem), GFP_KERNEL);
	if (!mem)
		return NULL;
	mem->size = size;
	mem->refs = 1;
	mem->gpu = gpu;
	used[gpu] += size;
	return mem;
}

void sim_mem_put(struct sim_mem *mem)
{
	if (!mem || --mem->refs)
		return;
	used[mem->gpu] -= mem->size;
	kfree(mem);
}

/* Sizes are rounded up to the pages that are asked for: attr. */
static u32 alloc_mem(struct sim_object *object, u32 attr, u64 *size)
{
	u64 page = (attr >> 23 & 3) == PAGES_HUGE ? PAGE_2M : PAGE_64K;

	*size = (*size + page - 1) & ~(page - 1);
	if (object->gpu < 0)
		return NV_ERR_INVALID_OBJECT_PARENT;
	object->mem = *size ? sim_mem_new(object->gpu, *size) : NULL;
	return object->mem ? NV_OK : NV_ERR_NO_MEMORY;
}

/* gpu_vaspace.c:gvaspaceAlloc */
static u32 alloc_space(struct sim_object *object, u32 flags, u64 size)
{
	if (!(flags & NVOS32_ALLOC_FLAGS_SPARSE) &&
	    flags & (NVOS32_ALLOC_FLAGS_LAZY | NVOS32_ALLOC_FLAGS_EXTERNALLY_MANAGED))
		return NV_OK;
	if (object->gpu < 0)
		return NV_ERR_INVALID_OBJECT_PARENT;
	object->mem = sim_mem_new(object->gpu, TABLE * (2 + size / COVERED));
	return object->mem ? NV_OK : NV_ERR_NO_MEMORY;
}

static size_t params_size(void)
{
	return sim_major >= 545 ? 128 : 120;
}

u32 sim_alloc_video(const struct sim_file *file, struct sim_object *object, u64 params)
{
	u8 block[128] = {};
	u64 *size = (u64 *)(block + NV_MEMORY_PARAMS_SIZE_AT);
	u32 status;

	if (sim_copy_in(file, block, params, params_size()))
		return NV_ERR_INVALID_ARGUMENT;
	status = alloc_mem(object, *(u32 *)(block + 24), size);
	if (status)
		return status;
	*(u64 *)(block + 88) = *size - 1;
	sim_copy_out(file, params, block, params_size());
	return NV_OK;
}

u32 sim_alloc_space(const struct sim_file *file, struct sim_object *object, u64 params)
{
	u8 block[128] = {};

	if (sim_copy_in(file, block, params, params_size()))
		return NV_ERR_INVALID_ARGUMENT;
	return alloc_space(object, *(u32 *)(block + NV_MEMORY_PARAMS_FLAGS_AT),
			   *(u64 *)(block + NV_MEMORY_PARAMS_SIZE_AT));
}

/* RM_MAP_MEMORY_DMA: some more tables, which stay for as long as the client does. */
u32 sim_map_dma(const struct sim_file *file, u32 *data, u32 size)
{
	struct sim_client *client;
	u32 *status = data + (size - 8) / sizeof(*data);

	if (size != (sim_major >= 580 ? 64 : 56))
		return NV_ERR_INVALID_ARGUMENT;
	client = sim_client(data[0], file);
	if (client)
		*status = sim_object(client, data[3]) ? NV_OK : NV_ERR_OBJECT_NOT_FOUND;
	else
		*status = NV_ERR_INVALID_CLIENT;
	if (!*status && !client->tables) {
		client->tables = sim_mem_new(0, 0);
		if (!client->tables)
			*status = NV_ERR_NO_MEMORY;
	}
	if (!*status && sim_memory_free(0) >= TABLE) {
		client->tables->size += TABLE;
		used[0] += TABLE;
	}
	return NV_OK;
}

u32 sim_heap(struct sim_file *file, struct nvos32 *arg)
{
	u32 *handle = (u32 *)(arg->data + 4), *flags = (u32 *)(arg->data + 12), *attr = (u32 *)(arg->data + 16);
	struct sim_client *client = sim_client(arg->root, file);
	struct nvos00 free = { arg->root, arg->parent, *handle };
	u64 *size = (u64 *)(arg->data + 48);
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
	class = *flags & NVOS32_ALLOC_FLAGS_VIRTUAL ? NV50_MEMORY_VIRTUAL :
		NVOS32_ATTR_LOCATION(*attr) == NVOS32_ATTR_LOCATION_VIDMEM ? NV01_MEMORY_LOCAL_USER : NV01_MEMORY_SYSTEM;
	status = sim_insert(client, arg->parent, handle, class, &object);
	if (status)
		return status;
	object->gpu = sim_object(client, arg->parent) ? sim_object(client, arg->parent)->gpu : -1;
	if (class == NV01_MEMORY_LOCAL_USER)
		status = alloc_mem(object, *attr, size);
	else if (class == NV50_MEMORY_VIRTUAL)
		status = alloc_space(object, *flags, *size);
	if (status)
		sim_destroy(client, object);
	return status;
}

/* sem_surf.c: memory that it is given has another handle in a client of RM's own, here for good. */
u32 sim_hold_memory(const struct sim_file *file, struct sim_client *client, u64 params)
{
	struct sim_object *object;
	u32 memory = 0;

	if (!params || sim_copy_in(file, &memory, params, sizeof(memory)))
		return NV_ERR_INVALID_ARGUMENT;
	object = sim_object(client, memory);
	if (!object)
		return NV_ERR_OBJECT_NOT_FOUND;
	return object->mem && sim_file_hold(client->owner, object->mem) ? NV_ERR_NO_MEMORY : NV_OK;
}

/* mem_fabric.c: the object keeps the memory that the parameters name; none: memory is attached later. */
u32 sim_put_on_fabric(const struct sim_file *file, struct sim_client *client, struct sim_object *object, u64 params)
{
	struct sim_object *source;
	u32 memory = 0;

	if (!params || sim_copy_in(file, &memory, params + SIM_FABRIC_MEMORY_AT, sizeof(memory)))
		return NV_ERR_INVALID_ARGUMENT;
	if (!memory)
		return NV_OK;
	source = sim_object(client, memory);
	if (!source || !source->mem || source == object)
		return NV_ERR_OBJECT_NOT_FOUND;
	object->mem = source->mem;
	object->mem->refs++;
	return NV_OK;
}

int sim_file_hold(struct sim_file *file, struct sim_mem *mem)
{
	if (file->nr_held == SIM_HELD_MAX)
		return -ENOSPC;
	mem->refs++;
	file->held[file->nr_held++] = mem;
	return 0;
}

void sim_file_drop(struct sim_file *file)
{
	while (file->nr_held)
		sim_mem_put(file->held[--file->nr_held]);
}

/* nv.c, which qgpu.ko probes */
struct sim_file *nv_get_file_private(s32 fd, u8 control, void **os_private);
noinline struct sim_file *nv_get_file_private(s32 fd, u8 control, void **os_private)
{
	struct file *filp = fget(fd);

	if (filp && filp->f_op == sim_fops) {
		*os_private = filp;
		return filp->private_data;
	}
	if (filp)
		fput(filp);
	return NULL;
}

/* rmobjexportimport.c: an exported object is the file's. Only the first of each call, which is enough. */
u32 sim_export(struct sim_client *client, s32 fd, u32 handle)
{
	struct sim_object *object = sim_object(client, handle);
	struct sim_file *to;
	void *filp;
	u32 status;

	if (object && object->class == NV01_MEMORY_SYSTEM && object->gpu >= 0 && !object->mem) {
		object->mem = sim_mem_new(object->gpu, 0);
		if (object->mem)
			object->mem->class = object->class;
	}
	if (!object || !object->mem)
		return NV_ERR_OBJECT_NOT_FOUND;
	to = nv_get_file_private(fd, true, &filp);
	if (!to)
		return NV_ERR_INVALID_ARGUMENT;
	status = sim_file_hold(to, object->mem) ? NV_ERR_NO_MEMORY : NV_OK;
	fput(filp);
	return status;
}

u32 sim_import(struct sim_client *client, s32 fd, u32 parent, u32 *handle)
{
	struct sim_object *object;
	struct sim_file *from;
	void *filp;
	u32 status, class;

	from = nv_get_file_private(fd, true, &filp);
	if (!from)
		return NV_ERR_INVALID_ARGUMENT;
	class = from->nr_held && from->held[0]->class ? from->held[0]->class : NV01_MEMORY_LOCAL_USER;
	status = from->nr_held ? sim_insert(client, parent, handle, class, &object) : NV_ERR_INVALID_ARGUMENT;
	if (!status) {
		object->mem = from->held[0];
		object->mem->refs++;
		object->gpu = object->mem->gpu;
	}
	fput(filp);
	return status;
}

/* nv_uvm_interface.c: duplicates of memory in a client that is UVM's own, of which only the memory is kept here. */
static DEFINE_XARRAY_ALLOC1(duplicates);

u32 nvUvmInterfaceDupMemory(void *device, u32 client, u32 memory, u32 *made, struct nv_uvm_memory_info *info);
u32 nvUvmInterfaceDupMemory(void *device, u32 client, u32 memory, u32 *made, struct nv_uvm_memory_info *info)
{
	struct sim_object *object;
	u32 status = NV_ERR_OBJECT_NOT_FOUND;

	sim_uvm_wait();
	mutex_lock(&sim_lock);
	object = sim_client(client, NULL) ? sim_object(sim_client(client, NULL), memory) : NULL;
	if (object && object->mem) {
		status = xa_alloc(&duplicates, made, object->mem, xa_limit_32b, GFP_KERNEL) ? NV_ERR_NO_MEMORY : NV_OK;
		object->mem->refs += !status;
		*info = (struct nv_uvm_memory_info){
			.sysmem = !!object->mem->class,
			.size = object->mem->size ?: PAGE_SIZE,
		};
	}
	mutex_unlock(&sim_lock);
	linger_after_dup();
	return status;
}
EXPORT_SYMBOL(nvUvmInterfaceDupMemory);

u32 nvUvmInterfaceFreeDupedHandle(void *device, u32 handle);
u32 nvUvmInterfaceFreeDupedHandle(void *device, u32 handle)
{
	mutex_lock(&sim_lock);
	sim_mem_put(xa_erase(&duplicates, handle));
	mutex_unlock(&sim_lock);
	return NV_OK;
}
EXPORT_SYMBOL(nvUvmInterfaceFreeDupedHandle);

/* As the real ones, as far as to find the object. */
static u32 look_up(u32 client, u32 handle)
{
	u32 status;

	mutex_lock(&sim_lock);
	status = sim_client(client, NULL) && sim_object(sim_client(client, NULL), handle) ? NV_OK : NV_ERR_OBJECT_NOT_FOUND;
	mutex_unlock(&sim_lock);
	return status;
}

u32 nvUvmInterfaceDupAddressSpace(void *device, u32 client, u32 handle, void **space, void *info);
u32 nvUvmInterfaceDupAddressSpace(void *device, u32 client, u32 handle, void **space, void *info)
{
	u32 status;

	sim_uvm_wait();
	status = look_up(client, handle);
	if (status)
		return status;
	*space = kmalloc(1, GFP_KERNEL);	/* a name that nothing else has */
	return *space ? NV_OK : NV_ERR_NO_MEMORY;
}
EXPORT_SYMBOL(nvUvmInterfaceDupAddressSpace);

void nvUvmInterfaceAddressSpaceDestroy(void *space);
void nvUvmInterfaceAddressSpaceDestroy(void *space)
{
	kfree(space);
}
EXPORT_SYMBOL(nvUvmInterfaceAddressSpaceDestroy);

u32 nvUvmInterfaceRetainChannel(void *space, u32 client, u32 handle, void **retained, void *info);
/* Keeps the TSG's memory, which a channel without a TSG has itself. */
u32 nvUvmInterfaceRetainChannel(void *space, u32 client, u32 handle, void **retained, void *info)
{
	struct sim_object *object, *above;
	u32 status = NV_ERR_OBJECT_NOT_FOUND;

	sim_uvm_wait();
	mutex_lock(&sim_lock);
	object = sim_client(client, NULL) ? sim_object(sim_client(client, NULL), handle) : NULL;
	if (object && object->channel) {
		above = object->mem ? object : sim_object(sim_client(client, NULL), object->parent);
		*retained = above->mem;
		above->mem->refs++;
		status = NV_OK;
	}
	mutex_unlock(&sim_lock);
	return status;
}
EXPORT_SYMBOL(nvUvmInterfaceRetainChannel);

void nvUvmInterfaceReleaseChannel(void *retained);
void nvUvmInterfaceReleaseChannel(void *retained)
{
	mutex_lock(&sim_lock);
	sim_mem_put(retained);
	mutex_unlock(&sim_lock);
}
EXPORT_SYMBOL(nvUvmInterfaceReleaseChannel);

/* UVM takes memory of the card without a handle (PMA): page tables, pieces for managed memory. */
struct sim_mem *sim_uvm_take(u64 size)
{
	struct sim_mem *mem;

	mutex_lock(&sim_lock);
	mem = sim_mem_new(0, size);
	mutex_unlock(&sim_lock);
	return mem;
}
EXPORT_SYMBOL(sim_uvm_take);

void sim_uvm_give_back(struct sim_mem *mem)
{
	mutex_lock(&sim_lock);
	sim_mem_put(mem);
	mutex_unlock(&sim_lock);
}
EXPORT_SYMBOL(sim_uvm_give_back);
