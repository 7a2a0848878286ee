/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_UVM_MEM_H
#define _QGPU_UVM_MEM_H

#include <linux/types.h>

#include "probes.h"

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
 * The current task has UVM map memory. Page tables of this size were added before (tables: a reference, or NULL). They
 * go with the mapped memory, or at the end if nothing is mapped.
 */
struct qgpu_mapper {
	struct qgpu_pass pass;
	struct qgpu_tables *tables;
	u64 size, left;		/* left: not yet charged to a mapping */
};

void qgpu_mapper_begin(struct qgpu_mapper *mapper, struct qgpu_tables *tables, u64 size);
void qgpu_mapper_end(struct qgpu_mapper *mapper);
/* The current task's, or NULL. */
struct qgpu_mapper *qgpu_mapper_of_current(void);

#endif
