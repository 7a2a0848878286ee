// SPDX-License-Identifier: GPL-2.0
/*
 * pause.c - the times at which plans do not count: while the machine sleeps, and while the module lets go of the
 * driver. Opening and closing is slice.c's.
 *
 * Around a suspend two things are needed. Gates are opened before, for whoever saves a channel's state may wait for the
 * channel to run dry. And from then until the machine is back no control is sent: calls from the kernel do not wait for
 * the driver's own suspend lock, as those of processes do. What is left over is sent afterwards. Time that a lease
 * counts stands still in a real suspend; if one lapses all the same, the gates simply stay open.
 */
#include <linux/atomic.h>
#include <linux/delay.h>
#include <linux/suspend.h>

#include "pause.h"
#include "slice.h"

static atomic_t paused;		/* QGPU_PAUSE_* */

bool qgpu_paused(void)
{
	return atomic_read(&paused);
}

void qgpu_pause(int reason)
{
	int tries;

	atomic_or(reason, &paused);
	qgpu_slice_refresh();
	for (tries = 0; tries < 10 && !qgpu_slice_settled(); tries++) {
		msleep(20);
		qgpu_slice_refresh();
	}
	if (!qgpu_slice_settled())
		pr_err("qgpu: the driver did not let every gate be opened\n");
}

void qgpu_unpause(int reason)
{
	atomic_andnot(reason, &paused);
	qgpu_slice_refresh();
}

static int pm_event(struct notifier_block *nb, unsigned long event, void *data)
{
	switch (event) {
	case PM_SUSPEND_PREPARE:
	case PM_HIBERNATION_PREPARE:
	case PM_RESTORE_PREPARE:
		qgpu_pause(QGPU_PAUSE_SUSPEND);
		qgpu_slice_mute(true);
		break;
	case PM_POST_SUSPEND:
	case PM_POST_HIBERNATION:
	case PM_POST_RESTORE:
		qgpu_slice_mute(false);
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
