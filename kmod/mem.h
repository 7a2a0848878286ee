/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_MEM_H
#define _QGPU_MEM_H

#include <linux/sizes.h>

#include "object_table.h"

/* What is charged for an address space, for its first page tables: on an H200 RM takes 20 KiB for them. */
#define QGPU_SPACE_BYTES SZ_64K

/*
 * Memory that is charged to a pod on some pGPUs (a mask of indexes) until the last reference goes. It may be a
 * reservation: memory that is about to be made, or memory without a handle. Only functions that take a GFP mask sleep,
 * and those that let go of a list.
 */
struct qgpu_mem;

/* ERR_PTR(-EDQUOT): the pod has no room; ERR_PTR(-ENOMEM): no kernel memory. */
struct qgpu_mem *qgpu_mem_new(struct qgpu_pod *pod, u32 gpus, u64 size, gfp_t gfp);
/* -EDQUOT: it does not fit, and nothing has changed. */
int qgpu_mem_resize(struct qgpu_mem *mem, u32 gpus, u64 size);
/* The memory exists: charge it, whether it fits or not. */
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
/* Keep the memory of an object charged until the pod has no file left, because it is exported. Returns its pGPUs. */
u32 qgpu_mem_export(struct qgpu_client *client, struct qgpu_object *object);
void qgpu_mem_release(struct list_head *kept);
/* One file of the pod is gone. With the last one nothing that the pod has exported stays charged. */
void qgpu_mem_file_closed(struct qgpu_pod *pod);

/* Exported memory, by a name that it had. The name may have been freed or reused since, so look it up again. */
struct qgpu_export {
	u32 client, handle;
	struct qgpu_mem *mem;	/* a reference */
};

/* The pod's exports of one size on these pGPUs, newest first; returns their number, at most max. */
int qgpu_mem_exports(struct qgpu_pod *pod, u32 gpus, u64 size, struct qgpu_export *exports, int max);

void qgpu_mem_usage(struct qgpu_pod *pod, int gpu, u64 *size, u64 *peak);

#endif
