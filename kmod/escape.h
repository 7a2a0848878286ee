/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_ESCAPE_H
#define _QGPU_ESCAPE_H

#include "call.h"

/* A pod's ioctl on a file of the driver. */
long qgpu_escape(struct qgpu_file *file, unsigned int cmd, unsigned long arg, qgpu_driver_ioctl_t driver);

#endif
