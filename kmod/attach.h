/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_ATTACH_H
#define _QGPU_ATTACH_H

#include "nvrm.h"
#include "uapi/qgpu.h"

int qgpu_attach_init(void);
void qgpu_attach_uninit(void);

/* Interpose if the driver is there and known, and not switched off. Cheap when there is nothing to do. */
void qgpu_attach(void);
/* The same, unless attaching or detaching is under way: that can wait for a pod's call for as long as the pod likes. */
void qgpu_try_attach(void);
/* When it returns, the driver is let go of, no task is in this module's wrappers, and every gate is open. */
void qgpu_detach(void);

void qgpu_attach_info(struct qgpu_info *info);

/* For the glue module on branches whose interface is no GPL export; see rm_glue.c. */
int qgpu_rm_offer(nv_get_rm_ops_t get_rm_ops);
void qgpu_rm_withdraw(void);

#endif
