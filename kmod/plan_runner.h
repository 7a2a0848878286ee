/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_SLICE_H
#define _QGPU_SLICE_H

#include "timeline.h"
#include "tsg.h"

void qgpu_slice_init(void);
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
