// SPDX-License-Identifier: GPL-2.0
/*
 * tsg.c - the TSGs of a pGPU and their channels, and the two things done to them: a gate, which takes all channels of a
 * pod off the GPU or puts them back, and a timeslice.
 *
 * All TSGs of a pod are gated, not only those declared for compute, because a pod may declare a TSG falsely.
 * plan_runner.c decides when a gate closes; the plan says which timeslice is due.
 */
#include <linux/atomic.h>
#include <linux/slab.h>

#include "events.h"
#include "rm.h"
#include "timeline.h"
#include "trace.h"
#include "tsg.h"

#define RETRY_MIN_NS	(10 * NSEC_PER_MSEC)
#define RETRY_MAX_NS	NSEC_PER_SEC
#define SILENT_NS	(10 * NSEC_PER_SEC)
#define SLOW_MIN_NS	(2 * NSEC_PER_MSEC)
#define SLOW_MAX_NS	(50 * NSEC_PER_MSEC)

static atomic64_t last_id;
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

struct qgpu_tsg *qgpu_tsg_add(struct qgpu_client *client, struct qgpu_gpu *gpu, u32 handle, u32 device, u32 engine)
{
	struct qgpu_tsg *tsg = kzalloc(sizeof(*tsg), GFP_KERNEL_ACCOUNT);

	if (!tsg)
		return ERR_PTR(-ENOMEM);
	tsg->pod = client->pod;
	tsg->gpu = gpu;
	tsg->client = client->handle;
	tsg->device = device;
	tsg->handle = handle;
	tsg->engine = engine;
	tsg->tgid = client->tgid;
	tsg->wish_us = NV_DEFAULT_TIMESLICE_US;
	mutex_lock(&gpu->lock);
	tsg->id = atomic64_inc_return(&last_id);	/* under the lock: the list is in order of ids */
	list_add_tail(&tsg->node, &gpu->tsgs);
	qgpu_tsgs_apply(gpu);
	mutex_unlock(&gpu->lock);
	qgpu_event(QGPU_EVENT_TSG_NEW, tsg->pod->id, qgpu_gpu_index(gpu), tsg->id);
	return tsg;
}

void qgpu_tsg_remove(struct qgpu_tsg *tsg)
{
	mutex_lock(&tsg->gpu->lock);
	list_del(&tsg->node);
	mutex_unlock(&tsg->gpu->lock);
	qgpu_event(QGPU_EVENT_TSG_GONE, tsg->pod->id, qgpu_gpu_index(tsg->gpu), tsg->id);
	kfree(tsg);
}

int qgpu_channel_add(struct qgpu_tsg *tsg, u32 handle)
{
	int ret = -ENOSPC;

	mutex_lock(&tsg->gpu->lock);
	if (tsg->nr_channels < QGPU_TSG_CHANNELS_MAX) {
		tsg->channels[tsg->nr_channels++] = (struct qgpu_channel){ .handle = handle };
		qgpu_tsgs_apply(tsg->gpu);
		ret = 0;
	}
	mutex_unlock(&tsg->gpu->lock);
	return ret;
}

void qgpu_channel_remove(struct qgpu_tsg *tsg, u32 handle)
{
	u32 i;

	mutex_lock(&tsg->gpu->lock);
	for (i = 0; i < tsg->nr_channels; i++) {
		if (tsg->channels[i].handle == handle) {
			tsg->channels[i] = tsg->channels[--tsg->nr_channels];
			break;
		}
	}
	mutex_unlock(&tsg->gpu->lock);
	if (qgpu_tsg_hidden(tsg))
		qgpu_tsg_remove(tsg);
}

static bool is_closed(const struct qgpu_tsg *tsg)
{
	return tsg->pod->shares[qgpu_gpu_index(tsg->gpu)].closed && tsg->hold <= 0 && !READ_ONCE(tsg->pod->gone);
}

bool qgpu_tsg_hold(struct qgpu_tsg *tsg, int by)
{
	bool was, closed;

	mutex_lock(&tsg->gpu->lock);
	was = is_closed(tsg);
	tsg->hold += by;
	closed = is_closed(tsg);
	qgpu_tsgs_apply(tsg->gpu);
	mutex_unlock(&tsg->gpu->lock);
	return was && !closed;
}

