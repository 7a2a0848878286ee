// SPDX-License-Identifier: GPL-2.0
/*
 * attach.c - decides when to attach to the NVIDIA driver and when to detach, and reports the state. interpose.c
 * replaces the driver's functions.
 */
#define pr_fmt(fmt) "qgpu: " fmt

#include <linux/file.h>
#include <linux/module.h>
#include <linux/notifier.h>
#include <linux/workqueue.h>

#include "attach.h"
#include "compat.h"
#include "driver_file.h"
#include "events.h"
#include "interpose.h"
#include "pause.h"
#include "pod.h"
#include "power.h"
#include "probe_watch.h"
#include "rm.h"
#include "toctou.h"
#include "plan_runner.h"
#include "uvm.h"
#include "uvm_mem.h"

/* A driver from a container makes its nodes there; the second is where NVIDIA's GPU operator does. */
static char *node;
module_param(node, charp, 0444);
MODULE_PARM_DESC(node, "path of the driver's control node, where the host has none at /dev/nvidiactl");

static const char *const nodes[] = { "/dev/nvidiactl", "/run/nvidia/driver/dev/nvidiactl" };

static struct file_operations *fops;	/* the driver's table; NULL: not attached. Under qgpu_attach_lock */
static bool enforce = true;
static bool ready;		/* initialised, and not unloading */
static char attached[QGPU_NAME_LEN];	/* to which version. Under qgpu_attach_lock */

static DEFINE_SPINLOCK(state_lock);	/* protects what follows */
static u32 state = QGPU_STATE_NO_DRIVER;
static char version[QGPU_NAME_LEN];

static struct file *open_node(void)
{
	struct file *filp = ERR_PTR(-ENOENT);
	size_t i;

	if (node)
		return filp_open(node, O_RDWR, 0);
	for (i = 0; i < ARRAY_SIZE(nodes) && IS_ERR(filp); i++)
		filp = filp_open(nodes[i], O_RDWR, 0);
	return filp;
}

/*
 * Accept a table only if it lies in writable memory of the module named nvidia, and that is an open one: the kernel
 * forbids this module to bring a closed one what only GPL modules may use.
 */
static struct file_operations *find_fops(void)
{
	struct file_operations *found = NULL;
	struct file *filp = open_node();
	const struct file_operations *ops;

	if (IS_ERR(filp))
		return NULL;
	ops = filp->f_op;
	if (MAJOR(file_inode(filp)->i_rdev) != NV_MAJOR_DEVICE_NUMBER || !ops->owner)
		goto out;
	if (strcmp(ops->owner->name, "nvidia") || !qgpu_in_writable_data(ops->owner, ops, sizeof(*ops)))
		goto out;
	if (test_bit(TAINT_PROPRIETARY_MODULE, &ops->owner->taints)) {
		pr_warn_ratelimited("the driver's closed modules are not supported; install its open ones\n");
		goto out;
	}
	if (!ops->open || !ops->release || !ops->unlocked_ioctl || !ops->mmap)
		goto out;
	if (try_module_get(ops->owner))
		found = (struct file_operations *)ops;
out:
	fput(filp);
	return found;
}

/* The version is set together with the state: qgpu_attach_info() returns both without waiting. */
static void set_state(u32 to, const char *driver)
{
	bool changed;

	spin_lock(&state_lock);
	changed = state != to;
	WRITE_ONCE(state, to);
	strscpy(version, driver, sizeof(version));
	spin_unlock(&state_lock);
	if (!changed)
		return;
	qgpu_event(QGPU_EVENT_STATE, 0, 0, to);
	if (to == QGPU_STATE_ENFORCING)
		pr_info_ratelimited("enforcing on driver %s\n", driver);
	else if (to == QGPU_STATE_UNKNOWN_DRIVER)
		pr_warn_ratelimited("driver %s was not compared with this module; nothing is enforced\n", driver);
	else
		pr_info_ratelimited("not enforcing (state %u)\n", to);
}

/*
 * The fput() of find_fops()'s own file may be deferred until this task returns to user space. The wrapper installed by
 * then releases the file, like any other file that was open before.
 */
static u32 take_hold(char *driver, size_t size)
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
	qgpu_gpus_enumerate();
	qgpu_probe_watch_start();
	qgpu_power_start();
	qgpu_unpause(QGPU_PAUSE_DETACH);
	qgpu_interpose_enter(fops);
	return QGPU_STATE_ENFORCING;
}

static void attach_locked(void)
{
	char driver[QGPU_NAME_LEN] = "";
	u32 to;

	lockdep_assert_held(&qgpu_attach_lock);
	if (fops && enforce && ready) {		/* a detach was interrupted */
		qgpu_unpause(QGPU_PAUSE_DETACH);
		if (qgpu_interpose_enter(fops))
			qgpu_pods_unchecked();
		set_state(QGPU_STATE_ENFORCING, attached);
	}
	if (fops)
		return;
	to = take_hold(driver, sizeof(driver));
	strscpy(attached, driver, sizeof(attached));
	set_state(to, driver);
}

void qgpu_attach(void)
{
	if (READ_ONCE(state) == QGPU_STATE_ENFORCING)
		return;
	mutex_lock(&qgpu_attach_lock);
	attach_locked();
	mutex_unlock(&qgpu_attach_lock);
}

