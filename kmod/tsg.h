/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_TSG_H
#define _QGPU_TSG_H

#include <linux/kref.h>

#include "gpu.h"
#include "object_table.h"

#define QGPU_TSG_CHANNELS_MAX 128	/* RM's own limit */
#define QGPU_TSG_HANDLES_MAX 128	/* an MPS server has up to 60 clients */
#define QGPU_POD_TSGS_MAX 512	/* on all pGPUs: plans and the daemon go through them. A CUDA process has four */
#define QGPU_POD_FURTHER_MAX 1024	/* handles besides the first ones, on all TSGs of a pod: the daemon asks for each */

/* A TSG as one RM client names it: that of its maker, or a duplicate in another client of the pod. */
struct qgpu_tsg_handle {
	struct list_head node;	/* of a further one */
	u64 stamp;		/* never given twice, as handles are */
	u32 client;
	u32 device;
	u32 handle;
	u32 subdevice;		/* 0: not asked yet; the pGPU's thread's own */
	u32 tgid;
};

struct qgpu_channel {
	u32 client;
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
	struct rcu_head rcu;
	struct kref ref;	/* the list's; another while a call or a control for it is under way */
	bool listed;
	u64 id;
	struct qgpu_pod *pod;	/* its clients' pod, which outlives the listed TSG */
	struct qgpu_gpu *gpu;
	struct qgpu_tsg_handle first;	/* stands for the TSG; if it is freed, the next one does */
	struct list_head further;	/* its other handles, by stamp, ascending */
	u32 nr_further;
	u32 engine;		/* as the pod declared it */
	bool copies;		/* it runs copies only, and not on the compute engine's runlist: that is certain */
	bool preemptible;	/* in mid-kernel */
	u64 wish_us;		/* what the pod asked for itself */
	u64 set_us;		/* what the plan set; 0: nothing; all ones: RM's answer is missing, or was an error */
	u8 absent;		/* how often RM said in a row that there is no such TSG */
	struct qgpu_retry retry;	/* for its timeslice */
	int hold;		/* above 0: being freed; its gate stays open and no timeslice is set */
	u32 nr_channels;
	struct qgpu_channel channels[QGPU_TSG_CHANNELS_MAX];
};

/*
 * Returns once its timeslice and those of its channels that exist are as they should be. ERR_PTR(-ENOSPC): the pod has
 * too many.
 */
struct qgpu_tsg *qgpu_tsg_add(struct qgpu_client *client, struct qgpu_gpu *gpu, u32 handle, u32 device, u32 engine,
			      bool copies);
void qgpu_tsg_put(struct qgpu_tsg *tsg);
/* The stamp of one of its handles; 0: it has no such handle. */
u64 qgpu_tsg_stamp(struct qgpu_tsg *tsg, u32 client, u32 handle);
/*
 * Note a further handle, which RM made as a duplicate of the one with this stamp. -ESTALE: that one has gone since, so
 * it is not known what RM has duplicated; -ENOSPC: the TSG has too many.
 */
int qgpu_tsg_share(struct qgpu_tsg *tsg, u64 stamp, const struct qgpu_client *client, u32 handle, u32 device);
/* Forget a handle, and the TSG with its last one. held: as long as it was there, it held the TSG's gate open. */
void qgpu_tsg_drop(struct qgpu_tsg *tsg, u32 client, u32 handle, bool held);
/* The first of the handles that a client has on it, or NULL. Needs the pGPU's lock. */
struct qgpu_tsg_handle *qgpu_tsg_handle_of(struct qgpu_tsg *tsg, u32 client);
static inline bool qgpu_tsg_shared(const struct qgpu_tsg *tsg)
{
	return READ_ONCE(tsg->nr_further);
}

/* Returns once its gate is as it should be. -ENOSPC: the TSG, or the pod on this pGPU, has too many. */
int qgpu_channel_add(struct qgpu_tsg *tsg, u32 client, u32 handle);
void qgpu_channel_remove(struct qgpu_tsg *tsg, u32 client, u32 handle);
static inline bool qgpu_tsg_hidden(const struct qgpu_tsg *tsg)
{
	return !READ_ONCE(tsg->first.handle);
}

/* Its pod's share of its pGPU. */
static inline struct qgpu_share *qgpu_share_of(const struct qgpu_tsg *tsg)
{
	lockdep_assert_held(&tsg->gpu->lock);
	return &tsg->pod->shares[qgpu_gpu_index(tsg->gpu)];
}

/* Whether its gate should be closed. Needs the pGPU's lock. */
bool qgpu_tsg_closed(const struct qgpu_tsg *tsg);
/*
 * Hold its gate open (by 1), or no longer (by -1). Nothing has moved when this returns: qgpu_tsgs_wait() does, for all
 * pGPUs of the mask. False: the plan in force leaves its gate open anyway.
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
/* The TSG's handle with the lowest stamp above next->stamp, or -ENOENT. */
int qgpu_tsg_handle_next(struct qgpu_gpu *gpu, struct qgpu_handle_next *next);

#endif
