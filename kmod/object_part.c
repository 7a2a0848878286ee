// SPDX-License-Identifier: GPL-2.0
/*
 * object_part.c - bounds the parts of a pod's objects that RM goes through without letting others in: event objects,
 * which it notifies all of a card's in an interrupt, under a spinlock; bindings of channels to semaphore surfaces, for
 * each of which it makes up to eight events of its own; and pieces of multicast objects, which it detaches with its
 * lock held.
 *
 * RM frees them with what they belong to, too. So the module asks RM which of those there are before it refuses another
 * one.
 */
#include "object_part.h"
#include "pod.h"
#include "rm.h"

static const u32 most[] = {
	[QGPU_PART_EVENT] = 2048,	/* a CUDA process has about ten */
	[QGPU_PART_BINDING] = 2048,
	[QGPU_PART_PIECE] = 32768,	/* as for the guardian, of mappings for the card */
};

static unsigned long key_of(u32 client, u32 handle)
{
	return (unsigned long)client << 32 | handle;
}

static void set(struct qgpu_object_parts *parts, unsigned long key, u32 number)
{
	parts->sum += number - xa_to_value(xa_load(&parts->numbers, key));
	if (number)	/* RM has it already, so noting it must not fail */
		xa_store(&parts->numbers, key, xa_mk_value(number), GFP_KERNEL_ACCOUNT | __GFP_NOFAIL);
	else
		xa_erase(&parts->numbers, key);
}

static void forget_gone(struct qgpu_object_parts *parts)
{
	unsigned long key;
	void *entry;

	xa_for_each(&parts->numbers, key, entry) {
		if (qgpu_rm_gone(key >> 32, (u32)key))
			set(parts, key, 0);
		cond_resched();
	}
}

bool qgpu_object_part_fits(struct qgpu_pod *pod, enum qgpu_object_part kind)
{
	struct qgpu_object_parts *parts = &pod->parts[kind];

	lockdep_assert_held(&pod->parts_lock);
	if (parts->sum >= most[kind])
		forget_gone(parts);
	return parts->sum < most[kind];
}

void qgpu_object_part_made(struct qgpu_pod *pod, enum qgpu_object_part kind, u32 client, u32 handle)
{
	lockdep_assert_held(&pod->parts_lock);
	set(&pod->parts[kind], key_of(client, handle), 1);
}

void qgpu_object_part_count(struct qgpu_pod *pod, enum qgpu_object_part kind, u32 client, u32 handle, bool more)
{
	struct qgpu_object_parts *parts = &pod->parts[kind];
	unsigned long key = key_of(client, handle);
	u32 number = xa_to_value(xa_load(&parts->numbers, key));

	lockdep_assert_held(&pod->parts_lock);
	if (more || number)
		set(parts, key, more ? number + 1 : number - 1);
}
