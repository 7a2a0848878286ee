/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_TSG_H
#define _QGPU_TSG_H

#include "gpu.h"
#include "object_table.h"

#define QGPU_TSG_CHANNELS_MAX 128	/* RM's own limit */

/* A control that failed is tried again: soon at first, then at growing intervals. */
struct qgpu_retry {
	u64 at_ns;		/* 0: no retry pending */
	u64 pause_ns;
};

struct qgpu_channel {
	u32 handle;
	bool off;		/* taken off the GPU by the gate */
	bool unsure;		/* it may be off even if off is false */
	bool gone;		/* the driver has freed it with something it depended on */
	struct qgpu_retry retry;	/* for its gate */
};

/* A TSG, or (handle 0) the TSG that RM makes implicitly for a channel directly below a device. */
struct qgpu_tsg {
	struct list_head node;
	u64 id;
	struct qgpu_pod *pod;	/* its client's pod, which outlives it */
	struct qgpu_gpu *gpu;
	u32 client;
	u32 device;
	u32 subdevice;		/* 0: not asked yet */
	u32 handle;
	u32 engine;		/* as the pod declared it */
	bool preemptible;	/* in mid-kernel; under the client's lock */
	u32 tgid;
	u64 wish_us;		/* what the pod asked for itself */
	u64 set_us;		/* what the plan set; 0: nothing */
	bool gone;		/* the driver has freed it, or refuses to set its timeslice */
	struct qgpu_retry retry;	/* for its timeslice */
	int hold;		/* above 0: being freed; its gate stays open and no timeslice is set */
	u32 nr_channels;
	struct qgpu_channel channels[QGPU_TSG_CHANNELS_MAX];
};

struct qgpu_tsg *qgpu_tsg_add(struct qgpu_client *client, struct qgpu_gpu *gpu, u32 handle, u32 device, u32 engine);
void qgpu_tsg_remove(struct qgpu_tsg *tsg);
int qgpu_channel_add(struct qgpu_tsg *tsg, u32 handle);
void qgpu_channel_remove(struct qgpu_tsg *tsg, u32 handle);
static inline bool qgpu_tsg_hidden(const struct qgpu_tsg *tsg)
{
	return !tsg->handle;
}

/* True: its gate was closed, and this call opened it. */
bool qgpu_tsg_hold(struct qgpu_tsg *tsg, int by);
/* The pod may have put its channels back on the GPU itself: close the gate again if it should be closed (true). */
bool qgpu_tsg_reclose(struct qgpu_tsg *tsg);
void qgpu_tsg_wish(struct qgpu_tsg *tsg, u64 wish_us);

/* While there is a reason to pause, no timeslice of a plan is due. pause.c has the reasons. */
void qgpu_tsgs_pause(int reason);
void qgpu_tsgs_unpause(int reason);
bool qgpu_tsgs_paused(void);

/* The pod's TSG with the lowest id above next->id, or -ENOENT. */
int qgpu_tsg_next(struct qgpu_gpu *gpu, struct qgpu_tsg_next *next);

/*
 * Bring gates and timeslices to what they should be; failures are retried at gpu->retry_ns, for which the timer is
 * armed. Needs the pGPU's lock.
 */
void qgpu_tsgs_apply(struct qgpu_gpu *gpu);

#endif
