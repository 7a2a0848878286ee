// SPDX-License-Identifier: GPL-2.0
/*
 * client.c - the object table: RM clients of pods as RM has them, by handle and by file. object.c holds the objects
 * below them.
 *
 * Lock order: a client's lock, then files_lock or a pGPU's lock (tsg.c), then mem_lock (mem.c). A client's lock is held
 * while the driver allocates or frees under it, so no code that the driver may wait for (a pGPU's worker) takes it.
 */
#include <linux/rhashtable.h>
#include <linux/sched.h>
#include <linux/slab.h>

#include "client.h"
#include "mem.h"
#include "nvrm.h"
#include "tsg.h"
#include "untracked_object.h"

/*
 * Of a pod. RM looks through the clients of all processes for some calls, and when a file is closed frees all of its
 * clients with its lock held. The guardian has the same bound.
 */
#define CLIENTS_MAX (1 << 12)

atomic_t qgpu_nr_clients = ATOMIC_INIT(0);

static const struct rhashtable_params client_params = {
	.key_len = sizeof(u32),
	.key_offset = offsetof(struct qgpu_client, handle),
	.head_offset = offsetof(struct qgpu_client, node),
	.automatic_shrinking = true,
};

static struct rhashtable clients;
static DEFINE_SPINLOCK(files_lock);	/* protects every file's and pod's list of clients */

int qgpu_clients_init(void)
{
	return rhashtable_init(&clients, &client_params);
}

void qgpu_clients_uninit(void)
{
	rhashtable_destroy(&clients);
}

static void client_free(struct kref *ref)
{
	struct qgpu_client *client = container_of(ref, struct qgpu_client, ref);

	WARN_ON(!xa_empty(&client->objects) || !xa_empty(&client->untracked) || !xa_empty(&client->mappings) ||
		!RB_EMPTY_ROOT(&client->dma_mappings));
	qgpu_mem_release(&client->kept);
	atomic_dec(&client->pod->nr_entries);
	qgpu_pod_put(client->pod);
	xa_destroy(&client->objects);
	xa_destroy(&client->untracked);
	xa_destroy(&client->mappings);
	kfree_rcu(client, rcu);
}

struct qgpu_client *qgpu_client_get(u32 handle, const struct qgpu_pod *pod)
{
	struct qgpu_client *client;

	rcu_read_lock();
	client = rhashtable_lookup(&clients, &handle, client_params);
	if (client && (client->pod != pod || !kref_get_unless_zero(&client->ref)))
		client = NULL;
	rcu_read_unlock();
	return client;
}

void qgpu_client_put(struct qgpu_client *client)
{
	kref_put(&client->ref, client_free);
}

static struct qgpu_client *find_and_lock(u32 handle, const struct qgpu_pod *pod)
{
	struct qgpu_client *client = qgpu_client_get(handle, pod);

	if (!client)
		return NULL;
	if (mutex_lock_killable(&client->lock)) {
		qgpu_client_put(client);
		return ERR_PTR(-EINTR);
	}
	if (!client->dead)
		return client;
	qgpu_client_unlock(client);
	return NULL;
}

/* RM may have made the client, or given the handle of a dead one to it, and another thread is about to enter it. */
struct qgpu_client *qgpu_client_lock(u32 handle, struct qgpu_pod *pod)
{
	struct qgpu_client *client = find_and_lock(handle, pod);

	if (client)
		return client;
	if (down_write_killable(&pod->making))
		return ERR_PTR(-EINTR);
	up_write(&pod->making);
	return find_and_lock(handle, pod);
}

/* Its next client, with a reference, which becomes the last; NULL: it has none. */
static struct qgpu_client *next_of(struct qgpu_pod *pod)
{
	struct qgpu_client *client;

	spin_lock(&files_lock);
	client = list_first_entry_or_null(&pod->clients, struct qgpu_client, pod_node);
	if (client) {
		kref_get(&client->ref);	/* in a list: not unlinked yet */
		list_move_tail(&client->pod_node, &pod->clients);
	}
	spin_unlock(&files_lock);
	return client;
}

