/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_CONTROL_H
#define _QGPU_CONTROL_H

#include "call.h"

long qgpu_control(struct qgpu_call *call);

#endif
