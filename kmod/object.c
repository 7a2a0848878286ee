// SPDX-License-Identifier: GPL-2.0
/*
 * object.c - the object table: RM objects of a client that matter for GPU time or memory, their tree, and which
 * objects go together. tsg.c handles TSGs, mem.c memory.
 *
 * A pod decides how many objects a client has. So every loop over them holds nothing but the client's lock, and lets
 * others run. untracked_object.c knows of the client's other objects no more than that they are there.
 */
#include <linux/sched.h>
#include <linux/slab.h>

#include "mem.h"
#include "nvrm.h"
#include "object.h"
#include "rm.h"
#include "tsg.h"
#include "untracked_object.h"

#define OBJECT_DEPTH_MAX 16

/*
 * As in qgpu/guardian/proxy/alloc_checks.py, which explains them: devices of a client on one card, without a limit and
 * with one, and subdevices of a device. tests/kmod/test_rules.py compares them.
 */
#define DEVICES_MAX		16
#define DEVICES_MAX_LIMITED	4
#define SUBDEVICES_MAX		8
/* Of a client on all cards: without a seal the pod may misstate a card. */
#define ALL_DEVICES_MAX		128

#define DEVICE XA_MARK_2	/* of the object table: a device or a subdevice */

static struct qgpu_object *next_object(struct qgpu_client *client, unsigned long *index, unsigned long from)
{
	cond_resched();
	*index = from;
	return xa_find(&client->objects, index, ULONG_MAX, XA_PRESENT);
}

#define for_each_object(client, index, object) \
	for ((object) = next_object(client, &(index), 0); (object); \
	     (object) = (index) == ULONG_MAX ? NULL : next_object(client, &(index), (index) + 1))

atomic_t qgpu_nr_objects = ATOMIC_INIT(0);

struct qgpu_object *qgpu_object_find(struct qgpu_client *client, u32 handle)
{
	return xa_load(&client->objects, handle);
}

/*
 * Whether the bound on objects counts a class, because nothing else bounds it. Address spaces, context shares and
 * subdevices are in both tables. object_part.c bounds events.
 */
static bool is_counted(u32 class)
{
	return !qgpu_is_memory(class) && !NV_IS_GPFIFO(class) && class != NV01_DEVICE_0 &&
	       class != KEPLER_CHANNEL_GROUP_A && class != NV01_EVENT && class != NV01_EVENT_OS_EVENT;
}

static int insert(struct qgpu_client *client, struct qgpu_object *object)
{
	return xa_insert(&client->objects, object->handle, object, GFP_KERNEL_ACCOUNT);
}

struct qgpu_object *qgpu_object_add(struct qgpu_client *client, u32 handle, u32 parent, u32 class, bool sure)
{
	struct qgpu_object *object;
	int ret;

	lockdep_assert_held(&client->lock);
	if (handle == client->handle)
		return ERR_PTR(-EEXIST);
	if (!qgpu_pod_enter(&client->pod->nr_entries))
		return ERR_PTR(-ENOMEM);
	object = kzalloc(sizeof(*object), GFP_KERNEL_ACCOUNT);
	if (!object) {
		atomic_dec(&client->pod->nr_entries);
		return ERR_PTR(-ENOMEM);
	}
	object->handle = handle;
	object->parent = parent;
	object->class = class;
	object->gpu = qgpu_object_gpu(client, parent);
	ret = insert(client, object);
	if (ret == -EBUSY && sure) {	/* RM hands no handle out twice, so the older object is gone there */
		qgpu_objects_remove(client, handle);
		ret = insert(client, object);
	}
	if (ret) {
		atomic_dec(&client->pod->nr_entries);
		kfree(object);
		return ERR_PTR(ret == -EBUSY ? -EEXIST : ret);
	}
	if (is_counted(class))
		qgpu_untracked_note(client, handle, class, object->gpu);
	else
		qgpu_untracked_forget(client, handle);	/* RM had freed it with another object */
	atomic_inc(&qgpu_nr_objects);
	if (class == NV01_DEVICE_0 || class == NV20_SUBDEVICE_0)
		xa_set_mark(&client->objects, handle, DEVICE);
	if (class == NV01_DEVICE_0) {
		client->nr_devices++;
		atomic_inc(&client->pod->nr_devices);
	}
	return object;
}

