// SPDX-License-Identifier: GPL-2.0
/*
 * untracked_object.c - bounds a pod's objects that nothing else bounds, most of which the object table does not keep: RM
 * holds its lock while it frees a client, and its memory for them is charged to nobody. object.c says which these are.
 *
 * Only their handles are known, and the cards that they were made for. RM also frees them with what they lie below, and
 * with what they depend on. So some of them may be gone, which RM is asked before another one is refused.
 *
 * A pod's mappings for the CPU are bounded likewise. RM also ends one with the object that is mapped, and with the
 * device or subdevice that the call named; in the last case the mapping counts until the object is gone. dma_mapping.c
 * keeps those for the card.
 */
#include <linux/sched.h>
#include <linux/sched/signal.h>

#include "dma_mapping.h"
#include "nvrm.h"
#include "rm.h"
#include "untracked_object.h"

/*
 * As in qgpu/guardian/proxy, where untracked_objects.py, client_registry.py, alloc_checks.py and dma_mappings.py explain
 * them; tests/kmod/test_rules.py compares them.
 */
static const struct {
	u32 of_client, of_pod;
} most[] = {
	[QGPU_UNTRACKED_OTHER] = { 1 << 11, 1 << 14 },
	[QGPU_UNTRACKED_SYSTEM] = { 1 << 15, 1 << 16 },
	[QGPU_UNTRACKED_DEBUGGER] = { 1 << 9, 1 << 9 },
	[QGPU_UNTRACKED_PAGE] = { 1 << 4, 1 << 14 },
	[QGPU_UNTRACKED_MAPPING] = { 1 << 15, 1 << 16 },	/* the guardian: 65,536 in a process's life */
	[QGPU_UNTRACKED_DMA_MAPPING] = { 1 << 14, 1 << 15 },
};

enum qgpu_untracked_kind qgpu_untracked_kind(u32 class)
{
	switch (class) {
	case NV01_MEMORY_SYSTEM:
	case NV01_MEMORY_SYSTEM_OS_DESCRIPTOR:
		return QGPU_UNTRACKED_SYSTEM;
	case GT200_DEBUGGER:
		return QGPU_UNTRACKED_DEBUGGER;
	case RM_USER_SHARED_DATA:
		return QGPU_UNTRACKED_PAGE;
	}
	return QGPU_UNTRACKED_OTHER;
}

u64 qgpu_stamp(void)
{
	static atomic64_t last;

	return atomic64_inc_return(&last);
}

/* An entry of a client's untracked objects: the stamp above the card, counted from 1, above the kind. */
#define KIND_BITS 2
#define GPU_BITS 6
#define STAMP_AT (KIND_BITS + GPU_BITS)
static_assert(QGPU_UNTRACKED_MAPPING <= BIT(KIND_BITS));	/* mappings have no entry there */
static_assert(QGPU_MAX_GPUS < BIT(GPU_BITS));

static void *entry_of(u32 class, int gpu)
{
	return xa_mk_value(qgpu_stamp() << STAMP_AT | (gpu + 1) << KIND_BITS | qgpu_untracked_kind(class));
}

static enum qgpu_untracked_kind kind_in(const void *entry)
{
	return xa_to_value(entry) & (BIT(KIND_BITS) - 1);
}

u64 qgpu_untracked_stamp(struct qgpu_client *client, u32 handle)
{
	const void *entry = xa_load(&client->untracked, handle);

	return entry ? xa_to_value(entry) >> STAMP_AT : 0;
}

bool qgpu_untracked_has(struct qgpu_client *client, u32 handle)
{
	return xa_load(&client->untracked, handle);
}

int qgpu_untracked_gpu(struct qgpu_client *client, u32 handle)
{
	const void *entry = xa_load(&client->untracked, handle);

	return entry ? (int)(xa_to_value(entry) >> KIND_BITS & (BIT(GPU_BITS) - 1)) - 1 : -1;
}

bool qgpu_untracked_is_page(struct qgpu_client *client, u32 handle)
{
	const void *entry = xa_load(&client->untracked, handle);

	return entry && kind_in(entry) == QGPU_UNTRACKED_PAGE;
}

