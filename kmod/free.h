/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_FREE_H
#define _QGPU_FREE_H

#include "call.h"

/* A call that frees an object, and the offset of RM's status in its form of the call. */
struct qgpu_freeing {
	u32 root, handle;
	size_t status_at;
};

long qgpu_free(struct qgpu_call *call, const struct qgpu_freeing *freeing);
/* RM_FREE */
long qgpu_free_object(struct qgpu_call *call);

#endif
