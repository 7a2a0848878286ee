/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_UVM_H
#define _QGPU_UVM_H

#include <linux/types.h>

/* Bound managed memory from now on, whenever UVM is there. */
void qgpu_uvm_start(void);
/* No task is in this file when it returns, and nothing is charged. */
void qgpu_uvm_stop(void);
/* UVM's module comes or goes: MODULE_STATE_*. */
void qgpu_uvm_module(unsigned long event);
/* False: UVM is not there, or its managed memory is not bounded. */
bool qgpu_uvm_bounded(void);

#endif
