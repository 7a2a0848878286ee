// SPDX-License-Identifier: GPL-2.0
/*
 * mem.c - video memory held by pods, against what they were granted.
 *
 * Memory is charged once to each pod that has a handle on it, until nothing of that pod's keeps it. So a pod that takes
 * another's (by a duplicate) must have room for it. Whether an allocation is asked for, and its true size, is found out
 * in video.c.
 */
#include <linux/slab.h>
#include <linux/spinlock.h>

#include "mem.h"

struct qgpu_mem {
	unsigned int refs;		/* handles, calls that are about to make one, and what else keeps it */
	struct qgpu_pod *pod;		/* that is charged: a reference */
	int gpu;
	u64 size;
};

static DEFINE_SPINLOCK(mem_lock);	/* protects everything in struct qgpu_mem, and what shares hold */

static void charge(struct qgpu_pod *pod, int gpu, u64 size)
{
	struct qgpu_share *share = &pod->shares[gpu];

	lockdep_assert_held(&mem_lock);
	share->memory += size;
	share->peak_memory = max(share->peak_memory, share->memory);
}

static bool fits(struct qgpu_pod *pod, int gpu, u64 size)
{
	struct qgpu_share *share = &pod->shares[gpu];
	u64 limit = READ_ONCE(pod->gone) ? U64_MAX : READ_ONCE(share->memory_limit);

	lockdep_assert_held(&mem_lock);
	return share->memory <= limit && size <= limit - share->memory;
}

int qgpu_mem_reserve(struct qgpu_pod *pod, int gpu, u64 size)
{
	int ret = -EDQUOT;

	spin_lock(&mem_lock);
	if (fits(pod, gpu, size)) {
		charge(pod, gpu, size);
		ret = 0;
	}
	spin_unlock(&mem_lock);
	return ret;
}

void qgpu_mem_unreserve(struct qgpu_pod *pod, int gpu, u64 size)
{
	spin_lock(&mem_lock);
	pod->shares[gpu].memory -= size;
	spin_unlock(&mem_lock);
}

int qgpu_mem_resize(struct qgpu_pod *pod, int gpu, u64 reserved, u64 size)
{
	int ret = 0;

	spin_lock(&mem_lock);
	if (size <= reserved)
		pod->shares[gpu].memory -= reserved - size;
	else if (fits(pod, gpu, size - reserved))
		charge(pod, gpu, size - reserved);
	else
		ret = -EDQUOT;
	spin_unlock(&mem_lock);
	return ret;
}

struct qgpu_mem *qgpu_mem_new(struct qgpu_pod *pod, int gpu, u64 size)
{
	struct qgpu_mem *mem = kzalloc(sizeof(*mem), GFP_KERNEL_ACCOUNT);

	if (!mem)
		return NULL;
	mem->refs = 1;
	mem->pod = qgpu_pod_get(pod);
	mem->gpu = gpu;
	mem->size = size;
	return mem;
}

int qgpu_mem_attach(struct qgpu_object *object, u64 size)
{
	struct qgpu_mem *mem = qgpu_mem_new(object->pod, object->gpu, size);

	if (!mem)
		return -ENOMEM;
	qgpu_mem_alias(object, mem);
	return 0;
}

void qgpu_mem_put(struct qgpu_mem *mem)
{
	bool last;

	if (!mem)
		return;
	spin_lock(&mem_lock);
	last = --mem->refs == 0;
	if (last)
		mem->pod->shares[mem->gpu].memory -= mem->size;
	spin_unlock(&mem_lock);
	if (!last)
		return;
	qgpu_pod_put(mem->pod);
	kfree(mem);
}

const struct qgpu_pod *qgpu_mem_pod(const struct qgpu_mem *mem)
{
	return mem->pod;	/* it does not change */
}

u64 qgpu_mem_size(const struct qgpu_mem *mem)
{
	return mem->size;	/* it does not change */
}

void qgpu_mem_alias(struct qgpu_object *object, struct qgpu_mem *mem)
{
	if (!mem)
		return;
	spin_lock(&mem_lock);
	object->mem = mem;
	spin_unlock(&mem_lock);
}

struct qgpu_mem *qgpu_mem_of(struct qgpu_object *object)
{
	struct qgpu_mem *mem;

	spin_lock(&mem_lock);
	mem = object->mem;
	if (mem)
		mem->refs++;
	spin_unlock(&mem_lock);
	return mem;
}

void qgpu_mem_drop(struct qgpu_object *object)
{
	struct qgpu_mem *mem;

	spin_lock(&mem_lock);
	mem = object->mem;
	object->mem = NULL;
	spin_unlock(&mem_lock);
	qgpu_mem_put(mem);
}

struct kept {
	struct list_head node;
	struct qgpu_mem *mem;
};

int qgpu_mem_keep(struct qgpu_pod *pod, struct qgpu_mem *mem)
{
	struct kept *kept = kmalloc(sizeof(*kept), GFP_KERNEL_ACCOUNT);

	if (!kept)
		return -ENOMEM;
	kept->mem = mem;
	spin_lock(&mem_lock);
	list_add(&kept->node, &pod->kept);
	spin_unlock(&mem_lock);
	return 0;
}

void qgpu_mem_release_kept(struct qgpu_pod *pod)
{
	struct kept *kept, *next;
	LIST_HEAD(gone);

	spin_lock(&mem_lock);
	list_splice_init(&pod->kept, &gone);
	spin_unlock(&mem_lock);
	list_for_each_entry_safe(kept, next, &gone, node) {
		qgpu_mem_put(kept->mem);
		kfree(kept);
	}
}

void qgpu_mem_usage(struct qgpu_pod *pod, int gpu, u64 *size, u64 *peak)
{
	spin_lock(&mem_lock);
	*size = pod->shares[gpu].memory;
	*peak = pod->shares[gpu].peak_memory;
	spin_unlock(&mem_lock);
}
