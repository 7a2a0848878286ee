// SPDX-License-Identifier: GPL-2.0
/*
 * timeline.c - what a plan says about a moment of its period: whose turn it is, and when that changes. plan_runner.c
 * has the clock and the gates.
 */
#include <linux/minmax.h>
#include <linux/mm.h>
#include <linux/slab.h>

#include "timeline.h"

void qgpu_timeline_free(struct qgpu_timeline *plan)
{
	u32 i;

	for (i = 0; i < plan->nr_parts; i++)
		qgpu_pod_put(plan->parts[i].pod);
	kvfree(plan->parts);
	kvfree(plan->windows);
	kfree(plan);
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

/* Lent time goes to the pods whose windows yield. */
static bool takes_part(const struct qgpu_part *part)
{
	u32 i;

	for (i = 0; i < part->nr_windows; i++) {
		if (part->windows[i].flags & QGPU_WINDOW_YIELD)
			return true;
	}
	return false;
}

bool qgpu_timeline_lent(const struct qgpu_timeline *plan, u64 phase_ns)
{
	bool any = false;
	u32 i;

	for (i = 0; i < plan->nr_parts; i++) {
		const struct qgpu_part *part = &plan->parts[i];
		const struct qgpu_window *window = window_at(part, phase_ns);

		if (!window)
			continue;
		if (!(window->flags & QGPU_WINDOW_YIELD) || (part->has_tsgs && !part->idle))
			return false;
		any = true;
	}
	return any;
}

/*
 * When the gate begins to close at the end of a window. The pod keeps at least half of the window. Never if the gate
 * stays open.
 */
static u64 closes_at(const struct qgpu_timeline *plan, const struct qgpu_part *part, const struct qgpu_window *window)
{
	u64 after_ns = window->end_ns == plan->period_ns ? 0 : window->end_ns;

	if (!part->early_ns)
		return window->end_ns;
	if (window_at(part, after_ns) || (takes_part(part) && qgpu_timeline_lent(plan, after_ns)))
		return U64_MAX;
	return window->end_ns - min(part->early_ns, (window->end_ns - window->start_ns) / 2);
}

bool qgpu_part_turn(const struct qgpu_timeline *plan, const struct qgpu_part *part, u64 phase_ns, bool lent)
{
	const struct qgpu_window *window = window_at(part, phase_ns);

	return window ? phase_ns < closes_at(plan, part, window) : lent && takes_part(part);
}

u64 qgpu_timeline_edge(const struct qgpu_timeline *plan, u64 phase_ns)
{
	u64 edge_ns = U64_MAX, closes_ns;
	u32 i, j;

	for (i = 0; i < plan->nr_parts; i++) {
		const struct qgpu_part *part = &plan->parts[i];

		if (!part->gated || !part->nr_windows)
			continue;
		edge_ns = min(edge_ns, plan->period_ns);
		for (j = 0; j < part->nr_windows; j++) {
			if (part->windows[j].start_ns > phase_ns)
				edge_ns = min(edge_ns, part->windows[j].start_ns);
			if (part->windows[j].end_ns > phase_ns)
				edge_ns = min(edge_ns, part->windows[j].end_ns);
			closes_ns = closes_at(plan, part, &part->windows[j]);
			if (closes_ns > phase_ns)
				edge_ns = min(edge_ns, closes_ns);
		}
	}
	return edge_ns;
}
