// SPDX-License-Identifier: GPL-2.0
/*
 * driver_file.c - decides which of the driver's files belong to a pod: those that its processes opened, wherever they
 * are passed, and those that its processes use and that no other pod is known to own. escape.c handles the calls on
 * them.
 *
 * The entry of a file is stable during a call on that file. It goes in release(), which runs after the last call, or
 * when the module detaches from the driver, which waits for calls.
 */
#include <linux/hash.h>
#include <linux/rhashtable.h>
#include <linux/slab.h>

#include "client.h"
#include "compat.h"
#include "driver_file.h"
#include "events.h"
#include "gate_penalty.h"
#include "gpu.h"
#include "mem.h"
#include "nvrm.h"
#include "pod.h"

static struct rhashtable files;

/*
 * Every call on the driver's files looks here first, those of processes outside all pods too. The seed comes before the
 * multiplication: after it, files that collide would do so whatever the seed is.
 */
static u32 hash(const void *filp, u32 length, u32 seed)
{
	return hash_64((u64)(uintptr_t)*(struct file *const *)filp ^ (u64)seed << 8, 32);
}

static const struct rhashtable_params file_params = {
	.hashfn = hash,
	.key_len = sizeof(struct file *),
	.key_offset = offsetof(struct qgpu_file, filp),
	.head_offset = offsetof(struct qgpu_file, node),
	.automatic_shrinking = true,
};

int qgpu_files_init(void)
{
	return rhashtable_init(&files, &file_params);
}

void qgpu_files_uninit(void)
{
	rhashtable_destroy(&files);
}

struct qgpu_file *qgpu_file_find(struct file *filp)
{
	return rhashtable_lookup_fast(&files, &filp, file_params);
}

/* The caller has a reference on the file and one on the pod. May be called by probes' handlers. */
bool qgpu_file_exports(struct qgpu_file *file, struct qgpu_pod *pod, u32 nr)
{
	struct qgpu_pod *exporter = cmpxchg(&file->exporter, NULL, pod);

	if (!exporter)
		qgpu_pod_get(pod);
	else if (exporter != pod)
		return false;
	atomic_add(nr, &file->nr_exports);
	return true;
}

static void file_free(struct qgpu_file *file)
{
	if (file->exporter)
		atomic_sub(atomic_read(&file->nr_exports), &file->exporter->nr_exports);
	qgpu_pod_put(file->exporter);
	qgpu_pod_put(file->pod);
	kfree_rcu(file, rcu);
}

/* The file counts before others find it: what one of them exports by it must not go with an earlier file. */
struct qgpu_file *qgpu_file_add(struct file *filp, struct qgpu_pod *pod)
{
	struct qgpu_file *file = kzalloc(sizeof(*file), GFP_KERNEL);
	int ret;

	if (!file)
		return ERR_PTR(-ENOMEM);
	file->filp = filp;
	file->pod = qgpu_pod_get(pod);
	file->gated_ns = U64_MAX;
	INIT_LIST_HEAD(&file->clients);
	atomic_inc(&pod->nr_files);
	ret = rhashtable_lookup_insert_fast(&files, &file->node, file_params);
	if (!ret)
		return file;
	qgpu_mem_file_closed(pod);
	file_free(file);
	return ERR_PTR(ret);
}

void qgpu_file_forget(struct qgpu_file *file)
{
	rhashtable_remove_fast(&files, &file->node, file_params);
	qgpu_mem_file_closed(file->pod);
	file_free(file);
}

/*
 * A process of a pod uses a file that no open() of a pod registered: the file was open before the module or the pod
 * came, or was passed in from outside. From now on it is the pod's; objects allocated on it before have no gate.
 */
static struct qgpu_file *adopt(struct file *filp, struct qgpu_pod *pod)
{
	struct qgpu_file *file = qgpu_file_add(filp, pod);

	if (PTR_ERR_OR_ZERO(file) == -EEXIST)	/* another thread was first */
		return qgpu_file_find(filp);
	if (IS_ERR(file))
		return file;
	qgpu_pod_flag(pod, QGPU_POD_LATE, QGPU_EVENT_LATE_FILE);
	return file;
}

struct qgpu_file *qgpu_file_of(struct file *filp)
{
	struct qgpu_file *file = qgpu_file_find(filp);
	struct qgpu_pod *pod;

	if (iminor(file_inode(filp)) == NV_MINOR_MODESET)
		return NULL;	/* before 545 nvidia-modeset's calls come through the same table */
	if (file && !READ_ONCE(file->pod->gone))
		return file;
	pod = qgpu_pod_of_current();
	if (!pod)
		return file;	/* of a removed pod: what is allocated is still noted, for the pod may come back */
	if (!file)
		file = adopt(filp, pod);
	else if (file->pod != pod)	/* what this pod made by it would have no limit and no gate */
		file = ERR_PTR(-EPERM);
	qgpu_pod_put(pod);
	return file;
}

void qgpu_file_close(struct qgpu_file *file)
{
	file->gated_ns = qgpu_gated_ns(file->pod);
	file->starved_ns = qgpu_starved_ns();
	file->held = qgpu_clients_open(&file->clients, &file->shared);
	rhashtable_remove_fast(&files, &file->node, file_params);
}

/*
 * Without parts_lock: its holder waits for user memory, and a release must not. So other files may free or make the
 * same events meanwhile; whoever takes an entry out lowers the count.
 */
static void forget_os_events(struct qgpu_file *file)
{
	struct qgpu_pod *pod = file->pod;
	unsigned long key;
	void *maker;

	if (!READ_ONCE(file->made_os_events))
		return;
	xa_for_each(&pod->os_events, key, maker) {
		if (maker == file && xa_cmpxchg(&pod->os_events, key, file, NULL, 0) == file)
			atomic_dec(&pod->nr_os_events);
	}
}

void qgpu_file_closed(struct qgpu_file *file)
{
	file->shared |= qgpu_clients_remove(&file->clients);
	if (file->held || file->shared)
		qgpu_gate_penalty_exit(file->pod, file->gated_ns, file->shared, qgpu_starved_ns() - file->starved_ns);
	qgpu_mem_file_closed(file->pod);
	forget_os_events(file);
	file_free(file);
}

static void drop(void *file, void *unused)
{
	qgpu_file_closed(file);
}

void qgpu_files_drop(void)
{
	rhashtable_free_and_destroy(&files, drop, NULL);
	WARN_ON(rhashtable_init(&files, &file_params));
}