void qgpu_try_attach(void)
{
	if (READ_ONCE(state) == QGPU_STATE_ENFORCING || !mutex_trylock(&qgpu_attach_lock))
		return;
	attach_locked();
	mutex_unlock(&qgpu_attach_lock);
}

/* Every gate is open, and nobody opens one after this. */
static int let_go(bool interruptible)
{
	struct module *owner = fops->owner;
	int ret = qgpu_interpose_leave(fops, interruptible);

	if (ret)
		return ret;
	qgpu_probe_watch_stop();
	qgpu_runner_drop(NULL);
	qgpu_power_stop();
	qgpu_files_drop();
	fops = NULL;
	qgpu_rm_detach();
	module_put(owner);
	return 0;
}

/*
 * The driver is let go of only once every gate is known to be open, however long RM takes to answer. A signal ends the
 * waiting, but gates are opened all the same. So it does the wait for calls that the driver, or a pod's own file
 * system, keeps: they go on to the driver already, and whoever switches off, unloads or switches on next goes on here.
 */
static int detach(bool interruptible)
{
	int ret = 0;

	mutex_lock(&qgpu_attach_lock);
	set_state(enforce ? QGPU_STATE_NO_DRIVER : QGPU_STATE_OFF, "");
	if (fops)
		ret = qgpu_pause(QGPU_PAUSE_DETACH, interruptible);
	if (fops && !ret)
		ret = let_go(interruptible);
	mutex_unlock(&qgpu_attach_lock);
	return ret;
}

void qgpu_detach(void)
{
	detach(false);
}

int qgpu_rm_offer(nv_get_rm_ops_t get_rm_ops)
{
	bool taken;

	mutex_lock(&qgpu_attach_lock);
	taken = qgpu_rm_offered(get_rm_ops);
	mutex_unlock(&qgpu_attach_lock);
	if (!taken)
		return -EBUSY;
	qgpu_attach();
	return 0;
}
EXPORT_SYMBOL_GPL(qgpu_rm_offer);

/* When this returns, the caller's text is no longer in use. */
void qgpu_rm_withdraw(void)
{
	mutex_lock(&qgpu_attach_lock);
	qgpu_rm_offered(NULL);	/* from here on nothing attaches through it */
	mutex_unlock(&qgpu_attach_lock);
	qgpu_detach();
}
EXPORT_SYMBOL_GPL(qgpu_rm_withdraw);

static void attach_work(struct work_struct *work)
{
	qgpu_attach();
}

static DECLARE_WORK(attach_later, attach_work);

/* Not from the notifier itself: it runs in modprobe's context, whose root may differ from the host's. */
static int module_event(struct notifier_block *nb, unsigned long event, void *data)
{
	struct module *mod = data;

	if (event == MODULE_STATE_LIVE && !strcmp(mod->name, "nvidia"))
		schedule_work(&attach_later);
	if (!strcmp(mod->name, "nvidia_uvm"))
		qgpu_uvm_module(event);
	return NOTIFY_OK;
}

/*
 * Before the kernel's own notifier for kprobes, which has priority 0: in 5.10 that one clears the post_handler of several
 * probes at one function before it disarms them, looks for them among the wrong ones, and leaves the function of a module
 * that goes in ftrace's hash (kill_kprobe()).
 */
static struct notifier_block module_notifier = { .notifier_call = module_event, .priority = 1 };

static int set_enforce(const char *value, const struct kernel_param *param)
{
	int ret = param_set_bool(value, param);

	if (ret || !READ_ONCE(ready))
		return ret;
	if (enforce)
		qgpu_attach();
	else
		ret = detach(true);
	return ret;
}

static const struct kernel_param_ops enforce_ops = { .set = set_enforce, .get = param_get_bool };
module_param_cb(enforce, &enforce_ops, &enforce, 0644);
MODULE_PARM_DESC(enforce, "0 lets go of the driver at once: gates open, nothing refused or counted (default 1)");

void qgpu_attach_info(struct qgpu_info *info)
{
	info->calls = qgpu_interpose_calls();
	info->nr_gpus = qgpu_gpu_count();
	info->missing = qgpu_probe_watch_check();
	info->flags = (qgpu_toctou_sealed() ? QGPU_INFO_SEALED : 0) | (qgpu_uvm_bounded() ? QGPU_INFO_MANAGED : 0) |
		      (qgpu_uvm_mem_counted() ? QGPU_INFO_HELD : 0) | QGPU_INFO_GROUPS;
	info->stalled = qgpu_gpus_stalled();
	spin_lock(&state_lock);
	info->state = state;
	strscpy(info->driver, version, sizeof(info->driver));
	spin_unlock(&state_lock);
}

int qgpu_attach_init(void)
{
	int ret = qgpu_interpose_init();

	if (ret)
		return ret;
	ret = qgpu_files_init();
	if (ret)
		goto err_interpose;
	ret = register_module_notifier(&module_notifier);
	if (ret)
		goto err_files;
	WRITE_ONCE(ready, true);
	qgpu_attach();
	return 0;
err_files:
	qgpu_files_uninit();
err_interpose:
	qgpu_interpose_uninit();
	return ret;
}

void qgpu_attach_uninit(void)
{
	unregister_module_notifier(&module_notifier);
	cancel_work_sync(&attach_later);
	mutex_lock(&qgpu_attach_lock);
	WRITE_ONCE(ready, false);
	mutex_unlock(&qgpu_attach_lock);
	qgpu_detach();
	qgpu_files_uninit();
	qgpu_interpose_uninit();
}
