// SPDX-License-Identifier: GPL-2.0
/*
 * interpose.c - stands in the NVIDIA driver's file operations. What a pod's call means is decided in escape.c.
 *
 * The pointers inside the driver's own table are replaced, not the table: from 550.40.07 RM compares file->f_op
 * with the table's address when a Device is allocated (nv.c:nv_match_dev_state), so a copy would break every CUDA
 * program. The table is not const (nv.c:nvidia_fops; nv-frontend.c:nv_frontend_fops before 545). Replacing it in
 * place also covers both character devices and every file that is open already.
 *
 * Going away is the delicate part: nothing pins this module while a task runs in a wrapper, and the driver may
 * keep a task for seconds. detach() therefore does four things in this order:
 *
 *  1. It writes the driver's pointers back. A task may have loaded one of ours before, and not yet entered.
 *  2. synchronize_rcu_tasks() waits until every task has given up the CPU of its own accord, or was in user space.
 *     No wrapper does so before its first line has entered the SRCU section. So whoever loaded an old pointer is
 *     past that line now: inside the section, or through with it.
 *  3. synchronize_srcu() waits for those inside. Gates have been opened before, so none of them waits for us.
 *  4. Between leaving the section and returning to the driver's caller a task is in our text still, but does not
 *     give up the CPU of its own accord there either. A second synchronize_rcu_tasks() waits for that.
 *
 * (Where CONFIG_TASKS_RCU is not set no task is preempted in the kernel; synchronize_rcu_tasks() is
 * synchronize_rcu() there, which gives the same promise.)
 */
#include <linux/file.h>
#include <linux/module.h>
#include <linux/notifier.h>
#include <linux/rhashtable.h>
#include <linux/slab.h>
#include <linux/srcu.h>
#include <linux/workqueue.h>

#include "client.h"
#include "compat.h"
#include "escape.h"
#include "events.h"
#include "interpose.h"
#include "pause.h"
#include "pod.h"
#include "rm.h"
#include "seal.h"
#include "slice.h"
#include "uvm.h"

#define NODE "/dev/nvidiactl"

DEFINE_MUTEX(qgpu_attach_lock);

static struct srcu_struct inside;	/* tasks in a wrapper */
static struct rhashtable files;
static DEFINE_PER_CPU(u64, calls);

/* Under qgpu_attach_lock, but for saved: written before the pointers are, and stable while anybody is inside. */
static struct file_operations *fops;	/* the driver's table; NULL: not interposed */
static struct file_operations saved;
static bool enforce = true;
static bool ready;		/* initialised, and not on the way out */

static DEFINE_SPINLOCK(state_lock);	/* protects what follows */
static u32 state = QGPU_STATE_NO_DRIVER;
static char version[QGPU_NAME_LEN];

static const struct rhashtable_params file_params = {
	.key_len = sizeof(struct file *),
	.key_offset = offsetof(struct qgpu_file, filp),
	.head_offset = offsetof(struct qgpu_file, node),
	.automatic_shrinking = true,
};

/* For compat calls too: on every branch the two members do the same (nv.c; nv-frontend.c before 545). */
long qgpu_driver_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
	return saved.unlocked_ioctl(filp, cmd, arg);
}

/*
 * The entry of a file is stable for as long as a call on that file lasts: it goes in release(), which comes after
 * the last call, or in detach(), which waits for it.
 */
static struct qgpu_file *file_find(struct file *filp)
{
	return rhashtable_lookup_fast(&files, &filp, file_params);
}

static struct qgpu_file *file_new(struct qgpu_pod *pod)
{
	struct qgpu_file *file = kzalloc(sizeof(*file), GFP_KERNEL);

	if (!file)
		return NULL;
	file->pod = qgpu_pod_get(pod);
	INIT_LIST_HEAD(&file->clients);
	return file;
}

static void file_free(struct qgpu_file *file)
{
	qgpu_pod_put(file->pod);
	kfree_rcu(file, rcu);
}

static int file_add(struct qgpu_file *file, struct file *filp)
{
	file->filp = filp;
	return rhashtable_lookup_insert_fast(&files, &file->node, file_params);
}

/*
 * A file that no open() of a pod made known, used by a process of a pod: it was open before the module or the pod
 * came, or was handed in from outside. From now on it is the pod's; what was allocated on it before has no gate.
 */
static struct qgpu_file *file_adopt(struct file *filp, struct qgpu_pod *pod)
{
	struct qgpu_file *file = file_new(pod);

	if (!file)
		return NULL;
	if (file_add(file, filp)) {
		file_free(file);
		return file_find(filp);
	}
	atomic_inc(&pod->nr_files);
	qgpu_pod_flag(pod, QGPU_POD_LATE, QGPU_EVENT_LATE_FILE);
	return file;
}

/* The one lookup that everybody pays. ERR_PTR(-ENOMEM) for a pod's file that cannot be remembered. */
static struct qgpu_file *file_of(struct file *filp)
{
	struct qgpu_file *file = file_find(filp);
	struct qgpu_pod *pod;

