// SPDX-License-Identifier: GPL-2.0
/*
 * uvm.c - /dev/nvidia-uvm as far as recorded traces and managed memory need it: managed ranges are born in mmap and end
 * with their mapping, under the names that the real one's functions have. Every other call answers OK and does nothing.
 */
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/version.h>

#include "sim.h"

#define UVM_INITIALIZE 0x30000001
/*
 * The test bed's own numbers: map memory of a client, and unmap the last of what is mapped; register an address space or
 * a channel of a client, and end the last registration of a channel.
 */
#define SIM_UVM_MAP 0x5101
#define SIM_UVM_UNMAP 0x5102
#define SIM_UVM_REGISTER_SPACE 0x5103
#define SIM_UVM_REGISTER_CHANNEL 0x5104
#define SIM_UVM_UNREGISTER_CHANNEL 0x5105
#define HELD_MAX 4096

struct sim_uvm_map {	/* begins as UVM_MAP_EXTERNAL_ALLOCATION_PARAMS does */
	u64 base, length;
	u32 client, memory;
	u64 cards;	/* how many it is mapped for, each by a duplicate of its own */
};

u32 nvUvmInterfaceDupMemory(void *device, u32 client, u32 memory, u32 *made, struct nv_uvm_memory_info *info);
u32 nvUvmInterfaceFreeDupedHandle(void *device, u32 handle);
u32 nvUvmInterfaceDupAddressSpace(void *device, u32 client, u32 handle, void **space, void *info);
u32 nvUvmInterfaceRetainChannel(void *space, u32 client, u32 handle, void **retained, void *info);
void nvUvmInterfaceReleaseChannel(void *retained);
void nvUvmInterfaceAddressSpaceDestroy(void *space);

/* What the last file was initialised with, and what is mapped, in bytes; for tests. */
static unsigned long init_flags;
module_param(init_flags, ulong, 0444);
static atomic_long_t mapped;

static int mapped_get(char *buffer, const struct kernel_param *param)
{
	return sprintf(buffer, "%ld\n", atomic_long_read(&mapped));
}

static const struct kernel_param_ops mapped_ops = { .get = mapped_get };
module_param_cb(mapped, &mapped_ops, NULL, 0444);

static DEFINE_MUTEX(spaces_lock);	/* protects what calls add to a space */

struct uvm_va_space {
	u64 flags;
	u32 nr_held, nr_tables, nr_channels;
	void *registered;	/* the address space */
	void *channels[HELD_MAX];
	struct sim_mem *tables[HELD_MAX];
	struct {
		u32 handle;
		struct sim_mem *tables;
	} held[HELD_MAX];
};

u32 uvm_va_space_create(struct address_space *mapping, struct uvm_va_space **where, u64 flags);
noinline u32 uvm_va_space_create(struct address_space *mapping, struct uvm_va_space **where, u64 flags)
{
	*where = kvzalloc(sizeof(**where), GFP_KERNEL);
	if (!*where)
		return 0x51;
	(*where)->flags = flags;
	init_flags = flags;
	return 0;
}

/* Page tables, of 4 KiB: the one of each level that a range falls into, and more where it is longer. */
static struct sim_mem *take_tables(u64 base, u64 length)
{
	static const u8 bits[] = { 21, 29, 38, 47 };
	u64 last = base + max(length, 1ull) - 1, nr = 0;
	int i;

	for (i = 0; i < ARRAY_SIZE(bits); i++)
		nr += (last >> bits[i]) - (base >> bits[i]) + 1;
	return last < base ? NULL : sim_uvm_take(nr << 12);
}

static u32 map_tables(const u64 *params, struct file *filp)
{
	struct uvm_va_space *space = filp->private_data;

	if (space->nr_tables == HELD_MAX)
		return NV_ERR_NO_MEMORY;
	space->tables[space->nr_tables] = take_tables(params[0], params[1]);
	return space->tables[space->nr_tables++] ? NV_OK : NV_ERR_NO_MEMORY;
}

