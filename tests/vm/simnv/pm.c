// SPDX-License-Identifier: GPL-2.0
/*
 * pm.c - the driver asleep: from the end of everybody's preparations to the beginning of their waking up. The real
 * one then saves its channels, waiting for those that run, and is not to be called.
 */
#include <linux/notifier.h>
#include <linux/proc_fs.h>
#include <linux/suspend.h>
#include <linux/uaccess.h>

#include "sim.h"

unsigned int sim_nr_sleeps, sim_asleep_off, sim_asleep_calls;
static bool asleep;

void sim_pm_called(void)
{
	lockdep_assert_held(&sim_lock);
	sim_asleep_calls += asleep;
}

static int prepare(struct notifier_block *nb, unsigned long event, void *data)
{
	if (event == PM_SUSPEND_PREPARE) {
		mutex_lock(&sim_lock);
		asleep = true;
		sim_nr_sleeps++;
		sim_asleep_off += sim_gpu_off();
		mutex_unlock(&sim_lock);
	}
	return NOTIFY_OK;
}

static int post(struct notifier_block *nb, unsigned long event, void *data)
{
	if (event == PM_POST_SUSPEND) {
		mutex_lock(&sim_lock);
		asleep = false;
		mutex_unlock(&sim_lock);
	}
	return NOTIFY_OK;
}

#define NV_POWER_STATE_RUNNING 2

/* nv.c, which qgpu.ko probes: by way of /proc, before the machine's own suspend; processes run on meanwhile. */
u32 nv_set_system_power_state(int state, int depth);
noinline __noclone u32 nv_set_system_power_state(int state, int depth)
{
	mutex_lock(&sim_lock);
	if (state != NV_POWER_STATE_RUNNING && !asleep) {
		sim_nr_sleeps++;
		sim_asleep_off += sim_gpu_off();
	}
	asleep = state != NV_POWER_STATE_RUNNING;
	mutex_unlock(&sim_lock);
	return NV_OK;
}

static ssize_t suspend_write(struct file *file, const char __user *from, size_t size, loff_t *pos)
{
	char text[8] = {};

	if (copy_from_user(text, from, min(size, sizeof(text) - 1)))
		return -EFAULT;
	return nv_set_system_power_state(strcmp(text, "resume") ? 1 : NV_POWER_STATE_RUNNING, 0) ? -EIO : size;
}

static const struct proc_ops suspend_ops = { .proc_write = suspend_write };

void sim_pm_proc(struct proc_dir_entry *folder)
{
	proc_create("suspend", 0200, folder, &suspend_ops);
}

static struct notifier_block last = { .notifier_call = prepare, .priority = INT_MIN };
static struct notifier_block first = { .notifier_call = post, .priority = INT_MAX };

void sim_pm_init(void)
{
	register_pm_notifier(&last);
	register_pm_notifier(&first);
}

void sim_pm_uninit(void)
{
	unregister_pm_notifier(&first);
	unregister_pm_notifier(&last);
}