bool qgpu_tsg_reclose(struct qgpu_tsg *tsg)
{
	bool closed;
	u32 i;

	mutex_lock(&tsg->gpu->lock);
	closed = is_closed(tsg);
	for (i = 0; i < tsg->nr_channels; i++)
		tsg->channels[i].unsure |= tsg->channels[i].off;
	tsg->hold++;	/* even if the card has not started them: each is put back and taken off in one call */
	qgpu_tsgs_apply(tsg->gpu);
	tsg->hold--;
	qgpu_tsgs_apply(tsg->gpu);
	mutex_unlock(&tsg->gpu->lock);
	return closed;
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
		next->client = tsg->client;
		next->handle = tsg->handle;
		next->tgid = tsg->tgid;
		next->nr_channels = tsg->nr_channels;
		next->flags = NV_IS_COMPUTE(tsg->engine) ? QGPU_ENGINE_COMPUTE : 0;
		next->timeslice_us = tsg->set_us;
		ret = 0;
		break;
	}
	mutex_unlock(&gpu->lock);
	return ret;
}

/* A subdevice handle can be freed and made anew, so ask for it again if a control failed. */
static u32 subdevice_of(struct qgpu_tsg *tsg, bool again)
{
	if (!tsg->subdevice || again)
		qgpu_rm_subdevice(tsg->client, tsg->device, &tsg->subdevice);
	return tsg->subdevice;
}

static u32 send_gate(struct qgpu_gpu *gpu, struct qgpu_tsg *tsg, bool off)
{
	u32 subdevice = subdevice_of(tsg, false), status;

	gpu->gate.disable = off;
	status = qgpu_rm_control(tsg->client, subdevice, NV2080_FIFO_DISABLE_CHANNELS, &gpu->gate, sizeof(gpu->gate));
	if (status != NV_OK && subdevice_of(tsg, true) != subdevice)
		status = qgpu_rm_control(tsg->client, tsg->subdevice, NV2080_FIFO_DISABLE_CHANNELS, &gpu->gate,
					 sizeof(gpu->gate));
	return status;
}

static u32 send_one(struct qgpu_gpu *gpu, struct qgpu_tsg *tsg, const struct qgpu_channel *channel, bool off)
{
	u32 status;

	gpu->gate.num = 1;
	gpu->gate.clients[0] = tsg->client;
	gpu->gate.channels[0] = channel->handle;
	status = send_gate(gpu, tsg, off);
	gpu->gate.num = 0;
	return status;
}

/* Returns true at the first failure. */
static bool retry_later(struct qgpu_retry *retry)
{
	bool first = !retry->at_ns;

	retry->pause_ns = first ? RETRY_MIN_NS : min_t(u64, 2 * retry->pause_ns, RETRY_MAX_NS);
	retry->at_ns = ktime_get_ns() + retry->pause_ns;
	return first;
}

/* If a card is lost or hangs, each further control would cost RM seconds, with all its locks held. */
static bool is_silent(struct qgpu_gpu *gpu, const struct qgpu_tsg *tsg, u32 status)
{
	if (status != NV_ERR_GPU_IS_LOST && status != NV_ERR_RESET_REQUIRED && status != NV_ERR_TIMEOUT)
		return false;
	gpu->silent_until_ns = ktime_get_ns() + SILENT_NS;
	qgpu_event(QGPU_EVENT_GATE_FAILED, tsg->pod->id, qgpu_gpu_index(gpu), status);
	return true;
}

/*
 * RM counts how often a channel was taken off, and enables it only after as many calls to put it back. Putting back a
 * channel that is on changes nothing. So a channel that may be off is put back before it is taken off.
 */
