// SPDX-License-Identifier: GPL-2.0
/*
 * gpu.c - the card: a compute engine and copy engines, which run at the same time. Each serves a runlist of TSGs round
 * robin, each TSG for its slice while another one is ready, with a price for every switch, preempting inside kernels,
 * skipping who has nothing to run. Channels off the card do not run. Copies are kernels here, and take no bandwidth.
 *
 * It is a simulation in jumps: nothing happens until somebody looks, then everything up to now happens at once, in
 * order. So the emulated machine's own jitter moves only the moments at which gates and slices change.
 */
#include <linux/ktime.h>
#include <linux/math64.h>
#include <linux/seq_file.h>
#include <linux/workqueue.h>

#include "sim.h"

#define FLOOD U64_MAX

struct engine {
	struct list_head runlist;
	struct sim_tsg *resident;
	u64 slice_left_ns, switch_left_ns;
	u64 at_ns;
};

static struct engine engines[SIM_GPUS_MAX][SIM_RUNLISTS];
static struct delayed_work catch_up;

static struct sim_channel *ready(const struct sim_tsg *tsg)
{
	struct sim_channel *channel;

	list_for_each_entry(channel, &tsg->channels, node) {
		if (!channel->disabled && channel->left)
			return channel;
	}
	return NULL;
}

static struct sim_tsg *next_ready(struct engine *engine, struct sim_tsg *after)
{
	struct list_head *at = after ? &after->node : &engine->runlist;
	struct sim_tsg *tsg;
	int lap;

	for (lap = 0; lap < 2; lap++) {
		for (at = at->next; at != &engine->runlist; at = at->next) {
			tsg = list_entry(at, struct sim_tsg, node);
			if (tsg != after && ready(tsg))
				return tsg;
		}
	}
	return NULL;
}

/* Periodic work that is due by now arrives; the time of the next arrival is returned. */
static u64 arrive(struct engine *engine)
{
	struct sim_channel *channel;
	struct sim_tsg *tsg;
	u64 next_ns = U64_MAX;

	list_for_each_entry(tsg, &engine->runlist, node) {
		list_for_each_entry(channel, &tsg->channels, node) {
			if (!channel->period_ns)
				continue;
			if (channel->next_ns <= engine->at_ns) {
				if (!channel->left) {
					channel->left = channel->batch;
					channel->current_ns = channel->kernel_ns;
					channel->submitted_ns = channel->next_ns;
				}
				channel->next_ns += channel->period_ns;
			}
			next_ns = min(next_ns, channel->next_ns);
		}
	}
	return next_ns;
}

static u64 until_idle_ns(const struct sim_channel *channel)
{
	return channel->left == FLOOD ? U64_MAX : channel->current_ns + (channel->left - 1) * channel->kernel_ns;
}

static void consume(struct engine *engine, struct sim_channel *channel, u64 ns)
{
	u64 done;

	if (ns < channel->current_ns) {
		channel->current_ns -= ns;
		return;
	}
	ns -= channel->current_ns;
	done = 1 + div64_u64_rem(ns, channel->kernel_ns, &ns);
	channel->current_ns = channel->kernel_ns - ns;
	channel->kernels += done;
	if (channel->left == FLOOD)
		return;
	channel->left -= done;
	if (!channel->left)
		channel->latency_ns[channel->nr_latencies++ % SIM_LATENCIES] =
			min_t(u64, engine->at_ns - channel->submitted_ns, U32_MAX);
}

/*
 * Random calls under a sanitizer can give the card more to do than can be simulated as it happens. Then it falls behind,
 * ever more, with the driver's lock held; so after a while it skips what is left. No test of shares comes near.
 */
#define ADVANCE_MAX_NS (300 * NSEC_PER_MSEC)

static void advance(struct engine *engine, u64 now_ns)
{
	u64 until_ns = ktime_get_ns() + ADVANCE_MAX_NS;

	if (list_empty(&engine->runlist))
		engine->at_ns = now_ns;
	while (engine->at_ns < now_ns) {
		u64 arrival_ns = arrive(engine), step_ns = now_ns - engine->at_ns;
		struct sim_tsg *here = engine->resident && ready(engine->resident) ? engine->resident : NULL;
		struct sim_tsg *other = next_ready(engine, engine->resident);
		struct sim_channel *channel;

		if (ktime_get_ns() > until_ns) {
			engine->at_ns = now_ns;
			break;
		}
		if (arrival_ns != U64_MAX)
			step_ns = min(step_ns, arrival_ns - engine->at_ns);
		if (here && !engine->slice_left_ns && !other)
			engine->slice_left_ns = here->slice_ns;
		if (other && !engine->switch_left_ns && (!here || !engine->slice_left_ns)) {
			engine->resident = here = other;
			engine->slice_left_ns = max(here->slice_ns, 1ull);
			engine->switch_left_ns = SIM_SWITCH_NS;
			here->starts++;
		}
		if (engine->switch_left_ns) {
			step_ns = min(step_ns, engine->switch_left_ns);
			engine->switch_left_ns -= step_ns;
			engine->at_ns += step_ns;
			continue;
		}
		if (here) {
			channel = ready(here);
			step_ns = min3(step_ns, engine->slice_left_ns, until_idle_ns(channel));
			engine->at_ns += step_ns;
			engine->slice_left_ns -= step_ns;
			here->run_ns += step_ns;
			consume(engine, channel, step_ns);
		} else {
			engine->at_ns += step_ns;
		}
	}
}

