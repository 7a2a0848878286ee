/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_GATE_PENALTY_H
#define _QGPU_GATE_PENALTY_H

#include <linux/types.h>

struct qgpu_pod;

/* Wait until the pod has paid what it owes; without any lock, because that may take long. -EINTR: killed. */
int qgpu_gate_penalty_pay(struct qgpu_pod *pod);
/* Before a call that may open a closed gate. -EAGAIN: the pod owes something, so pay without locks; -EINTR: killed. */
int qgpu_gate_penalty_begin(struct qgpu_pod *pod);
/* Both. */
int qgpu_gate_penalty_pay_and_begin(struct qgpu_pod *pod);

enum qgpu_gates {
	QGPU_GATES_UNTOUCHED,
	QGPU_GATES_HELD,	/* open: the pod owes for as long as they were due closed */
	QGPU_GATES_OPENED,	/* the pod owes for all the time since qgpu_gate_penalty_begin() */
	QGPU_GATES_OPENED_TWICE,	/* twice that: the end of what was made takes as long, maybe without a call */
};

/* After it: what it did to the pod's gates. */
void qgpu_gate_penalty_end(struct qgpu_pod *pod, enum qgpu_gates gates);
/*
 * An exit held gates open, from when the pod's gates had been due closed for gated_ns in all until now. No call of the
 * pod waited for that, so the next one does: if other processes use these gates, for all of it, else for the time in
 * which the exit waited for a CPU.
 */
void qgpu_gate_penalty_exit(struct qgpu_pod *pod, u64 gated_ns, bool shared, u64 starved_ns);

#endif
