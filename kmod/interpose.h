/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_INTERPOSE_H
#define _QGPU_INTERPOSE_H

#include <linux/fs.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/rhashtable-types.h>

#include "uapi/qgpu.h"

struct qgpu_pod;

/* A file of the NVIDIA driver that belongs to a pod, until its release. */
struct qgpu_file {
	struct rhash_head node;
	struct file *filp;
	struct qgpu_pod *pod;		/* a reference */
	struct list_head clients;	/* client.c */
	struct rcu_head rcu;
};

extern struct mutex qgpu_attach_lock;	/* attaching and detaching, one at a time */

int qgpu_interpose_init(void);
void qgpu_interpose_uninit(void);

/* Interpose if the driver is there and known, and not switched off. Cheap when there is nothing to do. */
void qgpu_interpose_attach(void);
/* The same, unless attaching or detaching is under way: that can wait for a pod's call for as long as the pod likes. */
void qgpu_interpose_try_attach(void);
/* When it returns, no task is in this module's wrappers, or will be. Every gate is open. */
void qgpu_interpose_detach(void);

/* The driver's own ioctl, for a caller that is inside a wrapper. */
long qgpu_driver_ioctl(struct file *filp, unsigned int cmd, unsigned long arg);

void qgpu_interpose_info(struct qgpu_info *info);

#endif
