// SPDX-License-Identifier: GPL-2.0
/*
 * uvm_space.c - how much of its address space a process has mapped from a file of UVM, and what that costs of the card.
 * uvm.c says when to count. A pod may have any number of mappings, so the count lets others run; the caller holds the
 * process's mmap_lock.
 */
#include <linux/mm.h>
#include <linux/sched.h>
#include <linux/sizes.h>

#include "compat.h"
#include "uvm_space.h"

/*
 * UVM manages memory in blocks of this size and alignment (uvm_va_block_types.h). It takes memory of the card in pieces
 * of the same size, which several blocks may share, and needs at most two page tables for each block. It allocates page
 * tables in batches of 64 (uvm_pmm_gpu.c: uvm_perf_pma_batch_nonpinned_order): on an H200 1468 and 1508 MiB of managed
 * memory were 1536 MiB of the card. A CUDA program without managed memory has one block, for semaphores.
 */
#define BLOCK		SZ_2M
#define BLOCK_TABLES	(2 * SZ_4K)
#define BATCH		(64 * BLOCK)

/* The ranges come in ascending order. */
static void add(struct qgpu_space *space, const struct vm_area_struct *vma)
{
	u64 first = max_t(u64, vma->vm_start / BLOCK, space->behind);

	space->behind = max_t(u64, DIV_ROUND_UP(vma->vm_end, BLOCK), space->behind);
	space->blocks += space->behind - min(first, space->behind);
	space->mappings++;
}

bool qgpu_space_closed_by(const struct vm_area_struct *vma, const void *close)
{
	return vma->vm_ops && vma->vm_ops->close == close;
}

/*
 * UVM has nothing of it on the card any more, or could not make it. Since 6.12 (f8d112a4e657) an mmap() over mappings
 * closes them first, and takes them out of the tree later.
 */
static bool is_closed(const struct vm_area_struct *vma)
{
	return !vma->vm_ops || !vma->vm_ops->close;
}

struct qgpu_space qgpu_space_mapped(const struct file *filp, struct mm_struct *mm, const struct vm_area_struct *with,
				    const struct vm_area_struct *without, const void *close)
{
	struct qgpu_space space = {};
	struct vm_area_struct *vma;

	qgpu_for_each_mapping(mm, vma) {
		cond_resched();
		if (with && with->vm_start < vma->vm_start) {
			add(&space, with);
			with = NULL;
		}
		if (vma->vm_file != filp || vma == with || vma == without || is_closed(vma))
			continue;
		add(&space, vma);
		if (qgpu_space_closed_by(vma, close))
			space.managed += vma->vm_end - vma->vm_start;
	}
	if (with)
		add(&space, with);
	return space;
}

u64 qgpu_space_cost(const struct qgpu_space *space)
{
	return space->blocks * (BLOCK + BLOCK_TABLES) + (space->blocks > 1 ? BATCH : 0);
}

/* uvm.c:uvm_mmap makes no managed range of any other mapping. */
bool qgpu_space_managed(const struct vm_area_struct *vma)
{
	const unsigned long needed = VM_SHARED | VM_READ | VM_WRITE;

	return (vma->vm_flags & needed) == needed && vma->vm_start == vma->vm_pgoff << PAGE_SHIFT;
}
