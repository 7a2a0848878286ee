/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_UVM_H
#define _QGPU_UVM_H

#include <linux/types.h>

/* From now on bound managed memory whenever UVM is loaded. */
void qgpu_uvm_start(void);
/* When it returns, no task is in this file, and nothing is charged. */
void qgpu_uvm_stop(void);
/* UVM's module comes or goes: MODULE_STATE_*. */
void qgpu_uvm_module(unsigned long event);
/* False: UVM is not loaded, or its managed memory is not bounded. */
bool qgpu_uvm_bounded(void);

#endif
