// SPDX-License-Identifier: GPL-2.0
/*
 * slice.c - the plan of each pGPU laid on the clock: a timer wakes a worker at every edge, the worker opens and
 * closes gates. It divides nothing and decides nothing; what to do about an idle pod stands in the plan.
 *
 * RM controls sleep and take up to a millisecond, so the timer only wakes the worker. The worker looks at the
 * clock anew: a late one is wrong for as long as it is late, and the next edge does not move.
 */
#include <linux/math64.h>
#include <linux/slab.h>

#include "compat.h"
#include "events.h"
#include "interpose.h"
#include "pause.h"
#include "rm.h"
#include "slice.h"
#include "trace.h"

struct qgpu_gpu qgpu_gpus[QGPU_MAX_GPUS];
int qgpu_nr_gpus;

u64 qgpu_slice_due_us(const struct qgpu_tsg *tsg)
{
	const struct qgpu_part *part = tsg->pod->shares[qgpu_gpu_index(tsg->gpu)].part;

	return part && !READ_ONCE(tsg->pod->gone) && !qgpu_paused() ? part->timeslice_us : 0;
}

static void set_closed(struct qgpu_share *share, bool closed, u64 now_ns)
{
	if (closed == share->closed)
		return;
	if (closed)
		share->closed_since_ns = now_ns;
	else
		share->gated_ns += now_ns - share->closed_since_ns;
	share->closed = closed;
}

static const struct qgpu_window *window_at(const struct qgpu_part *part, u64 phase_ns)
{
	u32 i;

	for (i = 0; i < part->nr_windows; i++) {
		if (part->windows[i].start_ns <= phase_ns && phase_ns < part->windows[i].end_ns)
			return &part->windows[i];
	}
	return NULL;
}

static bool takes_part(const struct qgpu_part *part)
{
	u32 i;

	for (i = 0; i < part->nr_windows; i++) {
		if (part->windows[i].flags & QGPU_WINDOW_YIELD)
			return true;
	}
	return false;
}

static bool has_work(const struct qgpu_gpu *gpu, const struct qgpu_part *part)
{
	const struct qgpu_tsg *tsg;

	if (part->idle)
		return false;
	list_for_each_entry(tsg, &gpu->tsgs, node) {
		if (tsg->pod == part->pod)
			return true;
	}
	return false;
}

/* Whether every window open now yields and its pod has nothing to run: then the rest of it is lent. */
static bool is_lent(const struct qgpu_gpu *gpu, const struct qgpu_timeline *plan, u64 phase_ns)
{
	bool any = false;
	u32 i;

	for (i = 0; i < plan->nr_parts; i++) {
		const struct qgpu_window *window = window_at(&plan->parts[i], phase_ns);

		if (!window)
			continue;
		if (!(window->flags & QGPU_WINDOW_YIELD) || has_work(gpu, &plan->parts[i]))
			return false;
		any = true;
	}
	return any;
}

