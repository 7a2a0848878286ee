/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_PLAN_RUNNER_H
#define _QGPU_PLAN_RUNNER_H

#include "timeline.h"
#include "tsg.h"

void qgpu_runner_init(void);
/* Consumes the plan if it returns 0. */
int qgpu_runner_set(struct qgpu_gpu *gpu, void *owner, struct qgpu_timeline *plan, u64 lease_ns);
int qgpu_runner_renew(struct qgpu_gpu *gpu, void *owner);
int qgpu_runner_idle(struct qgpu_gpu *gpu, void *owner, u64 pod, bool idle);
/*
 * Drop every plan of this owner (NULL: of all owners). Gates are open and timeslices reset when it returns, or RM does
 * not let them be, and they are tried until it does.
 */
void qgpu_runner_drop(void *owner);
/* Apply what is due now on every pGPU. When it returns gates are as they should be; timeslices may come later. */
void qgpu_runner_refresh(void);
/*
 * While plans are paused: wait until every gate is known to be open, and every timeslice the driver's own. -ETIMEDOUT;
 * -EINTR: a signal came.
 */
int qgpu_runner_wait_open(long timeout, bool interruptible);

/* Fill in the TSGs and gates that the pod holds on this pGPU. */
void qgpu_runner_usage(struct qgpu_gpu *gpu, struct qgpu_pod *pod, struct qgpu_usage *usage);

#endif