u32 uvm_api_map_dynamic_parallelism_region(const u64 *params, struct file *filp);
noinline u32 uvm_api_map_dynamic_parallelism_region(const u64 *params, struct file *filp)
{
	return map_tables(params, filp);
}

u32 uvm_api_map_external_sparse(const u64 *params, struct file *filp);
noinline u32 uvm_api_map_external_sparse(const u64 *params, struct file *filp)
{
	return map_tables(params, filp);
}

u32 uvm_api_alloc_semaphore_pool(const u64 *params, struct file *filp);
noinline u32 uvm_api_alloc_semaphore_pool(const u64 *params, struct file *filp)
{
	return map_tables(params, filp);
}

static void unmap_last(struct uvm_va_space *space)
{
	space->nr_held--;
	nvUvmInterfaceFreeDupedHandle(NULL, space->held[space->nr_held].handle);
	sim_uvm_give_back(space->held[space->nr_held].tables);
}

static u32 map_for_card(struct uvm_va_space *space, const struct sim_uvm_map *params)
{
	struct nv_uvm_memory_info info;
	u32 status, handle;

	status = nvUvmInterfaceDupMemory(NULL, params->client, params->memory, &handle, &info);
	if (status)
		return status;
	mutex_lock(&spaces_lock);
	if (space->nr_held < HELD_MAX) {
		space->held[space->nr_held].handle = handle;
		space->held[space->nr_held].tables = take_tables(params->base, params->length);
		space->nr_held++;
	} else {
		status = NV_ERR_NO_MEMORY;
	}
	mutex_unlock(&spaces_lock);
	if (status)
		nvUvmInterfaceFreeDupedHandle(NULL, handle);
	return status;
}

u32 uvm_api_map_external_allocation(struct sim_uvm_map *params, struct file *filp);
noinline u32 uvm_api_map_external_allocation(struct sim_uvm_map *params, struct file *filp)
{
	u32 status = NV_OK, i;

	if (!params->cards)
		return NV_ERR_INVALID_ARGUMENT;
	for (i = 0; i < params->cards && status == NV_OK; i++)
		status = map_for_card(filp->private_data, params);
	if (status != NV_OK)	/* what this call has mapped */
		for (i--; i; i--)
			unmap_last(filp->private_data);
	return status;
}

/* By UVM's own numbers; only what begins with base and length is looked at. */
static u32 call_by_number(struct file *filp, unsigned int cmd, const u64 *params)
{
	switch (cmd) {
	case 65:
		return uvm_api_map_dynamic_parallelism_region(params, filp);
	case 68:
		return uvm_api_alloc_semaphore_pool(params, filp);
	case 74:
		return uvm_api_map_external_sparse(params, filp);
	}
	return NV_OK;
}

static u32 register_channel(struct uvm_va_space *space, u32 client, u32 channel)
{
	void *retained;
	u32 status;

	if (!space || space->nr_channels == HELD_MAX)
		return NV_ERR_NO_MEMORY;
	status = nvUvmInterfaceRetainChannel(NULL, client, channel, &retained, NULL);
	mutex_lock(&spaces_lock);
	if (!status)
		space->channels[space->nr_channels++] = retained;
	mutex_unlock(&spaces_lock);
	return status;
}

static u32 register_space(struct uvm_va_space *space, u32 client, u32 handle)
{
	void *made;
	u32 status;

	if (!space || space->registered)
		return NV_ERR_INVALID_STATE;
	status = nvUvmInterfaceDupAddressSpace(NULL, client, handle, &made, NULL);
	space->registered = status ? NULL : made;
	return status;
}

static void unregister_last(struct uvm_va_space *space)
{
	nvUvmInterfaceReleaseChannel(space->channels[--space->nr_channels]);
}

static long register_of_client(struct uvm_va_space *space, unsigned int cmd, unsigned long arg)
{
	u32 of[2], status;	/* client, handle */

	if (copy_from_user(of, (void __user *)arg, sizeof(of)))
		return -EFAULT;
	status = cmd == SIM_UVM_REGISTER_SPACE ? register_space(space, of[0], of[1]) :
						 register_channel(space, of[0], of[1]);
	return status ? -EINVAL : 0;
}

