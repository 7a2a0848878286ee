// SPDX-License-Identifier: GPL-2.0
/*
 * uvm.c - bounds what UVM takes of the card by itself: managed memory, by its address space, and page tables. Whatever
 * a pod with a memory limit maps from /dev/nvidia-uvm is charged in full, on every pGPU on which it has a limit, until
 * it is unmapped. A mapping that does not fit is refused.
 *
 * UVM's table of operations is const and compared by address (uvm.c:uvm_file_is_nvidia_uvm), so the module probes its
 * functions; these are the same from 535 to 595. A probe that refuses a call sends it to a function of this module
 * instead of UVM's.
 *
 * Whenever a mapping of a file comes or goes, the charge is counted anew from the mappings that exist. So missed events
 * (an mmap that failed, a mapping from before the module was loaded) do not add up. The caller holds mmap_lock, so the
 * mappings do not change during the count. When an address space is torn down, nobody holds the lock; then all of a
 * file's mappings go (UVM accepts them in one address space only), and the last one ends the charge.
 *
 * Going away: no handler runs once the probes are unregistered, but a task may have been sent to a function of this
 * module and not have reached it. It does not give up the CPU voluntarily before it is back in the kernel, so
 * synchronize_rcu_tasks() waits for it.
 */
#include <linux/hashtable.h>
#include <linux/kprobes.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/sizes.h>
#include <linux/slab.h>

#include "compat.h"
#include "events.h"
#include "mem.h"
#include "nvrm.h"
#include "pod.h"
#include "uvm.h"
#include "uvm_mem.h"
#include "uvm_tables.h"

/* uvm_types.h */
#define UVM_INIT_FLAGS_DISABLE_HMM			0x1ul
#define UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE	0x2ul

/*
 * UVM manages memory in blocks of this size and alignment (uvm_va_block_types.h). It takes memory of the card in pieces
 * of the same size, which several blocks may share, and needs at most two page tables for each block. It allocates page
 * tables in batches of 64 (uvm_pmm_gpu.c: uvm_perf_pma_batch_nonpinned_order): on an H200 1468 and 1508 MiB of managed
 * memory were 1536 MiB of the card. A CUDA program without managed memory has one block, for semaphores.
 */
#define BLOCK		SZ_2M
#define BLOCK_TABLES	(2 * SZ_4K)
#define BATCH		(64 * BLOCK)

/* A file of /dev/nvidia-uvm that a pod with a limit has mapped. */
struct uvm_file {
	struct hlist_node node;
	struct file *filp;
	struct qgpu_mem *mem;		/* managed memory */
	struct qgpu_tables *tables;	/* of all other mappings */
	unsigned int mappings;		/* as last counted */
};

static DEFINE_SPINLOCK(files_lock);	/* protects files; mem_lock (mem.c) is taken inside */
static DEFINE_HASHTABLE(files, 6);

static DEFINE_MUTEX(probes_lock);	/* protects what follows */
static bool wanted, placed;

/* The current task's pod if it has a memory limit on any pGPU; the caller puts it. */
static struct qgpu_pod *limited_pod(void)
{
	struct qgpu_pod *pod = qgpu_pod_of_current();

	if (!pod || qgpu_pod_limited(pod))
		return pod;
	qgpu_pod_put(pod);
	return NULL;
}

static struct uvm_file *find(struct file *filp)
{
	struct uvm_file *file;

	lockdep_assert_held(&files_lock);
	hash_for_each_possible(files, file, node, (unsigned long)filp) {
		if (file->filp == filp)
			return file;
	}
	return NULL;
}

static struct uvm_file *find_or_add(struct file *filp, struct qgpu_pod *pod)
{
	struct uvm_file *file = find(filp);

	if (file)
		return file;
	file = kzalloc(sizeof(*file), GFP_ATOMIC | __GFP_NOWARN);
	if (!file)
		return NULL;
	file->filp = filp;
	file->mem = qgpu_mem_new(pod, 0, 0, GFP_ATOMIC | __GFP_NOWARN);
	if (IS_ERR(file->mem))
		goto err_file;
	file->tables = qgpu_tables_new(pod);
	if (!file->tables)
		goto err_mem;
	hash_add(files, &file->node, (unsigned long)filp);
	return file;
err_mem:
	qgpu_mem_put(file->mem);
err_file:
	kfree(file);
	return NULL;
}

static void drop(struct uvm_file *file)
{
	lockdep_assert_held(&files_lock);
	hash_del(&file->node);
	qgpu_mem_put(file->mem);
	qgpu_tables_put(file->tables);
	kfree(file);
}

/* Count address space in blocks; the ranges come in ascending order. */
struct space {
	u64 blocks, behind;
	unsigned int mappings;
};

