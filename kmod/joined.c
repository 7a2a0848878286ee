// SPDX-License-Identifier: GPL-2.0
/*
 * joined.c - cgroups that count to a pod besides its own: those of containers in a share group. pod.c says which pod a
 * process belongs to.
 */
#include <linux/cgroup.h>
#include <linux/rculist.h>
#include <linux/slab.h>

#include "joined.h"
#include "uapi/qgpu.h"

struct joined {
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

int qgpu_joined_level(const struct list_head *list, struct cgroup *cgroup)
{
	const struct joined *each;
	int level = -1;

	list_for_each_entry_rcu(each, list, node) {
		if (each->cgroup->level > level && cgroup_is_descendant(cgroup, each->cgroup))
			level = each->cgroup->level;
	}
	return level;
}

bool qgpu_joined_has(const struct list_head *list, const struct cgroup *cgroup)
{
	const struct joined *each;

	list_for_each_entry(each, list, node) {
		if (each->cgroup == cgroup)
			return true;
	}
	return false;
}

int qgpu_joined_add(struct list_head *list, struct cgroup *cgroup)
{
	struct joined *joined;

	if (nr_joined >= QGPU_MAX_JOINED)
		return -ENOSPC;
	joined = kzalloc(sizeof(*joined), GFP_KERNEL);
	if (!joined)
		return -ENOMEM;
	joined->cgroup = cgroup;
	nr_joined++;
	list_add_tail_rcu(&joined->node, list);
	return 0;
}

static void end(struct joined *joined)
{
	list_del_rcu(&joined->node);
	nr_joined--;
	cgroup_put(joined->cgroup);
	kfree_rcu(joined, rcu);
}

int qgpu_joined_remove(struct list_head *list, u64 id)
{
	struct joined *each;

	list_for_each_entry(each, list, node) {
		if (cgroup_id(each->cgroup) == id) {
			end(each);
			return 0;
		}
	}
	return -ENOENT;
}

u64 qgpu_joined_next(const struct list_head *list, u64 id)
{
	const struct joined *each;
	u64 found = 0;

	list_for_each_entry(each, list, node) {
		u64 this = cgroup_id(each->cgroup);

		if (this > id && (!found || this < found))
			found = this;
	}
	return found;
}

void qgpu_joined_end(struct list_head *list)
{
	struct joined *each, *next;

	list_for_each_entry_safe(each, next, list, node)
		end(each);
}
