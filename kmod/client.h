/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_CLIENT_H
#define _QGPU_CLIENT_H

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

int qgpu_clients_init(void);
void qgpu_clients_uninit(void);

/* Locked and referenced; NULL: not one of this pod's; ERR_PTR(-EINTR): a fatal signal came first. */
struct qgpu_client *qgpu_client_lock(u32 handle, const struct qgpu_pod *pod);
void qgpu_client_unlock(struct qgpu_client *client);
/* Whether it is still the client known by its handle: one that is dead gives that up to a newer one. */
bool qgpu_client_listed(const struct qgpu_client *client);
/* The id of its pod; 0: nobody's. */
u64 qgpu_client_pod(u32 handle);

/* Room for a client that RM is about to make, so that none is without an entry. NULL: the pod has as many as it may. */
struct qgpu_client *qgpu_client_new(struct qgpu_pod *pod);
void qgpu_client_discard(struct qgpu_client *client);
/*
 * Enter it, or discard it.
 * sure: RM itself said that it made this. Then whatever has the handle here already is gone there, and makes way.
 */
int qgpu_client_add(struct qgpu_client *client, struct list_head *file_clients, u32 handle, bool sure);
/* Of a file that is being released: the first opens every gate of its clients for good, the second forgets them. */
void qgpu_clients_open(struct list_head *file_clients);
void qgpu_clients_remove(struct list_head *file_clients);
/* Locked by the caller, who has removed its objects: forget the client itself. */
void qgpu_client_unlink(struct qgpu_client *client);

/* The rest needs the client's lock. */
struct qgpu_object *qgpu_object_find(struct qgpu_client *client, u32 handle);
struct qgpu_object *qgpu_object_add(struct qgpu_client *client, u32 handle, u32 parent, u32 class, bool sure);
int qgpu_object_gpu(struct qgpu_client *client, u32 handle);
u32 qgpu_object_device(struct qgpu_client *client, u32 handle);
/* Whether it is the last subdevice of a device with TSGs: gating them is a control on it. */
bool qgpu_object_needed(struct qgpu_client *client, struct qgpu_object *object);
/* Whether it has channels. */
bool qgpu_objects_run(struct qgpu_client *client);
/* Keep the gates of what is below (or hangs on) an object open while the driver frees it. */
/* True: a gate was opened by it that was closed. */
bool qgpu_objects_hold(struct qgpu_client *client, u32 handle);
void qgpu_objects_unhold(struct qgpu_client *client);
void qgpu_objects_remove(struct qgpu_client *client, u32 handle);
/* Ask RM which channels and TSGs are left, and forget those that are not. */
void qgpu_objects_reconcile(struct qgpu_client *client);
bool qgpu_objects_reclose(struct qgpu_client *client);

/* All memory that it has handles on is exported, as far as one can tell. */
void qgpu_objects_export(struct qgpu_client *client);

/* The memory object of any client, with a reference to the memory, or NULL. */
struct qgpu_mem *qgpu_client_mem(u32 client, u32 handle);

extern atomic_t qgpu_nr_clients, qgpu_nr_objects;

#endif
