// SPDX-License-Identifier: GPL-2.0
/*
 * plan_runner.c - runs the plan of each pGPU against the clock: a timer wakes a thread at every edge, and the thread
 * has gate.c open and close gates. It divides no time; the plan says what to do about an idle pod.
 *
 * The thread reads the clock anew before each control. If it is late, gates are late by that much once, and later edges
 * do not move.
 *
 * While a gate is closed, or may be, the module holds a reference to itself, so that it cannot be unloaded before the
 * gate is known to be open, however its plan has ended.
 */
#include <linux/math64.h>
#include <linux/module.h>

#include "events.h"
#include "gate.h"
#include "plan_runner.h"
#include "trace.h"

/* A new plan waits for its timeslices for this part of its lease at most: the daemon sets one for each card of a host. */
#define LEASE_PARTS	16
/* Other changes wait for timeslices for so long at most. */
#define SLICES_NS	(50 * NSEC_PER_MSEC)

static void set_closed(struct qgpu_share *share, bool closed, u64 now_ns)
{
	if (closed == share->closed)
		return;
	share->turn_ended = closed;
	if (closed)
		share->closed_since_ns = now_ns;
	else
		share->gated_ns += now_ns - share->closed_since_ns;
	share->closed = closed;
}

/* Which parts have TSGs at all; the daemon says whether those have work. */
static void look_at_tsgs(struct qgpu_gpu *gpu)
{
	const struct qgpu_tsg *tsg;
	u32 i;

	for (i = 0; i < gpu->plan->nr_parts; i++)
		gpu->plan->parts[i].has_tsgs = false;
	list_for_each_entry(tsg, &gpu->tsgs, node) {
		struct qgpu_part *part = tsg->pod->shares[qgpu_gpu_index(gpu)].part;

		if (part)
			part->has_tsgs = true;
	}
}

static void forget_plan(struct qgpu_gpu *gpu)
{
	u64 now_ns = ktime_get_ns();
	u32 i;

	lockdep_assert_held(&gpu->lock);
	if (!gpu->plan)
		return;
	for (i = 0; i < gpu->plan->nr_parts; i++) {
		struct qgpu_share *share = &gpu->plan->parts[i].pod->shares[qgpu_gpu_index(gpu)];

		share->part = NULL;
		set_closed(share, false, now_ns);
	}
	qgpu_timeline_free(gpu->plan);
	gpu->plan = NULL;
	gpu->owner = NULL;
}

/* Say of each gate whether it should be closed now. */
static void follow_clock(struct qgpu_gpu *gpu)
{
	u64 now_ns = ktime_get_ns(), phase_ns;
	struct qgpu_timeline *plan = gpu->plan;
	bool lent;
	u32 i;

	lockdep_assert_held(&gpu->lock);
	if (!plan)
		return;
	if (now_ns >= gpu->lease_until_ns) {
		trace_qgpu_lapse(qgpu_gpu_index(gpu), now_ns - gpu->lease_until_ns);
		forget_plan(gpu);
		gpu->lapsed = true;
		return;
	}
	div64_u64_rem(now_ns, plan->period_ns, &phase_ns);
	look_at_tsgs(gpu);
	lent = qgpu_timeline_lent(plan, phase_ns);
	for (i = 0; i < plan->nr_parts; i++) {
		struct qgpu_part *part = &plan->parts[i];
		struct qgpu_share *share = &part->pod->shares[qgpu_gpu_index(gpu)];

		part->early_ns = share->slow_ns;
		set_closed(share,
			   part->gated && !qgpu_tsgs_paused() && !qgpu_part_turn(plan, part, phase_ns, lent),
			   now_ns);
	}
}

/* Sleep until the next edge, the end of the lease or a retry. */
static void arm(struct qgpu_gpu *gpu)
{
	u64 now_ns = ktime_get_ns(), phase_ns, edge_ns = U64_MAX, at_ns = gpu->retry_ns;

	if (gpu->plan) {
		div64_u64_rem(now_ns, gpu->plan->period_ns, &phase_ns);
		edge_ns = qgpu_timeline_edge(gpu->plan, phase_ns);
		edge_ns = edge_ns == U64_MAX ? U64_MAX : now_ns - phase_ns + edge_ns;
		at_ns = min3(edge_ns, gpu->lease_until_ns, at_ns);
	}
	if (at_ns != U64_MAX)
		qgpu_gpu_arm(gpu, at_ns);
}

