/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_UVM_H
#define _QGPU_UVM_H

#include <linux/types.h>

int qgpu_uvm_init(void);
void qgpu_uvm_uninit(void);

/* From now on bound managed memory whenever UVM is loaded. */
void qgpu_uvm_start(void);
/* When it returns, no task is in this file, and nothing is charged. */
void qgpu_uvm_stop(void);
/* UVM's module comes or goes: MODULE_STATE_*. */
void qgpu_uvm_module(unsigned long event);
/* Whether UVM is loaded and its managed memory bounded; whether it is loaded and not bounded. */
bool qgpu_uvm_bounded(void);
bool qgpu_uvm_unbounded(void);
/* How many of UVM's calls were not seen since the last time this was asked. */
unsigned long qgpu_uvm_missed(void);

#endif
