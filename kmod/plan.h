/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_PLAN_H
#define _QGPU_PLAN_H

#include "timeline.h"

/* Copy a plan in and check it; ERR_PTR if it is refused. */
struct qgpu_timeline *qgpu_plan_read(const struct qgpu_plan *plan);

#endif
