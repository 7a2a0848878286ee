// SPDX-License-Identifier: GPL-2.0
/*
 * pause.c - suspends plans while the machine or the driver sleeps, and while the module detaches from the driver.
 * plan_runner.c opens and closes the gates.
 *
 * A sleep needs two things. Gates are opened before it, because the code that saves a channel's state may wait for the
 * channel to run dry; if they cannot be opened, the sleep is refused. And from then until the machine is back no control
 * may be sent: calls from the kernel do not wait for the driver's own suspend lock, as those of processes do. While plans
 * are paused and every gate is open, none is due. The clock of a lease stands still in a real suspend; if a lease lapses
 * all the same, the gates stay open.
 */
#include <linux/suspend.h>

#include "pause.h"
#include "plan_runner.h"

#define SLEEP_WAIT	(2 * HZ)
/* How often it is told that something waits for the driver. */
#define TELL_AFTER	(10 * HZ)

int qgpu_pause(int reason, bool interruptible)
{
	int ret;

	qgpu_tsgs_pause(reason);
	while ((ret = qgpu_runner_wait_open(TELL_AFTER, interruptible)) == -ETIMEDOUT)
		pr_warn("qgpu: waiting for the driver to let every gate be opened\n");
	return ret;
}

void qgpu_unpause(int reason)
{
	qgpu_tsgs_unpause(reason);
	qgpu_runner_refresh();
}

int qgpu_sleep(int reason)
{
	qgpu_tsgs_pause(reason);
	if (qgpu_runner_wait_open(SLEEP_WAIT, false)) {
		pr_err("qgpu: sleep refused: the driver does not let every gate be opened\n");
		qgpu_unpause(reason);
		return -EBUSY;
	}
	return 0;
}

static int pm_event(struct notifier_block *nb, unsigned long event, void *data)
{
	switch (event) {
	case PM_SUSPEND_PREPARE:
	case PM_HIBERNATION_PREPARE:
	case PM_RESTORE_PREPARE:
		return notifier_from_errno(qgpu_sleep(QGPU_PAUSE_SUSPEND));
	case PM_POST_SUSPEND:
	case PM_POST_HIBERNATION:
	case PM_POST_RESTORE:
		qgpu_unpause(QGPU_PAUSE_SUSPEND);
		break;
	}
	return NOTIFY_OK;
}

static struct notifier_block pm_notifier = { .notifier_call = pm_event };

int qgpu_pause_init(void)
{
	return register_pm_notifier(&pm_notifier);
}

void qgpu_pause_uninit(void)
{
	unregister_pm_notifier(&pm_notifier);
}
