/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_SLICE_H
#define _QGPU_SLICE_H

#include "tsg.h"

/* One pod's part of a plan. */
struct qgpu_part {
	struct qgpu_pod *pod;	/* a reference */
	u64 timeslice_us;
	bool gated;
	bool idle;		/* the daemon says it has nothing to run */
	u32 nr_windows;
	const struct qgpu_window *windows;
};

/* A plan as the module runs it; checked when it is made (cdev.c), then unchanged but for idle. */
struct qgpu_timeline {
	u64 period_ns;
	u32 nr_parts;
	struct qgpu_part *parts;
	struct qgpu_window *windows;
};

extern struct qgpu_gpu qgpu_gpus[QGPU_MAX_GPUS];
extern int qgpu_nr_gpus;

static inline int qgpu_gpu_count(void)
{
	/* pairs with qgpu_slice_enumerate(): whoever sees the count sees the cards */
	return smp_load_acquire(&qgpu_nr_gpus);
}

static inline int qgpu_gpu_index(const struct qgpu_gpu *gpu)
{
	return gpu - qgpu_gpus;
}

void qgpu_slice_init(void);
void qgpu_slice_uninit(void);
/* Learn which cards the driver has; those known keep their index. */
void qgpu_slice_enumerate(void);
int qgpu_slice_find_gpu(u32 gpu_id);

void qgpu_timeline_free(struct qgpu_timeline *plan);
/* Consumes the plan if 0 is returned. */
int qgpu_slice_set(struct qgpu_gpu *gpu, void *owner, struct qgpu_timeline *plan, u64 lease_ns);
int qgpu_slice_renew(struct qgpu_gpu *gpu, void *owner);
int qgpu_slice_idle(struct qgpu_gpu *gpu, void *owner, u64 pod, bool idle);
/* Give up every plan of this owner (NULL: everybody's): gates open and timeslices back when it returns. */
void qgpu_slice_drop(void *owner);
/* Bring every pGPU up to what is due now. */
void qgpu_slice_refresh(void);
/* Send no control, on any pGPU; none is under way when it returns. */
void qgpu_slice_mute(bool muted);

/* See to it that the worker comes at gpu->retry_ns at the latest. Needs the pGPU's lock. */
void qgpu_slice_retry(struct qgpu_gpu *gpu);
/* Whether every gate and timeslice is as it is to be. */
bool qgpu_slice_settled(void);

/* Fill in what the pod holds on this pGPU in TSGs and gates. */
void qgpu_slice_usage(struct qgpu_gpu *gpu, struct qgpu_pod *pod, struct qgpu_usage *usage);

/* The timeslice the plan in force asks for this TSG, 0 for none. Needs the pGPU's lock. */
u64 qgpu_slice_due_us(const struct qgpu_tsg *tsg);

#endif
