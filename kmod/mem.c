// SPDX-License-Identifier: GPL-2.0
/*
 * mem.c - memory held by pods, charged against their grants.
 *
 * Memory is charged once to each pod that has a handle on it, until nothing of that pod keeps it. So a pod that takes
 * another pod's memory (by a duplicate, or by a descriptor) must have room for it. vram_heap.c finds out whether a call
 * allocates memory, and its true size.
 */
#include <linux/hash.h>
#include <linux/hashtable.h>
#include <linux/slab.h>
#include <linux/spinlock.h>

#include "mem.h"
#include "nvrm.h"

/* Exports that are looked at for one import. A pod can have any number, and sizes that share a bucket. */
#define LOOKED_AT_MAX 1024

struct qgpu_mem {
	unsigned int refs;		/* handles, calls that are about to make one, and other keepers */
	struct qgpu_pod *pod;		/* the pod charged: a reference */
	u32 gpus;
	u64 size;
	struct list_head node;		/* in the list of its keeper: its client, or its pod */
	struct hlist_node export_node;	/* in exported, if it is in its pod's list */
	u32 client, handle;		/* the name it was exported by */
};

static_assert(QGPU_MAX_GPUS <= 32);

static DEFINE_SPINLOCK(mem_lock);	/* protects everything in struct qgpu_mem, what shares hold, and exported */
static DEFINE_HASHTABLE(exported, 12);	/* by pod, pGPUs and size */

static u32 export_key(const struct qgpu_pod *pod, u32 gpus, u64 size)
{
	return hash_64((uintptr_t)pod ^ gpus ^ size, 32);
}

static u64 on(u32 gpus, int gpu, u64 size)
{
	return gpus & BIT(gpu) ? size : 0;
}

static bool fits(const struct qgpu_pod *pod, int gpu, u64 more)
{
	const struct qgpu_share *share = &pod->shares[gpu];
	u64 limit = READ_ONCE(share->memory_limit);

	return share->memory <= limit && more <= limit - share->memory;
}

static bool may_become(const struct qgpu_mem *mem, u32 gpus, u64 size)
{
	int i;

	for (i = 0; i < QGPU_MAX_GPUS; i++) {
		u64 was = on(mem->gpus, i, mem->size), due = on(gpus, i, size);

		if (due > was && !fits(mem->pod, i, due - was))
			return false;
	}
	return true;
}

static void become(struct qgpu_mem *mem, u32 gpus, u64 size)
{
	int i;

	lockdep_assert_held(&mem_lock);
	for (i = 0; i < QGPU_MAX_GPUS; i++) {
		struct qgpu_share *share = &mem->pod->shares[i];

		share->memory += on(gpus, i, size) - on(mem->gpus, i, mem->size);
		share->peak_memory = max(share->peak_memory, share->memory);
	}
	mem->gpus = gpus;
	mem->size = size;
}

int qgpu_mem_resize(struct qgpu_mem *mem, u32 gpus, u64 size)
{
	int ret = -EDQUOT;

	spin_lock(&mem_lock);
	if (may_become(mem, gpus, size)) {
		become(mem, gpus, size);
		ret = 0;
	}
	spin_unlock(&mem_lock);
	return ret;
}

void qgpu_mem_grow(struct qgpu_mem *mem, u64 size)
{
	spin_lock(&mem_lock);
	become(mem, mem->gpus, max(mem->size, size));
	spin_unlock(&mem_lock);
}

struct qgpu_mem *qgpu_mem_new(struct qgpu_pod *pod, u32 gpus, u64 size, gfp_t gfp)
{
	struct qgpu_mem *mem = kzalloc(sizeof(*mem), gfp);

	if (!mem)
		return ERR_PTR(-ENOMEM);
	mem->refs = 1;
	mem->pod = qgpu_pod_get(pod);
	INIT_LIST_HEAD(&mem->node);
	if (!qgpu_mem_resize(mem, gpus, size))
		return mem;
	qgpu_mem_put(mem);
	return ERR_PTR(-EDQUOT);
}

struct qgpu_mem *qgpu_mem_get(struct qgpu_mem *mem)
{
	spin_lock(&mem_lock);
	mem->refs++;
	spin_unlock(&mem_lock);
	return mem;
}

void qgpu_mem_put(struct qgpu_mem *mem)
{
	bool last;

	if (!mem)
		return;
	spin_lock(&mem_lock);
	last = --mem->refs == 0;
	if (last)
		become(mem, 0, 0);
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
	return READ_ONCE(mem->size);	/* constant once it has a name */
}

void qgpu_mem_name(struct qgpu_object *object, struct qgpu_mem *mem)
{
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

void qgpu_mem_keep(struct qgpu_client *client, struct qgpu_mem *mem)
{
	spin_lock(&mem_lock);
	list_add(&mem->node, &client->kept);
	spin_unlock(&mem_lock);
}

u32 qgpu_mem_export(struct qgpu_client *client, struct qgpu_object *object)
{
	struct qgpu_mem *mem;
	u32 gpus = 0;

	spin_lock(&mem_lock);
	mem = object->mem;
	if (mem) {
		if (list_empty(&mem->node))
			mem->refs++;
		gpus = mem->gpus;
		list_move(&mem->node, &client->pod->kept);
		hash_del(&mem->export_node);
		hash_add(exported, &mem->export_node, export_key(mem->pod, mem->gpus, mem->size));
		if (object->class == NV01_MEMORY_LOCAL_USER || !mem->handle) {
			mem->client = client->handle;
			mem->handle = object->handle;
		}
	}
	spin_unlock(&mem_lock);
	return gpus;
}

/* No task adds to this list any more. */
void qgpu_mem_release(struct list_head *kept)
{
	struct qgpu_mem *mem;

	do {
		spin_lock(&mem_lock);
		mem = list_first_entry_or_null(kept, struct qgpu_mem, node);
		if (mem)
			list_del_init(&mem->node);
		if (mem)
			hash_del(&mem->export_node);
		spin_unlock(&mem_lock);
		qgpu_mem_put(mem);
		cond_resched();
	} while (mem);
}

/* The list may be long, and the pod may open a file meanwhile: what it exports by that one is not in this list. */
void qgpu_mem_file_closed(struct qgpu_pod *pod)
{
	LIST_HEAD(kept);

	spin_lock(&mem_lock);
	if (atomic_dec_and_test(&pod->nr_files))
		list_splice_init(&pod->kept, &kept);
	spin_unlock(&mem_lock);
	qgpu_mem_release(&kept);
}

int qgpu_mem_exports(struct qgpu_pod *pod, u32 gpus, u64 size, struct qgpu_export *exports, int max)
{
	struct qgpu_mem *mem;
	int n = 0, looked = 0;

	spin_lock(&mem_lock);
	hash_for_each_possible(exported, mem, export_node, export_key(pod, gpus, size)) {
		if (n == max || looked++ == LOOKED_AT_MAX)
			break;
		if (mem->pod != pod || mem->gpus != gpus || mem->size != size)
			continue;
		mem->refs++;
		exports[n++] = (struct qgpu_export){ mem->client, mem->handle, mem };
	}
	spin_unlock(&mem_lock);
	return n;
}

void qgpu_mem_usage(struct qgpu_pod *pod, int gpu, u64 *size, u64 *peak)
{
	spin_lock(&mem_lock);
	*size = pod->shares[gpu].memory;
	*peak = pod->shares[gpu].peak_memory;
	spin_unlock(&mem_lock);
}