/* Nothing is left to be sent for now. */
static void rest(struct qgpu_gpu *gpu, u64 asked)
{
	qgpu_gates_look(gpu);
	if (gpu->lapsed)	/* a reader of this event finds the gates open, unless RM does not let them be */
		qgpu_event(QGPU_EVENT_LEASE_LAPSED, 0, qgpu_gpu_index(gpu), 0);
	gpu->lapsed = false;
	if (gpu->pinned && !gpu->plan && gpu->all_open) {
		gpu->pinned = false;
		module_put(THIS_MODULE);	/* unloading waits for this thread */
	}
	arm(gpu);
	smp_store_release(&gpu->all_done, asked);	/* after all_open: is_open() */
	wake_up_all(&gpu->waiters);
}

/* The clock may move on, and anything may be asked for, during each control. Gates come before timeslices. */
static void work(struct kthread_work *work)
{
	struct qgpu_gpu *gpu = container_of(work, struct qgpu_gpu, work);
	u64 asked;

	mutex_lock(&gpu->lock);
	do {
		do {
			asked = gpu->asked;
			follow_clock(gpu);
		} while (qgpu_gates_step(gpu));
		WRITE_ONCE(gpu->gates_done, asked);
		wake_up_all(&gpu->waiters);
	} while (qgpu_slices_step(gpu));
	rest(gpu, asked);
	mutex_unlock(&gpu->lock);
}

int qgpu_runner_set(struct qgpu_gpu *gpu, void *owner, struct qgpu_timeline *plan, u64 lease_ns)
{
	u64 asked;
	u32 i;

	mutex_lock(&gpu->lock);
	if (gpu->plan && gpu->owner != owner) {
		mutex_unlock(&gpu->lock);
		return -EBUSY;
	}
	for (i = 0; i < plan->nr_parts; i++) {
		struct qgpu_share *share = &plan->parts[i].pod->shares[qgpu_gpu_index(gpu)];

		if (share->part)
			plan->parts[i].idle = share->part->idle;
	}
	if (!gpu->pinned)	/* the caller's open descriptor holds the module until the plan is dropped */
		__module_get(THIS_MODULE);
	gpu->pinned = true;
	/*
	 * A gate closed under both plans stays closed: forget_plan() marks it open, follow_clock() closed, and nothing
	 * is sent.
	 */
	forget_plan(gpu);
	gpu->plan = plan;
	gpu->owner = owner;
	gpu->lease_ns = lease_ns;
	gpu->lease_until_ns = ktime_get_ns() + lease_ns;
	for (i = 0; i < plan->nr_parts; i++)
		plan->parts[i].pod->shares[qgpu_gpu_index(gpu)].part = &plan->parts[i];
	trace_qgpu_plan(qgpu_gpu_index(gpu), plan->nr_parts, plan->period_ns);
	follow_clock(gpu);
	asked = qgpu_gpu_ask(gpu);
	mutex_unlock(&gpu->lock);
	qgpu_gpu_wait_briefly(gpu, asked, div_u64(lease_ns, LEASE_PARTS));
	return 0;
}

int qgpu_runner_renew(struct qgpu_gpu *gpu, void *owner)
{
	u64 now_ns = ktime_get_ns();
	int ret = -ENOENT;

	mutex_lock(&gpu->lock);
	if (gpu->plan && gpu->owner == owner && now_ns < gpu->lease_until_ns) {
		gpu->lease_until_ns = now_ns + gpu->lease_ns;
		ret = 0;
	}
	mutex_unlock(&gpu->lock);
	return ret;
}

