/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_EVENT_OBJECT_H
#define _QGPU_EVENT_OBJECT_H

#include <linux/types.h>

struct qgpu_pod;

/* Both under events_lock. Whether the pod may have another one. */
bool qgpu_event_object_fits(struct qgpu_pod *pod);
void qgpu_event_object_made(struct qgpu_pod *pod, u32 client, u32 handle);

#endif
