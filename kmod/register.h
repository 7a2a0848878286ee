/* SPDX-License-Identifier: GPL-2.0 */
/* register.h - what is kept of a pod's RM clients and of the objects below them. Who changes it: client.c, object.c. */
#ifndef _QGPU_REGISTER_H
#define _QGPU_REGISTER_H

#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/rhashtable-types.h>
#include <linux/xarray.h>

#include "pod.h"

struct qgpu_mem;
struct qgpu_tsg;

/* An RM object of a pod that matters for time or memory. */
struct qgpu_object {
	u32 handle;
	u32 parent;
	u32 class;
	int gpu;			/* of a device, else that of its device when it was made; -1: not known yet */
	bool doomed;			/* while its subtree is being removed */
	bool held;			/* its TSG is held open by the free that is under way */
	struct qgpu_tsg *tsg;		/* a TSG, or the TSG of a channel */
	struct qgpu_mem *mem;		/* its own, or what RM takes for it; under mem_lock */
	struct rcu_head rcu;
};

/* An RM client: the root of a tree of objects. It belongs to the file it was allocated on. */
struct qgpu_client {
	struct rhash_head node;
	u32 handle;
	u32 tgid;
	struct kref ref;
	struct rcu_head rcu;
	struct qgpu_pod *pod;		/* a reference */
	struct list_head file_node;	/* in the file's clients */
	struct mutex lock;		/* protects what follows; held over allocs and frees in the driver */
	bool dead;
	struct xarray objects;
	struct list_head kept;		/* memory that stays charged until the client goes: mem.c, under mem_lock */
};

#endif