int qgpu_runner_idle(struct qgpu_gpu *gpu, void *owner, u64 pod, bool idle)
{
	int ret = -ENOENT;
	u64 asked = 0;
	u32 i;

	mutex_lock(&gpu->lock);
	for (i = 0; gpu->plan && gpu->owner == owner && i < gpu->plan->nr_parts; i++) {
		if (gpu->plan->parts[i].pod->id != pod)
			continue;
		ret = 0;
		if (gpu->plan->parts[i].idle != idle) {
			gpu->plan->parts[i].idle = idle;
			asked = qgpu_gpu_ask(gpu);
		}
	}
	mutex_unlock(&gpu->lock);
	qgpu_gpu_wait_briefly(gpu, asked, 0);
	return ret;
}

/* Have every thread look, and wait for each in turn: they work at the same time. */
static void refresh(bool (*change)(struct qgpu_gpu *gpu, void *owner), void *owner,
		    void (*wait)(struct qgpu_gpu *gpu, u64 asked))
{
	u64 asked[QGPU_MAX_GPUS] = {};
	int i, n = qgpu_gpu_count();

	for (i = 0; i < n; i++) {
		mutex_lock(&qgpu_gpus[i].lock);
		if (change(&qgpu_gpus[i], owner))
			asked[i] = qgpu_gpu_ask(&qgpu_gpus[i]);
		mutex_unlock(&qgpu_gpus[i].lock);
	}
	for (i = 0; i < n; i++)
		wait(&qgpu_gpus[i], asked[i]);
}

static bool drop(struct qgpu_gpu *gpu, void *owner)
{
	if (!gpu->plan || (owner && gpu->owner != owner))
		return false;
	forget_plan(gpu);
	return true;
}

static bool nothing(struct qgpu_gpu *gpu, void *owner)
{
	return true;
}

void qgpu_runner_drop(void *owner)
{
	refresh(drop, owner, qgpu_gpu_wait);	/* without a plan no new TSG needs a timeslice */
}

/* Under a plan pods can make TSGs faster than RM sets their timeslices. */
static void wait_for_gates(struct qgpu_gpu *gpu, u64 asked)
{
	qgpu_gpu_wait_briefly(gpu, asked, SLICES_NS);
}

void qgpu_runner_refresh(void)
{
	refresh(nothing, NULL, wait_for_gates);
}

/* all_open was written before all_done, and may be older or newer than what was asked: the caller has paused plans. */
static bool is_open(const struct qgpu_gpu *gpu, u64 asked)
{
	u64 done = smp_load_acquire(&gpu->all_done);	/* before all_open: what was written with it */

	return done >= asked && READ_ONCE(gpu->all_open);
}

int qgpu_runner_wait_open(long timeout, bool interruptible)
{
	u64 asked[QGPU_MAX_GPUS];
	int i, n = qgpu_gpu_count();

	for (i = 0; i < n; i++) {
		mutex_lock(&qgpu_gpus[i].lock);
		asked[i] = qgpu_gpu_ask(&qgpu_gpus[i]);
		mutex_unlock(&qgpu_gpus[i].lock);
	}
	for (i = 0; i < n; i++) {
		struct qgpu_gpu *gpu = &qgpu_gpus[i];

		if (interruptible)
			timeout = wait_event_interruptible_timeout(gpu->waiters, is_open(gpu, asked[i]), timeout);
		else
			timeout = wait_event_idle_timeout(gpu->waiters, is_open(gpu, asked[i]), timeout);
		if (timeout <= 0)
			return timeout ? -EINTR : -ETIMEDOUT;
	}
	return 0;
}

void qgpu_runner_usage(struct qgpu_gpu *gpu, struct qgpu_pod *pod, struct qgpu_usage *usage)
{
	const struct qgpu_share *share = &pod->shares[qgpu_gpu_index(gpu)];
	const struct qgpu_tsg *tsg;

	mutex_lock(&gpu->lock);
	list_for_each_entry(tsg, &gpu->tsgs, node) {
		if (tsg->pod == pod) {
			usage->nr_tsgs++;
			usage->nr_channels += tsg->nr_channels;
		}
	}
	usage->now_ns = ktime_get_ns();
	usage->gate_closed = share->closed;
	usage->gated_ns = share->gated_ns + (share->closed ? usage->now_ns - share->closed_since_ns : 0);
	mutex_unlock(&gpu->lock);
}

void qgpu_runner_init(void)
{
	qgpu_gpus_init(work);
}