static void gate_one(struct qgpu_gpu *gpu, struct qgpu_tsg *tsg, struct qgpu_channel *channel, bool off)
{
	u32 status = NV_OK, class;

	if (!off || channel->unsure) {
		status = send_one(gpu, tsg, channel, false);
		if (status == NV_OK)
			channel->off = channel->unsure = false;
	}
	if (off && status == NV_OK) {
		status = send_one(gpu, tsg, channel, true);
		channel->off = status == NV_OK;
		channel->unsure = status != NV_OK;
	}
	if (status == NV_OK) {
		channel->retry.at_ns = 0;
	} else if (is_silent(gpu, tsg, status)) {
		return;
	} else if (qgpu_rm_gone(tsg->client, channel->handle) ||
		   (qgpu_rm_class(tsg->client, channel->handle, &class) == NV_OK && !NV_IS_GPFIFO(class))) {
		channel->gone = true;	/* or its handle names another object by now */
	} else if (retry_later(&channel->retry)) {
		qgpu_event(QGPU_EVENT_GATE_FAILED, tsg->pod->id, qgpu_gpu_index(gpu), status);
	}
}

/* All channels in gpu->gated belong to one client: RM then checks only that the caller owns them. */
static void flush_gate(struct qgpu_gpu *gpu, struct qgpu_tsg *tsg, bool off)
{
	struct qgpu_share *share = &tsg->pod->shares[qgpu_gpu_index(gpu)];
	u32 i, num = gpu->gate.num, status;
	u64 began_ns;

	if (!num)
		return;
	trace_qgpu_gate(qgpu_gpu_index(gpu), tsg->pod->id, num, off);
	began_ns = ktime_get_ns();
	status = send_gate(gpu, tsg, off);
	if (off)
		share->closing_ns += ktime_get_ns() - began_ns;
	gpu->gate.num = 0;
	for (i = 0; i < num; i++) {
		gpu->gated[i]->unsure = status != NV_OK;
		if (status == NV_OK)
			gpu->gated[i]->off = off;
	}
	if (status == NV_OK)
		return;
	share->turn_ended = false;	/* the length of this call says nothing about closing */
	if (is_silent(gpu, tsg, status))
		return;
	/* A refused call has moved all channels that come before the refused one. */
	for (i = 0; i < num && !gpu->silent_until_ns; i++)
		gate_one(gpu, tsg, gpu->gated[i], off);
}

static bool is_due(const struct qgpu_tsg *tsg, const struct qgpu_channel *channel, bool off)
{
	return is_closed(tsg) == off && (channel->off != off || channel->unsure) && !channel->gone;
}

/* A channel that failed before would fail the others in its batch, and it has its own retry time. */
static bool goes_alone(const struct qgpu_channel *channel, bool off)
{
	return channel->retry.at_ns || (off && channel->unsure);
}

static void apply_single_gates(struct qgpu_gpu *gpu, bool off)
{
	struct qgpu_channel *channel;
	struct qgpu_tsg *tsg;

	list_for_each_entry(tsg, &gpu->tsgs, node) {
		for (channel = tsg->channels; channel < tsg->channels + tsg->nr_channels; channel++) {
			if (gpu->silent_until_ns)
				return;
			if (is_due(tsg, channel, off) && goes_alone(channel, off) &&
			    channel->retry.at_ns <= ktime_get_ns())
				gate_one(gpu, tsg, channel, off);
		}
	}
}

static void apply_gates(struct qgpu_gpu *gpu, bool off)
{
	struct qgpu_tsg *tsg, *last = NULL;
	u32 i, num;

	list_for_each_entry(tsg, &gpu->tsgs, node) {
		if (is_closed(tsg) != off)
			continue;
		if (last && last->client != tsg->client)
			flush_gate(gpu, last, off);
		for (i = 0; i < tsg->nr_channels; i++) {
			if (!is_due(tsg, &tsg->channels[i], off) || goes_alone(&tsg->channels[i], off) ||
			    gpu->silent_until_ns)
				continue;
			num = gpu->gate.num++;
			gpu->gate.clients[num] = tsg->client;
			gpu->gate.channels[num] = tsg->channels[i].handle;
			gpu->gated[num] = &tsg->channels[i];
			if (gpu->gate.num == NV_DISABLE_CHANNELS_MAX)
				flush_gate(gpu, tsg, off);
		}
		last = tsg;
	}
	if (last)
		flush_gate(gpu, last, off);
	apply_single_gates(gpu, off);
}