static struct qgpu_object *device_of(struct qgpu_client *client, u32 handle)
{
	struct qgpu_object *object = qgpu_object_find(client, handle);
	int depth;

	for (depth = 0; object && depth < OBJECT_DEPTH_MAX; depth++) {
		if (object->class == NV01_DEVICE_0)
			return object;
		object = qgpu_object_find(client, object->parent);
	}
	return NULL;
}

int qgpu_object_gpu(struct qgpu_client *client, u32 handle)
{
	struct qgpu_object *device = device_of(client, handle);

	return device ? device->gpu : -1;
}

u32 qgpu_object_device(struct qgpu_client *client, u32 handle)
{
	struct qgpu_object *device = device_of(client, handle);

	return device ? device->handle : 0;
}

int qgpu_memory_gpu(struct qgpu_client *client, u32 handle)
{
	const struct qgpu_object *object = qgpu_object_find(client, handle);

	return object ? object->gpu : qgpu_untracked_gpu(client, handle);
}

u32 qgpu_device_subdevices(struct qgpu_client *client, u32 device)
{
	struct qgpu_object *object;
	unsigned long index;
	u32 number = 0;

	lockdep_assert_held(&client->lock);
	xa_for_each_marked(&client->objects, index, object, DEVICE)
		number += object->class == NV20_SUBDEVICE_0 && object->parent == device;
	return number;
}

static bool device_fits(struct qgpu_client *client, u32 number)
{
	u32 most = qgpu_pod_limited(client->pod) ? DEVICES_MAX_LIMITED : DEVICES_MAX;
	struct qgpu_object *object;
	unsigned long index;
	u32 there = 0;

	lockdep_assert_held(&client->lock);
	xa_for_each_marked(&client->objects, index, object, DEVICE)
		there += object->class == NV01_DEVICE_0 && object->number == number;
	return there < most && client->nr_devices < ALL_DEVICES_MAX;
}

bool qgpu_object_needed(struct qgpu_client *client, struct qgpu_object *object)
{
	struct qgpu_object *other;
	unsigned long index;
	bool needed = false;

	if (object->class != NV20_SUBDEVICE_0)
		return false;
	for_each_object(client, index, other) {
		if (other == object || qgpu_object_device(client, other->handle) != object->parent)
			continue;
		if (other->class == NV20_SUBDEVICE_0)
			return false;
		needed |= !!other->tsg;
	}
	return needed;
}

bool qgpu_is_registered(u32 class)
{
	return class == NV01_DEVICE_0 || class == NV20_SUBDEVICE_0 || class == KEPLER_CHANNEL_GROUP_A ||
	       class == FERMI_VASPACE_A || class == FERMI_CONTEXT_SHARE_A || NV_IS_GPFIFO(class);
}

bool qgpu_is_memory(u32 class)
{
	return class == NV01_MEMORY_LOCAL_USER || class == NV_MEMORY_FABRIC;
}

void qgpu_object_stamp(struct qgpu_object *object)
{
	smp_store_release(&object->stamp, qgpu_stamp());	/* pairs with qgpu_client_stamp() */
}

static bool is_below(struct qgpu_client *client, struct qgpu_object *object, u32 handle)
{
	int depth;

	if (handle == client->handle)	/* ends even if the chain of parents has a cycle */
		return true;
	for (depth = 0; object && depth < OBJECT_DEPTH_MAX; depth++) {
		if (object->handle == handle || object->parent == handle)
			return true;
		object = qgpu_object_find(client, object->parent);
	}
	return false;
}

/* RM tears down all channels that use an address space or context share with it, wherever they are in the tree. */
static bool goes_with(struct qgpu_client *client, struct qgpu_object *object, u32 handle)
{
	struct qgpu_object *freed = qgpu_object_find(client, handle);

	if (freed && (freed->class == FERMI_VASPACE_A || freed->class == FERMI_CONTEXT_SHARE_A))
		return true;
	return is_below(client, object, handle);
}

/* A mark of either table of a client: the handle was named as memory that the card writes. */
#define WRITTEN XA_MARK_1

bool qgpu_written_may_be(struct qgpu_client *client, u32 memory)
{
	u32 class;

	if (!qgpu_object_find(client, memory) && !qgpu_untracked_has(client, memory))
		return false;
	return qgpu_rm_class(client->handle, memory, &class) == NV_OK &&
	       (class == NV01_MEMORY_LOCAL_USER || class == NV01_MEMORY_SYSTEM);
}

