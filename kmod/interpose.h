/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_INTERPOSE_H
#define _QGPU_INTERPOSE_H

#include <linux/fs.h>

int qgpu_interpose_init(void);
void qgpu_interpose_uninit(void);

/* Replace the pointers of this table, which is the driver's own. */
void qgpu_interpose_enter(struct file_operations *fops);
/* When it returns, no task is in this module's wrappers or will enter one. Gates must be open for good. */
void qgpu_interpose_leave(struct file_operations *fops);

/* Number of calls that came through so far. */
u64 qgpu_interpose_calls(void);

#endif
