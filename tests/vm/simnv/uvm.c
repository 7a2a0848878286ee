// SPDX-License-Identifier: GPL-2.0
/* uvm.c - /dev/nvidia-uvm as far as recorded traces need it: a device that answers OK and does nothing. */
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/module.h>

static long uvm_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
	return 0;
}

static int uvm_mmap(struct file *filp, struct vm_area_struct *vma)
{
	return 0;
}

static const struct file_operations uvm_fops = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = uvm_ioctl,
	.mmap = uvm_mmap,
};

static struct miscdevice uvm = { .minor = MISC_DYNAMIC_MINOR, .name = "nvidia-uvm", .fops = &uvm_fops, .mode = 0666 };

module_misc_device(uvm);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("qgpu test bed: a stand-in for nvidia-uvm");
