/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_MEM_H
#define _QGPU_MEM_H

#include "register.h"

/*
 * Memory that is charged to a pod on some pGPUs (a mask of indexes) for as long as anybody has a reference. It may be a
 * reservation: memory that is about to be made, or what nobody has a handle on. Only what needs GFP sleeps.
 */
struct qgpu_mem;

/* ERR_PTR(-EDQUOT): the pod has no room, ERR_PTR(-ENOMEM). */
struct qgpu_mem *qgpu_mem_new(struct qgpu_pod *pod, u32 gpus, u64 size, gfp_t gfp);
/* -EDQUOT: it does not fit, and all is as it was. */
int qgpu_mem_resize(struct qgpu_mem *mem, u32 gpus, u64 size);
/* The memory is there: charge it, whether it fits or not. */
void qgpu_mem_grow(struct qgpu_mem *mem, u64 size);
struct qgpu_mem *qgpu_mem_get(struct qgpu_mem *mem);
void qgpu_mem_put(struct qgpu_mem *mem);

u64 qgpu_mem_size(const struct qgpu_mem *mem);
const struct qgpu_pod *qgpu_mem_pod(const struct qgpu_mem *mem);

/* Make object a name of mem; consumes the reference. */
void qgpu_mem_name(struct qgpu_object *object, struct qgpu_mem *mem);
/* Under rcu_read_lock(): a reference to the memory of an object, or NULL. */
struct qgpu_mem *qgpu_mem_of(struct qgpu_object *object);
void qgpu_mem_drop(struct qgpu_object *object);

/* Keep memory charged until the client goes (it has no other name); consumes the reference. */
void qgpu_mem_keep(struct qgpu_client *client, struct qgpu_mem *mem);
/* Keep the memory of an object charged until the pod has no file left, for it is exported. */
void qgpu_mem_export(struct qgpu_client *client, struct qgpu_object *object);
void qgpu_mem_release(struct list_head *kept);

/* An exported piece of memory, by a name that it had: in case that is another's by now, or nobody's, look it up. */
struct qgpu_export {
	u32 client, handle;
	struct qgpu_mem *mem;	/* a reference */
};

/* The pod's exports of a size on a pGPU, newest first; how many there are, max at most. */
int qgpu_mem_exports(struct qgpu_pod *pod, int gpu, u64 size, struct qgpu_export *exports, int max);

void qgpu_mem_usage(struct qgpu_pod *pod, int gpu, u64 *size, u64 *peak);

#endif
