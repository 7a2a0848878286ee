// SPDX-License-Identifier: GPL-2.0
/*
 * pm.c - the driver asleep: from the end of everybody's preparations to the beginning of their waking up. The real
 * one then saves its channels, waiting for those that run, and is not to be called.
 */
#include <linux/notifier.h>
#include <linux/suspend.h>

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
