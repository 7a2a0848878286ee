/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_PAUSE_H
#define _QGPU_PAUSE_H

#include <linux/types.h>

/* While there is a reason to pause, every gate should be open and every timeslice the driver's own. */
#define QGPU_PAUSE_SUSPEND	0x1
#define QGPU_PAUSE_DETACH	0x2
#define QGPU_PAUSE_DRIVER	0x4	/* the driver is put to sleep: power.c */

/*
 * Returns 0 once every gate is known to be open, and -EINTR if a signal came first. Plans stay paused in both cases, and
 * gates are opened as soon as RM lets them be.
 */
int qgpu_pause(int reason, bool interruptible);
void qgpu_unpause(int reason);

/* ... for a machine or driver that is to sleep. -EBUSY: RM did not let every gate be opened in time; plans go on. */
int qgpu_sleep(int reason);

int qgpu_pause_init(void);
void qgpu_pause_uninit(void);

#endif