	this_cpu_inc(calls);
	if (iminor(file_inode(filp)) == NV_MINOR_MODESET)
		return NULL;	/* before 545 nvidia-modeset's calls come through the same table */
	if (file && !READ_ONCE(file->pod->gone))
		return file;
	pod = qgpu_pod_of_current();
	if (!pod)
		return NULL;
	if (file) {	/* of a pod that was removed; what it holds stays without a gate */
		qgpu_pod_flag(pod, QGPU_POD_LATE, QGPU_EVENT_LATE_FILE);
		file = NULL;
	} else {
		file = file_adopt(filp, pod) ?: ERR_PTR(-ENOMEM);
	}
	qgpu_pod_put(pod);
	return file;
}

static long handle_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
	struct qgpu_file *file = file_of(filp);

	if (IS_ERR(file))
		return PTR_ERR(file);
	return file ? qgpu_escape(file, cmd, arg) : qgpu_driver_ioctl(filp, cmd, arg);
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
	struct qgpu_file *file = file_of(filp);

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
	struct qgpu_file *file = NULL;
	int ret;

	if (pod) {
		file = file_new(pod);
		ret = file ? file_add(file, filp) : -ENOMEM;
		if (ret)
			goto out;
	}
	ret = saved.open(inode, filp);
	if (file && ret)
		rhashtable_remove_fast(&files, &file->node, file_params);
	else if (file)
		atomic_inc(&pod->nr_files);
out:
	if (file && ret)
		file_free(file);
	qgpu_pod_put(pod);
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
	struct qgpu_file *file = file_find(filp);
	int ret;

	if (!file)
		return saved.release(inode, filp);
	qgpu_clients_open(&file->clients);
	rhashtable_remove_fast(&files, &file->node, file_params);
	ret = saved.release(inode, filp);
	qgpu_clients_remove(&file->clients);
	atomic_dec(&file->pod->nr_files);
	file_free(file);
	return ret;
}

static int wrap_release(struct inode *inode, struct file *filp)
{
	int idx = srcu_read_lock(&inside);
	int ret = handle_release(inode, filp);

	srcu_read_unlock(&inside, idx);
	return ret;
}

/* Only a table that the driver named nvidia keeps in memory it may write is what we think it is. */
static struct file_operations *find_fops(void)
{
	struct file_operations *found = NULL;
	struct file *filp = filp_open(NODE, O_RDWR, 0);
	const struct file_operations *ops;

	if (IS_ERR(filp))
		return NULL;
	ops = filp->f_op;
	if (MAJOR(file_inode(filp)->i_rdev) != NV_MAJOR_DEVICE_NUMBER || !ops->owner)
		goto out;
	if (strcmp(ops->owner->name, "nvidia") || !qgpu_in_writable_data(ops->owner, ops, sizeof(*ops)))
		goto out;
	if (!ops->open || !ops->release || !ops->unlocked_ioctl || !ops->mmap)
		goto out;
	if (try_module_get(ops->owner))
		found = (struct file_operations *)ops;
out:
	fput(filp);
	return found;
}

static void patch(void)
{
	saved = *fops;
	smp_wmb();	/* saved is read by whoever sees one of our pointers */
	if (fops->compat_ioctl)
		WRITE_ONCE(fops->compat_ioctl, wrap_ioctl);
	WRITE_ONCE(fops->unlocked_ioctl, wrap_ioctl);
	WRITE_ONCE(fops->mmap, wrap_mmap);
	WRITE_ONCE(fops->release, wrap_release);
	WRITE_ONCE(fops->open, wrap_open);
}

static void unpatch(void)
{
	WRITE_ONCE(fops->open, saved.open);
	WRITE_ONCE(fops->release, saved.release);
	WRITE_ONCE(fops->mmap, saved.mmap);
	WRITE_ONCE(fops->unlocked_ioctl, saved.unlocked_ioctl);
	if (saved.compat_ioctl)
		WRITE_ONCE(fops->compat_ioctl, saved.compat_ioctl);
}

/* The version goes with the state: both are told by qgpu_interpose_info(), which waits for nobody. */
static void set_state(u32 to, const char *driver)
{
	bool changed;

	spin_lock(&state_lock);
	changed = state != to;
	WRITE_ONCE(state, to);
	strscpy(version, driver, sizeof(version));
	spin_unlock(&state_lock);
	if (changed)
		qgpu_event(QGPU_EVENT_STATE, 0, 0, to);
}

/*
 * The fput() of find_fops()'s own file may be deferred to this task's way out, so it is released through the
 * wrapper that is in place by then: as any other file that was open before.
 */
static u32 attach_locked(char *driver, size_t size)
{
	u32 to;

	if (!enforce || !ready)
		return QGPU_STATE_OFF;
	to = qgpu_rm_attach(driver, size);
	if (to != QGPU_STATE_ENFORCING)
		return to;
	fops = find_fops();
	if (!fops) {
		qgpu_rm_detach();
		return QGPU_STATE_NO_DRIVER;
	}
	qgpu_slice_enumerate();
	qgpu_seal_init(fops->owner);
	qgpu_unpause(QGPU_PAUSE_DETACH);
	qgpu_uvm_start();
	patch();
	return QGPU_STATE_ENFORCING;
}