static void add(struct space *space, const struct vm_area_struct *vma)
{
	u64 first = max_t(u64, vma->vm_start / BLOCK, space->behind);

	space->behind = max_t(u64, DIV_ROUND_UP(vma->vm_end, BLOCK), space->behind);
	space->blocks += space->behind - min(first, space->behind);
	space->mappings++;
}

/* A file's mappings, with one that is about to come (or NULL) and without one that goes (or NULL). */
static struct space mapped(const struct file *filp, struct mm_struct *mm, const struct vm_area_struct *with,
			   const struct vm_area_struct *without)
{
	struct space space = {};
	struct vm_area_struct *vma;

	qgpu_for_each_mapping(mm, vma) {
		if (with && with->vm_start < vma->vm_start) {
			add(&space, with);
			with = NULL;
		}
		if (vma->vm_file == filp && vma != with && vma != without)
			add(&space, vma);
	}
	if (with)
		add(&space, with);
	return space;
}

/* All or nothing, on every pGPU with a limit. */
static int charge(struct uvm_file *file, const struct space *space)
{
	u64 size = space->blocks * (BLOCK + BLOCK_TABLES) + (space->blocks > 1 ? BATCH : 0);

	lockdep_assert_held(&files_lock);
	if (qgpu_mem_resize(file->mem, qgpu_pod_limited(qgpu_mem_pod(file->mem)), size))
		return -ENOMEM;
	file->mappings = space->mappings;
	return 0;
}

/* uvm.c:uvm_mmap makes no managed range of any other mapping. */
static bool may_be_managed(const struct vm_area_struct *vma)
{
	const unsigned long needed = VM_SHARED | VM_READ | VM_WRITE;

	return (vma->vm_flags & needed) == needed && vma->vm_start == vma->vm_pgoff << PAGE_SHIFT;
}

static int refuse(struct file *filp, struct vm_area_struct *vma)
{
	return -ENOMEM;
}

static u32 refuse_tables(void *params, struct file *filp)
{
	return NV_ERR_NO_MEMORY;
}

static void refused(struct qgpu_pod *pod, u64 size)
{
	atomic64_inc(&pod->refused_allocs);
	qgpu_event(QGPU_EVENT_MEMORY_REFUSED, pod->id, 0, size);
}

static int mmap_called(struct kprobe *probe, struct pt_regs *regs)
{
	struct file *filp = (struct file *)regs_get_kernel_argument(regs, 0);
	struct vm_area_struct *vma = (struct vm_area_struct *)regs_get_kernel_argument(regs, 1);
	struct qgpu_pod *pod = may_be_managed(vma) ? limited_pod() : NULL;
	struct uvm_file *file;
	struct space space;
	int ret;

	if (!pod)
		return 0;
	space = mapped(filp, current->mm, vma, NULL);
	spin_lock(&files_lock);
	file = find_or_add(filp, pod);
	ret = file ? charge(file, &space) : -ENOMEM;
	spin_unlock(&files_lock);
	if (ret) {
		refused(pod, vma->vm_end - vma->vm_start);
		instruction_pointer_set(regs, (unsigned long)refuse);
	}
	qgpu_pod_put(pod);
	return ret != 0;
}

static bool is_known(struct file *filp)
{
	bool known;

	spin_lock(&files_lock);
	known = find(filp);
	spin_unlock(&files_lock);
	return known;
}

static int close_called(struct kprobe *probe, struct pt_regs *regs)
{
	const struct vm_area_struct *vma = (struct vm_area_struct *)regs_get_kernel_argument(regs, 0);
	bool all_go = vma->vm_mm != current->mm;
	struct space space = {};
	struct uvm_file *file;

	if (!is_known(vma->vm_file))
		return 0;
	if (!all_go)
		space = mapped(vma->vm_file, vma->vm_mm, NULL, vma);
	spin_lock(&files_lock);
	file = find(vma->vm_file);
	if (file && all_go && file->mappings > 1)
		file->mappings--;
	else if (file)
		charge(file, &space);
	spin_unlock(&files_lock);
	return 0;
}

/*
 * UVM's calls that map memory and need page tables: name(params, filp). params are UVM's own copy, and begin with base
 * and length. held: the mapped memory has a duplicate, and the tables are charged with it; other tables are charged
 * until the file is released.
 */
static int map_called(struct pt_regs *regs, bool held)
{
	const u64 *params = (const u64 *)regs_get_kernel_argument(regs, 0);
	u64 size = qgpu_table_bytes(params[0], params[1]);
	struct qgpu_pod *pod = limited_pod();
	struct uvm_file *file;
	int ret;

	if (!pod)
		return 0;
	spin_lock(&files_lock);
	file = find_or_add((struct file *)regs_get_kernel_argument(regs, 1), pod);
	ret = file ? qgpu_tables_add(file->tables, size) : -ENOMEM;
	if (!ret && held) {
		ret = qgpu_uvm_mem_map(file->tables, size);
		if (ret)
			qgpu_tables_sub(file->tables, size);
	}
	spin_unlock(&files_lock);
	if (ret) {
		refused(pod, size);
		instruction_pointer_set(regs, (unsigned long)refuse_tables);
	}
	qgpu_pod_put(pod);
	return ret != 0;
}

