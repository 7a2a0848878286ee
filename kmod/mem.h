/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_MEM_H
#define _QGPU_MEM_H

#include "client.h"

/* Charge a pod before the driver allocates; -EDQUOT if it has no room. */
int qgpu_mem_reserve(struct qgpu_pod *pod, int gpu, u64 size);
void qgpu_mem_unreserve(struct qgpu_pod *pod, int gpu, u64 size);
/* Replace a reservation by the true size; -EDQUOT: it does not fit, and the reservation stands. */
int qgpu_mem_resize(struct qgpu_pod *pod, int gpu, u64 reserved, u64 size);

/* Memory that was reserved, without an object yet; NULL: -ENOMEM. */
struct qgpu_mem *qgpu_mem_new(struct qgpu_pod *pod, int gpu, u64 size);
/* Make object own what was reserved. */
int qgpu_mem_attach(struct qgpu_object *object, u64 size);
/* Make object an alias of mem; consumes the reference. NULL is fine. */
void qgpu_mem_alias(struct qgpu_object *object, struct qgpu_mem *mem);
void qgpu_mem_put(struct qgpu_mem *mem);
u64 qgpu_mem_size(const struct qgpu_mem *mem);
const struct qgpu_pod *qgpu_mem_pod(const struct qgpu_mem *mem);
/* Under rcu_read_lock(): a reference to the memory of an object, or NULL. */
struct qgpu_mem *qgpu_mem_of(struct qgpu_object *object);
void qgpu_mem_drop(struct qgpu_object *object);

/* Keep memory charged until the pod has no file left; consumes the reference, or -ENOMEM. */
int qgpu_mem_keep(struct qgpu_pod *pod, struct qgpu_mem *mem);
void qgpu_mem_release_kept(struct qgpu_pod *pod);

void qgpu_mem_usage(struct qgpu_pod *pod, int gpu, u64 *size, u64 *peak);

#endif