void qgpu_written_note(struct qgpu_client *client, struct qgpu_object *object, const u32 written[QGPU_WRITTEN_MAX])
{
	int i;

	lockdep_assert_held(&client->lock);
	for (i = 0; i < QGPU_WRITTEN_MAX; i++) {
		object->written[i] = written[i];
		xa_set_mark(&client->objects, written[i], WRITTEN);
		xa_set_mark(&client->untracked, written[i], WRITTEN);
	}
}

/* RM takes one of any card (vaspaceGetByHandleOrDeviceDefault). */
bool qgpu_space_may_be(struct qgpu_client *client, u32 parent, u32 space)
{
	int gpu = qgpu_object_gpu(client, space);

	if (!space || (space == NV_SPACE_DYNAMIC && !qgpu_object_find(client, space)))
		return true;
	return gpu >= 0 && gpu == qgpu_object_gpu(client, parent);
}

/* RM says below what system memory lies. */
static bool memory_is_below(struct qgpu_client *client, u32 memory, u32 handle)
{
	struct qgpu_object *object = qgpu_object_find(client, memory);

	return is_below(client, object ?: qgpu_object_find(client, qgpu_rm_parent(client->handle, memory)), handle);
}

/* above: what is freed may have memory below it. */
static bool loses_memory(struct qgpu_client *client, struct qgpu_object *object, u32 freed, bool above)
{
	u32 memory;
	int i;

	for (i = 0; i < QGPU_WRITTEN_MAX; i++) {
		memory = object->written[i];
		if (memory && !is_below(client, object, freed) &&
		    (memory == freed || (above && memory_is_below(client, memory, freed))))
			return true;
	}
	return false;
}

struct qgpu_object *qgpu_written_for(struct qgpu_client *client, u32 handle)
{
	struct qgpu_object *object = qgpu_object_find(client, handle);
	bool above = object && (object->class == NV01_DEVICE_0 || object->class == NV20_SUBDEVICE_0);
	unsigned long index;

	lockdep_assert_held(&client->lock);
	if (!above && !xa_get_mark(&client->objects, handle, WRITTEN) &&
	    !xa_get_mark(&client->untracked, handle, WRITTEN))
		return NULL;
	for_each_object(client, index, object) {
		if (object->tsg && loses_memory(client, object, handle, above))
			return object;
	}
	return NULL;
}

bool qgpu_objects_share(struct qgpu_client *client)
{
	struct qgpu_object *object;
	unsigned long index;

	lockdep_assert_held(&client->lock);
	for_each_object(client, index, object) {
		if (object->tsg && qgpu_tsg_shared(object->tsg))
			return true;
	}
	return false;
}

/* Freeing one channel opens its TSG's gate: RM preempts by TSG, and waits for all of it. */
bool qgpu_objects_hold(struct qgpu_client *client, u32 handle, u32 *gpus)
{
	struct qgpu_object *object;
	unsigned long index;
	bool held = false;

	lockdep_assert_held(&client->lock);
	for_each_object(client, index, object) {
		if (!object->tsg || !goes_with(client, object, handle))
			continue;
		if (NV_IS_GPFIFO(object->class) && !qgpu_tsg_hidden(object->tsg) && object->handle != handle)
			continue;	/* freed with its TSG */
		object->held = true;
		held |= qgpu_tsg_hold(object->tsg, 1, gpus);
	}
	return held;
}

/* The object table no longer holds what the driver has freed; the rest is gated as before. */
void qgpu_objects_unhold(struct qgpu_client *client)
{
	struct qgpu_object *object;
	unsigned long index;
	u32 gpus = 0;

	lockdep_assert_held(&client->lock);
	for_each_object(client, index, object) {
		if (object->held)
			qgpu_tsg_hold(object->tsg, -1, &gpus);
		object->held = false;
	}
	qgpu_tsgs_wait(gpus);
}