static int tables_called(struct kprobe *probe, struct pt_regs *regs)
{
	return map_called(regs, false);
}

static int external_called(struct kprobe *probe, struct pt_regs *regs)
{
	return map_called(regs, true);
}

static int external_returned(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	qgpu_uvm_mem_mapped();
	return 0;
}

static int release_called(struct kprobe *probe, struct pt_regs *regs)
{
	struct uvm_file *file;

	spin_lock(&files_lock);
	file = find((struct file *)regs_get_kernel_argument(regs, 1));
	if (file)
		drop(file);
	spin_unlock(&files_lock);
	return 0;
}

/* uvm_va_space_create(mapping, where, flags). HMM would move ordinary memory to the card without a mapping. */
static int create_called(struct kprobe *probe, struct pt_regs *regs)
{
	unsigned long flags = regs_get_kernel_argument(regs, 2);
	struct qgpu_pod *pod = limited_pod();

	if (pod)
		qgpu_set_argument_2(regs, (flags | UVM_INIT_FLAGS_DISABLE_HMM) &
				    ~UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE);
	qgpu_pod_put(pod);
	return 0;
}

#define MAP_EXTERNAL "nvidia_uvm:uvm_api_map_external_allocation"

static const struct {
	const char *symbol;
	kprobe_pre_handler_t handler;
} hooks[] = {
	{ "nvidia_uvm:uvm_mmap_entry", mmap_called },
	{ "nvidia_uvm:uvm_vm_close_managed_entry", close_called },
	{ "nvidia_uvm:uvm_release_entry", release_called },
	{ "nvidia_uvm:uvm_va_space_create", create_called },
	{ "nvidia_uvm:uvm_api_map_dynamic_parallelism_region", tables_called },
	{ "nvidia_uvm:uvm_api_map_external_sparse", tables_called },
	{ "nvidia_uvm:uvm_api_alloc_semaphore_pool", tables_called },
	{ MAP_EXTERNAL, external_called },	/* last, before return_probe: a call refused here does not reach it */
};

static struct kprobe probes[ARRAY_SIZE(hooks)];
static struct kretprobe return_probe;

static void take_away(int n)
{
	while (n--)
		unregister_kprobe(&probes[n]);
	synchronize_rcu_tasks();
}

/* Only a probe by ftrace reliably lets its handler redirect the call; a jump-optimized probe would ignore it. */
static bool are_by_ftrace(void)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(probes); i++) {
		if (!(probes[i].flags & KPROBE_FLAG_FTRACE))
			return false;
	}
	return true;
}

static void place(void)
{
	int i;

	lockdep_assert_held(&probes_lock);
	for (i = 0; i < ARRAY_SIZE(hooks); i++) {
		probes[i] = (struct kprobe){ .symbol_name = hooks[i].symbol, .pre_handler = hooks[i].handler };
		if (register_kprobe(&probes[i])) {	/* the first: UVM is not loaded */
			if (i)
				take_away(i);
			return;
		}
	}
	return_probe = (struct kretprobe){ .kp.symbol_name = MAP_EXTERNAL, .handler = external_returned, .maxactive = 1024 };
	if (!are_by_ftrace() || register_kretprobe(&return_probe))
		take_away(i);
	else
		WRITE_ONCE(placed, true);
}

static void drop_all(void)
{
	struct hlist_node *next;
	struct uvm_file *file;
	int bucket;

	spin_lock(&files_lock);
	hash_for_each_safe(files, bucket, next, file, node)
		drop(file);
	spin_unlock(&files_lock);
}

static void remove(void)
{
	lockdep_assert_held(&probes_lock);
	if (placed) {
		unregister_kretprobe(&return_probe);
		take_away(ARRAY_SIZE(hooks));
	}
	WRITE_ONCE(placed, false);
	drop_all();
}

void qgpu_uvm_start(void)
{
	mutex_lock(&probes_lock);
	wanted = true;
	if (!placed)
		place();
	mutex_unlock(&probes_lock);
}

void qgpu_uvm_stop(void)
{
	mutex_lock(&probes_lock);
	wanted = false;
	remove();
	mutex_unlock(&probes_lock);
}

void qgpu_uvm_module(unsigned long event)
{
	mutex_lock(&probes_lock);
	if (event == MODULE_STATE_COMING && wanted && !placed)
		place();
	else if (event == MODULE_STATE_GOING)
		remove();
	mutex_unlock(&probes_lock);
}

bool qgpu_uvm_bounded(void)
{
	return READ_ONCE(placed);
}
