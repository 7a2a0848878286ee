/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_ATTACH_H
#define _QGPU_ATTACH_H

#include <linux/mutex.h>

#include "uapi/qgpu.h"

extern struct mutex qgpu_attach_lock;	/* attaching and detaching, one at a time */

int qgpu_attach_init(void);
void qgpu_attach_uninit(void);

/* Interpose if the driver is there and known, and not switched off. Cheap when there is nothing to do. */
void qgpu_attach(void);
/* The same, unless attaching or detaching is under way: that can wait for a pod's call for as long as the pod likes. */
void qgpu_try_attach(void);
/* When it returns, the driver is let go of, no task is in this module's wrappers, and every gate is open. */
void qgpu_detach(void);

void qgpu_attach_info(struct qgpu_info *info);

#endif
