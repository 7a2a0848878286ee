/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_EXPORT_H
#define _QGPU_EXPORT_H

#include "call.h"

/* memory_at: where in the parameters the handle of the memory lies; 0: they name many. */
long qgpu_export(struct qgpu_call *call, u32 memory_at);
long qgpu_import(struct qgpu_call *call);

#endif
