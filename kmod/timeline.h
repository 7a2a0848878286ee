/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_TIMELINE_H
#define _QGPU_TIMELINE_H

#include "pod.h"

/* One pod's part of a plan. */
struct qgpu_part {
	struct qgpu_pod *pod;	/* a reference */
	u64 timeslice_us;
	u64 copy_timeslice_us;	/* 0: the driver's own */
	bool gated;
	bool copies_gated;	/* its copy TSGs too */
	bool idle;		/* the daemon says it has nothing to run */
	bool has_tsgs;		/* when the runner last looked */
	u64 early_ns;		/* its gate begins to close this much before a window ends */
	u32 nr_windows;
	const struct qgpu_window *windows;
};

/* A plan as the module runs it. plan.c checks it once; afterwards only idle, has_tsgs and early_ns change. */
struct qgpu_timeline {
	u64 period_ns;
	bool online;	/* it has online pods */
	u32 nr_parts;
	struct qgpu_part *parts;
	struct qgpu_window *windows;
};

void qgpu_timeline_free(struct qgpu_timeline *plan);

/* Whether every window open at this phase of the period yields and its pod has nothing to run: the time is lent. */
bool qgpu_timeline_lent(const struct qgpu_timeline *plan, u64 phase_ns);
/* Whether it is this part's turn at this phase, lent or not. The turn ends when the gate is due to begin to close. */
bool qgpu_part_turn(const struct qgpu_timeline *plan, const struct qgpu_part *part, u64 phase_ns, bool lent);
/* The first edge after phase_ns, else the end of the period; U64_MAX if no gate ever moves. */
u64 qgpu_timeline_edge(const struct qgpu_timeline *plan, u64 phase_ns);

#endif