/* The timeslice that the plan in force asks for; 0: none. */
static u64 due_us_of(const struct qgpu_tsg *tsg)
{
	const struct qgpu_part *part = tsg->pod->shares[qgpu_gpu_index(tsg->gpu)].part;

	lockdep_assert_held(&tsg->gpu->lock);
	return part && !READ_ONCE(tsg->pod->gone) && !qgpu_tsgs_paused() ? part->timeslice_us : 0;
}

static bool is_slice_due(const struct qgpu_tsg *tsg)
{
	return tsg->hold <= 0 && !qgpu_tsg_hidden(tsg) && !tsg->gone && due_us_of(tsg) != tsg->set_us;
}

static void apply_timeslice(struct qgpu_gpu *gpu, struct qgpu_tsg *tsg)
{
	u64 due_us = due_us_of(tsg);
	struct nva06c_timeslice slice = { due_us ?: tsg->wish_us };
	u32 status;

	if (gpu->silent_until_ns || !is_slice_due(tsg) || tsg->retry.at_ns > ktime_get_ns())
		return;
	status = qgpu_rm_control(tsg->client, tsg->handle, NVA06C_SET_TIMESLICE, &slice, sizeof(slice));
	if (status == NV_OK) {
		tsg->set_us = due_us;
		tsg->retry.at_ns = 0;
	} else if (is_silent(gpu, tsg, status)) {
		return;
	} else if (qgpu_rm_gone(tsg->client, tsg->handle)) {
		tsg->gone = true;
	} else if (retry_later(&tsg->retry)) {
		qgpu_event(QGPU_EVENT_GATE_FAILED, tsg->pod->id, qgpu_gpu_index(gpu), status);
	}
}

static u64 next_retry_ns(const struct qgpu_gpu *gpu)
{
	const struct qgpu_channel *channel;
	const struct qgpu_tsg *tsg;
	u64 at_ns = U64_MAX;

	list_for_each_entry(tsg, &gpu->tsgs, node) {
		for (channel = tsg->channels; channel < tsg->channels + tsg->nr_channels; channel++) {
			if (is_due(tsg, channel, is_closed(tsg)))
				at_ns = min(at_ns, max(channel->retry.at_ns, gpu->silent_until_ns));
		}
		if (is_slice_due(tsg))
			at_ns = min(at_ns, max(tsg->retry.at_ns, gpu->silent_until_ns));
	}
	return at_ns;
}

/*
 * A gate takes 0.4 to 0.9 ms to close, but twenty times that over a kernel that keeps reading host memory
 * (docs/decisions/0027-slow-calls.md): plan_runner.c closes such a gate earlier by that much.
 */
static void note_slow(struct qgpu_gpu *gpu)
{
	const struct qgpu_tsg *tsg;

	list_for_each_entry(tsg, &gpu->tsgs, node) {
		struct qgpu_share *share = &tsg->pod->shares[qgpu_gpu_index(gpu)];

		if (share->turn_ended && share->closing_ns) {
			share->slow_ns = ((share->slow_ns ?: share->closing_ns) + share->closing_ns) / 2;
			share->slow_ns = share->slow_ns < SLOW_MIN_NS ? 0 : min_t(u64, share->slow_ns, SLOW_MAX_NS);
		}
		share->turn_ended = false;
		share->closing_ns = 0;
	}
}

void qgpu_tsgs_apply(struct qgpu_gpu *gpu)
{
	struct qgpu_tsg *tsg;

	lockdep_assert_held(&gpu->lock);
	if (gpu->muted) {
		gpu->retry_ns = U64_MAX;
		return;
	}
	if (gpu->silent_until_ns && gpu->silent_until_ns <= ktime_get_ns())
		gpu->silent_until_ns = 0;
	apply_gates(gpu, true);		/* close gates before opening any: windows do not overlap */
	note_slow(gpu);
	apply_gates(gpu, false);
	list_for_each_entry(tsg, &gpu->tsgs, node)
		apply_timeslice(gpu, tsg);
	gpu->retry_ns = next_retry_ns(gpu);
	if (gpu->retry_ns != U64_MAX)
		qgpu_gpu_arm_retry(gpu);
}
