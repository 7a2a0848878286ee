/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_EXPORT_H
#define _QGPU_EXPORT_H

#include "call.h"

/* memory_at: offset of the memory's handle in the parameters; 0: they name several. */
long qgpu_export(struct qgpu_call *call, u32 memory_at);
long qgpu_import(struct qgpu_call *call);

#endif