static int forget_gone(struct qgpu_pod *pod, enum qgpu_untracked_kind kind)
{
	int n = atomic_read(&pod->nr_clients), ret = 0;
	struct qgpu_client *client;

	while (!ret && n-- > 0 && (client = next_of(pod))) {
		ret = mutex_lock_killable(&client->lock);
		if (!ret) {
			if (!client->dead)
				ret = qgpu_untracked_forget_gone(client, kind);
			mutex_unlock(&client->lock);
		}
		qgpu_client_put(client);
	}
	return ret;
}

static int make_room(struct qgpu_pod *pod, enum qgpu_untracked_kind kind, u32 most)
{
	int ret = 0;

	if (!qgpu_untracked_near_most(pod, kind, most) || READ_ONCE(pod->gone))
		return 0;
	if (mutex_lock_killable(&pod->untracked_lock))
		return -EINTR;
	if (qgpu_untracked_near_most(pod, kind, most))	/* nobody else has made room */
		ret = forget_gone(pod, kind);
	mutex_unlock(&pod->untracked_lock);
	return ret;
}

struct qgpu_client *qgpu_client_lock_to_make(u32 handle, struct qgpu_pod *pod, enum qgpu_untracked_kind kind)
{
	int ret = make_room(pod, kind, 1);

	return ret ? ERR_PTR(ret) : qgpu_client_lock(handle, pod);
}

struct qgpu_client *qgpu_client_lock_to_take(u32 handle, struct qgpu_pod *pod, u32 most)
{
	int ret = make_room(pod, QGPU_UNTRACKED_OTHER, most) ?: make_room(pod, QGPU_UNTRACKED_SYSTEM, most);

	return ret ? ERR_PTR(ret) : qgpu_client_lock(handle, pod);
}

static int lock_alive(struct qgpu_client *client, unsigned int subclass)
{
	int ret = mutex_lock_killable_nested(&client->lock, subclass);

	if (!ret && client->dead) {
		mutex_unlock(&client->lock);
		ret = -ESTALE;
	}
	return ret;
}

/*
 * In order of handles: another call may need the same two. Whoever has the lock of a client that ends must not wait:
 * qgpu_clients_open() says why.
 */
int qgpu_client_lock_also(struct qgpu_client *client, struct qgpu_client *other)
{
	struct qgpu_client *first = client, *second = other;
	int ret;

	if (other->handle < client->handle) {
		swap(first, second);
		mutex_unlock(&client->lock);
		ret = lock_alive(first, 0);
		if (ret)
			return ret;
	}
	ret = lock_alive(second, SINGLE_DEPTH_NESTING);
	if (ret)
		mutex_unlock(&first->lock);
	return ret;
}

void qgpu_client_unlock(struct qgpu_client *client)
{
	mutex_unlock(&client->lock);
	qgpu_client_put(client);
}

bool qgpu_client_listed(const struct qgpu_client *client)
{
	return rhashtable_lookup_fast(&clients, &client->handle, client_params) == client;
}

u64 qgpu_client_pod(u32 handle)
{
	struct qgpu_client *client;
	u64 pod;

	rcu_read_lock();
	client = rhashtable_lookup(&clients, &handle, client_params);
	pod = client ? client->pod->id : 0;
	rcu_read_unlock();
	return pod;
}

struct qgpu_pod *qgpu_client_owner(u32 handle)
{
	struct qgpu_client *client;
	struct qgpu_pod *pod;

	rcu_read_lock();
	client = rhashtable_lookup(&clients, &handle, client_params);
	pod = client && kref_get_unless_zero(&client->pod->ref) ? client->pod : NULL;
	rcu_read_unlock();
	return pod;
}

void qgpu_client_unlink(struct qgpu_client *client)
{
	lockdep_assert_held(&client->lock);
	rhashtable_remove_fast(&clients, &client->node, client_params);
	spin_lock(&files_lock);
	list_del_init(&client->file_node);
	list_del(&client->pod_node);
	spin_unlock(&files_lock);
	atomic_dec(&client->pod->nr_clients);
	atomic_dec(&qgpu_nr_clients);
	qgpu_client_put(client);
}