static void attach(void)
{
	char driver[QGPU_NAME_LEN] = "";
	u32 to;

	lockdep_assert_held(&qgpu_attach_lock);
	if (fops)
		return;
	to = attach_locked(driver, sizeof(driver));
	set_state(to, driver);
}

void qgpu_interpose_attach(void)
{
	if (READ_ONCE(state) == QGPU_STATE_ENFORCING)
		return;
	mutex_lock(&qgpu_attach_lock);
	attach();
	mutex_unlock(&qgpu_attach_lock);
}

void qgpu_interpose_try_attach(void)
{
	if (READ_ONCE(state) == QGPU_STATE_ENFORCING || !mutex_trylock(&qgpu_attach_lock))
		return;
	attach();
	mutex_unlock(&qgpu_attach_lock);
}

static void file_drop(void *ptr, void *unused)
{
	struct qgpu_file *file = ptr;

	qgpu_clients_remove(&file->clients);
	atomic_dec(&file->pod->nr_files);
	file_free(file);
}

void qgpu_interpose_detach(void)
{
	struct module *owner;

	mutex_lock(&qgpu_attach_lock);
	set_state(enforce ? QGPU_STATE_NO_DRIVER : QGPU_STATE_OFF, "");
	if (fops) {
		qgpu_pause(QGPU_PAUSE_DETACH);	/* nobody opens a gate after us */
		unpatch();
		synchronize_rcu_tasks();
		synchronize_srcu(&inside);
		synchronize_rcu_tasks();
		qgpu_uvm_stop();
		qgpu_slice_drop(NULL);
		qgpu_seal_uninit();
		rhashtable_free_and_destroy(&files, file_drop, NULL);
		WARN_ON(rhashtable_init(&files, &file_params));
		owner = fops->owner;
		fops = NULL;
		qgpu_rm_detach();
		module_put(owner);
	}
	mutex_unlock(&qgpu_attach_lock);
}

static void attach_work(struct work_struct *work)
{
	qgpu_interpose_attach();
}

static DECLARE_WORK(attach_later, attach_work);

/* Not from the notifier itself: it runs in modprobe's context, whose root need not be the host's. */
static int module_event(struct notifier_block *nb, unsigned long event, void *data)
{
	struct module *mod = data;

	if (event == MODULE_STATE_LIVE && !strcmp(mod->name, "nvidia"))
		schedule_work(&attach_later);
	if (!strcmp(mod->name, "nvidia_uvm"))
		qgpu_uvm_module(event);
	return NOTIFY_OK;
}

static struct notifier_block module_notifier = { .notifier_call = module_event };

static int set_enforce(const char *value, const struct kernel_param *param)
{
	int ret = param_set_bool(value, param);

	if (ret || !READ_ONCE(ready))
		return ret;
	if (enforce)
		qgpu_interpose_attach();
	else
		qgpu_interpose_detach();
	return 0;
}

static const struct kernel_param_ops enforce_ops = { .set = set_enforce, .get = param_get_bool };
module_param_cb(enforce, &enforce_ops, &enforce, 0644);
MODULE_PARM_DESC(enforce, "0 lets go of the driver at once: gates open, nothing refused or counted (default 1)");

void qgpu_interpose_info(struct qgpu_info *info)
{
	int cpu;

	for_each_possible_cpu(cpu)
		info->calls += per_cpu(calls, cpu);
	info->nr_gpus = qgpu_gpu_count();
	info->flags = (qgpu_sealed() ? QGPU_INFO_SEALED : 0) | (qgpu_uvm_bounded() ? QGPU_INFO_MANAGED : 0);
	spin_lock(&state_lock);
	info->state = state;
	strscpy(info->driver, version, sizeof(info->driver));
	spin_unlock(&state_lock);
}

int qgpu_interpose_init(void)
{
	int ret = init_srcu_struct(&inside);

	if (ret)
		return ret;
	ret = rhashtable_init(&files, &file_params);
	if (ret)
		goto err_srcu;
	ret = register_module_notifier(&module_notifier);
	if (ret)
		goto err_files;
	WRITE_ONCE(ready, true);
	qgpu_interpose_attach();
	return 0;
err_files:
	rhashtable_destroy(&files);
err_srcu:
	cleanup_srcu_struct(&inside);
	return ret;
}

void qgpu_interpose_uninit(void)
{
	unregister_module_notifier(&module_notifier);
	cancel_work_sync(&attach_later);
	mutex_lock(&qgpu_attach_lock);
	WRITE_ONCE(ready, false);
	mutex_unlock(&qgpu_attach_lock);
	qgpu_interpose_detach();
	rhashtable_destroy(&files);
	cleanup_srcu_struct(&inside);
}
