/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_GPU_H
#define _QGPU_GPU_H

#include <linux/hrtimer.h>
#include <linux/kthread.h>
#include <linux/list.h>
#include <linux/mutex.h>

#include "nvrm.h"
#include "uapi/qgpu.h"

struct qgpu_channel;
struct qgpu_timeline;

/* One pGPU. */
struct qgpu_gpu {
	u32 gpu_id;
	u32 domain, bus, slot, function;
	u64 memory;

	struct mutex lock;	/* protects what follows; held during the RM controls for gates and timeslices */
	struct list_head tsgs;
	struct nv2080_disable_channels gate;	/* buffer for the next control */
	struct qgpu_channel *gated[NV_DISABLE_CHANNELS_MAX];
	u64 silent_until_ns;	/* the card does not answer: send nothing until then */
	u64 retry_ns;		/* when to try again; U64_MAX: everything is as it should be */
	bool muted;		/* send no control: the machine sleeps or is about to */

	struct qgpu_timeline *plan;
	void *owner;		/* the descriptor that installed the plan */
	u64 lease_ns, lease_until_ns;
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

/* work runs in each pGPU's own thread, woken by its timer. */
void qgpu_gpus_init(void (*work)(struct kthread_work *work));
void qgpu_gpus_uninit(void);
/* Wake the thread at this time. */
void qgpu_gpu_arm(struct qgpu_gpu *gpu, u64 at_ns);
/* ... no later than gpu->retry_ns. Needs the pGPU's lock. */
void qgpu_gpu_arm_retry(struct qgpu_gpu *gpu);
/* Enumerate the cards; those already known keep their index. */
void qgpu_gpus_enumerate(void);

#endif
