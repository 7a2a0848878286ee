/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_OS_EVENT_H
#define _QGPU_OS_EVENT_H

#include "call.h"

/* NV_ESC_ALLOC_OS_EVENT and NV_ESC_FREE_OS_EVENT */
long qgpu_os_event(struct qgpu_call *call);

#endif
