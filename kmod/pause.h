/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_PAUSE_H
#define _QGPU_PAUSE_H

#include <linux/types.h>

/* While there is a reason to pause, every gate should be open and every timeslice the driver's own. */
#define QGPU_PAUSE_SUSPEND	0x1
#define QGPU_PAUSE_DETACH	0x2

/* Returns once every gate is open, or after trying for a while. */
void qgpu_pause(int reason);
void qgpu_unpause(int reason);

int qgpu_pause_init(void);
void qgpu_pause_uninit(void);

#endif
