// SPDX-License-Identifier: GPL-2.0
/*
 * pod.c - the list of pods, the processes that belong to each, and its grants.
 *
 * A pod is a cgroup of the v2 tree; containers of a share group join its pod by cgroups of their own. A process belongs
 * to the pod of the deepest such cgroup that is its own or above it. mem.c and plan_runner.c enforce grants.
 */
#include <linux/cgroup.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/rculist.h>
#include <linux/slab.h>

#include "events.h"
#include "pod.h"
#include "pod_cgroups.h"

/* Each entry holds kernel memory here and more in the driver. A whole card in pieces of 2 MiB is a quarter of this. */
static unsigned int entries_max = 1 << 18;
module_param(entries_max, uint, 0644);
MODULE_PARM_DESC(entries_max,
		 "clients and objects of the driver that a pod may have at once, and mappings by UVM (default 262144)");

static DEFINE_MUTEX(pods_lock);
static LIST_HEAD(pods);		/* by id, ascending */
static unsigned int nr_pods;
static u64 last_id;

static DEFINE_SPINLOCK(former_lock);	/* protects former */
static LIST_HEAD(former);	/* pods that were removed and are still named by open files */

static void pod_free(struct kref *ref)
{
	struct qgpu_pod *pod = container_of(ref, struct qgpu_pod, ref);
	int i;

	spin_lock(&former_lock);
	list_del(&pod->former_node);
	spin_unlock(&former_lock);
	WARN_ON(atomic_read(&pod->nr_os_events));
	xa_destroy(&pod->os_events);
	for (i = 0; i < QGPU_OBJECT_PARTS; i++)
		xa_destroy(&pod->parts[i].numbers);
	cgroup_put(pod->cgroup);
	kfree_rcu(pod, rcu);
}

struct qgpu_pod *qgpu_pod_get(struct qgpu_pod *pod)
{
	kref_get(&pod->ref);
	return pod;
}

void qgpu_pod_put(struct qgpu_pod *pod)
{
	if (pod)
		kref_put(&pod->ref, pod_free);
}

struct qgpu_pod *qgpu_pod_of_current(void)
{
	struct qgpu_pod *pod, *found;
	struct cgroup *cgroup;
	int level, deepest;

	if (!READ_ONCE(nr_pods))
		return NULL;
	rcu_read_lock();
	cgroup = task_dfl_cgroup(current);
	do {	/* start over if it was removed meanwhile: the pod above it is next */
		found = NULL;
		deepest = -1;
		list_for_each_entry_rcu(pod, &pods, node) {
			level = cgroup_is_descendant(cgroup, pod->cgroup) ? pod->cgroup->level : -1;
			if (!list_empty(&pod->joined))
				level = max(level, qgpu_pod_cgroups_level(&pod->joined, cgroup));
			if (level > deepest) {
				deepest = level;
				found = pod;
			}
		}
	} while (found && !kref_get_unless_zero(&found->ref));
	rcu_read_unlock();
	return found;
}

struct qgpu_pod *qgpu_pod_find(u64 id)
{
	struct qgpu_pod *pod, *found;

	mutex_lock(&pods_lock);
	found = ERR_PTR(id && id <= last_id ? -ENOENT : -EINVAL);
	list_for_each_entry(pod, &pods, node) {
		if (pod->id == id)
			found = qgpu_pod_get(pod);
	}
	mutex_unlock(&pods_lock);
	return found;
}

struct qgpu_pod *qgpu_pod_next(u64 id)
{
	struct qgpu_pod *pod, *found = NULL;

	mutex_lock(&pods_lock);
	list_for_each_entry(pod, &pods, node) {
		if (pod->id > id) {
			found = qgpu_pod_get(pod);
			break;
		}
	}
	mutex_unlock(&pods_lock);
	return found;
}

/* Whether the cgroup is a pod's, its own or a joined one. */
static bool is_taken(const struct cgroup *cgroup)
{
	const struct qgpu_pod *pod;

	lockdep_assert_held(&pods_lock);
	list_for_each_entry(pod, &pods, node) {
		if (pod->cgroup == cgroup || qgpu_pod_cgroups_has(&pod->joined, cgroup))
			return true;
	}
	return false;
}

static int pod_insert(struct qgpu_pod *pod, const char *name)
{
	struct qgpu_pod *other;

	lockdep_assert_held(&pods_lock);
	if (nr_pods >= QGPU_MAX_PODS)
		return -ENOSPC;
	if (is_taken(pod->cgroup))
		return -EEXIST;
	list_for_each_entry(other, &pods, node) {
		if (!strcmp(other->name, name))
			return -EEXIST;
	}
	strscpy_pad(pod->name, name, sizeof(pod->name));
	WRITE_ONCE(pod->id, ++last_id);
	atomic_set(&pod->flags, 0);
	atomic64_set(&pod->refused_allocs, 0);
	atomic64_set(&pod->refused_controls, 0);
	atomic64_set(&pod->refused_objects, 0);
	spin_lock(&former_lock);
	list_del_init(&pod->former_node);
	spin_unlock(&former_lock);
	WRITE_ONCE(pod->gone, false);
	list_add_tail_rcu(&pod->node, &pods);
	WRITE_ONCE(nr_pods, nr_pods + 1);
	return 0;
}

