// SPDX-License-Identifier: GPL-2.0
/*
 * interpose.c - replaces functions in the NVIDIA driver's file operations: how it enters, what each operation does, how
 * it leaves. driver_file.c decides whose a file is, escape.c what a pod's call means, attach.c when to enter and leave.
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
 * for seconds. So leaving takes five steps in this order:
 *
 * 1. Write the driver's pointers back, where ours still are, but for release(). A task may have loaded one of ours
 *    before, and not have entered it yet.
 * 2. synchronize_rcu_tasks() waits until every task has given up the CPU voluntarily or was in user space. A wrapper
 *    does neither before its first line has entered the SRCU section. So a task that loaded an old pointer is past that
 *    line now: inside the section, or already out of it.
 * 3. A grace period of SRCU waits for the tasks inside. All gates are open by then, so none of them waits for this module.
 * 4. Write back release(), and do the second and third step for it; it has a section of its own. Until then the module
 *    sees files end: the third step may last, and can be given up to enter again.
 * 5. Between leaving the section and returning to the driver's caller a task is still in this module's text, but does
 *    not give up the CPU voluntarily there either. A last synchronize_rcu_tasks() waits for that.
 *
 * (Where CONFIG_TASKS_RCU is not set, no task is preempted in the kernel; synchronize_rcu_tasks() is synchronize_rcu()
 * there, which gives the same guarantee.)
 */
#define pr_fmt(fmt) "qgpu: " fmt

#include <linux/err.h>
#include <linux/module.h>
#include <linux/percpu.h>
#include <linux/rcupdate.h>
#include <linux/srcu.h>
#include <linux/wait.h>

#include "driver_file.h"
#include "escape.h"
#include "interpose.h"
#include "pod.h"

static struct srcu_struct inside;	/* tasks in a wrapper, but for: */
static struct srcu_struct releasing;	/* those in release(), which no process can prolong for ever */
static struct file_operations saved;	/* the driver's pointers; stable while a task is inside */
static bool away = true;		/* we have left, or begun to: whoever still gets here goes on to the driver */
static bool entered;			/* the driver's pointers lead here */
static bool sees_release;		/* its release() does: longer than the others */

/* One wait for the tasks inside. It goes on when nobody waits for it any more, because a signal came. */
static struct rcu_head grace;
static bool waiting;
static DECLARE_WAIT_QUEUE_HEAD(graces);
static DEFINE_PER_CPU(u64, calls);

/*
 * Another module may have put its function in front of ours since. Then the driver's table is not ours to write back:
 * that module would be bypassed, and calls us as long as it likes. So for such a pointer we stay, pass calls on, keep the
 * driver, and are not unloaded before the other module has given the pointer back.
 */
static struct {
	struct file_operations *fops;
	bool open, release, ioctl, compat, mmap;
} covered;

static long handle_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
	struct qgpu_file *file = READ_ONCE(away) ? NULL : qgpu_file_of(filp);

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
	struct qgpu_file *file = READ_ONCE(away) ? NULL : qgpu_file_of(filp);

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
	struct qgpu_pod *pod = READ_ONCE(away) ? NULL : qgpu_pod_of_current();
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
	struct qgpu_file *file = READ_ONCE(sees_release) ? qgpu_file_find(filp) : NULL;
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
	int idx = srcu_read_lock(&releasing);
	int ret = handle_release(inode, filp);

	srcu_read_unlock(&releasing, idx);
	return ret;
}

/*
 * Publish each pointer after what must be visible before it: saved, and the pointers that come first. This pairs with
 * the full barrier of srcu_read_lock(): a task that sees one of our pointers reads saved after that barrier.
 */
#define PUBLISH(pointer, to)	smp_store_release(&(pointer), to)

static void take(struct file_operations *fops)
{
	memset(&covered, 0, sizeof(covered));
	if (!sees_release)
		saved.release = fops->release;
	saved.open = fops->open;
	saved.mmap = fops->mmap;
	saved.unlocked_ioctl = fops->unlocked_ioctl;
	saved.compat_ioctl = fops->compat_ioctl;
}

