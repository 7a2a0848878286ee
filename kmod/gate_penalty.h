/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_GATE_PENALTY_H
#define _QGPU_GATE_PENALTY_H

#include <linux/types.h>

struct qgpu_pod;

/* Before a call that may open a closed gate: wait until the pod has paid for its last such call. -EINTR: killed. */
int qgpu_gate_penalty_begin(struct qgpu_pod *pod);
/* After it. opened: since then, a gate was open that should be closed. */
void qgpu_gate_penalty_end(struct qgpu_pod *pod, bool opened);
/* A gate that should be closed was open for so long, and no call of the pod waited: the next one does. */
void qgpu_gate_penalty_owe(struct qgpu_pod *pod, u64 open_ns);

#endif
