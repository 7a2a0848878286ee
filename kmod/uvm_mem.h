/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_UVM_MEM_H
#define _QGPU_UVM_MEM_H

#include <linux/types.h>

struct qgpu_client;
struct qgpu_mem;
struct qgpu_tables;

/* Count what UVM holds from now on, as far as the driver can be probed. */
void qgpu_uvm_mem_start(void);
/* Nothing is held for UVM's sake when it returns. */
void qgpu_uvm_mem_stop(void);

/*
 * Around a mapping that the current task has UVM make, whose page tables of this size have been added: they go with
 * what is mapped, or at once if nothing is. -ENOMEM: all is as before.
 */
int qgpu_uvm_mem_map(struct qgpu_tables *tables, u64 size);
void qgpu_uvm_mem_mapped(void);

/*
 * Memory is known by now that was made a moment ago, and in that moment UVM may have mapped it already: let that hold
 * it. False: it has not. No handle leads to it any more, or the register's own does.
 */
bool qgpu_uvm_mem_found(struct qgpu_client *client, u32 handle, struct qgpu_mem *mem);

#endif