static void object_remove(struct qgpu_client *client, struct qgpu_object *object)
{
	bool held = object->held && !qgpu_tsg_hidden(object->tsg) && NV_IS_GPFIFO(object->class);
	struct qgpu_tsg *tsg = object->tsg;
	u32 gpus = 0;

	xa_erase(&client->objects, object->handle);
	qgpu_untracked_forget(client, object->handle);	/* RM ends its mappings with it */
	if (object->mem)
		qgpu_mem_drop(object);
	if (object->tsg && NV_IS_GPFIFO(object->class))
		qgpu_channel_remove(object->tsg, client->handle, object->handle);
	else if (object->tsg)
		qgpu_tsg_drop(object->tsg, client->handle, object->handle, object->held);
	if (held) {	/* what is left of its TSG is gated as before */
		qgpu_tsg_hold(tsg, -1, &gpus);
		qgpu_tsgs_wait(gpus);
	}
	if (object->class == NV01_DEVICE_0) {
		client->nr_devices--;
		atomic_dec(&client->pod->nr_devices);
	}
	atomic_dec(&client->pod->nr_entries);
	atomic_dec(&qgpu_nr_objects);
	kfree_rcu(object, rcu);
}

void qgpu_objects_remove(struct qgpu_client *client, u32 handle)
{
	struct qgpu_object *object = qgpu_object_find(client, handle);
	unsigned long index;

	lockdep_assert_held(&client->lock);
	if (handle == client->handle)
		qgpu_untracked_end(client);
	else
		qgpu_untracked_forget(client, handle);
	if (object && qgpu_is_memory(object->class)) {
		object_remove(client, object);
		return;
	}
	for_each_object(client, index, object)
		object->doomed = is_below(client, object, handle);
	/* channels before the TSGs they are listed in */
	for_each_object(client, index, object) {
		if (object->doomed && NV_IS_GPFIFO(object->class))
			object_remove(client, object);
	}
	for_each_object(client, index, object) {
		if (object->doomed)
			object_remove(client, object);
	}
}

static bool fits(struct qgpu_client *client, u32 parent, u32 class, u32 number)
{
	if (class == NV01_DEVICE_0)
		return device_fits(client, number);
	if (class == NV20_SUBDEVICE_0 && qgpu_device_subdevices(client, parent) >= SUBDEVICES_MAX)
		return false;
	return !is_counted(class) || qgpu_untracked_fits(client, class);
}

/* A removed pod may have any number. */
bool qgpu_object_fits(struct qgpu_client *client, u32 parent, u32 class, u32 number)
{
	if (READ_ONCE(client->pod->gone) || fits(client, parent, class, number))
		return true;
	atomic64_inc(&client->pod->refused_objects);
	return false;
}

void qgpu_object_note(struct qgpu_client *client, u32 handle, u32 class, int gpu, bool sure)
{
	if (sure && qgpu_object_find(client, handle))
		qgpu_objects_remove(client, handle);
	if (is_counted(class) && !qgpu_is_registered(class) && handle != client->handle &&
	    !qgpu_object_find(client, handle))
		qgpu_untracked_note(client, handle, class, gpu);
	else if (sure)
		qgpu_untracked_forget(client, handle);
}

void qgpu_objects_export(struct qgpu_client *client, bool any)
{
	struct qgpu_object *object;
	unsigned long index;

	lockdep_assert_held(&client->lock);
	for_each_object(client, index, object) {
		if (any || qgpu_is_memory(object->class))
			qgpu_mem_export(client, object);
	}
}

void qgpu_objects_reconcile(struct qgpu_client *client)
{
	struct qgpu_object *object;
	unsigned long index;

	lockdep_assert_held(&client->lock);
	for_each_object(client, index, object) {
		if (object->tsg && NV_IS_GPFIFO(object->class) && qgpu_rm_gone(client->handle, object->handle))
			object_remove(client, object);
	}
	for_each_object(client, index, object) {
		if (object->tsg && qgpu_rm_gone(client->handle, object->handle))
			qgpu_objects_remove(client, object->handle);
	}
}

bool qgpu_objects_reclose(struct qgpu_client *client)
{
	struct qgpu_object *object;
	unsigned long index;
	bool closed = false;
	u32 gpus = 0;

	lockdep_assert_held(&client->lock);
	for_each_object(client, index, object) {
		if (!object->tsg || (NV_IS_GPFIFO(object->class) && !qgpu_tsg_hidden(object->tsg)))
			continue;	/* not a channel, or freed with its TSG */
		closed |= qgpu_tsg_reclose(object->tsg, &gpus);
	}
	qgpu_tsgs_wait(gpus);
	return closed;
}
