// SPDX-License-Identifier: GPL-2.0
/*
 * gate.c - moves gates and sets timeslices: which control is due next, for which channels, and what RM's answer means.
 * tsg.c says which gates should be closed, plan_runner.c when that changes.
 *
 * A control takes 0.4 to 0.9 ms and up to 64 channels, of any clients. If RM refuses one, it may have moved some of
 * them, so nothing is known of any until it is sent again: first by pod, then by client, then one by one. So a pod
 * whose channels RM refuses costs its neighbours one control each.
 *
 * RM counts how often a channel was taken off, and enables it only after as many calls to put it back. Putting back a
 * channel that is on changes nothing. So a channel that may be off is put back before it is taken off.
 *
 * Nothing is forgotten that may be off. What could not be opened is tried again at least every RETRY_MAX_NS, or
 * SILENT_OPEN_NS if the card does not answer: then each control may cost RM seconds, with all its locks held.
 */
#include <linux/slab.h>

#include "events.h"
#include "gate.h"
#include "rm.h"
#include "timeline.h"
#include "trace.h"
#include "tsg.h"

#define RETRY_MIN_NS	(10 * NSEC_PER_MSEC)
#define RETRY_MAX_NS	(250 * NSEC_PER_MSEC)
#define SILENT_OPEN_NS	(400 * NSEC_PER_MSEC)
#define SILENT_CLOSE_NS	(10 * NSEC_PER_SEC)
#define SLOW_MIN_NS	(2 * NSEC_PER_MSEC)
#define SLOW_MAX_NS	(50 * NSEC_PER_MSEC)
/* Other pods' gates open after so long even if gates are left to close. */
#define CLOSING_MAX_NS	(10 * NSEC_PER_MSEC)
/* RM is believed when it says so often in a row, ABSENT_NS apart, that there is no such object. */
#define ABSENT_TIMES	3
#define ABSENT_NS	(400 * NSEC_PER_MSEC)
/* After so many refused batches of several clients that could be sent by client, RM does not like such batches. */
#define MIXED_MAX	3
/* A timeslice that RM may or may not have set. */
#define UNSURE_US	U64_MAX

enum action { NOTHING, OPEN, PUT_BACK, CLOSE };

/* Which channels may be in one control. */
enum apart { TOGETHER, BY_POD, BY_CLIENT, ALONE };

static enum action action_of(const struct qgpu_tsg *tsg, const struct qgpu_channel *channel)
{
	if (channel->absent >= ABSENT_TIMES)
		return NOTHING;
	if (!qgpu_tsg_closed(tsg))
		return channel->off || channel->unsure ? OPEN : NOTHING;
	if (channel->unsure)
		return PUT_BACK;
	return channel->off ? NOTHING : CLOSE;
}

static u64 allowed_at(const struct qgpu_gpu *gpu, const struct qgpu_retry *retry, bool opens)
{
	u64 silent_ns = gpu->silent ? gpu->silent_ns + (opens ? SILENT_OPEN_NS : SILENT_CLOSE_NS) : 0;

	return max3(gpu->busy.at_ns, retry->at_ns, silent_ns);
}

/* Returns true at the first failure. */
static bool retry_later(struct qgpu_retry *retry)
{
	bool first = !retry->at_ns;

	retry->pause_ns = first ? RETRY_MIN_NS : min_t(u64, 2 * retry->pause_ns, RETRY_MAX_NS);
	retry->at_ns = ktime_get_ns() + retry->pause_ns;
	return first;
}

/* Statuses that say nothing about the objects of the call. */
static bool is_busy(u32 status)
{
	switch (status) {
	case NV_ERR_BUSY_RETRY:
	case NV_ERR_IN_USE:
	case NV_ERR_INSUFFICIENT_RESOURCES:
	case NV_ERR_NO_MEMORY:
	case NV_ERR_STATE_IN_USE:
	case NV_ERR_TIMEOUT_RETRY:
		return true;
	}
	return false;
}