static void forget_grants(struct qgpu_pod *pod)
{
	int i;

	for (i = 0; i < QGPU_MAX_GPUS; i++) {
		struct qgpu_share *share = &pod->shares[i];

		share->granted = false;
		share->pod_class = 0;
		share->cores = 0;
		share->latency_target_ns = 0;
		WRITE_ONCE(share->memory_limit, U64_MAX);
	}
}

/* Consumes the reference on the cgroup. */
static struct qgpu_pod *pod_new(struct cgroup *cgroup)
{
	struct qgpu_pod *pod = kzalloc(sizeof(*pod), GFP_KERNEL);
	int i;

	if (!pod) {
		cgroup_put(cgroup);
		return ERR_PTR(-ENOMEM);
	}
	kref_init(&pod->ref);
	INIT_LIST_HEAD(&pod->clients);
	mutex_init(&pod->untracked_lock);
	sema_init(&pod->calls, QGPU_POD_CALLS);
	mutex_init(&pod->penalty_lock);
	spin_lock_init(&pod->owed_lock);
	init_rwsem(&pod->making);
	mutex_init(&pod->parts_lock);
	xa_init_flags(&pod->os_events, XA_FLAGS_ACCOUNT);
	for (i = 0; i < QGPU_OBJECT_PARTS; i++)
		xa_init_flags(&pod->parts[i].numbers, XA_FLAGS_ACCOUNT);
	INIT_LIST_HEAD(&pod->joined);
	INIT_LIST_HEAD(&pod->kept);
	INIT_LIST_HEAD(&pod->former_node);
	forget_grants(pod);
	pod->cgroup = cgroup;
	return pod;
}

static struct qgpu_pod *find_former(const struct cgroup *cgroup)
{
	struct qgpu_pod *pod, *found = NULL;

	spin_lock(&former_lock);
	list_for_each_entry(pod, &former, former_node) {
		if (pod->cgroup == cgroup && kref_get_unless_zero(&pod->ref)) {
			found = pod;
			break;
		}
	}
	spin_unlock(&former_lock);
	return found;
}

/*
 * A cgroup that was a pod before becomes the same one again, because open files, clients and charges name it. Readers
 * of the list may still be at its old place there, so its new place waits for them.
 */
static struct qgpu_pod *pod_for(int cgroup_fd)
{
	struct cgroup *cgroup = qgpu_cgroup_of(cgroup_fd);
	struct qgpu_pod *pod;

	if (IS_ERR(cgroup))
		return ERR_CAST(cgroup);
	pod = find_former(cgroup);
	if (!pod)
		return pod_new(cgroup);
	cgroup_put(cgroup);
	synchronize_rcu();
	return pod;
}

int qgpu_pod_add(int cgroup_fd, const char *name, u64 *id)
{
	struct qgpu_pod *pod = pod_for(cgroup_fd);
	int ret;

	if (IS_ERR(pod))
		return PTR_ERR(pod);
	mutex_lock(&pods_lock);
	ret = pod_insert(pod, name);
	*id = pod->id;
	mutex_unlock(&pods_lock);
	if (ret)
		qgpu_pod_put(pod);
	else
		qgpu_event(QGPU_EVENT_POD_CHANGED, *id, 0, 0);
	return ret;
}

int qgpu_pod_join(u64 id, int cgroup_fd)
{
	struct qgpu_pod *pod = qgpu_pod_find(id);
	struct cgroup *cgroup;
	int ret;

	if (IS_ERR(pod))
		return PTR_ERR(pod);
	cgroup = qgpu_cgroup_of(cgroup_fd);
	ret = PTR_ERR_OR_ZERO(cgroup);
	if (!ret) {
		mutex_lock(&pods_lock);
		ret = pod->gone ? -ENOENT : is_taken(cgroup) ? -EEXIST : qgpu_pod_cgroups_add(&pod->joined, cgroup);
		mutex_unlock(&pods_lock);
		if (ret)
			cgroup_put(cgroup);
	}
	qgpu_pod_put(pod);
	return ret;
}

int qgpu_pod_leave_cgroup(u64 id, u64 cgroup)
{
	struct qgpu_pod *pod = qgpu_pod_find(id);
	int ret;

	if (IS_ERR(pod))
		return PTR_ERR(pod);
	mutex_lock(&pods_lock);
	ret = qgpu_pod_cgroups_remove(&pod->joined, cgroup);
	mutex_unlock(&pods_lock);
	qgpu_pod_put(pod);
	return ret;
}

