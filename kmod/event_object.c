// SPDX-License-Identifier: GPL-2.0
/*
 * event_object.c - bounds a pod's event objects: RM notifies all of a card's in an interrupt, under a spinlock. RM frees
 * them with what they belong to, too. So the module asks RM which ones there are before it refuses another one.
 */
#include <linux/lockdep.h>

#include "event_object.h"
#include "pod.h"
#include "rm.h"

/* A CUDA process has about ten. */
#define MOST_EVENTS	2048

static void forget_gone(struct qgpu_pod *pod)
{
	unsigned long key;
	void *entry;

	xa_for_each(&pod->event_objects, key, entry) {
		if (!qgpu_rm_gone(key >> 32, (u32)key))
			continue;
		xa_erase(&pod->event_objects, key);
		pod->nr_event_objects--;
	}
}

bool qgpu_event_object_fits(struct qgpu_pod *pod)
{
	lockdep_assert_held(&pod->events_lock);
	if (pod->nr_event_objects >= MOST_EVENTS)
		forget_gone(pod);
	return pod->nr_event_objects < MOST_EVENTS;
}

/* RM has it already, so noting it must not fail. */
void qgpu_event_object_made(struct qgpu_pod *pod, u32 client, u32 handle)
{
	unsigned long key = (unsigned long)client << 32 | handle;

	lockdep_assert_held(&pod->events_lock);
	if (!xa_store(&pod->event_objects, key, xa_mk_value(1), GFP_KERNEL_ACCOUNT | __GFP_NOFAIL))
		pod->nr_event_objects++;
}
