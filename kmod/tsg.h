/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_TSG_H
#define _QGPU_TSG_H

#include <linux/kref.h>

#include "gpu.h"
#include "object_table.h"

#define QGPU_TSG_CHANNELS_MAX 128	/* RM's own limit */

struct qgpu_channel {
	u32 handle;
	u64 stamp;		/* never given twice, as handles are */
	bool off;		/* taken off the GPU by the gate */
	bool unsure;		/* it may be off even if off is false: RM's answer is missing, or was an error */
	u8 apart;		/* with whom it may be in one control: gate.c */
	u8 absent;		/* how often RM said in a row that there is no such channel */
	struct qgpu_retry retry;	/* for its gate */
};

/* A TSG, or (handle 0) the TSG that RM makes implicitly for a channel directly below a device. */
struct qgpu_tsg {
	struct list_head node;
	struct kref ref;	/* the list's; another while a control for it is under way */
	bool listed;
	u64 id;
	struct qgpu_pod *pod;	/* its client's pod, which outlives the listed TSG */
	struct qgpu_gpu *gpu;
	u32 client;
	u32 device;
	u32 subdevice;		/* 0: not asked yet; the pGPU's thread's own */
	u32 handle;
	u32 engine;		/* as the pod declared it */
	bool preemptible;	/* in mid-kernel; under the client's lock */
	u32 tgid;
	u64 wish_us;		/* what the pod asked for itself */
	u64 set_us;		/* what the plan set; 0: nothing; all ones: RM's answer is missing, or was an error */
	u8 absent;		/* how often RM said in a row that there is no such TSG */
	struct qgpu_retry retry;	/* for its timeslice */
	int hold;		/* above 0: being freed; its gate stays open and no timeslice is set */
	u32 nr_channels;
	struct qgpu_channel channels[QGPU_TSG_CHANNELS_MAX];
};

/* Returns once its timeslice and those of its channels that exist are as they should be. */
struct qgpu_tsg *qgpu_tsg_add(struct qgpu_client *client, struct qgpu_gpu *gpu, u32 handle, u32 device, u32 engine);
void qgpu_tsg_remove(struct qgpu_tsg *tsg);
void qgpu_tsg_put(struct qgpu_tsg *tsg);
/* Returns once its gate is as it should be. */
int qgpu_channel_add(struct qgpu_tsg *tsg, u32 handle);
void qgpu_channel_remove(struct qgpu_tsg *tsg, u32 handle);
static inline bool qgpu_tsg_hidden(const struct qgpu_tsg *tsg)
{
	return !tsg->handle;
}

/* Whether its gate should be closed. Needs the pGPU's lock. */
bool qgpu_tsg_closed(const struct qgpu_tsg *tsg);
/*
 * Hold its gate open (by 1), or no longer (by -1). True: its gate was closed, and is to be opened. Nothing has moved
 * when this returns: qgpu_tsgs_wait() does, for all pGPUs of the mask.
 */
bool qgpu_tsg_hold(struct qgpu_tsg *tsg, int by, u32 *gpus);
void qgpu_tsgs_wait(u32 gpus);
/*
 * The pod may have put its channels back on the GPU itself: the gate is to be closed again if it should be closed
 * (true). As for qgpu_tsg_hold().
 */
bool qgpu_tsg_reclose(struct qgpu_tsg *tsg, u32 *gpus);
void qgpu_tsg_wish(struct qgpu_tsg *tsg, u64 wish_us);

/* While there is a reason to pause, no timeslice of a plan is due. pause.c has the reasons. */
void qgpu_tsgs_pause(int reason);
void qgpu_tsgs_unpause(int reason);
bool qgpu_tsgs_paused(void);

/* The pod's TSG with the lowest id above next->id, or -ENOENT. */
int qgpu_tsg_next(struct qgpu_gpu *gpu, struct qgpu_tsg_next *next);

#endif