/* The first edge after phase_ns, else the end of the period; U64_MAX where no gate ever moves. */
static u64 next_edge(const struct qgpu_timeline *plan, u64 phase_ns)
{
	u64 edge_ns = U64_MAX;
	u32 i, j;

	for (i = 0; i < plan->nr_parts; i++) {
		if (!plan->parts[i].gated || !plan->parts[i].nr_windows)
			continue;
		edge_ns = min(edge_ns, plan->period_ns);
		for (j = 0; j < plan->parts[i].nr_windows; j++) {
			const struct qgpu_window *window = &plan->parts[i].windows[j];

			if (window->start_ns > phase_ns)
				edge_ns = min(edge_ns, window->start_ns);
			if (window->end_ns > phase_ns)
				edge_ns = min(edge_ns, window->end_ns);
		}
	}
	return edge_ns;
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

static void arm(struct qgpu_gpu *gpu, u64 at_ns)
{
	hrtimer_start(&gpu->timer, ns_to_ktime(at_ns), HRTIMER_MODE_ABS);
}

void qgpu_slice_retry(struct qgpu_gpu *gpu)
{
	lockdep_assert_held(&gpu->lock);
	if (!hrtimer_is_queued(&gpu->timer) || ktime_to_ns(hrtimer_get_expires(&gpu->timer)) > gpu->retry_ns)
		arm(gpu, gpu->retry_ns);
}

bool qgpu_slice_settled(void)
{
	bool settled = true;
	int i;

	for (i = 0; i < qgpu_nr_gpus; i++) {
		mutex_lock(&qgpu_gpus[i].lock);
		settled &= qgpu_gpus[i].retry_ns == U64_MAX;
		mutex_unlock(&qgpu_gpus[i].lock);
	}
	return settled;
}

/* Do what is due, and come back when something else is. */
static void run(struct qgpu_gpu *gpu)
{
	u64 now_ns = ktime_get_ns(), phase_ns, edge_ns;
	struct qgpu_timeline *plan = gpu->plan;
	bool lent;
	u32 i;

	lockdep_assert_held(&gpu->lock);
	if (plan && now_ns >= gpu->lease_until_ns) {
		trace_qgpu_lapse(qgpu_gpu_index(gpu), now_ns - gpu->lease_until_ns);
		forget_plan(gpu);
		qgpu_event(QGPU_EVENT_LEASE_LAPSED, 0, qgpu_gpu_index(gpu), 0);
		plan = NULL;
	}
	if (!plan) {
		qgpu_tsgs_apply(gpu);
		return;
	}
	div64_u64_rem(now_ns, plan->period_ns, &phase_ns);
	lent = is_lent(gpu, plan, phase_ns);
	for (i = 0; i < plan->nr_parts; i++) {
		struct qgpu_part *part = &plan->parts[i];
		bool turn = window_at(part, phase_ns) || (lent && takes_part(part));
		bool closed = part->gated && !qgpu_paused() && !turn;

		set_closed(&part->pod->shares[qgpu_gpu_index(gpu)], closed, now_ns);
	}
	qgpu_tsgs_apply(gpu);
	edge_ns = next_edge(plan, phase_ns);
	edge_ns = edge_ns == U64_MAX ? U64_MAX : now_ns - phase_ns + edge_ns;
	arm(gpu, min3(edge_ns, gpu->lease_until_ns, gpu->retry_ns));
}

static void work(struct kthread_work *work)
{
	struct qgpu_gpu *gpu = container_of(work, struct qgpu_gpu, work);

	mutex_lock(&gpu->lock);
	run(gpu);
	mutex_unlock(&gpu->lock);
}

static enum hrtimer_restart wake(struct hrtimer *timer)
{
	struct qgpu_gpu *gpu = container_of(timer, struct qgpu_gpu, timer);

	kthread_queue_work(gpu->worker, &gpu->work);
	return HRTIMER_NORESTART;
}

void qgpu_timeline_free(struct qgpu_timeline *plan)
{
	u32 i;

	for (i = 0; i < plan->nr_parts; i++)
		qgpu_pod_put(plan->parts[i].pod);
	kvfree(plan->parts);
	kvfree(plan->windows);
	kfree(plan);
}

int qgpu_slice_set(struct qgpu_gpu *gpu, void *owner, struct qgpu_timeline *plan, u64 lease_ns)
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
	/* A gate closed under both plans stays closed: forget_plan() marks it open, run() closed, nothing is sent. */
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

int qgpu_slice_renew(struct qgpu_gpu *gpu, void *owner)
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

int qgpu_slice_idle(struct qgpu_gpu *gpu, void *owner, u64 pod, bool idle)
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

void qgpu_slice_drop(void *owner)
{
	int i;

	for (i = 0; i < qgpu_nr_gpus; i++) {
		mutex_lock(&qgpu_gpus[i].lock);
		if (qgpu_gpus[i].plan && (!owner || qgpu_gpus[i].owner == owner)) {
			forget_plan(&qgpu_gpus[i]);
			qgpu_tsgs_apply(&qgpu_gpus[i]);
		}
		mutex_unlock(&qgpu_gpus[i].lock);
	}
}

void qgpu_slice_refresh(void)
{
	int i;

	for (i = 0; i < qgpu_nr_gpus; i++) {
		mutex_lock(&qgpu_gpus[i].lock);
		run(&qgpu_gpus[i]);
		mutex_unlock(&qgpu_gpus[i].lock);
	}
}

void qgpu_slice_mute(bool muted)
{
	int i;

	for (i = 0; i < QGPU_MAX_GPUS; i++) {
		mutex_lock(&qgpu_gpus[i].lock);
		qgpu_gpus[i].muted = muted;
		mutex_unlock(&qgpu_gpus[i].lock);
	}
}

void qgpu_slice_usage(struct qgpu_gpu *gpu, struct qgpu_pod *pod, struct qgpu_usage *usage)
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

static int start_gpu(struct qgpu_gpu *gpu, const struct nv_gpu_info *info)
{
	gpu->worker = qgpu_run_worker("qgpu/%d", qgpu_gpu_index(gpu));
	if (IS_ERR(gpu->worker))
		return PTR_ERR(gpu->worker);
	sched_set_fifo_low(gpu->worker->task);
	gpu->gpu_id = info->gpu_id;
	gpu->domain = info->domain;
	gpu->bus = info->bus;
	gpu->slot = info->slot;
	gpu->function = info->function;
	return 0;
}

void qgpu_slice_enumerate(void)
{
	struct nv_gpu_info *infos = kcalloc(NV_MAX_GPUS, sizeof(*infos), GFP_KERNEL);
	int i, n;

	lockdep_assert_held(&qgpu_attach_lock);
	if (!infos)
		return;
	n = qgpu_rm_enumerate(infos);
	for (i = 0; i < n && qgpu_nr_gpus < QGPU_MAX_GPUS; i++) {
		if (qgpu_slice_find_gpu(infos[i].gpu_id) >= 0 || start_gpu(&qgpu_gpus[qgpu_nr_gpus], &infos[i]))
			continue;
		/* pairs with qgpu_gpu_count(): the card before the count */
		smp_store_release(&qgpu_nr_gpus, qgpu_nr_gpus + 1);
	}
	kfree(infos);
}

int qgpu_slice_find_gpu(u32 gpu_id)
{
	int i, n = qgpu_gpu_count();

	for (i = 0; i < n; i++) {
		if (qgpu_gpus[i].gpu_id == gpu_id)
			return i;
	}
	return -1;
}

void qgpu_slice_init(void)
{
	int i;

	for (i = 0; i < QGPU_MAX_GPUS; i++) {
		struct qgpu_gpu *gpu = &qgpu_gpus[i];

		mutex_init(&gpu->lock);
		INIT_LIST_HEAD(&gpu->tsgs);
		gpu->retry_ns = U64_MAX;
		qgpu_hrtimer_setup(&gpu->timer, wake);
		kthread_init_work(&gpu->work, work);
	}
}

/* Neither plans (no descriptor is open) nor TSGs are left, so a timer that still fires finds nothing to re-arm for. */
void qgpu_slice_uninit(void)
{
	int i;

	for (i = 0; i < qgpu_nr_gpus; i++) {
		hrtimer_cancel(&qgpu_gpus[i].timer);
		kthread_destroy_worker(qgpu_gpus[i].worker);
	}
}
