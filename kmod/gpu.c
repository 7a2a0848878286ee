// SPDX-License-Identifier: GPL-2.0
/*
 * gpu.c - the pGPUs that the driver has shown so far, each with a thread and a timer, how others wait for the thread,
 * and how its controls are watched. plan_runner.c provides the work of the thread.
 *
 * Only the thread sends the controls for gates and timeslices, and it holds no lock meanwhile. RM may keep it for
 * seconds, polling with all of its own locks held, if a card's firmware hangs. So after STALL_NS the thread loses its
 * priority, the daemon stops waiting for it, and both the kernel's log and the daemon are told.
 */
#include <linux/sched.h>
#include <linux/slab.h>

#include "compat.h"
#include "events.h"
#include "gpu.h"
#include "pod.h"
#include "rm.h"

#define STALL_NS	(100 * NSEC_PER_MSEC)
/* How long a gate may fail to open before that is told. */
#define OVERDUE_NS	NSEC_PER_SEC

struct qgpu_gpu qgpu_gpus[QGPU_MAX_GPUS];
static int nr_gpus;
static DEFINE_MUTEX(enumerate_lock);	/* protects additions to both */

int qgpu_gpu_count(void)
{
	/* pairs with qgpu_gpus_enumerate(): a reader of the count sees the cards */
	return smp_load_acquire(&nr_gpus);
}

u64 qgpu_gated_ns(const struct qgpu_pod *pod)
{
	u64 sum_ns = 0;
	int i, n = qgpu_gpu_count();

	for (i = 0; i < n; i++) {
		const struct qgpu_share *share = &pod->shares[i];

		mutex_lock(&qgpu_gpus[i].lock);
		sum_ns += share->gated_ns + (share->closed ? ktime_get_ns() - share->closed_since_ns : 0);
		mutex_unlock(&qgpu_gpus[i].lock);
	}
	return sum_ns;
}

int qgpu_gpu_find(u32 gpu_id)
{
	int i, n = qgpu_gpu_count();

	for (i = 0; i < n; i++) {
		if (qgpu_gpus[i].gpu_id == gpu_id)
			return i;
	}
	return -1;
}

static void set_fifo(struct qgpu_gpu *gpu, bool fifo)
{
	if (fifo == gpu->fifo)
		return;
	gpu->fifo = fifo;
	if (fifo)
		sched_set_fifo_low(gpu->worker->task);
	else
		sched_set_normal(gpu->worker->task, 0);
}

static int start(struct qgpu_gpu *gpu, const struct nv_gpu_info *info)
{
	gpu->worker = qgpu_run_worker("qgpu/%d", qgpu_gpu_index(gpu));
	if (IS_ERR(gpu->worker))
		return PTR_ERR(gpu->worker);
	set_fifo(gpu, true);
	gpu->gpu_id = info->gpu_id;
	gpu->domain = info->domain;
	gpu->bus = info->bus;
	gpu->slot = info->slot;
	gpu->function = info->function;
	return 0;
}

void qgpu_gpus_enumerate(void)
{
	struct nv_gpu_info *infos = kcalloc(NV_MAX_GPUS, sizeof(*infos), GFP_KERNEL);
	int i, n;

	if (!infos)
		return;
	mutex_lock(&enumerate_lock);
	n = qgpu_rm_enumerate(infos);
	for (i = 0; i < n && nr_gpus < QGPU_MAX_GPUS; i++) {
		if (qgpu_gpu_find(infos[i].gpu_id) >= 0 || start(&qgpu_gpus[nr_gpus], &infos[i]))
			continue;
		/* pairs with qgpu_gpu_count(): the card before the count */
		smp_store_release(&nr_gpus, nr_gpus + 1);
	}
	mutex_unlock(&enumerate_lock);
	kfree(infos);
}

void qgpu_gpu_arm(struct qgpu_gpu *gpu, u64 at_ns)
{
	hrtimer_start(&gpu->timer, ns_to_ktime(at_ns), HRTIMER_MODE_ABS);
}

u64 qgpu_gpu_ask(struct qgpu_gpu *gpu)
{
	lockdep_assert_held(&gpu->lock);
	gpu->asked++;
	kthread_queue_work(gpu->worker, &gpu->work);
	return gpu->asked;
}

void qgpu_gpu_wait_gates(struct qgpu_gpu *gpu, u64 asked)
{
	wait_event_idle(gpu->waiters, READ_ONCE(gpu->gates_done) >= asked);
}

void qgpu_gpu_wait(struct qgpu_gpu *gpu, u64 asked)
{
	wait_event_idle(gpu->waiters, READ_ONCE(gpu->all_done) >= asked || READ_ONCE(gpu->stalled));
}

void qgpu_gpu_wait_briefly(struct qgpu_gpu *gpu, u64 asked, u64 slices_ns)
{
	wait_event_idle(gpu->waiters, READ_ONCE(gpu->gates_done) >= asked || READ_ONCE(gpu->stalled));
	wait_event_idle_timeout(gpu->waiters, READ_ONCE(gpu->all_done) >= asked || READ_ONCE(gpu->stalled),
				nsecs_to_jiffies(slices_ns));
}

