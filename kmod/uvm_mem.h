/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_UVM_MEM_H
#define _QGPU_UVM_MEM_H

/* Count what UVM holds from now on, as far as the driver can be probed. */
void qgpu_uvm_mem_start(void);
/* Nothing is held for UVM's sake when it returns. */
void qgpu_uvm_mem_stop(void);

#endif