bool qgpu_interpose_enter(struct file_operations *fops)
{
	bool again = covered.fops == fops, passed = sees_release && !entered, released = !sees_release;

	WRITE_ONCE(away, false);
	if (entered)
		return false;
	entered = true;
	if (!again)
		take(fops);
	WRITE_ONCE(sees_release, true);
	if (released && !covered.release)
		PUBLISH(fops->release, wrap_release);
	if (!covered.open)
		PUBLISH(fops->open, wrap_open);
	if (!covered.mmap)
		PUBLISH(fops->mmap, wrap_mmap);
	if (!covered.ioctl)
		PUBLISH(fops->unlocked_ioctl, wrap_ioctl);
	if (saved.compat_ioctl && !covered.compat)
		PUBLISH(fops->compat_ioctl, wrap_ioctl);
	if (again)
		module_put(fops->owner);
	covered.fops = NULL;
	return passed;
}

/* Whether somebody else's pointer stands where ours was. */
#define PUT_BACK(pointer, ours, theirs) \
	(cmpxchg(&(pointer), ours, theirs) != (ours) && READ_ONCE(pointer) != (theirs))

static void restore(struct file_operations *fops)
{
	covered.compat = saved.compat_ioctl && PUT_BACK(fops->compat_ioctl, wrap_ioctl, saved.compat_ioctl);
	covered.ioctl = PUT_BACK(fops->unlocked_ioctl, wrap_ioctl, saved.unlocked_ioctl);
	covered.mmap = PUT_BACK(fops->mmap, wrap_mmap, saved.mmap);
	covered.open = PUT_BACK(fops->open, wrap_open, saved.open);
}

static void restore_release(struct file_operations *fops)
{
	covered.release = PUT_BACK(fops->release, wrap_release, saved.release);
}

static bool is_covered(void)
{
	return covered.compat || covered.ioctl || covered.mmap || covered.open || covered.release;
}

static void grace_over(struct rcu_head *head)
{
	WRITE_ONCE(waiting, false);
	wake_up_all(&graces);
}

/* As synchronize_srcu(), but a task may be inside for as long as its own file system keeps it; so this can be given up. */
static int wait_for_inside(bool interruptible)
{
	int ret = 0;

	if (!waiting) {
		waiting = true;
		call_srcu(&inside, &grace, grace_over);
	}
	if (interruptible)
		ret = wait_event_interruptible(graces, !READ_ONCE(waiting));
	else
		wait_event_idle(graces, !READ_ONCE(waiting));
	return ret ? -EINTR : 0;
}

/* Whoever has loaded one of our pointers before. */
static int wait_for_calls(bool interruptible)
{
	int ret;

	synchronize_rcu_tasks();
	ret = waiting ? wait_for_inside(interruptible) : 0;	/* begun earlier: it does not count whoever came since */
	if (!ret)
		ret = wait_for_inside(interruptible);
	return ret;
}

/* Whoever has loaded our release() before; only RM keeps them. */
static void wait_for_releases(void)
{
	synchronize_rcu_tasks();
	synchronize_srcu(&releasing);
}

static void note_covered(struct file_operations *fops)
{
	if (covered.fops || !is_covered())
		return;
	pr_warn("another module has put its functions in front of these; calls pass through until it takes them away\n");
	__module_get(fops->owner);	/* the caller holds it too */
	covered.fops = fops;
}

int qgpu_interpose_leave(struct file_operations *fops, bool interruptible)
{
	int ret;

	WRITE_ONCE(away, true);
	if (entered) {
		covered.release = false;	/* not looked at yet */
		restore(fops);
		note_covered(fops);
	}
	entered = false;
	ret = wait_for_calls(interruptible);
	if (ret)
		return ret;
	WRITE_ONCE(sees_release, false);
	restore_release(fops);
	note_covered(fops);
	wait_for_releases();
	synchronize_rcu_tasks();
	return 0;
}

static bool restore_covered(void)
{
	restore(covered.fops);
	restore_release(covered.fops);
	return !is_covered();
}

void qgpu_interpose_uninit(void)
{
	struct module *owner;

	while (covered.fops && !restore_covered()) {
		pr_warn_ratelimited("cannot be unloaded while another module's functions lead here\n");
		schedule_timeout_idle(HZ);
	}
	if (covered.fops) {
		owner = covered.fops->owner;
		wait_for_calls(false);
		wait_for_releases();
		synchronize_rcu_tasks();
		covered.fops = NULL;
		module_put(owner);
	}
	srcu_barrier(&inside);
	cleanup_srcu_struct(&inside);
	cleanup_srcu_struct(&releasing);
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
	int ret = init_srcu_struct(&inside);

	if (ret)
		return ret;
	ret = init_srcu_struct(&releasing);
	if (ret)
		cleanup_srcu_struct(&inside);
	return ret;
}
