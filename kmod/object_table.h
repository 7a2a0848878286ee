/* SPDX-License-Identifier: GPL-2.0 */
/* object_table.h - records of a pod's RM clients and their objects. client.c and object.c change them. */
#ifndef _QGPU_OBJECT_TABLE_H
#define _QGPU_OBJECT_TABLE_H

#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/rbtree.h>
#include <linux/rhashtable-types.h>
#include <linux/xarray.h>

#include "pod.h"

struct qgpu_mem;
struct qgpu_tsg;

#define QGPU_WRITTEN_MAX 3	/* error notifiers of both kinds, USERD */

/* An RM object of a pod that matters for GPU time or memory. */
struct qgpu_object {
	u32 handle;
	u32 parent;
	u32 class;
	int gpu;			/* on which memory lies, else that of its device when it was made; -1: unknown */
	bool doomed;			/* while its subtree is being removed */
	bool held;			/* the free under way holds its TSG open */
	u32 number;			/* of a device: the call's number of its card, which counts if the call was sealed */
	u32 written[QGPU_WRITTEN_MAX];	/* of a TSG or channel: handles of memory that the card writes for it */
	struct qgpu_tsg *tsg;		/* a TSG, or the TSG of a channel */
	struct qgpu_mem *mem;		/* its own, or RM's for it; under mem_lock */
	u64 stamp;			/* of a channel or memory, never given twice; set last */
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
	struct list_head pod_node;	/* in the pod's, for as long */
	struct mutex lock;		/* protects what follows; held during allocs and frees in the driver */
	bool dead;
	struct xarray objects;
	unsigned int nr_devices;	/* among them */
	struct xarray untracked;	/* untracked_object.c: by handle, the kinds and stamps of others */
	struct xarray mappings;		/* likewise: by the handle of what is mapped, how often */
	struct rb_root dma_mappings;	/* dma_mapping.c */
	unsigned int nr_untracked[QGPU_UNTRACKED_KINDS];	/* in these three */
	struct list_head kept;		/* memory that stays charged until the client goes: mem.c, under mem_lock */
};

static inline void qgpu_untracked_count(struct qgpu_client *client, enum qgpu_untracked_kind kind, int by)
{
	client->nr_untracked[kind] += by;
	atomic_add(by, &client->pod->nr_untracked[kind]);
}

#endif
