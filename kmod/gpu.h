/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_GPU_H
#define _QGPU_GPU_H

#include <linux/hrtimer.h>
#include <linux/kthread.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "nvrm.h"
#include "uapi/qgpu.h"

struct qgpu_timeline;
struct qgpu_tsg;

/* A control that failed is tried again: soon at first, then at growing intervals. */
struct qgpu_retry {
	u64 at_ns;		/* 0: no retry pending */
	u64 pause_ns;
};

/* A channel of the control under way. */
struct qgpu_gated {
	struct qgpu_tsg *tsg;	/* a reference */
	u64 stamp;		/* of the channel, which may have gone meanwhile */
};

struct qgpu_pod;

/* One pGPU. */
struct qgpu_gpu {
	u32 gpu_id;
	u32 domain, bus, slot, function;
	u64 memory;

	struct mutex lock;	/* protects what follows; never held during a control */
	struct list_head tsgs;
	u64 asked;		/* how often something changed that may need a control */
	u64 retry_ns;		/* when to try again; U64_MAX: everything is as it should be */
	struct qgpu_retry busy;	/* RM refused for a reason that has nothing to do with a channel */
	bool silent;		/* RM's last answer: the card does not answer */
	u64 silent_ns;		/* when it said so */
	u64 overdue_ns;		/* since when a gate is to be opened; 0: none */
	bool pinned;		/* the module stays loaded until every gate is known to be open */
	bool lapsed;		/* a lease has lapsed, and its event is due */

	struct qgpu_timeline *plan;
	void *owner;		/* the descriptor that installed the plan */
	u64 lease_ns, lease_until_ns;

	/* written under the lock, waited for without it */
	u64 gates_done, all_done;	/* of what was asked */
	bool all_open;		/* every gate is known to be open, and every timeslice the driver's own */
	bool stalled;		/* a control is under way for too long, or a gate does not open */
	u64 calling_ns;		/* since when a control is under way; 0: none is */
	wait_queue_head_t waiters;
	struct delayed_work watch;

	/* the thread's own: it alone sends controls */
	struct nv2080_disable_channels gate;
	struct qgpu_gated gated[NV_DISABLE_CHANNELS_MAX];
	u64 closing_ns;		/* spent on closing, or to put back before, since everything was last as it should be */
	bool opened_first;	/* one control has opened gates before those that are due to close */
	u32 refused_mixed;	/* batches of several clients that RM refused in a row, without one channel to blame */
	bool fifo;		/* the thread's scheduling class */

	struct hrtimer timer;
	struct kthread_worker *worker;
	struct kthread_work work;
};

extern struct qgpu_gpu qgpu_gpus[QGPU_MAX_GPUS];

/* How many there are. These are complete, and stay until the module is unloaded. */
int qgpu_gpu_count(void);
int qgpu_gpu_find(u32 gpu_id);

static inline int qgpu_gpu_index(const struct qgpu_gpu *gpu)
{
	return gpu - qgpu_gpus;
}

/* How long the gates of a pod were due closed so far, on all pGPUs together. */
u64 qgpu_gated_ns(const struct qgpu_pod *pod);

/* work runs in each pGPU's own thread, woken by its timer and by qgpu_gpu_ask(). */
void qgpu_gpus_init(void (*work)(struct kthread_work *work));
void qgpu_gpus_uninit(void);
/* Wake the thread at this time. */
void qgpu_gpu_arm(struct qgpu_gpu *gpu, u64 at_ns);
/* Enumerate the cards; those already known keep their index. The driver must not go meanwhile. */
void qgpu_gpus_enumerate(void);

/* Have the thread look at what is due. Needs the pGPU's lock. Returns what to wait for. */
u64 qgpu_gpu_ask(struct qgpu_gpu *gpu);
/*
 * Wait, without the lock, until the gates are as they should be since then; or until RM has answered that they cannot
 * be, and they are tried again later. As RM makes its callers wait, nothing interrupts this.
 */
void qgpu_gpu_wait_gates(struct qgpu_gpu *gpu, u64 asked);
/* ... and timeslices; but no longer than until the card stalls: a daemon must not hang with RM. */
void qgpu_gpu_wait(struct qgpu_gpu *gpu, u64 asked);
/* ... and timeslices for this long at most: pods decide how many there are, and meanwhile the daemon renews nothing. */
void qgpu_gpu_wait_briefly(struct qgpu_gpu *gpu, u64 asked, u64 slices_ns);

/*
 * One control, in the pGPU's thread and with its lock, which is released meanwhile. A control that takes too long, and
 * an answer that the card does not answer, are told (events.c, the kernel's log) and cost the thread its priority.
 */
u32 qgpu_gpu_control(struct qgpu_gpu *gpu, u32 client, u32 object, u32 cmd, void *params, u32 size);
/* An opening is overdue, or no longer. Needs the lock. */
void qgpu_gpu_overdue(struct qgpu_gpu *gpu, bool overdue);
/* The pGPUs that are stalled: a mask of indexes. */
u32 qgpu_gpus_stalled(void);

#endif
