/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_ATTACH_H
#define _QGPU_ATTACH_H

#include "nvrm.h"
#include "uapi/qgpu.h"

int qgpu_attach_init(void);
void qgpu_attach_uninit(void);

/* Interpose if the driver is loaded, known, and not switched off. Cheap if there is nothing to do. */
void qgpu_attach(void);
/* The same, but returns at once while an attach or detach is under way: that can wait for a pod's call indefinitely. */
void qgpu_try_attach(void);
/* When it returns, the module has detached, no task is in its wrappers, and every gate is open. */
void qgpu_detach(void);

void qgpu_attach_info(struct qgpu_info *info);

/* For the glue module, on branches whose interface is not a GPL export; see rm_glue.c. */
int qgpu_rm_offer(nv_get_rm_ops_t get_rm_ops);
void qgpu_rm_withdraw(void);

#endif
