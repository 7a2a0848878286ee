/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_POD_H
#define _QGPU_POD_H

#include <linux/cgroup.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/semaphore.h>
#include <linux/xarray.h>

#include "uapi/qgpu.h"

/*
 * Inspected calls of one pod at the same time. More calls wait, so that no pod uses up the probe instances of the
 * others.
 */
#define QGPU_POD_CALLS 32

struct qgpu_part;

/*
 * What nothing else bounds: system memory, of which programs have what they pin; debuggers and the page that RM shares
 * with all, of which RM does too much at once; other objects; and mappings. Most of it the object table does not keep.
 */
enum qgpu_untracked_kind {
	QGPU_UNTRACKED_OTHER,
	QGPU_UNTRACKED_SYSTEM,
	QGPU_UNTRACKED_DEBUGGER,
	QGPU_UNTRACKED_PAGE,
	QGPU_UNTRACKED_MAPPING,		/* for the CPU */
	QGPU_UNTRACKED_DMA_MAPPING,	/* for the card */
	QGPU_UNTRACKED_KINDS,
};

/* What objects have in RM: object_part.c. */
enum qgpu_object_part {
	QGPU_PART_EVENT,	/* an object of its own, and part of what it tells of */
	QGPU_PART_BINDING,	/* of a channel to a semaphore surface */
	QGPU_PART_PIECE,	/* of a multicast object */
	QGPU_OBJECT_PARTS,
};

struct qgpu_object_parts {
	struct xarray numbers;	/* by client and handle */
	u32 sum;
};

/* A pod on one pGPU. */
struct qgpu_share {
	/* its grant: written under pods_lock, read anywhere */
	bool granted;
	u32 pod_class;
	u32 cores;
	u64 latency_target_ns;
	u64 memory_limit;	/* U64_MAX: none */

	/* what it holds: mem.c, under mem_lock */
	u64 memory;
	u64 peak_memory;

	u32 nr_channels;	/* tsg.c, under the pGPU's lock */

	/* its turns: plan_runner.c, under the pGPU's lock */
	struct qgpu_part *part;	/* of the plan in force */
	bool turn_ended;	/* its turn has ended, and its gate is due to close */
	u64 closing_ns;		/* how long closing takes this time */
	u64 slow_ns;		/* and lately; 0 if not slow */
	bool may_be_slow;	/* its gate was closed together with others, and that took long */
	bool closed;
	u64 closed_since_ns;
	u64 gated_ns;
};

struct qgpu_pod {
	struct list_head node;	/* in pods: written under pods_lock, walked under RCU */
	struct kref ref;
	struct rcu_head rcu;
	u64 id;
	struct cgroup *cgroup;
	struct list_head joined;	/* further cgroups: written under pods_lock, walked under RCU */
	char name[QGPU_NAME_LEN];
	bool gone;		/* removed: nothing is enforced, while files still name it; until its cgroup is added again */
	struct list_head former_node;	/* in former, if gone */
	atomic_t flags;		/* QGPU_POD_* */
	atomic_t nr_files;
	atomic_t nr_clients;
	atomic_t nr_entries;	/* clients and objects in the object table */
	atomic_t nr_held;	/* uvm_mem.c: what UVM holds of its clients */
	atomic_t nr_devices;	/* of them */
	atomic_t nr_exports;	/* objects that RM keeps for its exports by descriptors: export.c */
	atomic64_t refused_allocs;
	atomic64_t refused_controls;
	atomic64_t refused_objects;
	struct list_head clients;	/* client.c */
	struct mutex untracked_lock;	/* client.c: serializes looking for untracked objects that are gone */
	atomic_t nr_untracked[QGPU_UNTRACKED_KINDS];
	struct semaphore calls;	/* limits inspected calls */
	struct mutex penalty_lock;	/* gate_penalty.c: serializes calls that open closed gates */
	u64 open_since_ns;	/* under penalty_lock */
	u64 gated_since_ns;	/* likewise */
	spinlock_t owed_lock;
	u64 penalty_until_ns;	/* under owed_lock */
	u64 billed_ns[2];	/* likewise: up to how much of the gated time it owes for exits; [1]: with shared gates */
	struct rw_semaphore making;	/* client.c: read while RM makes a client that is not in the object table yet */
	struct mutex parts_lock;	/* serializes the calls that make parts of objects, and make or free OS events */
	struct xarray os_events;	/* by client and number: the file that each was made on */
	atomic_t nr_os_events;	/* in it */
	atomic_t nr_uvm_files;	/* uvm.c: those with an entry there */
	struct qgpu_object_parts parts[QGPU_OBJECT_PARTS];	/* under parts_lock */
	atomic_t nr_tsgs;
	atomic_t nr_further;	/* handles on TSGs, without the first of each */
	struct list_head kept;	/* memory that stays charged until the last file goes: mem.c, under mem_lock */
	struct qgpu_share shares[QGPU_MAX_GPUS];
};

struct qgpu_pod *qgpu_pod_get(struct qgpu_pod *pod);
void qgpu_pod_put(struct qgpu_pod *pod);

/* The pod in one of whose cgroups the current task is, or NULL; the caller puts it. */
struct qgpu_pod *qgpu_pod_of_current(void);
/* By id; the caller puts it. ERR_PTR(-ENOENT): removed, ERR_PTR(-EINVAL): no pod ever had this id. */
struct qgpu_pod *qgpu_pod_find(u64 id);
/* The pod with the lowest id above this one, or NULL; the caller puts it. */
struct qgpu_pod *qgpu_pod_next(u64 id);

int qgpu_pod_add(int cgroup_fd, const char *name, u64 *id);
int qgpu_pod_remove(u64 id);
/* Further cgroups of a pod. leave: by id; joined_next: the one with the lowest id above *cgroup, or -ENOENT. */
int qgpu_pod_join(u64 id, int cgroup_fd);
int qgpu_pod_leave_cgroup(u64 id, u64 cgroup);
int qgpu_pod_joined_next(u64 id, u64 *cgroup);
/* -EOPNOTSUPP: it brings a limit that the pod does not have, and limits are not safe now. */
int qgpu_pod_grant(u64 id, const struct qgpu_grant *grant, bool safe);
/* The pGPUs on which the pod has a memory limit: a mask of indexes. */
u32 qgpu_pod_limited(const struct qgpu_pod *pod);
void qgpu_pod_flag(struct qgpu_pod *pod, u32 flag, u32 event);
/* Calls may have passed unchecked: mark every pod that has a limit. */
void qgpu_pods_unchecked(void);
/* Count one more in nr_entries or nr_held, until its atomic_dec(); false: the pod is at its maximum. */
bool qgpu_pod_enter(atomic_t *entries);
unsigned int qgpu_pod_count(void);
void qgpu_pod_uninit(void);

#endif
