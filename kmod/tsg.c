// SPDX-License-Identifier: GPL-2.0
/*
 * tsg.c - the TSGs of a pGPU and their channels, as the pods have made them, and which of their gates should be closed.
 * gate.c moves gates and sets timeslices.
 *
 * A plan says whether its gate covers a pod's copy TSGs. It covers all others, because a pod may declare a TSG falsely;
 * context.c says which are copy TSGs for certain.
 *
 * A TSG may have several handles, in clients of one pod: a client of an MPS server duplicates the server's TSG and makes
 * its channels below that. RM keeps the TSG until the last handle is freed.
 */
#include <linux/atomic.h>
#include <linux/moduleparam.h>
#include <linux/slab.h>

#include "events.h"
#include "timeline.h"
#include "tsg.h"

/* One control moves 64, and gate.c makes up for 50 ms of closing at most. */
static unsigned int channels_max = 4096;
module_param(channels_max, uint, 0644);
MODULE_PARM_DESC(channels_max, "channels that a pod may have at once on one pGPU (default 4096)");

static atomic64_t last_id, last_stamp;
static atomic_t paused;		/* a bit for each reason */

void qgpu_tsgs_pause(int reason)
{
	atomic_or(reason, &paused);
}

void qgpu_tsgs_unpause(int reason)
{
	atomic_andnot(reason, &paused);
}

bool qgpu_tsgs_paused(void)
{
	return atomic_read(&paused);
}

static void name(struct qgpu_tsg_handle *as, const struct qgpu_client *client, u32 handle, u32 device)
{
	*as = (struct qgpu_tsg_handle){
		.stamp = atomic64_inc_return(&last_stamp),
		.client = client->handle,
		.device = device,
		.handle = handle,
		.tgid = client->tgid,
	};
}

struct qgpu_tsg *qgpu_tsg_add(struct qgpu_client *client, struct qgpu_gpu *gpu, u32 handle, u32 device, u32 engine,
			      bool copies)
{
	u64 pod = client->pod->id, id, asked;
	struct qgpu_tsg *tsg;

	if (!atomic_add_unless(&client->pod->nr_tsgs, 1, QGPU_POD_TSGS_MAX))
		return ERR_PTR(-ENOSPC);
	tsg = kzalloc(sizeof(*tsg), GFP_KERNEL_ACCOUNT);
	if (!tsg) {
		atomic_dec(&client->pod->nr_tsgs);
		return ERR_PTR(-ENOMEM);
	}
	kref_init(&tsg->ref);
	tsg->listed = true;
	tsg->pod = client->pod;
	tsg->gpu = gpu;
	name(&tsg->first, client, handle, device);
	INIT_LIST_HEAD(&tsg->further);
	tsg->engine = engine;
	tsg->copies = copies;
	tsg->wish_us = NV_DEFAULT_TIMESLICE_US;
	mutex_lock(&gpu->lock);
	tsg->id = id = atomic64_inc_return(&last_id);	/* under the lock: the list is in order of ids */
	list_add_tail(&tsg->node, &gpu->tsgs);
	asked = qgpu_gpu_ask(gpu);
	mutex_unlock(&gpu->lock);
	qgpu_gpu_wait_gates(gpu, asked);
	qgpu_event(QGPU_EVENT_TSG_NEW, pod, qgpu_gpu_index(gpu), id);
	return tsg;
}

/* Finders look at it under RCU. */
static void tsg_free(struct kref *ref)
{
	struct qgpu_tsg *tsg = container_of(ref, struct qgpu_tsg, ref);

	kfree_rcu(tsg, rcu);
}

void qgpu_tsg_put(struct qgpu_tsg *tsg)
{
	kref_put(&tsg->ref, tsg_free);
}

static struct qgpu_tsg_handle *handle_of(struct qgpu_tsg *tsg, u32 client, u32 handle)
{
	struct qgpu_tsg_handle *each;

	lockdep_assert_held(&tsg->gpu->lock);
	if (tsg->first.client == client && tsg->first.handle == handle)
		return &tsg->first;
	list_for_each_entry(each, &tsg->further, node) {
		if (each->client == client && each->handle == handle)
			return each;
	}
	return NULL;
}

struct qgpu_tsg_handle *qgpu_tsg_handle_of(struct qgpu_tsg *tsg, u32 client)
{
	struct qgpu_tsg_handle *each;

	lockdep_assert_held(&tsg->gpu->lock);
	if (tsg->first.client == client)
		return &tsg->first;
	list_for_each_entry(each, &tsg->further, node) {
		if (each->client == client)
			return each;
	}
	return NULL;
}

u64 qgpu_tsg_stamp(struct qgpu_tsg *tsg, u32 client, u32 handle)
{
	const struct qgpu_tsg_handle *found;
	u64 stamp;

	mutex_lock(&tsg->gpu->lock);
	found = tsg->listed ? handle_of(tsg, client, handle) : NULL;
	stamp = found ? found->stamp : 0;
	mutex_unlock(&tsg->gpu->lock);
	return stamp;
}

