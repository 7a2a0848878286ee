// SPDX-License-Identifier: GPL-2.0
/*
 * gpu.c - the card: one runlist of TSGs served round robin, each for its slice while another one is ready, with a
 * price for every switch, preempting inside kernels, skipping who has nothing to run. Channels off the card do not
 * run.
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

struct card {
	struct list_head runlist;
	struct sim_tsg *resident;
	u64 slice_left_ns, switch_left_ns;
	u64 at_ns;
};

static struct card cards[SIM_GPUS_MAX];
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

static struct sim_tsg *next_ready(struct card *card, struct sim_tsg *after)
{
	struct list_head *at = after ? &after->node : &card->runlist;
	struct sim_tsg *tsg;
	int lap;

	for (lap = 0; lap < 2; lap++) {
		for (at = at->next; at != &card->runlist; at = at->next) {
			tsg = list_entry(at, struct sim_tsg, node);
			if (tsg != after && ready(tsg))
				return tsg;
		}
	}
	return NULL;
}

/* Periodic work that is due by now arrives; the time of the next arrival is returned. */
static u64 arrive(struct card *card)
{
	struct sim_channel *channel;
	struct sim_tsg *tsg;
	u64 next_ns = U64_MAX;

	list_for_each_entry(tsg, &card->runlist, node) {
		list_for_each_entry(channel, &tsg->channels, node) {
			if (!channel->period_ns)
				continue;
			if (channel->next_ns <= card->at_ns) {
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

static void consume(struct card *card, struct sim_channel *channel, u64 ns)
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
			min_t(u64, card->at_ns - channel->submitted_ns, U32_MAX);
}

/*
 * Random calls under a sanitizer can give the card more to do than can be simulated as it happens. Then it falls behind,
 * ever more, with the driver's lock held; so after a while it skips what is left. No test of shares comes near.
 */
#define ADVANCE_MAX_NS (300 * NSEC_PER_MSEC)

static void advance(struct card *card, u64 now_ns)
{
	u64 until_ns = ktime_get_ns() + ADVANCE_MAX_NS;

	while (card->at_ns < now_ns) {
		u64 arrival_ns = arrive(card), step_ns = now_ns - card->at_ns;
		struct sim_tsg *here = card->resident && ready(card->resident) ? card->resident : NULL;
		struct sim_tsg *other = next_ready(card, card->resident);
		struct sim_channel *channel;

		if (ktime_get_ns() > until_ns) {
			card->at_ns = now_ns;
			break;
		}
		if (arrival_ns != U64_MAX)
			step_ns = min(step_ns, arrival_ns - card->at_ns);
		if (here && !card->slice_left_ns && !other)
			card->slice_left_ns = here->slice_ns;
		if (other && !card->switch_left_ns && (!here || !card->slice_left_ns)) {
			card->resident = here = other;
			card->slice_left_ns = max(here->slice_ns, 1ull);
			card->switch_left_ns = SIM_SWITCH_NS;
			here->starts++;
		}
		if (card->switch_left_ns) {
			step_ns = min(step_ns, card->switch_left_ns);
			card->switch_left_ns -= step_ns;
			card->at_ns += step_ns;
			continue;
		}
		if (here) {
			channel = ready(here);
			step_ns = min3(step_ns, card->slice_left_ns, until_idle_ns(channel));
			card->at_ns += step_ns;
			card->slice_left_ns -= step_ns;
			here->run_ns += step_ns;
			consume(card, channel, step_ns);
		} else {
			card->at_ns += step_ns;
		}
	}
}

void sim_gpu_advance(int gpu)
{
	lockdep_assert_held(&sim_lock);
	if (gpu >= 0)
		advance(&cards[gpu], ktime_get_ns());
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

void sim_gpu_add_tsg(int gpu, struct sim_tsg *tsg)
{
	sim_gpu_advance(gpu);
	list_add_tail(&tsg->node, &cards[gpu].runlist);
}

/* Whoever is on the engine leaves it for others that are ready, and comes back in its turn. */
void sim_gpu_preempt(int gpu, const struct sim_tsg *tsg)
{
	sim_gpu_advance(gpu);
	if (cards[gpu].resident == tsg)
		cards[gpu].slice_left_ns = 0;
}

void sim_gpu_remove_tsg(int gpu, struct sim_tsg *tsg)
{
	sim_gpu_advance(gpu);
	if (cards[gpu].resident == tsg)
		cards[gpu].resident = NULL;
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

void sim_gpu_show(struct seq_file *seq)
{
	struct sim_channel *channel;
	struct sim_tsg *tsg;
	int i, off;

	for (i = 0; i < sim_nr_gpus; i++) {
		sim_gpu_advance(i);
		list_for_each_entry(tsg, &cards[i].runlist, node) {
			off = 0;
			list_for_each_entry(channel, &tsg->channels, node)
				off += !!channel->disabled;
			seq_printf(seq, "tsg %d %u %u run_ns %llu starts %llu resident %d slice_ns %llu off %d mode %u\n", i,
				   tsg->client, tsg->handle, tsg->run_ns, tsg->starts, cards[i].resident == tsg,
				   tsg->slice_ns, off, tsg->mode);
		}
	}
}

unsigned int sim_gpu_channels(int gpu)
{
	struct sim_channel *channel;
	unsigned int nr = 0;
	struct sim_tsg *tsg;

	list_for_each_entry(tsg, &cards[gpu].runlist, node) {
		list_for_each_entry(channel, &tsg->channels, node)
			nr++;
	}
	return nr;
}

/* Channels off the cards. */
unsigned int sim_gpu_off(void)
{
	struct sim_channel *channel;
	unsigned int i, off = 0;
	struct sim_tsg *tsg;

	for (i = 0; i < SIM_GPUS_MAX; i++) {
		list_for_each_entry(tsg, &cards[i].runlist, node) {
			list_for_each_entry(channel, &tsg->channels, node)
				off += !!channel->disabled;
		}
	}
	return off;
}

void sim_gpu_init(void)
{
	int i;

	for (i = 0; i < SIM_GPUS_MAX; i++) {
		INIT_LIST_HEAD(&cards[i].runlist);
		cards[i].at_ns = ktime_get_ns();
	}
	INIT_DELAYED_WORK(&catch_up, catch_up_work);
	schedule_delayed_work(&catch_up, 1);
}

void sim_gpu_uninit(void)
{
	cancel_delayed_work_sync(&catch_up);
}