int qgpu_pod_joined_next(u64 id, u64 *cgroup)
{
	struct qgpu_pod *pod = qgpu_pod_find(id);

	if (IS_ERR(pod))
		return PTR_ERR(pod);
	mutex_lock(&pods_lock);
	*cgroup = qgpu_pod_cgroups_next(&pod->joined, *cgroup);
	mutex_unlock(&pods_lock);
	qgpu_pod_put(pod);
	return *cgroup ? 0 : -ENOENT;
}

static void pod_unlist(struct qgpu_pod *pod)
{
	lockdep_assert_held(&pods_lock);
	qgpu_pod_cgroups_end(&pod->joined);
	list_del_rcu(&pod->node);
	WRITE_ONCE(nr_pods, nr_pods - 1);
	WRITE_ONCE(pod->gone, true);
	forget_grants(pod);
	spin_lock(&former_lock);
	list_add(&pod->former_node, &former);
	spin_unlock(&former_lock);
}

int qgpu_pod_remove(u64 id)
{
	struct qgpu_pod *pod = qgpu_pod_find(id);

	if (IS_ERR(pod))
		return PTR_ERR(pod);
	mutex_lock(&pods_lock);
	if (pod->gone) {
		mutex_unlock(&pods_lock);
		qgpu_pod_put(pod);
		return -ENOENT;
	}
	pod_unlist(pod);
	mutex_unlock(&pods_lock);
	qgpu_event(QGPU_EVENT_POD_CHANGED, id, 0, 0);
	qgpu_pod_put(pod);	/* the list's */
	qgpu_pod_put(pod);
	return 0;
}

static bool brings_limit(const struct qgpu_share *share, const struct qgpu_grant *grant)
{
	return (grant->memory && share->memory_limit != grant->memory) || (grant->cores && share->cores != grant->cores);
}

int qgpu_pod_grant(u64 id, const struct qgpu_grant *grant, bool safe)
{
	struct qgpu_pod *pod = qgpu_pod_find(id);
	struct qgpu_share *share;

	if (IS_ERR(pod))
		return PTR_ERR(pod);
	mutex_lock(&pods_lock);
	share = &pod->shares[grant->gpu];
	if (pod->gone) {	/* removed meanwhile; the same cgroup, added again, must not have this grant */
		mutex_unlock(&pods_lock);
		qgpu_pod_put(pod);
		return -ENOENT;
	}
	if (!safe && brings_limit(share, grant)) {
		mutex_unlock(&pods_lock);
		qgpu_pod_put(pod);
		return -EOPNOTSUPP;
	}
	share->granted = true;
	share->pod_class = grant->pod_class;
	share->cores = grant->cores;
	share->latency_target_ns = grant->latency_target_ns;
	WRITE_ONCE(share->memory_limit, grant->memory ?: U64_MAX);
	mutex_unlock(&pods_lock);
	qgpu_event(QGPU_EVENT_POD_CHANGED, id, grant->gpu, 0);
	qgpu_pod_put(pod);
	return 0;
}

u32 qgpu_pod_limited(const struct qgpu_pod *pod)
{
	u32 gpus = 0;
	int i;

	for (i = 0; i < QGPU_MAX_GPUS; i++) {
		if (READ_ONCE(pod->shares[i].memory_limit) != U64_MAX)
			gpus |= BIT(i);
	}
	return gpus;
}

void qgpu_pod_flag(struct qgpu_pod *pod, u32 flag, u32 event)
{
	if (!(atomic_fetch_or(flag, &pod->flags) & flag))
		qgpu_event(event, pod->id, 0, 0);
}

static bool has_limit(const struct qgpu_pod *pod)
{
	int i;

	for (i = 0; i < QGPU_MAX_GPUS; i++) {
		if (pod->shares[i].cores || pod->shares[i].memory_limit != U64_MAX)
			return true;
	}
	return false;
}

void qgpu_pods_unchecked(void)
{
	struct qgpu_pod *pod;

	mutex_lock(&pods_lock);
	list_for_each_entry(pod, &pods, node) {
		if (has_limit(pod))
			qgpu_pod_flag(pod, QGPU_POD_UNCHECKED, QGPU_EVENT_POD_CHANGED);
	}
	mutex_unlock(&pods_lock);
}

bool qgpu_pod_enter(atomic_t *entries)
{
	if ((unsigned int)atomic_inc_return(entries) <= READ_ONCE(entries_max))
		return true;
	atomic_dec(entries);
	return false;
}

unsigned int qgpu_pod_count(void)
{
	return READ_ONCE(nr_pods);
}

void qgpu_pod_uninit(void)
{
	struct qgpu_pod *pod, *next;

	mutex_lock(&pods_lock);
	list_for_each_entry_safe(pod, next, &pods, node) {
		pod_unlist(pod);
		qgpu_pod_put(pod);
	}
	mutex_unlock(&pods_lock);
}