static bool has_stamp(const struct qgpu_tsg *tsg, u64 stamp)
{
	const struct qgpu_tsg_handle *each;

	if (!tsg->listed)
		return false;
	if (tsg->first.stamp == stamp)
		return true;
	list_for_each_entry(each, &tsg->further, node) {
		if (each->stamp == stamp)
			return true;
	}
	return false;
}

int qgpu_tsg_share(struct qgpu_tsg *tsg, u64 stamp, const struct qgpu_client *client, u32 handle, u32 device)
{
	struct qgpu_tsg_handle *further = kzalloc(sizeof(*further), GFP_KERNEL_ACCOUNT);
	int ret = 0;

	if (!further)
		return -ENOMEM;
	mutex_lock(&tsg->gpu->lock);
	if (!has_stamp(tsg, stamp)) {
		ret = -ESTALE;
	} else if (tsg->nr_further + 1 >= QGPU_TSG_HANDLES_MAX ||
		   !atomic_add_unless(&tsg->pod->nr_further, 1, QGPU_POD_FURTHER_MAX)) {
		ret = -ENOSPC;
	} else {
		name(further, client, handle, device);
		list_add_tail(&further->node, &tsg->further);
		WRITE_ONCE(tsg->nr_further, tsg->nr_further + 1);
	}
	mutex_unlock(&tsg->gpu->lock);
	if (ret)
		kfree(further);
	return ret;
}

/* Take a handle out; the entry returned is free. */
static struct qgpu_tsg_handle *take_out(struct qgpu_tsg *tsg, u32 client, u32 handle)
{
	struct qgpu_tsg_handle *gone = handle_of(tsg, client, handle);

	if (!gone)
		return NULL;
	if (gone == &tsg->first) {
		gone = list_first_entry(&tsg->further, struct qgpu_tsg_handle, node);
		tsg->first = *gone;
		tsg->absent = 0;	/* that was said of the former */
	}
	list_del(&gone->node);
	atomic_dec(&tsg->pod->nr_further);
	WRITE_ONCE(tsg->nr_further, tsg->nr_further - 1);
	return gone;
}

void qgpu_tsg_drop(struct qgpu_tsg *tsg, u32 client, u32 handle, bool held)
{
	struct qgpu_tsg_handle *gone = NULL;
	struct qgpu_gpu *gpu = tsg->gpu;
	u64 asked;
	bool last;

	mutex_lock(&gpu->lock);
	last = list_empty(&tsg->further);
	if (last) {
		list_del(&tsg->node);
		tsg->listed = false;
		atomic_dec(&tsg->pod->nr_tsgs);
	} else {
		gone = take_out(tsg, client, handle);
		tsg->hold -= held;
	}
	asked = qgpu_gpu_ask(gpu);	/* it may have been the last whose gate was not known to be open */
	mutex_unlock(&gpu->lock);
	kfree(gone);
	if (!last) {
		if (held)	/* what is left of it is gated as before */
			qgpu_gpu_wait_gates(gpu, asked);
		return;
	}
	qgpu_event(QGPU_EVENT_TSG_GONE, tsg->pod->id, qgpu_gpu_index(gpu), tsg->id);
	qgpu_tsg_put(tsg);
}

int qgpu_channel_add(struct qgpu_tsg *tsg, u32 client, u32 handle)
{
	u64 asked = 0;
	int ret = -ENOSPC;

	mutex_lock(&tsg->gpu->lock);
	if (tsg->nr_channels < QGPU_TSG_CHANNELS_MAX && qgpu_share_of(tsg)->nr_channels < READ_ONCE(channels_max)) {
		qgpu_share_of(tsg)->nr_channels++;
		tsg->channels[tsg->nr_channels++] = (struct qgpu_channel){
			.client = client,
			.handle = handle,
			.stamp = atomic64_inc_return(&last_stamp),
		};
		asked = qgpu_gpu_ask(tsg->gpu);
		ret = 0;
	}
	mutex_unlock(&tsg->gpu->lock);
	qgpu_gpu_wait_gates(tsg->gpu, asked);
	return ret;
}

void qgpu_channel_remove(struct qgpu_tsg *tsg, u32 client, u32 handle)
{
	u32 i;

	mutex_lock(&tsg->gpu->lock);
	for (i = 0; i < tsg->nr_channels; i++) {
		if (tsg->channels[i].client == client && tsg->channels[i].handle == handle) {
			tsg->channels[i] = tsg->channels[--tsg->nr_channels];
			qgpu_share_of(tsg)->nr_channels--;
			break;
		}
	}
	qgpu_gpu_ask(tsg->gpu);
	mutex_unlock(&tsg->gpu->lock);
	if (qgpu_tsg_hidden(tsg))
		qgpu_tsg_drop(tsg, client, 0, false);
}

