/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_GATE_H
#define _QGPU_GATE_H

#include "gpu.h"

/*
 * In the pGPU's thread and with its lock, which is released during controls. Each sends one control of what is due now;
 * false: nothing is due, or its retry is not. Gates come before timeslices.
 */
bool qgpu_gates_step(struct qgpu_gpu *gpu);
bool qgpu_slices_step(struct qgpu_gpu *gpu);

/* What is left to do: gpu->retry_ns, gpu->all_open, and whether an opening is overdue. Needs the lock. */
void qgpu_gates_look(struct qgpu_gpu *gpu);

#endif