/* True: the failure is dealt with, and says nothing about the objects of the call. */
static bool is_general(struct qgpu_gpu *gpu, const struct qgpu_tsg *tsg, u32 status, bool was_silent)
{
	bool first = !was_silent;

	if (!gpu->silent && !is_busy(status))
		return false;
	if (!gpu->silent)
		first = retry_later(&gpu->busy);
	if (first)
		qgpu_event(QGPU_EVENT_GATE_FAILED, tsg->listed ? tsg->pod->id : 0, qgpu_gpu_index(gpu), status);
	return true;
}

/* A subdevice handle can be freed and made anew, so ask for it again if a control failed. */
static u32 subdevice_of(struct qgpu_gpu *gpu, struct qgpu_tsg *tsg, u32 client, bool again)
{
	struct qgpu_tsg_handle *handle = qgpu_tsg_handle_of(tsg, client);
	struct nv0080_find_subdevice find = {};

	if (!handle)
		return 0;
	if (handle->subdevice && !again)
		return handle->subdevice;
	qgpu_gpu_control(gpu, client, handle->device, NV0080_GPU_FIND_SUBDEVICE_HANDLE, &find, sizeof(find));
	handle = qgpu_tsg_handle_of(tsg, client);	/* it may have been freed meanwhile */
	if (handle)
		handle->subdevice = find.subdevice;
	return find.subdevice;
}

/* In the name of the client that has the first channel. */
static u32 send_gate(struct qgpu_gpu *gpu, struct qgpu_tsg *tsg)
{
	u32 client = gpu->gate.clients[0], subdevice = subdevice_of(gpu, tsg, client, false), status, found;

	status = qgpu_gpu_control(gpu, client, subdevice, NV2080_FIFO_DISABLE_CHANNELS, &gpu->gate, sizeof(gpu->gate));
	if (status == NV_OK || gpu->silent || is_busy(status))
		return status;
	found = subdevice_of(gpu, tsg, client, true);
	if (found != subdevice)
		status = qgpu_gpu_control(gpu, client, found, NV2080_FIFO_DISABLE_CHANNELS, &gpu->gate,
					  sizeof(gpu->gate));
	return status;
}

static bool is_absent(struct qgpu_gpu *gpu, u32 client, u32 handle, bool channel)
{
	struct nv0000_handle_info info = { .object = handle, .index = NV0000_HANDLE_INFO_CLASS };
	u32 status = qgpu_gpu_control(gpu, client, client, NV0000_CLIENT_GET_HANDLE_INFO, &info, sizeof(info));

	return status == NV_OK ? channel && !NV_IS_GPFIFO(info.result) : qgpu_rm_says_gone(status);
}

/* The channel of an entry of gpu->gated, or NULL if it has gone meanwhile. */
static struct qgpu_channel *channel_of(const struct qgpu_gated *gated)
{
	struct qgpu_channel *channel = gated->tsg->channels;
	u32 i;

	for (i = 0; gated->tsg->listed && i < gated->tsg->nr_channels; i++) {
		if (channel[i].stamp == gated->stamp)
			return &channel[i];
	}
	return NULL;
}

/* What the batch is made of so far, and what may still join it. */
struct batch {
	enum action action;
	enum apart apart;
	u32 num;
	bool clients, pods;	/* it is of several */
};

static enum apart apart_of(const struct qgpu_gpu *gpu, const struct qgpu_tsg *tsg, const struct qgpu_channel *channel)
{
	enum apart apart = channel->apart;

	if (qgpu_share_of(tsg)->slow_ns || qgpu_share_of(tsg)->may_be_slow)
		apart = max_t(enum apart, apart, BY_POD);
	if (gpu->refused_mixed >= MIXED_MAX)
		apart = max_t(enum apart, apart, BY_CLIENT);
	return apart;
}

static bool joins(struct qgpu_gpu *gpu, struct batch *batch, const struct qgpu_tsg *tsg,
		  const struct qgpu_channel *channel)
{
	enum apart apart = apart_of(gpu, tsg, channel);
	const struct qgpu_tsg *first = gpu->gated[0].tsg;
	u32 first_client = gpu->gate.clients[0];

	if (!batch->num) {
		batch->apart = apart;
		return true;
	}
	if (apart != batch->apart || (apart >= BY_POD && first->pod != tsg->pod) ||
	    (apart >= BY_CLIENT && first_client != channel->client))
		return false;
	batch->pods |= first->pod != tsg->pod;
	batch->clients |= first_client != channel->client;
	return true;
}

