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

#define UVM_INITIALIZE 0x30000001
/* The test bed's own: map memory of a client {client, memory}, and unmap it again. */
#define SIM_UVM_MAP 0x5101
#define SIM_UVM_UNMAP 0x5102

u32 nvUvmInterfaceDupMemory(void *device, u32 client, u32 memory, u32 *made, void *info);
u32 nvUvmInterfaceFreeDupedHandle(void *device, u32 handle);

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

struct uvm_va_space {
	u64 flags;
	u32 held;	/* one at a time is enough */
};

u32 uvm_va_space_create(struct address_space *mapping, struct uvm_va_space **where, u64 flags);
noinline u32 uvm_va_space_create(struct address_space *mapping, struct uvm_va_space **where, u64 flags)
{
	*where = kzalloc(sizeof(**where), GFP_KERNEL);
	if (!*where)
		return 0x51;
	(*where)->flags = flags;
	init_flags = flags;
	return 0;
}

static long uvm_unlocked_ioctl_entry(struct file *filp, unsigned int cmd, unsigned long arg)
{
	struct uvm_va_space *space = filp->private_data;
	u32 memory[2];
	u64 flags;

	if (cmd == SIM_UVM_MAP && space && !space->held) {
		if (copy_from_user(memory, (void __user *)arg, sizeof(memory)))
			return -EFAULT;
		return nvUvmInterfaceDupMemory(NULL, memory[0], memory[1], &space->held, NULL) ? -EINVAL : 0;
	}
	if (cmd == SIM_UVM_UNMAP && space && space->held) {
		nvUvmInterfaceFreeDupedHandle(NULL, space->held);
		space->held = 0;
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

	if (space && space->held)
		nvUvmInterfaceFreeDupedHandle(NULL, space->held);
	kfree(space);
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
