/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_OBJECT_PART_H
#define _QGPU_OBJECT_PART_H

#include "pod.h"

/* All under parts_lock. Whether the pod may have another one. */
bool qgpu_object_part_fits(struct qgpu_pod *pod, enum qgpu_object_part kind);
/* RM has made an object that is such a part itself. */
void qgpu_object_part_made(struct qgpu_pod *pod, enum qgpu_object_part kind, u32 client, u32 handle);
/* An object has one more, or one less. */
void qgpu_object_part_count(struct qgpu_pod *pod, enum qgpu_object_part kind, u32 client, u32 handle, bool more);

#endif