static void tell(struct qgpu_gpu *gpu, const char *what, u64 ns)
{
	pr_warn_ratelimited("qgpu: %04x:%02x:%02x.%x: %s (%llu ms)\n", gpu->domain, gpu->bus, gpu->slot, gpu->function,
			    what, div_u64(ns, NSEC_PER_MSEC));
	qgpu_event(QGPU_EVENT_STALLED, 0, qgpu_gpu_index(gpu), gpu->stalled);
}

/* for_ns: how long the control under way, or the last one, has taken. */
static void judge(struct qgpu_gpu *gpu, u64 for_ns)
{
	u64 overdue_ns = gpu->overdue_ns ? ktime_get_ns() - gpu->overdue_ns : 0;
	bool hangs = gpu->calling_ns && for_ns > STALL_NS;
	const char *what = NULL;

	lockdep_assert_held(&gpu->lock);
	if (hangs) {
		set_fifo(gpu, false);
		what = "the driver does not answer";
	} else if (gpu->silent) {
		what = "the driver says that the card does not answer";
	} else if (overdue_ns > OVERDUE_NS) {
		what = "the driver does not let a gate be opened";
		for_ns = overdue_ns;
	}
	if (what && !gpu->stalled) {
		WRITE_ONCE(gpu->stalled, true);
		tell(gpu, what, for_ns);
		wake_up_all(&gpu->waiters);
	} else if (!what && gpu->stalled) {
		WRITE_ONCE(gpu->stalled, false);
		tell(gpu, "the driver answers again", for_ns);
	}
}

static void watch_later(struct qgpu_gpu *gpu)
{
	queue_delayed_work(system_highpri_wq, &gpu->watch, nsecs_to_jiffies(STALL_NS) + 1);
}

static void watch(struct work_struct *work)
{
	struct qgpu_gpu *gpu = container_of(to_delayed_work(work), struct qgpu_gpu, watch);

	mutex_lock(&gpu->lock);
	if (gpu->calling_ns || gpu->overdue_ns) {
		judge(gpu, gpu->calling_ns ? ktime_get_ns() - gpu->calling_ns : 0);
		watch_later(gpu);
	}
	mutex_unlock(&gpu->lock);
}

/* The others RM answers by itself. */
static bool reaches_card(u32 cmd)
{
	return cmd == NV2080_FIFO_DISABLE_CHANNELS || cmd == NVA06C_SET_TIMESLICE;
}

u32 qgpu_gpu_control(struct qgpu_gpu *gpu, u32 client, u32 object, u32 cmd, void *params, u32 size)
{
	u32 status;
	u64 for_ns;

	lockdep_assert_held(&gpu->lock);
	gpu->calling_ns = ktime_get_ns();
	watch_later(gpu);
	mutex_unlock(&gpu->lock);
	status = qgpu_rm_control(client, object, cmd, params, size);
	mutex_lock(&gpu->lock);
	for_ns = ktime_get_ns() - gpu->calling_ns;
	gpu->calling_ns = 0;
	if (status == NV_OK && reaches_card(cmd)) {
		gpu->silent = false;
		set_fifo(gpu, true);
	} else if (status == NV_ERR_GPU_IS_LOST || status == NV_ERR_RESET_REQUIRED || status == NV_ERR_TIMEOUT) {
		gpu->silent = true;
		gpu->silent_ns = ktime_get_ns();
		set_fifo(gpu, false);
	}
	judge(gpu, for_ns);
	return status;
}

void qgpu_gpu_overdue(struct qgpu_gpu *gpu, bool overdue)
{
	lockdep_assert_held(&gpu->lock);
	if (!overdue)
		gpu->overdue_ns = 0;
	else if (!gpu->overdue_ns)
		gpu->overdue_ns = ktime_get_ns();
	if (overdue)
		watch_later(gpu);
	judge(gpu, 0);
}

u32 qgpu_gpus_stalled(void)
{
	int i, n = qgpu_gpu_count();
	u32 gpus = 0;

	for (i = 0; i < n; i++)
		gpus |= READ_ONCE(qgpu_gpus[i].stalled) ? BIT(i) : 0;
	return gpus;
}

/* The timer only wakes the thread, because RM controls sleep and take up to a millisecond. */
static enum hrtimer_restart wake(struct hrtimer *timer)
{
	struct qgpu_gpu *gpu = container_of(timer, struct qgpu_gpu, timer);

	kthread_queue_work(gpu->worker, &gpu->work);
	return HRTIMER_NORESTART;
}

void qgpu_gpus_init(void (*work)(struct kthread_work *work))
{
	int i;

	for (i = 0; i < QGPU_MAX_GPUS; i++) {
		struct qgpu_gpu *gpu = &qgpu_gpus[i];

		mutex_init(&gpu->lock);
		INIT_LIST_HEAD(&gpu->tsgs);
		init_waitqueue_head(&gpu->waiters);
		INIT_DELAYED_WORK(&gpu->watch, watch);
		gpu->retry_ns = U64_MAX;
		gpu->all_open = true;
		qgpu_hrtimer_setup(&gpu->timer, wake);
		kthread_init_work(&gpu->work, work);
	}
}

/* No plan is left (no descriptor is open), no TSG and no closed gate, so a timer that still fires is not armed again. */
void qgpu_gpus_uninit(void)
{
	int i;

	for (i = 0; i < nr_gpus; i++) {
		hrtimer_cancel(&qgpu_gpus[i].timer);
		kthread_destroy_worker(qgpu_gpus[i].worker);
		cancel_delayed_work_sync(&qgpu_gpus[i].watch);
	}
}