/* RM no longer has it. If several callers notice, the first removes it and the others find nothing. */
static void client_end(struct qgpu_client *client)
{
	lockdep_assert_held(&client->lock);
	WRITE_ONCE(client->dead, true);
	qgpu_objects_remove(client, client->handle);
	if (!list_empty(&client->file_node))
		qgpu_client_unlink(client);
}

/*
 * RM reuses a handle as soon as the release of its file has freed it, which may be before our release handler is done.
 * So an entry that is being released (its gates are open for good, see qgpu_clients_open()) makes way. If RM itself
 * said that it made a new client, any other entry is stale as well and makes way. Otherwise the new handle may be
 * forged to evict the entry, so the entry stays.
 */
static int publish(struct qgpu_client *client, bool sure)
{
	struct qgpu_client *old;

	rcu_read_lock();
	old = rhashtable_lookup(&clients, &client->handle, client_params);
	if (old && (sure || READ_ONCE(old->dead)))
		rhashtable_remove_fast(&clients, &old->node, client_params);
	else
		old = NULL;
	if (old && (READ_ONCE(old->dead) || !kref_get_unless_zero(&old->ref)))
		old = NULL;
	rcu_read_unlock();
	if (old) {
		/* The new client is not in the table yet: no holder of the old lock can be waiting for it. */
		mutex_lock_nested(&old->lock, SINGLE_DEPTH_NESTING);
		client_end(old);
		qgpu_client_unlock(old);
	}
	return rhashtable_lookup_insert_fast(&clients, &client->node, client_params);
}

/* Calls that make clients at the same time may make a few more. A removed pod may have any number. */
static bool may_have_another(struct qgpu_pod *pod)
{
	if (atomic_read(&pod->nr_clients) < CLIENTS_MAX || READ_ONCE(pod->gone))
		return true;
	atomic64_inc(&pod->refused_objects);
	return false;
}

struct qgpu_client *qgpu_client_new(struct qgpu_pod *pod)
{
	struct qgpu_client *client;

	if (!may_have_another(pod) || !qgpu_pod_enter(&pod->nr_entries))
		return NULL;
	client = kzalloc(sizeof(*client), GFP_KERNEL_ACCOUNT);
	if (!client || down_read_killable(&pod->making)) {
		atomic_dec(&pod->nr_entries);
		kfree(client);
		return client ? ERR_PTR(-EINTR) : NULL;
	}
	client->tgid = task_tgid_nr(current);
	client->pod = qgpu_pod_get(pod);
	kref_init(&client->ref);
	mutex_init(&client->lock);
	xa_init_flags(&client->objects, XA_FLAGS_ACCOUNT);
	xa_init_flags(&client->untracked, XA_FLAGS_ACCOUNT);
	xa_init_flags(&client->mappings, XA_FLAGS_ACCOUNT);
	client->dma_mappings = RB_ROOT;
	INIT_LIST_HEAD(&client->file_node);
	INIT_LIST_HEAD(&client->kept);
	return client;
}

void qgpu_client_made(struct qgpu_pod *pod)
{
	up_read(&pod->making);
}

int qgpu_client_add(struct qgpu_client *client, struct list_head *file_clients, u32 handle, bool sure)
{
	int ret;

	client->handle = handle;
	mutex_lock(&client->lock);	/* a finder in the table waits until it is in its file's list too */
	ret = publish(client, sure);
	if (!ret) {
		atomic_inc(&qgpu_nr_clients);
		atomic_inc(&client->pod->nr_clients);
		spin_lock(&files_lock);
		list_add(&client->file_node, file_clients);
		list_add_tail(&client->pod_node, &client->pod->clients);
		spin_unlock(&files_lock);
	}
	mutex_unlock(&client->lock);
	if (ret)
		qgpu_client_put(client);
	return ret;
}

/*
 * Take the first of a file's clients, move it to another list, lock it and take a reference; NULL: the list is empty.
 */
static struct qgpu_client *take_first(struct list_head *from, struct list_head *to)
{
	struct qgpu_client *client;

