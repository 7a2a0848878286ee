/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_EVENT_OBJECT_H
#define _QGPU_EVENT_OBJECT_H

#include "pod.h"

/* All under events_lock. Whether the pod may have another one. */
bool qgpu_part_fits(struct qgpu_pod *pod, enum qgpu_part_kind kind);
void qgpu_event_object_made(struct qgpu_pod *pod, u32 client, u32 handle);
/* An object has one more, or one less. */
void qgpu_part_count(struct qgpu_pod *pod, enum qgpu_part_kind kind, u32 client, u32 handle, bool more);

#endif
