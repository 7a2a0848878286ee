/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_UVM_MEM_H
#define _QGPU_UVM_MEM_H

#include <linux/types.h>

struct qgpu_client;
struct qgpu_mem;
struct qgpu_tables;

int qgpu_uvm_mem_init(void);
void qgpu_uvm_mem_uninit(void);
/* Under qgpu_attach_lock: from now on count what UVM holds, if the driver's functions can be probed. */
void qgpu_uvm_mem_start(void);
/* When it returns, nothing is held because of UVM. */
void qgpu_uvm_mem_stop(void);
/* Whether it is counted now. */
bool qgpu_uvm_mem_counted(void);
/* How many of UVM's calls were not seen since the last time this was asked. */
unsigned long qgpu_uvm_mem_missed(void);

/*
 * Around a mapping that the current task has UVM make, after its page tables of this size were added: they go with the
 * mapped memory, or at once if nothing is mapped. -ENOMEM: nothing has changed.
 */
int qgpu_uvm_mem_map(struct qgpu_tables *tables, u64 size);
void qgpu_uvm_mem_mapped(void);

/*
 * The object table now knows memory that RM made a moment ago. UVM may have mapped it in between: then the mapping holds
 * its charge. False: it has not. Then no handle leads to the memory any more, or the table's own does.
 */
bool qgpu_uvm_mem_found(struct qgpu_client *client, u32 handle, struct qgpu_mem *mem);

#endif