/* Whether its pod's gate covers it. Without a plan, that of the next one may. */
static bool is_covered(const struct qgpu_tsg *tsg)
{
	const struct qgpu_part *part = qgpu_share_of(tsg)->part;

	return !tsg->copies || !part || part->copies_gated;
}

bool qgpu_tsg_closed(const struct qgpu_tsg *tsg)
{
	return qgpu_share_of(tsg)->closed && is_covered(tsg) && tsg->hold <= 0 && !READ_ONCE(tsg->pod->gone);
}

bool qgpu_tsg_hold(struct qgpu_tsg *tsg, int by, u32 *gpus)
{
	bool covered;

	mutex_lock(&tsg->gpu->lock);
	tsg->hold += by;
	covered = is_covered(tsg);
	qgpu_gpu_ask(tsg->gpu);
	mutex_unlock(&tsg->gpu->lock);
	*gpus |= BIT(qgpu_gpu_index(tsg->gpu));
	return covered;
}

bool qgpu_tsg_reclose(struct qgpu_tsg *tsg, u32 *gpus)
{
	bool closed;
	u32 i;

	mutex_lock(&tsg->gpu->lock);
	closed = qgpu_tsg_closed(tsg);
	for (i = 0; i < tsg->nr_channels; i++) {
		struct qgpu_channel *channel = &tsg->channels[i];

		channel->unsure |= channel->off;
		if (channel->unsure)	/* the answer to a control under way no longer tells */
			channel->stamp = atomic64_inc_return(&last_stamp);
	}
	qgpu_gpu_ask(tsg->gpu);
	mutex_unlock(&tsg->gpu->lock);
	*gpus |= BIT(qgpu_gpu_index(tsg->gpu));
	return closed;
}

void qgpu_tsgs_wait(u32 gpus)
{
	u64 asked;
	int i;

	for (i = 0; gpus; gpus >>= 1, i++) {
		if (!(gpus & 1))
			continue;
		mutex_lock(&qgpu_gpus[i].lock);
		asked = qgpu_gpus[i].asked;
		mutex_unlock(&qgpu_gpus[i].lock);
		qgpu_gpu_wait_gates(&qgpu_gpus[i], asked);
	}
}

void qgpu_tsg_wish(struct qgpu_tsg *tsg, u64 wish_us)
{
	mutex_lock(&tsg->gpu->lock);
	tsg->wish_us = clamp_t(u64, wish_us, QGPU_MIN_TIMESLICE_US, NV_LONGEST_WISH_US);
	mutex_unlock(&tsg->gpu->lock);
}

int qgpu_tsg_next(struct qgpu_gpu *gpu, struct qgpu_tsg_next *next)
{
	const struct qgpu_tsg *tsg;
	int ret = -ENOENT;

	mutex_lock(&gpu->lock);
	list_for_each_entry(tsg, &gpu->tsgs, node) {	/* by id, ascending */
		if (tsg->pod->id != next->pod || tsg->id <= next->id)
			continue;
		next->id = tsg->id;
		next->client = tsg->first.client;
		next->handle = tsg->first.handle;
		next->tgid = tsg->first.tgid;
		next->nr_channels = tsg->nr_channels;
		next->flags = NV_IS_COMPUTE(tsg->engine) ? QGPU_ENGINE_COMPUTE : 0;
		next->flags |= tsg->nr_further ? QGPU_TSG_SHARED : 0;
		next->timeslice_us = tsg->set_us == U64_MAX ? 0 : tsg->set_us;
		ret = 0;
		break;
	}
	mutex_unlock(&gpu->lock);
	return ret;
}

static bool is_next(const struct qgpu_tsg_handle *handle, struct qgpu_handle_next *next)
{
	if (handle->stamp <= next->stamp)
		return false;
	next->stamp = handle->stamp;
	next->client = handle->client;
	next->handle = handle->handle;
	next->tgid = handle->tgid;
	return true;
}

static bool next_of(const struct qgpu_tsg *tsg, struct qgpu_handle_next *next)
{
	const struct qgpu_tsg_handle *each;

	if (is_next(&tsg->first, next))
		return true;
	list_for_each_entry(each, &tsg->further, node) {
		if (is_next(each, next))
			return true;
	}
	return false;
}

int qgpu_tsg_handle_next(struct qgpu_gpu *gpu, struct qgpu_handle_next *next)
{
	const struct qgpu_tsg *tsg;
	int ret = -ENOENT;

	mutex_lock(&gpu->lock);
	list_for_each_entry(tsg, &gpu->tsgs, node) {	/* by id, ascending */
		if (tsg->id < next->tsg)
			continue;
		if (tsg->id == next->tsg)
			ret = next_of(tsg, next) ? 0 : -ENOENT;
		break;
	}
	mutex_unlock(&gpu->lock);
	return ret;
}
