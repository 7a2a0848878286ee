// SPDX-License-Identifier: GPL-2.0
/*
 * dev.c - the character devices, as nvidia.ko of 545 and later has them: two of them on major 195, one writable
 * table of operations for both, an ioctl that goes by number and size, and rm_ioctl() on the kernel's copy.
 */
#include <linux/cdev.h>
#include <linux/delay.h>
#include <linux/file.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "sim.h"

char *sim_version = "580.105.08";
module_param_named(version, sim_version, charp, 0444);
int sim_nr_gpus = 1;
module_param_named(gpus, sim_nr_gpus, int, 0644);	/* cards come and go */
int sim_major;
const struct file_operations *sim_fops;

/* How long a release lingers when everything of its file is gone. */
static u32 close_late_us;
module_param(close_late_us, uint, 0644);

static int nvidia_open(struct inode *inode, struct file *filp)
{
	struct sim_file *file;

	if (iminor(inode) != NV_MINOR_CONTROL && iminor(inode) >= sim_nr_gpus)
		return -ENODEV;
	file = kzalloc(sizeof(*file), GFP_KERNEL);
	if (!file)
		return -ENOMEM;
	file->minor = iminor(inode);
	filp->private_data = file;
	return 0;
}

static int nvidia_close(struct inode *inode, struct file *filp)
{
	struct sim_file *file = filp->private_data;

	sim_close(file);
	if (READ_ONCE(close_late_us))
		usleep_range(close_late_us, close_late_us + 10);
	if (file->control_filp)
		fput(file->control_filp);
	kfree(file);
	return 0;
}

static int register_fd(struct sim_file *file, const u32 *fd)
{
	struct file *filp = fget(*fd);
	struct sim_file *control;

	if (!filp)
		return -EINVAL;
	control = filp->private_data;
	if (MAJOR(file_inode(filp)->i_rdev) != NV_MAJOR_DEVICE_NUMBER || filp->f_op != sim_fops ||
	    control->minor != NV_MINOR_CONTROL || file->control) {
		fput(filp);
		return -EINVAL;
	}
	file->control = control;
	file->control_filp = filp;
	return 0;
}

/*
 * The name, arguments and order are those of osapi.c:rm_ioctl, which qgpu.ko probes. notrace, for the real one is
 * in the part of the driver that is built without fentry: a probe on it is a breakpoint, not ftrace's call.
 */
u32 rm_ioctl(void *stack, void *nv_state, struct sim_file *file, u32 nr, void *data, u32 size);
noinline notrace u32 rm_ioctl(void *stack, void *nv_state, struct sim_file *file, u32 nr, void *data, u32 size)
{
	barrier();
	if (nr == NV_ESC_REGISTER_FD)
		return size == sizeof(u32) ? register_fd(file, data) : -EINVAL;
	return sim_escape(file, nr, data, size);
}

static long nvidia_unlocked_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
	struct sim_file *file = filp->private_data;
	u32 nr = _IOC_NR(cmd), size = _IOC_SIZE(cmd);
	void *data;
	long ret = 0;

	if (nr == NV_ESC_IOCTL_XFER_CMD) {
		struct nv_xfer xfer;

		if (size != sizeof(xfer))
			return -EINVAL;
		if (copy_from_user(&xfer, (void __user *)arg, sizeof(xfer)))
			return -EFAULT;
		if (xfer.size > NV_IOCTL_XFER_MAX_SIZE)
			return -EINVAL;
		nr = xfer.cmd;
		size = xfer.size;
		arg = xfer.ptr;
	}
	data = kvmalloc(size ?: 1, GFP_KERNEL);
	if (!data)
		return -ENOMEM;
	if (copy_from_user(data, (void __user *)arg, size)) {
		ret = -EFAULT;
		goto out;
	}
	if (rm_ioctl(NULL, NULL, file, nr, data, size))
		ret = -EINVAL;
	if (copy_to_user((void __user *)arg, data, size))
		ret = -EFAULT;
out:
	kvfree(data);
	return ret;
}

static int nvidia_mmap(struct file *filp, struct vm_area_struct *vma)
{
	return 0;
}

static struct file_operations nvidia_fops = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = nvidia_unlocked_ioctl,
	.compat_ioctl = nvidia_unlocked_ioctl,
	.mmap = nvidia_mmap,
	.open = nvidia_open,
	.release = nvidia_close,
};

/* /proc/driver/nvidia/sim: totals, and one line per TSG (client handle run_ns starts resident). */
static int show(struct seq_file *seq, void *unused)
{
	mutex_lock(&sim_lock);
	seq_printf(seq, "clients %u objects %u free %llu total %llu waits %u strays %u ", sim_nr_clients, sim_nr_objects,
		   sim_memory_free(0), sim_memory_total(), sim_nr_waits, sim_nr_strays);
	seq_printf(seq, "sleeps %u asleep_off %u asleep_calls %u\n", sim_nr_sleeps, sim_asleep_off, sim_asleep_calls);
	sim_gpu_show(seq);
	mutex_unlock(&sim_lock);
	return 0;
}

static struct cdev gpus, control;
static struct proc_dir_entry *proc;

static int __init nvidia_init(void)
{
	int ret;

	if (sscanf(sim_version, "%d.", &sim_major) != 1 || sim_nr_gpus < 0 || sim_nr_gpus > SIM_GPUS_MAX)
		return -EINVAL;
	sim_fops = &nvidia_fops;
	sim_gpu_init();
	sim_pm_init();
	proc = proc_mkdir("driver/nvidia", NULL);
	if (!proc || !proc_create_single("sim", 0444, proc, show)) {
		ret = -ENOMEM;
		goto err_gpu;
	}
	sim_fault_init(proc);
	sim_pm_proc(proc);
	ret = register_chrdev_region(MKDEV(NV_MAJOR_DEVICE_NUMBER, 0), 256, "nvidia");
	if (ret)
		goto err_gpu;
	cdev_init(&gpus, &nvidia_fops);
	cdev_init(&control, &nvidia_fops);
	ret = cdev_add(&gpus, MKDEV(NV_MAJOR_DEVICE_NUMBER, 0), 248);
	if (ret)
		goto err_region;
	ret = cdev_add(&control, MKDEV(NV_MAJOR_DEVICE_NUMBER, NV_MINOR_CONTROL), 1);
	if (ret)
		goto err_gpus;
	return 0;
err_gpus:
	cdev_del(&gpus);
err_region:
	unregister_chrdev_region(MKDEV(NV_MAJOR_DEVICE_NUMBER, 0), 256);
err_gpu:
	proc_remove(proc);
	sim_pm_uninit();
	sim_gpu_uninit();
	return ret;
}

static void __exit nvidia_exit(void)
{
	cdev_del(&control);
	cdev_del(&gpus);
	unregister_chrdev_region(MKDEV(NV_MAJOR_DEVICE_NUMBER, 0), 256);
	proc_remove(proc);
	sim_pm_uninit();
	sim_gpu_uninit();
}

module_init(nvidia_init);
module_exit(nvidia_exit);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_DESCRIPTION("qgpu test bed: a simulated NVIDIA driver");
