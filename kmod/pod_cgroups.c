// SPDX-License-Identifier: GPL-2.0
/*
 * pod_cgroups.c - cgroups that count to a pod besides its own: those of containers in a share group. pod.c says which
 * pod a process belongs to.
 */
#include <linux/cgroup.h>
#include <linux/rculist.h>
#include <linux/slab.h>

#include "pod_cgroups.h"
#include "uapi/qgpu.h"

struct pod_cgroup {
	struct list_head node;	/* in its pod's list: walked under RCU */
	struct cgroup *cgroup;	/* a reference; the kernel frees a cgroup under RCU, too */
	struct rcu_head rcu;
};

static unsigned int nr_joined;	/* in all lists */

struct cgroup *qgpu_cgroup_of(int fd)
{
	struct cgroup *cgroup = cgroup_get_from_fd(fd);

	if (IS_ERR(cgroup) || cgroup->root == &cgrp_dfl_root)
		return cgroup;
	cgroup_put(cgroup);	/* in a v1 tree: no process would ever be found in it */
	return ERR_PTR(-EBADF);
}

int qgpu_pod_cgroups_level(const struct list_head *list, struct cgroup *cgroup)
{
	const struct pod_cgroup *each;
	int level = -1;

	list_for_each_entry_rcu(each, list, node) {
		if (each->cgroup->level > level && cgroup_is_descendant(cgroup, each->cgroup))
			level = each->cgroup->level;
	}
	return level;
}

bool qgpu_pod_cgroups_has(const struct list_head *list, const struct cgroup *cgroup)
{
	const struct pod_cgroup *each;

	list_for_each_entry(each, list, node) {
		if (each->cgroup == cgroup)
			return true;
	}
	return false;
}

int qgpu_pod_cgroups_add(struct list_head *list, struct cgroup *cgroup)
{
	struct pod_cgroup *added;

	if (nr_joined >= QGPU_MAX_JOINED)
		return -ENOSPC;
	added = kzalloc(sizeof(*added), GFP_KERNEL);
	if (!added)
		return -ENOMEM;
	added->cgroup = cgroup;
	nr_joined++;
	list_add_tail_rcu(&added->node, list);
	return 0;
}

static void end(struct pod_cgroup *gone)
{
	list_del_rcu(&gone->node);
	nr_joined--;
	cgroup_put(gone->cgroup);
	kfree_rcu(gone, rcu);
}

int qgpu_pod_cgroups_remove(struct list_head *list, u64 id)
{
	struct pod_cgroup *each;

	list_for_each_entry(each, list, node) {
		if (cgroup_id(each->cgroup) == id) {
			end(each);
			return 0;
		}
	}
	return -ENOENT;
}

u64 qgpu_pod_cgroups_next(const struct list_head *list, u64 id)
{
	const struct pod_cgroup *each;
	u64 found = 0;

	list_for_each_entry(each, list, node) {
		u64 this = cgroup_id(each->cgroup);

		if (this > id && (!found || this < found))
			found = this;
	}
	return found;
}

void qgpu_pod_cgroups_end(struct list_head *list)
{
	struct pod_cgroup *each, *next;

	list_for_each_entry_safe(each, next, list, node)
		end(each);
}
