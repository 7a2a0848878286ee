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

	struct mutex lock;	/* protects what follows; held over the RM controls for gates and timeslices */
	struct list_head tsgs;
	struct nv2080_disable_channels gate;	/* room for the next control */
	struct qgpu_channel *gated[NV_DISABLE_CHANNELS_MAX];
	u64 silent_until_ns;	/* the card does not answer: until then it is not asked */
	u64 retry_ns;		/* when something is to be tried again; U64_MAX: all is as it is to be */
	bool muted;		/* no control is sent: the machine is about to sleep, or does */

	struct qgpu_timeline *plan;
	void *owner;		/* the descriptor that installed the plan */
	u64 lease_ns, lease_until_ns;
	struct hrtimer timer;
	struct kthread_worker *worker;
	struct kthread_work work;
};

extern struct qgpu_gpu qgpu_gpus[QGPU_MAX_GPUS];

/* How many there are: those are complete, and stay for as long as the module does. */
int qgpu_gpu_count(void);
int qgpu_gpu_find(u32 gpu_id);

static inline int qgpu_gpu_index(const struct qgpu_gpu *gpu)
{
	return gpu - qgpu_gpus;
}

/* work is what each pGPU's own thread does, woken by its timer. */
void qgpu_gpus_init(void (*work)(struct kthread_work *work));
void qgpu_gpus_uninit(void);
/* Have the thread come at this time. */
void qgpu_gpu_arm(struct qgpu_gpu *gpu, u64 at_ns);
/* ... at gpu->retry_ns at the latest. Needs the pGPU's lock. */
void qgpu_gpu_arm_retry(struct qgpu_gpu *gpu);
/* Learn which cards the driver has; those known keep their index. */
void qgpu_gpus_enumerate(void);

#endif