/* Fill gpu->gate and gpu->gated. From here until RM has answered, nothing is known of these channels. */
static void collect(struct qgpu_gpu *gpu, struct batch *batch)
{
	u64 now_ns = ktime_get_ns();
	struct qgpu_channel *channel;
	struct qgpu_tsg *tsg;

	list_for_each_entry(tsg, &gpu->tsgs, node) {
		for (channel = tsg->channels; channel < tsg->channels + tsg->nr_channels; channel++) {
			if (action_of(tsg, channel) != batch->action ||
			    allowed_at(gpu, &channel->retry, batch->action == OPEN) > now_ns ||
			    !joins(gpu, batch, tsg, channel))
				continue;
			kref_get(&tsg->ref);
			gpu->gated[batch->num] = (struct qgpu_gated){ tsg, channel->stamp };
			gpu->gate.clients[batch->num] = channel->client;
			gpu->gate.channels[batch->num] = channel->handle;
			batch->num++;
			channel->unsure = true;
			if (batch->apart == ALONE || batch->num == NV_DISABLE_CHANNELS_MAX)
				return;
		}
	}
}

static void note_moved(struct qgpu_gpu *gpu, const struct batch *batch)
{
	struct qgpu_channel *channel;
	u32 i;

	gpu->busy.at_ns = 0;
	if (batch->clients)
		gpu->refused_mixed = 0;
	for (i = 0; i < batch->num; i++) {
		channel = channel_of(&gpu->gated[i]);
		if (!channel)
			continue;
		channel->off = batch->action == CLOSE;
		channel->unsure = false;
		channel->absent = 0;
		if (batch->action == PUT_BACK)
			continue;	/* what was refused is still to come */
		channel->apart = TOGETHER;
		channel->retry.at_ns = 0;
	}
}

/* RM refused a control for the sake of one channel, alone in it. */
static void note_alone(struct qgpu_gpu *gpu, u32 status)
{
	struct qgpu_gated *gated = &gpu->gated[0];
	bool absent = is_absent(gpu, gpu->gate.clients[0], gpu->gate.channels[0], true);
	struct qgpu_channel *channel = channel_of(gated);

	gpu->refused_mixed = 0;
	if (!channel)
		return;
	channel->absent = absent ? channel->absent + 1 : 0;
	if (retry_later(&channel->retry) && !absent)
		qgpu_event(QGPU_EVENT_GATE_FAILED, gated->tsg->pod->id, qgpu_gpu_index(gpu), status);
	if (absent)
		channel->retry.at_ns = ktime_get_ns() + ABSENT_NS;
}

static void note_refused(struct qgpu_gpu *gpu, const struct batch *batch, u32 status)
{
	struct qgpu_channel *channel;
	u32 i;

	if (batch->num == 1) {
		note_alone(gpu, status);
		return;
	}
	gpu->refused_mixed += batch->clients && gpu->refused_mixed < MIXED_MAX;
	for (i = 0; i < batch->num; i++) {
		channel = channel_of(&gpu->gated[i]);
		if (channel)
			channel->apart = batch->apart + 1;
	}
}

/*
 * How long it takes to close each pod's gate; see note_slow(). A control for several pods that takes long says nothing
 * about any of them, so they are apart the next time.
 */
static void note_time(struct qgpu_gpu *gpu, const struct batch *batch, u64 ns, u32 status)
{
	struct qgpu_share *share, *last = NULL;
	u32 i;

	for (i = 0; i < batch->num; i++) {
		if (!gpu->gated[i].tsg->listed)
			continue;
		share = qgpu_share_of(gpu->gated[i].tsg);
		if (share == last)
			continue;
		last = share;
		if (status != NV_OK)
			share->turn_ended = false;	/* the length of this call says nothing about closing */
		else if (!batch->pods)
			share->closing_ns += ns;
		share->may_be_slow = batch->pods && ns >= SLOW_MIN_NS;
	}
}