	spin_lock(&files_lock);
	client = list_first_entry_or_null(from, struct qgpu_client, file_node);
	if (client) {
		kref_get(&client->ref);	/* in a list: not unlinked yet */
		list_move_tail(&client->file_node, to);
	}
	spin_unlock(&files_lock);
	if (client)
		mutex_lock(&client->lock);
	return client;
}

/*
 * A call that names a client may wait for user memory with the client's lock. So no gate is opened before all are dead,
 * and no such call has a lock of theirs. All open together: else the first would be open while the others move.
 */
bool qgpu_clients_open(struct list_head *file_clients, bool *shared)
{
	struct qgpu_client *client;
	bool held = false;
	LIST_HEAD(dead);
	LIST_HEAD(opened);
	u32 gpus = 0;

	while ((client = take_first(file_clients, &dead))) {
		WRITE_ONCE(client->dead, true);
		qgpu_client_unlock(client);
	}
	while ((client = take_first(&dead, &opened))) {
		if (qgpu_objects_hold(client, client->handle, &gpus)) {
			held = true;
			*shared |= qgpu_objects_share(client);
		}
		qgpu_client_unlock(client);
	}
	spin_lock(&files_lock);
	list_splice(&opened, file_clients);
	spin_unlock(&files_lock);
	qgpu_tsgs_wait(gpus);
	return held;
}

bool qgpu_clients_remove(struct list_head *file_clients)
{
	struct qgpu_client *client;
	bool shared = false;
	LIST_HEAD(removed);

	while ((client = take_first(file_clients, &removed))) {
		shared |= qgpu_objects_share(client);
		client_end(client);
		qgpu_client_unlock(client);
	}
	return shared;
}

/* Needs rcu_read_lock(), and no reference on the client: letting go of the last one sleeps, and probes' handlers ask too. */
static struct qgpu_object *find_object(u32 handle, u32 object)
{
	struct qgpu_client *client = rhashtable_lookup(&clients, &handle, client_params);

	return client ? xa_load(&client->objects, object) : NULL;
}

struct qgpu_mem *qgpu_client_mem(u32 handle, u32 memory)
{
	struct qgpu_object *object;
	struct qgpu_mem *mem = NULL;

	rcu_read_lock();
	object = find_object(handle, memory);
	if (object && qgpu_is_memory(object->class))
		mem = qgpu_mem_of(object);
	rcu_read_unlock();
	return mem;
}

/* A channel without a TSG of the pod's is charged itself. */
struct qgpu_mem *qgpu_client_tsg_mem(u32 handle, u32 channel)
{
	struct qgpu_object *object, *above = NULL;
	struct qgpu_mem *mem = NULL;

	rcu_read_lock();
	object = find_object(handle, channel);
	if (object && NV_IS_GPFIFO(object->class)) {
		above = find_object(handle, object->parent);
		mem = qgpu_mem_of(above && above->class == KEPLER_CHANNEL_GROUP_A ? above : object);
	}
	rcu_read_unlock();
	return mem;
}

u64 qgpu_client_stamp(u32 handle, u32 object_handle)
{
	struct qgpu_client *client;
	struct qgpu_object *object;
	u64 stamp = 0;

	rcu_read_lock();
	client = rhashtable_lookup(&clients, &handle, client_params);
	object = client ? xa_load(&client->objects, object_handle) : NULL;
	if (object)
		stamp = smp_load_acquire(&object->stamp);	/* pairs with qgpu_object_stamp() */
	else if (client)
		stamp = qgpu_untracked_stamp(client, object_handle);
	rcu_read_unlock();
	return stamp;
}

struct qgpu_tsg *qgpu_client_tsg(struct qgpu_client *client, u32 handle)
{
	struct qgpu_object *object;
	struct qgpu_tsg *tsg = NULL;

	rcu_read_lock();
	object = READ_ONCE(client->dead) ? NULL : xa_load(&client->objects, handle);
	if (object && object->class == KEPLER_CHANNEL_GROUP_A)
		tsg = smp_load_acquire(&object->tsg);	/* pairs with qgpu_enter_tsg() */
	if (tsg && !kref_get_unless_zero(&tsg->ref))
		tsg = NULL;
	rcu_read_unlock();
	return tsg;
}
