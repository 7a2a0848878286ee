/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_ALLOC_H
#define _QGPU_ALLOC_H

#include "call.h"

long qgpu_alloc(struct qgpu_call *call);
long qgpu_alloc_memory(struct qgpu_call *call);

#endif
