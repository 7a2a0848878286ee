// SPDX-License-Identifier: GPL-2.0
/*
 * pause.c - suspends plans while the machine sleeps, and while the module detaches from the driver. plan_runner.c opens
 * and closes the gates.
 *
 * A suspend needs two things. Gates are opened before it, because the code that saves a channel's state may wait for
 * the channel to run dry. And from then until the machine is back no control is sent: calls from the kernel do not wait
 * for the driver's own suspend lock, as those of processes do. Pending controls are sent afterwards. The clock of a
 * lease stands still in a real suspend; if a lease lapses all the same, the gates stay open.
 */
#include <linux/delay.h>
#include <linux/suspend.h>

#include "pause.h"
#include "plan_runner.h"

void qgpu_pause(int reason)
{
	int tries;

	qgpu_tsgs_pause(reason);
	qgpu_runner_refresh();
	for (tries = 0; tries < 10 && !qgpu_runner_settled(); tries++) {
		msleep(20);
		qgpu_runner_refresh();
	}
	if (!qgpu_runner_settled())
		pr_err("qgpu: the driver did not let every gate be opened\n");
}

void qgpu_unpause(int reason)
{
	qgpu_tsgs_unpause(reason);
	qgpu_runner_refresh();
}

static int pm_event(struct notifier_block *nb, unsigned long event, void *data)
{
	switch (event) {
	case PM_SUSPEND_PREPARE:
	case PM_HIBERNATION_PREPARE:
	case PM_RESTORE_PREPARE:
		qgpu_pause(QGPU_PAUSE_SUSPEND);
		qgpu_runner_mute(true);
		break;
	case PM_POST_SUSPEND:
	case PM_POST_HIBERNATION:
	case PM_POST_RESTORE:
		qgpu_runner_mute(false);
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