/* One control. */
static void step(struct qgpu_gpu *gpu, enum action action)
{
	struct batch batch = { .action = action };
	bool was_silent = gpu->silent;
	u64 began_ns, ns;
	u32 status, i;

	collect(gpu, &batch);
	if (!batch.num)
		return;
	gpu->gate.disable = action == CLOSE;
	gpu->gate.num = batch.num;
	trace_qgpu_gate(qgpu_gpu_index(gpu), batch.pods ? 0 : gpu->gated[0].tsg->pod->id, batch.num, action == CLOSE);
	began_ns = ktime_get_ns();
	status = send_gate(gpu, gpu->gated[0].tsg);
	ns = ktime_get_ns() - began_ns;
	if (action != OPEN)
		gpu->closing_ns += ns;
	if (action == CLOSE)
		note_time(gpu, &batch, ns, status);
	if (status == NV_OK)
		note_moved(gpu, &batch);
	else if (!is_general(gpu, gpu->gated[0].tsg, status, was_silent))
		note_refused(gpu, &batch, status);
	for (i = 0; i < batch.num; i++)
		qgpu_tsg_put(gpu->gated[i].tsg);
}

static bool has_long_slices(const struct qgpu_tsg *tsg)
{
	const struct qgpu_part *part = qgpu_share_of(tsg)->part;

	return part && part->timeslice_us > QGPU_MIN_TIMESLICE_US;
}

/*
 * Return a bit for each action that is due and may be sent now, and tell whether gates open before others close. They do
 * if one control opens all of them: two pods then share the card while that control runs, instead of leaving it idle.
 * Beside online pods they close first, because online work would wait for both pods; so do gates of pods with the
 * shortest slices, which would spend the time on switches (docs/decisions/0059-open-before-close.md).
 */
static u32 due_now(struct qgpu_gpu *gpu, bool *opens_first)
{
	bool long_slices = false, together = true, closes = false;
	const struct qgpu_channel *channel;
	const struct qgpu_tsg *tsg;
	u64 now_ns = ktime_get_ns();
	u32 due = 0, opens = 0;

	list_for_each_entry(tsg, &gpu->tsgs, node) {
		for (channel = tsg->channels; channel < tsg->channels + tsg->nr_channels; channel++) {
			enum action action = action_of(tsg, channel);

			closes |= action == PUT_BACK || action == CLOSE;
			if (action == NOTHING || allowed_at(gpu, &channel->retry, action == OPEN) > now_ns)
				continue;
			due |= BIT(action);
			if (action == OPEN) {
				opens++;
				together &= apart_of(gpu, tsg, channel) == TOGETHER;
			} else {
				long_slices |= has_long_slices(tsg);
			}
		}
	}
	gpu->opened_first &= closes;
	*opens_first = together && long_slices && !gpu->plan->online && opens <= NV_DISABLE_CHANNELS_MAX &&
		       !gpu->opened_first;
	return due;
}

/*
 * A gate takes 0.4 to 0.9 ms to close, but twenty times that over a kernel that keeps reading host memory
 * (docs/decisions/0027-slow-calls.md): plan_runner.c closes such a gate earlier by that much.
 */
static void note_slow(struct qgpu_gpu *gpu)
{
	const struct qgpu_tsg *tsg;

	list_for_each_entry(tsg, &gpu->tsgs, node) {
		struct qgpu_share *share = qgpu_share_of(tsg);

		if (share->turn_ended && share->closing_ns) {
			share->slow_ns = ((share->slow_ns ?: share->closing_ns) + share->closing_ns) / 2;
			share->slow_ns = share->slow_ns < SLOW_MIN_NS ? 0 : min_t(u64, share->slow_ns, SLOW_MAX_NS);
		}
		share->turn_ended = false;
		share->closing_ns = 0;
	}
}

bool qgpu_gates_step(struct qgpu_gpu *gpu)
{
	bool opens_first;
	u32 due = due_now(gpu, &opens_first);

	lockdep_assert_held(&gpu->lock);
	if (!due) {
		note_slow(gpu);
		gpu->closing_ns = 0;
		return false;
	}
	if (due & BIT(OPEN) && (opens_first || due == BIT(OPEN) || gpu->closing_ns >= CLOSING_MAX_NS)) {
		gpu->opened_first |= opens_first;
		step(gpu, OPEN);
	} else {
		step(gpu, due & BIT(PUT_BACK) ? PUT_BACK : CLOSE);
	}
	return true;
}

