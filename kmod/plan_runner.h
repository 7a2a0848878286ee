/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_PLAN_RUNNER_H
#define _QGPU_PLAN_RUNNER_H

#include "timeline.h"
#include "tsg.h"

void qgpu_runner_init(void);
/* Consumes the plan if 0 is returned. */
int qgpu_runner_set(struct qgpu_gpu *gpu, void *owner, struct qgpu_timeline *plan, u64 lease_ns);
int qgpu_runner_renew(struct qgpu_gpu *gpu, void *owner);
int qgpu_runner_idle(struct qgpu_gpu *gpu, void *owner, u64 pod, bool idle);
/* Give up every plan of this owner (NULL: everybody's): gates open and timeslices back when it returns. */
void qgpu_runner_drop(void *owner);
/* Bring every pGPU up to what is due now. */
void qgpu_runner_refresh(void);
/* Send no control, on any pGPU; none is under way when it returns. */
void qgpu_runner_mute(bool muted);

/* Whether every gate and timeslice is as it is to be. */
bool qgpu_runner_settled(void);

/* Fill in what the pod holds on this pGPU in TSGs and gates. */
void qgpu_runner_usage(struct qgpu_gpu *gpu, struct qgpu_pod *pod, struct qgpu_usage *usage);

#endif