void sim_gpu_advance(int gpu)
{
	u64 now_ns = ktime_get_ns();
	int i;

	lockdep_assert_held(&sim_lock);
	for (i = 0; gpu >= 0 && i < SIM_RUNLISTS; i++)
		advance(&engines[gpu][i], now_ns);
}

/* Keeps the jumps short. */
static void catch_up_work(struct work_struct *work)
{
	int i;

	mutex_lock(&sim_lock);
	for (i = 0; i < sim_nr_gpus; i++)
		sim_gpu_advance(i);
	mutex_unlock(&sim_lock);
	schedule_delayed_work(&catch_up, msecs_to_jiffies(50));
}

int sim_copy_engine(u32 engine)
{
	if (engine >= 0x09 && engine <= 0x12)
		return engine - 0x09;
	if (engine >= 0x34 && engine <= 0x3d)
		return engine - 0x34 + 10;
	if (engine >= 0x40 && engine <= 0x53)
		return engine - 0x40;
	return -1;
}

void sim_gpu_add_tsg(int gpu, struct sim_tsg *tsg, u32 engine)
{
	int copy = sim_copy_engine(engine);

	sim_gpu_advance(gpu);
	tsg->runlist = copy < SIM_GRCES ? 0 : copy;
	list_add_tail(&tsg->node, &engines[gpu][tsg->runlist].runlist);
}

/* Whoever is on the engine leaves it for others that are ready, and comes back in its turn. */
void sim_gpu_preempt(int gpu, const struct sim_tsg *tsg)
{
	struct engine *engine = &engines[gpu][tsg->runlist];

	sim_gpu_advance(gpu);
	if (engine->resident == tsg)
		engine->slice_left_ns = 0;
}

void sim_gpu_remove_tsg(int gpu, struct sim_tsg *tsg)
{
	struct engine *engine = &engines[gpu][tsg->runlist];

	sim_gpu_advance(gpu);
	if (engine->resident == tsg)
		engine->resident = NULL;
	list_del(&tsg->node);
}

void sim_gpu_submit(int gpu, struct sim_channel *channel, const struct sim_submit *arg)
{
	sim_gpu_advance(gpu);
	/*
	 * Bounds, or a random call could make the jumps so short that they never catch up, or a batch so long that it
	 * comes to nothing in 64 bits.
	 */
	channel->kernel_ns = clamp_t(u64, arg->kernel_ns, 1000, NSEC_PER_SEC);
	channel->current_ns = channel->kernel_ns;
	channel->period_ns = arg->period_ns ? clamp_t(u64, arg->period_ns, NSEC_PER_MSEC, 1000 * NSEC_PER_SEC) : 0;
	channel->batch = arg->count > NSEC_PER_SEC ? FLOOD : arg->count;
	channel->next_ns = ktime_get_ns() + channel->period_ns;
	channel->left = channel->period_ns ? 0 : channel->batch;
	channel->submitted_ns = ktime_get_ns();
}

static unsigned int nr_off(const struct sim_tsg *tsg)
{
	const struct sim_channel *channel;
	unsigned int off = 0;

	list_for_each_entry(channel, &tsg->channels, node)
		off += !!channel->disabled;
	return off;
}

void sim_gpu_show(struct seq_file *seq)
{
	const struct sim_tsg *tsg;
	int i, j;

	for (i = 0; i < sim_nr_gpus; i++) {
		sim_gpu_advance(i);
		for (j = 0; j < SIM_RUNLISTS; j++) {
			list_for_each_entry(tsg, &engines[i][j].runlist, node)
				seq_printf(seq,
					   "tsg %d %u %u run_ns %llu starts %llu resident %d slice_ns %llu off %u mode %u runlist %d\n",
					   i, tsg->client, tsg->handle, tsg->run_ns, tsg->starts,
					   engines[i][j].resident == tsg, tsg->slice_ns, nr_off(tsg), tsg->mode, j);
		}
	}
}

unsigned int sim_gpu_channels(int gpu)
{
	struct sim_channel *channel;
	unsigned int i, nr = 0;
	struct sim_tsg *tsg;

	for (i = 0; i < SIM_RUNLISTS; i++) {
		list_for_each_entry(tsg, &engines[gpu][i].runlist, node) {
			list_for_each_entry(channel, &tsg->channels, node)
				nr++;
		}
	}
	return nr;
}

/* Channels off the cards. */
unsigned int sim_gpu_off(void)
{
	const struct sim_tsg *tsg;
	unsigned int off = 0;
	int i, j;

	for (i = 0; i < SIM_GPUS_MAX; i++) {
		for (j = 0; j < SIM_RUNLISTS; j++) {
			list_for_each_entry(tsg, &engines[i][j].runlist, node)
				off += nr_off(tsg);
		}
	}
	return off;
}

void sim_gpu_init(void)
{
	int i, j;

	for (i = 0; i < SIM_GPUS_MAX; i++) {
		for (j = 0; j < SIM_RUNLISTS; j++) {
			INIT_LIST_HEAD(&engines[i][j].runlist);
			engines[i][j].at_ns = ktime_get_ns();
		}
	}
	INIT_DELAYED_WORK(&catch_up, catch_up_work);
	schedule_delayed_work(&catch_up, 1);
}

void sim_gpu_uninit(void)
{
	cancel_delayed_work_sync(&catch_up);
}
