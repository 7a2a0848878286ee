/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _QGPU_UVM_SPACE_H
#define _QGPU_UVM_SPACE_H

#include <linux/types.h>

struct file;
struct mm_struct;
struct vm_area_struct;

/* Address space in UVM's blocks. */
struct qgpu_space {
	u64 blocks, behind;
	u64 managed;		/* bytes of managed ranges */
	unsigned int mappings;
};

/*
 * A file's mappings, with one that is about to come (or NULL) and without one that goes (or NULL). close: UVM's
 * function for the end of a managed range. Sleeps.
 */
struct qgpu_space qgpu_space_mapped(const struct file *filp, struct mm_struct *mm, const struct vm_area_struct *with,
				    const struct vm_area_struct *without, const void *close);
bool qgpu_space_closed_by(const struct vm_area_struct *vma, const void *close);
/* What it takes of the card, in bytes. */
u64 qgpu_space_cost(const struct qgpu_space *space);
/* Whether UVM may make a managed range of a mapping that is about to come. */
bool qgpu_space_managed(const struct vm_area_struct *vma);

#endif
