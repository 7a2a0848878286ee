// SPDX-License-Identifier: GPL-2.0
/*
 * uvm_tables.c - page tables that UVM makes for mappings of a process. They lie on the card, and no interface reports
 * them. Each pGPU on which the pod has a limit is charged their peak since the pod last had none, because UVM returns a
 * piece of the card only when no table lies in it any more.
 */
#include <linux/kref.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/spinlock.h>

#include "mem.h"
#include "uvm_tables.h"

struct qgpu_tables {
	struct kref ref;
	u64 now;
	struct qgpu_mem *mem;
};

static DEFINE_SPINLOCK(tables_lock);	/* protects the current sizes; mem_lock (mem.c) is taken inside */

/* How much address space one table covers, by level, beginning with that of the smallest pages (uvm_hopper_mmu.c). */
static const u8 level_bits[] = { 21, 29, 38, 47 };

u64 qgpu_table_bytes(u64 base, u64 length)
{
	u64 last = base + max(length, 1ull) - 1, tables = 0;
	int i;

	if (last < base)
		return 0;	/* UVM refuses such a range */
	for (i = 0; i < ARRAY_SIZE(level_bits); i++)
		tables += (last >> level_bits[i]) - (base >> level_bits[i]) + 1;
	return tables * SZ_4K;
}

struct qgpu_tables *qgpu_tables_new(struct qgpu_pod *pod)
{
	struct qgpu_tables *tables = kzalloc(sizeof(*tables), GFP_ATOMIC | __GFP_NOWARN);

	if (!tables)
		return NULL;
	kref_init(&tables->ref);
	tables->mem = qgpu_mem_new(pod, 0, 0, GFP_ATOMIC | __GFP_NOWARN);
	if (!IS_ERR(tables->mem))
		return tables;
	kfree(tables);
	return NULL;
}

static void tables_free(struct kref *ref)
{
	struct qgpu_tables *tables = container_of(ref, struct qgpu_tables, ref);

	qgpu_mem_put(tables->mem);
	kfree(tables);
}

struct qgpu_tables *qgpu_tables_get(struct qgpu_tables *tables)
{
	kref_get(&tables->ref);
	return tables;
}

void qgpu_tables_put(struct qgpu_tables *tables)
{
	if (tables)
		kref_put(&tables->ref, tables_free);
}

bool qgpu_tables_empty(const struct qgpu_tables *tables)
{
	return !READ_ONCE(tables->now);
}

int qgpu_tables_add(struct qgpu_tables *tables, u64 size)
{
	int ret = 0;

	spin_lock(&tables_lock);
	if (tables->now + size > qgpu_mem_size(tables->mem))
		ret = qgpu_mem_resize(tables->mem, qgpu_pod_limited(qgpu_mem_pod(tables->mem)), tables->now + size);
	if (!ret)
		tables->now += size;
	spin_unlock(&tables_lock);
	return ret;
}

void qgpu_tables_sub(struct qgpu_tables *tables, u64 size)
{
	spin_lock(&tables_lock);
	tables->now -= size;
	if (!tables->now)
		qgpu_mem_resize(tables->mem, 0, 0);
	spin_unlock(&tables_lock);
}
