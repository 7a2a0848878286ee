/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_DEBT_H
#define _QGPU_DEBT_H

#include <linux/types.h>

struct qgpu_pod;

/* Before a call that may open a closed gate: waits until the pod has paid for the last such call. -EINTR: killed. */
int qgpu_debt_begin(struct qgpu_pod *pod);
/* After it. opened: a gate that is to be closed was open since. */
void qgpu_debt_end(struct qgpu_pod *pod, bool opened);

#endif
