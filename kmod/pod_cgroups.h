/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_POD_CGROUPS_H
#define _QGPU_POD_CGROUPS_H

#include <linux/cgroup.h>
#include <linux/list.h>

/* Of a v2 tree, with a reference, or ERR_PTR. */
struct cgroup *qgpu_cgroup_of(int fd);

/*
 * A pod's list of cgroups besides its own. A lock of the caller protects changes, and all of these but the first, which
 * needs rcu_read_lock(): how deep the cgroup of the list is that is this one or above it; -1: there is none.
 */
int qgpu_pod_cgroups_level(const struct list_head *list, struct cgroup *cgroup);
bool qgpu_pod_cgroups_has(const struct list_head *list, const struct cgroup *cgroup);
/* Consumes the reference if it returns 0. -ENOSPC: there are QGPU_MAX_JOINED in all lists. */
int qgpu_pod_cgroups_add(struct list_head *list, struct cgroup *cgroup);
/* By id; -ENOENT: it is not in the list. */
int qgpu_pod_cgroups_remove(struct list_head *list, u64 id);
/* The lowest id above this one; 0: there is none. */
u64 qgpu_pod_cgroups_next(const struct list_head *list, u64 id);
void qgpu_pod_cgroups_end(struct list_head *list);

#endif
