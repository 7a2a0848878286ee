// SPDX-License-Identifier: GPL-2.0
/*
 * gpu.c - the pGPUs that the driver has shown so far, each with a thread and a timer. plan_runner.c provides the work
 * of the thread.
 */
#include <linux/slab.h>

#include "compat.h"
#include "gpu.h"
#include "rm.h"

struct qgpu_gpu qgpu_gpus[QGPU_MAX_GPUS];
static int nr_gpus;

int qgpu_gpu_count(void)
{
	/* pairs with qgpu_gpus_enumerate(): a reader of the count sees the cards */
	return smp_load_acquire(&nr_gpus);
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

static int start(struct qgpu_gpu *gpu, const struct nv_gpu_info *info)
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

void qgpu_gpus_enumerate(void)
{
	struct nv_gpu_info *infos = kcalloc(NV_MAX_GPUS, sizeof(*infos), GFP_KERNEL);
	int i, n;

	lockdep_assert_held(&qgpu_attach_lock);
	if (!infos)
		return;
	n = qgpu_rm_enumerate(infos);
	for (i = 0; i < n && nr_gpus < QGPU_MAX_GPUS; i++) {
		if (qgpu_gpu_find(infos[i].gpu_id) >= 0 || start(&qgpu_gpus[nr_gpus], &infos[i]))
			continue;
		/* pairs with qgpu_gpu_count(): the card before the count */
		smp_store_release(&nr_gpus, nr_gpus + 1);
	}
	kfree(infos);
}

void qgpu_gpu_arm(struct qgpu_gpu *gpu, u64 at_ns)
{
	hrtimer_start(&gpu->timer, ns_to_ktime(at_ns), HRTIMER_MODE_ABS);
}

void qgpu_gpu_arm_retry(struct qgpu_gpu *gpu)
{
	lockdep_assert_held(&gpu->lock);
	if (!hrtimer_is_queued(&gpu->timer) || ktime_to_ns(hrtimer_get_expires(&gpu->timer)) > gpu->retry_ns)
		qgpu_gpu_arm(gpu, gpu->retry_ns);
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
		gpu->retry_ns = U64_MAX;
		qgpu_hrtimer_setup(&gpu->timer, wake);
		kthread_init_work(&gpu->work, work);
	}
}

/* No plan is left (no descriptor is open) and no TSG, so a timer that still fires is not armed again. */
void qgpu_gpus_uninit(void)
{
	int i;

	for (i = 0; i < nr_gpus; i++) {
		hrtimer_cancel(&qgpu_gpus[i].timer);
		kthread_destroy_worker(qgpu_gpus[i].worker);
	}
}
