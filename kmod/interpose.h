/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_INTERPOSE_H
#define _QGPU_INTERPOSE_H

#include <linux/fs.h>

int qgpu_interpose_init(void);
/* Waits until nobody calls through this module any more; see interpose.c. */
void qgpu_interpose_uninit(void);

/*
 * Replace the pointers of this table, which is the driver's own; again after leaving it, or half leaving it. True: it
 * was half left, and calls may have passed unseen.
 */
bool qgpu_interpose_enter(struct file_operations *fops);
/*
 * When it returns, no task is in this module's wrappers, and one that enters them goes on to the driver. Gates must be
 * open for good. -EINTR: a signal came first; calls pass through already, but the end of a file is seen, and the caller
 * may wait again or enter again.
 */
int qgpu_interpose_leave(struct file_operations *fops, bool interruptible);

/* Number of calls that came through so far. */
u64 qgpu_interpose_calls(void);

#endif
