// SPDX-License-Identifier: GPL-2.0
/*
 * plan.c - copies a plan from user space and checks every member, so plan_runner.c needs no checks. A plan that it does
 * not understand is refused, never corrected.
 */
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "plan.h"

/* Where an element of a caller ends that does not say how long it is: it knows of no copy TSGs. */
#define SHORT_POD_PLAN	offsetof(struct qgpu_pod_plan, copy_timeslice_us)

static size_t pod_plan_size(const struct qgpu_plan *plan)
{
	return plan->pod_plan_size ?: SHORT_POD_PLAN;
}

static bool head_is_sane(const struct qgpu_plan *plan)
{
	return !plan->flags && !plan->pad && pod_plan_size(plan) >= SHORT_POD_PLAN &&
	       pod_plan_size(plan) <= QGPU_MAX_POD_PLAN_SIZE &&
	       plan->nr_pods <= QGPU_MAX_PODS && plan->nr_windows <= QGPU_MAX_WINDOWS &&
	       plan->period_ns >= QGPU_MIN_PERIOD_NS && plan->period_ns <= QGPU_MAX_PERIOD_NS &&
	       plan->lease_ns >= QGPU_MIN_LEASE_NS && plan->lease_ns <= QGPU_MAX_LEASE_NS;
}

static bool windows_are_sane(const struct qgpu_window *windows, u32 nr, u64 period_ns)
{
	u64 at_ns = 0;
	u32 i;

	for (i = 0; i < nr; i++) {
		if (windows[i].flags & ~QGPU_WINDOW_YIELD || windows[i].pad)
			return false;
		if (windows[i].start_ns < at_ns || windows[i].end_ns <= windows[i].start_ns ||
		    windows[i].end_ns > period_ns)
			return false;
		at_ns = windows[i].end_ns;
	}
	return true;
}

static bool timeslice_is_sane(u64 timeslice_us)
{
	return timeslice_us >= QGPU_MIN_TIMESLICE_US && timeslice_us <= QGPU_MAX_TIMESLICE_US;
}

static bool pod_is_sane(const struct qgpu_plan *plan, const struct qgpu_pod_plan *pod)
{
	bool gated = pod->flags & QGPU_POD_PLAN_GATED;

	return !(pod->flags & ~(QGPU_POD_PLAN_GATED | QGPU_POD_PLAN_COPIES)) && pod->pod_class <= QGPU_CLASS_ONLINE &&
	       timeslice_is_sane(pod->timeslice_us) &&
	       (!pod->copy_timeslice_us || timeslice_is_sane(pod->copy_timeslice_us)) &&
	       pod->first_window <= plan->nr_windows && pod->nr_windows <= plan->nr_windows - pod->first_window &&
	       (gated || (!pod->nr_windows && !pod->first_window && !(pod->flags & QGPU_POD_PLAN_COPIES)));
}

static int read_part(struct qgpu_timeline *timeline, const struct qgpu_plan *plan, const struct qgpu_pod_plan *in)
{
	struct qgpu_part *part = &timeline->parts[timeline->nr_parts];
	struct qgpu_pod *pod;
	u32 i;

	if (!pod_is_sane(plan, in) ||
	    !windows_are_sane(timeline->windows + in->first_window, in->nr_windows, plan->period_ns))
		return -EINVAL;
	pod = qgpu_pod_find(in->pod);
	if (PTR_ERR_OR_ZERO(pod) == -ENOENT)
		return 0;	/* removed in the meantime */
	if (IS_ERR(pod))
		return PTR_ERR(pod);
	*part = (struct qgpu_part){
		.pod = pod,
		.timeslice_us = in->timeslice_us,
		.copy_timeslice_us = in->copy_timeslice_us,
		.gated = in->flags & QGPU_POD_PLAN_GATED,
		.copies_gated = in->flags & QGPU_POD_PLAN_COPIES,
		.nr_windows = in->nr_windows,
		.windows = timeline->windows + in->first_window,
	};
	timeline->nr_parts++;
	timeline->online |= in->pod_class == QGPU_CLASS_ONLINE;
	for (i = 0; i + 1 < timeline->nr_parts; i++) {
		if (timeline->parts[i].pod == pod)
			return -EINVAL;	/* the plan names it twice */
	}
	return 0;
}

static int copy_pod(struct qgpu_pod_plan *pod, const struct qgpu_plan *plan, u32 at)
{
	const void __user *pods = (void __user *)(uintptr_t)plan->pods;
	size_t size = pod_plan_size(plan);
	int ret;

	ret = copy_struct_from_user(pod, sizeof(*pod), pods + at * size, size);
	if (!ret && size == SHORT_POD_PLAN) {
		pod->copy_timeslice_us = pod->timeslice_us;
		pod->flags |= pod->flags & QGPU_POD_PLAN_GATED ? QGPU_POD_PLAN_COPIES : 0;
	}
	return ret;
}

static int read_parts(struct qgpu_timeline *timeline, const struct qgpu_plan *plan)
{
	struct qgpu_pod_plan pod;
	int ret = 0;
	u32 i;

	for (i = 0; i < plan->nr_pods && !ret; i++)
		ret = copy_pod(&pod, plan, i) ?: read_part(timeline, plan, &pod);
	return ret;
}

struct qgpu_timeline *qgpu_plan_read(const struct qgpu_plan *plan)
{
	struct qgpu_timeline *timeline;
	int ret = -ENOMEM;

	if (!head_is_sane(plan))
		return ERR_PTR(-EINVAL);
	timeline = kzalloc(sizeof(*timeline), GFP_KERNEL);
	if (!timeline)
		return ERR_PTR(-ENOMEM);
	timeline->period_ns = plan->period_ns;
	timeline->windows = kvcalloc(plan->nr_windows ?: 1, sizeof(*timeline->windows), GFP_KERNEL);
	timeline->parts = kvcalloc(plan->nr_pods ?: 1, sizeof(*timeline->parts), GFP_KERNEL);
	if (!timeline->windows || !timeline->parts)
		goto err;
	ret = -EFAULT;
	if (copy_from_user(timeline->windows, (void __user *)(uintptr_t)plan->windows,
			   plan->nr_windows * sizeof(*timeline->windows)))
		goto err;
	ret = read_parts(timeline, plan);
	if (ret)
		goto err;
	return timeline;
err:
	qgpu_timeline_free(timeline);
	return ERR_PTR(ret);
}
