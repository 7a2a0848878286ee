// SPDX-License-Identifier: GPL-2.0
/*
 * plan_runner.c - runs the plan of each pGPU against the clock: a timer wakes a worker at every edge, and the worker
 * opens and closes gates. It divides no time; the plan says what to do about an idle pod.
 *
 * The worker reads the clock anew each time. If it is late, gates are late by that much once, and later edges do not
 * move.
 */
#include <linux/math64.h>

#include "events.h"
#include "plan_runner.h"
#include "trace.h"

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

bool qgpu_runner_settled(void)
{
	bool settled = true;
	int i, n = qgpu_gpu_count();

	for (i = 0; i < n; i++) {
		mutex_lock(&qgpu_gpus[i].lock);
		settled &= qgpu_gpus[i].retry_ns == U64_MAX;
		mutex_unlock(&qgpu_gpus[i].lock);
	}
	return settled;
}

/* Do what is due, and return when the next thing is due. */
static void run(struct qgpu_gpu *gpu)
{
	u64 now_ns = ktime_get_ns(), phase_ns, edge_ns;
	struct qgpu_timeline *plan = gpu->plan;
	bool lent;
	u32 i;

	lockdep_assert_held(&gpu->lock);
	if (!plan) {
		qgpu_tsgs_apply(gpu);
		return;
	}
	if (now_ns >= gpu->lease_until_ns) {
		trace_qgpu_lapse(qgpu_gpu_index(gpu), now_ns - gpu->lease_until_ns);
		forget_plan(gpu);
		qgpu_tsgs_apply(gpu);	/* a reader of this event finds the gates open */
		qgpu_event(QGPU_EVENT_LEASE_LAPSED, 0, qgpu_gpu_index(gpu), 0);
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
	qgpu_tsgs_apply(gpu);
	edge_ns = qgpu_timeline_edge(plan, phase_ns);
	edge_ns = edge_ns == U64_MAX ? U64_MAX : now_ns - phase_ns + edge_ns;
	qgpu_gpu_arm(gpu, min3(edge_ns, gpu->lease_until_ns, gpu->retry_ns));
}

static void work(struct kthread_work *work)
{
	struct qgpu_gpu *gpu = container_of(work, struct qgpu_gpu, work);

	mutex_lock(&gpu->lock);
	run(gpu);
	mutex_unlock(&gpu->lock);
}

int qgpu_runner_set(struct qgpu_gpu *gpu, void *owner, struct qgpu_timeline *plan, u64 lease_ns)
{
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
	/*
	 * A gate closed under both plans stays closed: forget_plan() marks it open, run() closed, and nothing is sent.
	 */
	forget_plan(gpu);
	gpu->plan = plan;
	gpu->owner = owner;
	gpu->lease_ns = lease_ns;
	gpu->lease_until_ns = ktime_get_ns() + lease_ns;
	for (i = 0; i < plan->nr_parts; i++)
		plan->parts[i].pod->shares[qgpu_gpu_index(gpu)].part = &plan->parts[i];
	trace_qgpu_plan(qgpu_gpu_index(gpu), plan->nr_parts, plan->period_ns);
	run(gpu);
	mutex_unlock(&gpu->lock);
	return 0;
}

int qgpu_runner_renew(struct qgpu_gpu *gpu, void *owner)
{
	int ret = -ENOENT;

	mutex_lock(&gpu->lock);
	if (gpu->plan && gpu->owner == owner) {
		gpu->lease_until_ns = ktime_get_ns() + gpu->lease_ns;
		ret = 0;
	}
	mutex_unlock(&gpu->lock);
	return ret;
}

int qgpu_runner_idle(struct qgpu_gpu *gpu, void *owner, u64 pod, bool idle)
{
	int ret = -ENOENT;
	u32 i;

	mutex_lock(&gpu->lock);
	for (i = 0; gpu->plan && gpu->owner == owner && i < gpu->plan->nr_parts; i++) {
		if (gpu->plan->parts[i].pod->id != pod)
			continue;
		ret = 0;
		if (gpu->plan->parts[i].idle != idle) {
			gpu->plan->parts[i].idle = idle;
			run(gpu);
		}
	}
	mutex_unlock(&gpu->lock);
	return ret;
}

void qgpu_runner_drop(void *owner)
{
	int i, n = qgpu_gpu_count();

	for (i = 0; i < n; i++) {
		mutex_lock(&qgpu_gpus[i].lock);
		if (qgpu_gpus[i].plan && (!owner || qgpu_gpus[i].owner == owner)) {
			forget_plan(&qgpu_gpus[i]);
			qgpu_tsgs_apply(&qgpu_gpus[i]);
		}
		mutex_unlock(&qgpu_gpus[i].lock);
	}
}

void qgpu_runner_refresh(void)
{
	int i, n = qgpu_gpu_count();

	for (i = 0; i < n; i++) {
		mutex_lock(&qgpu_gpus[i].lock);
		run(&qgpu_gpus[i]);
		mutex_unlock(&qgpu_gpus[i].lock);
	}
}

void qgpu_runner_mute(bool muted)
{
	int i;

	for (i = 0; i < QGPU_MAX_GPUS; i++) {
		mutex_lock(&qgpu_gpus[i].lock);
		qgpu_gpus[i].muted = muted;
		mutex_unlock(&qgpu_gpus[i].lock);
	}
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
