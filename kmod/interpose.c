// SPDX-License-Identifier: GPL-2.0
/*
 * interpose.c - replaces functions in the NVIDIA driver's file operations: how it enters, what each operation does, how
 * it leaves. file.c decides whose a file is, escape.c what a pod's call means, attach.c when to enter and leave.
 *
 * The module replaces the pointers inside the driver's own table, not the table. From 550.40.07 on RM compares
 * file->f_op with the table's address when a Device is allocated (nv.c:nv_match_dev_state), so a copy would break every
 * CUDA program. The table is not const (nv.c:nvidia_fops; nv-frontend.c:nv_frontend_fops before 545). Replacing
 * pointers in place also covers both character devices and every file that is already open.
 *
 * The pointers change one by one. release() is replaced first and restored last, so the module sees the end of every
 * file that it knows. Otherwise a missed file's address could belong to another file the next moment.
 *
 * Leaving is the delicate part: nothing pins this module while a task runs in a wrapper, and the driver may keep a task
 * for seconds. So leaving takes four steps in this order:
 *
 * 1. Write the driver's pointers back. A task may have loaded one of ours before, and not have entered it yet.
 * 2. synchronize_rcu_tasks() waits until every task has given up the CPU voluntarily or was in user space. A wrapper
 *    does neither before its first line has entered the SRCU section. So a task that loaded an old pointer is past that
 *    line now: inside the section, or already out of it.
 * 3. synchronize_srcu() waits for the tasks inside. All gates are open by then, so none of them waits for this module.
 * 4. Between leaving the section and returning to the driver's caller a task is still in this module's text, but does
 *    not give up the CPU voluntarily there either. A second synchronize_rcu_tasks() waits for that.
 *
 * (Where CONFIG_TASKS_RCU is not set, no task is preempted in the kernel; synchronize_rcu_tasks() is synchronize_rcu()
 * there, which gives the same guarantee.)
 */
#include <linux/err.h>
#include <linux/percpu.h>
#include <linux/rcupdate.h>
#include <linux/srcu.h>

#include "escape.h"
#include "file.h"
#include "interpose.h"
#include "pod.h"

static struct srcu_struct inside;	/* tasks in a wrapper */
static struct file_operations saved;	/* the driver's pointers; stable while a task is inside */
static DEFINE_PER_CPU(u64, calls);

static long handle_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
	struct qgpu_file *file = qgpu_file_of(filp);

	this_cpu_inc(calls);
	if (IS_ERR(file))
		return PTR_ERR(file);
	/* for compat calls too: on every branch the two members do the same (nv.c; nv-frontend.c before 545) */
	return file ? qgpu_escape(file, cmd, arg, saved.unlocked_ioctl) : saved.unlocked_ioctl(filp, cmd, arg);
}

static long wrap_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
	int idx = srcu_read_lock(&inside);
	long ret = handle_ioctl(filp, cmd, arg);

	srcu_read_unlock(&inside, idx);
	return ret;
}

static int handle_mmap(struct file *filp, struct vm_area_struct *vma)
{
	struct qgpu_file *file = qgpu_file_of(filp);

	this_cpu_inc(calls);
	return IS_ERR(file) ? PTR_ERR(file) : saved.mmap(filp, vma);
}

static int wrap_mmap(struct file *filp, struct vm_area_struct *vma)
{
	int idx = srcu_read_lock(&inside);
	int ret = handle_mmap(filp, vma);

	srcu_read_unlock(&inside, idx);
	return ret;
}

static int handle_open(struct inode *inode, struct file *filp)
{
	struct qgpu_pod *pod = qgpu_pod_of_current();
	struct qgpu_file *file;
	int ret;

	if (!pod)
		return saved.open(inode, filp);
	file = qgpu_file_add(filp, pod);
	qgpu_pod_put(pod);
	if (IS_ERR(file))
		return PTR_ERR(file);
	ret = saved.open(inode, filp);
	if (ret)
		qgpu_file_forget(file);
	else
		qgpu_file_opened(file);
	return ret;
}

static int wrap_open(struct inode *inode, struct file *filp)
{
	int idx = srcu_read_lock(&inside);
	int ret = handle_open(inode, filp);

	srcu_read_unlock(&inside, idx);
	return ret;
}

/* RM idles the file's channels before it frees them, so their gates are opened first, for good. */
static int handle_release(struct inode *inode, struct file *filp)
{
	struct qgpu_file *file = qgpu_file_find(filp);
	int ret;

	if (!file)
		return saved.release(inode, filp);
	qgpu_file_close(file);
	ret = saved.release(inode, filp);
	qgpu_file_closed(file);
	return ret;
}

static int wrap_release(struct inode *inode, struct file *filp)
{
	int idx = srcu_read_lock(&inside);
	int ret = handle_release(inode, filp);

	srcu_read_unlock(&inside, idx);
	return ret;
}

/*
 * Publish each pointer after what must be visible before it: saved, and the pointers that come first. This pairs with
 * the full barrier of srcu_read_lock(): a task that sees one of our pointers reads saved after that barrier.
 */
#define PUBLISH(pointer, to)	smp_store_release(&(pointer), to)

void qgpu_interpose_enter(struct file_operations *fops)
{
	saved = *fops;
	PUBLISH(fops->release, wrap_release);
	PUBLISH(fops->open, wrap_open);
	PUBLISH(fops->mmap, wrap_mmap);
	PUBLISH(fops->unlocked_ioctl, wrap_ioctl);
	if (saved.compat_ioctl)
		PUBLISH(fops->compat_ioctl, wrap_ioctl);
}

static void restore(struct file_operations *fops)
{
	PUBLISH(fops->compat_ioctl, saved.compat_ioctl);
	PUBLISH(fops->unlocked_ioctl, saved.unlocked_ioctl);
	PUBLISH(fops->mmap, saved.mmap);
	PUBLISH(fops->open, saved.open);
	PUBLISH(fops->release, saved.release);
}

void qgpu_interpose_leave(struct file_operations *fops)
{
	restore(fops);
	synchronize_rcu_tasks();
	synchronize_srcu(&inside);
	synchronize_rcu_tasks();
}

u64 qgpu_interpose_calls(void)
{
	u64 sum = 0;
	int cpu;

	for_each_possible_cpu(cpu)
		sum += per_cpu(calls, cpu);
	return sum;
}

int qgpu_interpose_init(void)
{
	return init_srcu_struct(&inside);
}

void qgpu_interpose_uninit(void)
{
	cleanup_srcu_struct(&inside);
}