static long uvm_unlocked_ioctl_entry(struct file *filp, unsigned int cmd, unsigned long arg)
{
	struct uvm_va_space *space = filp->private_data;
	struct sim_uvm_map map;
	u64 flags, range[2];

	if (cmd == SIM_UVM_MAP && space) {
		if (copy_from_user(&map, (void __user *)arg, sizeof(map)))
			return -EFAULT;
		return uvm_api_map_external_allocation(&map, filp) ? -EINVAL : 0;
	}
	if (cmd == SIM_UVM_REGISTER_SPACE || cmd == SIM_UVM_REGISTER_CHANNEL)
		return register_of_client(space, cmd, arg);
	if (cmd == SIM_UVM_UNREGISTER_CHANNEL && space && space->nr_channels)
		unregister_last(space);
	if (cmd == SIM_UVM_UNMAP && space && space->nr_held)
		unmap_last(space);
	if ((cmd == 65 || cmd == 68 || cmd == 74) && space) {
		if (copy_from_user(range, (void __user *)arg, sizeof(range)))
			return -EFAULT;
		return call_by_number(filp, cmd, range) ? -EINVAL : 0;
	}
	if (cmd != UVM_INITIALIZE || filp->private_data)
		return 0;
	if (copy_from_user(&flags, (void __user *)arg, sizeof(flags)))
		return -EFAULT;
	if (!uvm_va_space_create(filp->f_mapping, &space, flags))
		filp->private_data = space;
	return 0;
}

static noinline void uvm_vm_close_managed_entry(struct vm_area_struct *vma)
{
	sim_uvm_wait();
	atomic_long_sub(vma->vm_end - vma->vm_start, &mapped);
}

static const struct vm_operations_struct uvm_vm_ops_managed = { .close = uvm_vm_close_managed_entry };

static noinline int uvm_mmap_entry(struct file *filp, struct vm_area_struct *vma)
{
	const unsigned long needed = VM_SHARED | VM_READ | VM_WRITE;

	if (!filp->private_data)
		return -EBADFD;
	if (vma->vm_start != vma->vm_pgoff << PAGE_SHIFT || (vma->vm_flags & needed) != needed)
		return -EINVAL;
	/* as the real one: so a mapping never becomes part of a neighbour, which would bypass this function */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
	vm_flags_set(vma, VM_MIXEDMAP | VM_DONTEXPAND | VM_DONTCOPY);
#else
	vma->vm_flags |= VM_MIXEDMAP | VM_DONTEXPAND | VM_DONTCOPY;
#endif
	vma->vm_ops = &uvm_vm_ops_managed;
	atomic_long_add(vma->vm_end - vma->vm_start, &mapped);
	return 0;
}

static int uvm_open_entry(struct inode *inode, struct file *filp)
{
	filp->private_data = NULL;	/* misc_open() leaves the device there */
	return 0;
}

static noinline int uvm_release_entry(struct inode *inode, struct file *filp)
{
	struct uvm_va_space *space = filp->private_data;

	while (space && space->nr_held)
		unmap_last(space);
	while (space && space->nr_channels)
		unregister_last(space);
	if (space && space->registered)
		nvUvmInterfaceAddressSpaceDestroy(space->registered);
	if (space && space->nr_tables)
		sim_uvm_wait();
	while (space && space->nr_tables)
		sim_uvm_give_back(space->tables[--space->nr_tables]);
	kvfree(space);
	return 0;
}

static const struct file_operations uvm_fops = {
	.owner = THIS_MODULE,
	.open = uvm_open_entry,
	.release = uvm_release_entry,
	.unlocked_ioctl = uvm_unlocked_ioctl_entry,
	.mmap = uvm_mmap_entry,
};

static struct miscdevice uvm = { .minor = MISC_DYNAMIC_MINOR, .name = "nvidia-uvm", .fops = &uvm_fops, .mode = 0666 };

module_misc_device(uvm);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("qgpu test bed: a stand-in for nvidia-uvm");