static bool fits(struct qgpu_client *client, enum qgpu_untracked_kind kind)
{
	lockdep_assert_held(&client->lock);
	if (client->nr_untracked[kind] >= most[kind].of_client)
		qgpu_untracked_forget_gone(client, kind);
	return client->nr_untracked[kind] < most[kind].of_client &&
	       atomic_read(&client->pod->nr_untracked[kind]) < most[kind].of_pod;
}

bool qgpu_untracked_fits(struct qgpu_client *client, u32 class)
{
	return fits(client, qgpu_untracked_kind(class));
}

bool qgpu_mapping_fits(struct qgpu_client *client)
{
	return fits(client, QGPU_UNTRACKED_MAPPING);
}

bool qgpu_dma_mapping_fits(struct qgpu_client *client)
{
	return fits(client, QGPU_UNTRACKED_DMA_MAPPING);
}

u32 qgpu_mappings_of(struct qgpu_client *client, u32 handle)
{
	return xa_to_value(xa_load(&client->mappings, handle));
}

int qgpu_mapping_add(struct qgpu_client *client, u32 handle)
{
	unsigned long times;
	int ret;

	lockdep_assert_held(&client->lock);
	times = xa_to_value(xa_load(&client->mappings, handle));
	ret = xa_err(xa_store(&client->mappings, handle, xa_mk_value(times + 1), GFP_KERNEL_ACCOUNT));
	if (!ret)
		qgpu_untracked_count(client, QGPU_UNTRACKED_MAPPING, 1);
	return ret;
}

void qgpu_mapping_remove(struct qgpu_client *client, u32 handle)
{
	unsigned long times;

	lockdep_assert_held(&client->lock);
	times = xa_to_value(xa_load(&client->mappings, handle));
	if (!times)
		return;
	if (times > 1)	/* replaces an entry, which needs no memory */
		xa_store(&client->mappings, handle, xa_mk_value(times - 1), GFP_KERNEL_ACCOUNT);
	else
		xa_erase(&client->mappings, handle);
	qgpu_untracked_count(client, QGPU_UNTRACKED_MAPPING, -1);
}

/* RM has it already, so noting it must not fail. */
void qgpu_untracked_note(struct qgpu_client *client, u32 handle, u32 class, int gpu)
{
	void *entry = entry_of(class, gpu), *before;

	lockdep_assert_held(&client->lock);
	before = xa_store(&client->untracked, handle, entry, GFP_KERNEL_ACCOUNT | __GFP_NOFAIL);
	if (before)
		qgpu_untracked_count(client, kind_in(before), -1);
	qgpu_untracked_count(client, kind_in(entry), 1);
}

void qgpu_untracked_forget(struct qgpu_client *client, u32 handle)
{
	void *entry = xa_erase(&client->untracked, handle);
	unsigned long times = xa_to_value(xa_erase(&client->mappings, handle));

	lockdep_assert_held(&client->lock);
	if (entry)
		qgpu_untracked_count(client, kind_in(entry), -1);
	qgpu_untracked_count(client, QGPU_UNTRACKED_MAPPING, -(int)times);
}

void qgpu_untracked_end(struct qgpu_client *client)
{
	unsigned long handle;
	void *entry;

	xa_for_each(&client->untracked, handle, entry) {
		qgpu_untracked_forget(client, handle);
		cond_resched();
	}
	xa_for_each(&client->mappings, handle, entry) {
		qgpu_untracked_forget(client, handle);
		cond_resched();
	}
	qgpu_dma_mappings_end(client);
}

int qgpu_untracked_forget_gone(struct qgpu_client *client, enum qgpu_untracked_kind kind)
{
	bool mappings = kind == QGPU_UNTRACKED_MAPPING;
	unsigned long handle;
	void *entry;

	if (kind == QGPU_UNTRACKED_DMA_MAPPING)
		return qgpu_dma_mappings_forget_gone(client);
	xa_for_each(mappings ? &client->mappings : &client->untracked, handle, entry) {
		if (fatal_signal_pending(current))
			return -EINTR;
		if ((mappings || kind_in(entry) == kind) && qgpu_rm_gone(client->handle, handle))
			qgpu_untracked_forget(client, handle);
		cond_resched();
	}
	return 0;
}

bool qgpu_untracked_near_most(const struct qgpu_pod *pod, enum qgpu_untracked_kind kind, u32 more)
{
	return atomic_read(&pod->nr_untracked[kind]) + more + QGPU_POD_CALLS > most[kind].of_pod;
}