/* The timeslice that the plan in force asks for; 0: none. */
static u64 due_us_of(const struct qgpu_tsg *tsg)
{
	const struct qgpu_part *part = qgpu_share_of(tsg)->part;

	if (!part || READ_ONCE(tsg->pod->gone) || qgpu_tsgs_paused())
		return 0;
	return tsg->copies ? part->copy_timeslice_us : part->timeslice_us;
}

static bool is_slice_due(const struct qgpu_tsg *tsg)
{
	return tsg->hold <= 0 && !qgpu_tsg_hidden(tsg) && tsg->absent < ABSENT_TIMES && due_us_of(tsg) != tsg->set_us;
}

static void note_slice_refused(struct qgpu_gpu *gpu, struct qgpu_tsg *tsg, u32 status)
{
	bool absent = is_absent(gpu, tsg->first.client, tsg->first.handle, false);

	tsg->absent = absent ? tsg->absent + 1 : 0;
	if (retry_later(&tsg->retry) && !absent && tsg->listed)
		qgpu_event(QGPU_EVENT_GATE_FAILED, tsg->pod->id, qgpu_gpu_index(gpu), status);
	if (absent)
		tsg->retry.at_ns = ktime_get_ns() + ABSENT_NS;
}

static void set_slice(struct qgpu_gpu *gpu, struct qgpu_tsg *tsg)
{
	u64 due_us = due_us_of(tsg);
	struct nva06c_timeslice slice = { due_us ?: tsg->wish_us };
	bool was_silent = gpu->silent;
	u32 status;

	kref_get(&tsg->ref);
	tsg->set_us = UNSURE_US;
	status = qgpu_gpu_control(gpu, tsg->first.client, tsg->first.handle, NVA06C_SET_TIMESLICE, &slice, sizeof(slice));
	if (status == NV_OK) {
		tsg->set_us = due_us;
		tsg->absent = 0;
		tsg->retry.at_ns = gpu->busy.at_ns = 0;
	} else if (!is_general(gpu, tsg, status, was_silent)) {
		note_slice_refused(gpu, tsg, status);
	}
	qgpu_tsg_put(tsg);
}

bool qgpu_slices_step(struct qgpu_gpu *gpu)
{
	u64 now_ns = ktime_get_ns();
	struct qgpu_tsg *tsg;

	lockdep_assert_held(&gpu->lock);
	list_for_each_entry(tsg, &gpu->tsgs, node) {
		if (is_slice_due(tsg) && allowed_at(gpu, &tsg->retry, !due_us_of(tsg)) <= now_ns) {
			set_slice(gpu, tsg);
			return true;
		}
	}
	return false;
}

void qgpu_gates_look(struct qgpu_gpu *gpu)
{
	const struct qgpu_channel *channel;
	const struct qgpu_tsg *tsg;
	bool opens = false, all_open = true;

	lockdep_assert_held(&gpu->lock);
	gpu->retry_ns = U64_MAX;
	list_for_each_entry(tsg, &gpu->tsgs, node) {
		for (channel = tsg->channels; channel < tsg->channels + tsg->nr_channels; channel++) {
			enum action action = action_of(tsg, channel);

			all_open &= channel->absent >= ABSENT_TIMES || (!channel->off && !channel->unsure);
			opens |= action == OPEN;
			if (action != NOTHING)
				gpu->retry_ns = min(gpu->retry_ns, allowed_at(gpu, &channel->retry, action == OPEN));
		}
		all_open &= tsg->absent >= ABSENT_TIMES || !tsg->set_us;
		if (is_slice_due(tsg))
			gpu->retry_ns = min(gpu->retry_ns, allowed_at(gpu, &tsg->retry, !due_us_of(tsg)));
	}
	WRITE_ONCE(gpu->all_open, all_open);	/* at once: others wait for it without the lock */
	if (list_empty(&gpu->tsgs))
		gpu->silent = false;	/* there is nobody to ask for, and nothing to be feared */
	qgpu_gpu_overdue(gpu, opens);
}
