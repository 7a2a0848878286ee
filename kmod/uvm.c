// SPDX-License-Identifier: GPL-2.0
/*
 * uvm.c - bounds what UVM takes of the card by itself: managed memory, by its address space, and page tables. Whatever
 * a pod with a memory limit maps from /dev/nvidia-uvm is charged in full, on every pGPU on which it has a limit, until
 * it is unmapped. A mapping that does not fit is refused.
 *
 * UVM's table of operations is const and compared by address (uvm.c:uvm_file_is_nvidia_uvm), so the module probes its
 * functions; these are the same from 535 to 595. A probe's handler must not sleep, and a pod may have any number of
 * mappings. So the handlers of mmap and close look at nothing: they send the call to a function of this module, which
 * counts and calls UVM's. A handler that refuses a call sends it to a function that does nothing else.
 *
 * Whenever a mapping of a file comes or goes, the charge is counted anew from the mappings that exist. So missed events
 * (an mmap that failed, a mapping from before the module was loaded) do not add up. The caller holds mmap_lock, so the
 * mappings do not change during the count. When an address space is torn down, nobody holds the lock; then all of a
 * file's mappings go (UVM accepts them in one address space only), and the last one ends the charge.
 *
 * Going away is as in interpose.c: no handler runs once the probes are gone, a task that was sent to a function of this
 * module has reached it and is inside the SRCU section (probes.c waits for that), the section is waited for, and so is
 * the way out of it.
 */
#include <linux/hashtable.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/srcu.h>
#include <linux/static_call.h>

#include "compat.h"
#include "events.h"
#include "probes.h"
#include "mem.h"
#include "nvrm.h"
#include "pod.h"
#include "uvm.h"
#include "uvm_mem.h"
#include "uvm_space.h"
#include "uvm_tables.h"

/* uvm_types.h */
#define UVM_INIT_FLAGS_DISABLE_HMM			0x1ul
#define UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE	0x2ul

/* Of a pod, because calls of all pods look a file up under one lock. A CUDA process has two at most. */
#define FILES_MAX 1024

/* A file of /dev/nvidia-uvm that a pod with a limit has mapped. */
struct uvm_file {
	struct hlist_node node;
	struct file *filp;
	struct qgpu_pod *pod;		/* mem has a reference */
	struct qgpu_mem *mem;		/* managed memory */
	struct qgpu_tables *tables;	/* of all other mappings */
	const struct mm_struct *mm;	/* whose mappings were counted last; compared, never used */
	unsigned int mappings;		/* as last counted */
	u64 managed;			/* bytes of managed ranges that UVM has not freed */
};

static DEFINE_SPINLOCK(files_lock);	/* protects files; mem_lock (mem.c) is taken inside */
static DEFINE_HASHTABLE(files, 12);

enum { MMAP, CLOSE, RELEASE, CREATE, DYNAMIC, SPARSE, SEMAPHORES, EXTERNAL, NR_PROBES };
static struct qgpu_probe probes[NR_PROBES];
static struct qgpu_probes set;		/* also the key of those that pass */
static struct srcu_struct inside;	/* tasks in a function that a handler sent them to */
static DEFINE_MUTEX(probes_lock);	/* protects wanted and the probes */
static bool wanted;
static bool going;			/* nobody can use UVM any more, though it is still in sysfs */
static bool callable;			/* map_external leads to UVM's function */

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

static void drop(struct uvm_file *file)
{
	lockdep_assert_held(&files_lock);
	hash_del(&file->node);
	atomic_dec(&file->pod->nr_uvm_files);
	qgpu_mem_put(file->mem);
	qgpu_tables_put(file->tables);
	kfree(file);
}

/*
 * NULL: another pod has something of the file, and would be charged after its end too; the pod has too many files; or
 * there is no kernel memory.
 */
static struct uvm_file *find_or_add(struct file *filp, struct qgpu_pod *pod)
{
	struct uvm_file *file = find(filp);

	if (file && qgpu_mem_pod(file->mem) == pod)
		return file;
	if (file && (file->mappings || !qgpu_tables_empty(file->tables)))
		return NULL;
	if (file)
		drop(file);
	if (!atomic_add_unless(&pod->nr_uvm_files, 1, FILES_MAX))
		return NULL;
	file = kzalloc(sizeof(*file), GFP_ATOMIC | __GFP_NOWARN);
	if (!file)
		goto err_count;
	file->filp = filp;
	file->pod = pod;
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
err_count:
	atomic_dec(&pod->nr_uvm_files);
	return NULL;
}

/* All or nothing, on every pGPU with a limit. */
static int charge(struct uvm_file *file, const struct qgpu_space *space)
{
	u64 size = qgpu_space_cost(space);

	lockdep_assert_held(&files_lock);
	if (qgpu_mem_resize(file->mem, qgpu_pod_limited(qgpu_mem_pod(file->mem)), size))
		return -ENOMEM;
	file->mappings = space->mappings;
	file->managed = space->managed;
	return 0;
}

static u32 refuse_tables(const u64 *params, struct file *filp)
{
	return NV_ERR_NO_MEMORY;
}

static void refused(struct qgpu_pod *pod, u64 size)
{
	atomic64_inc(&pod->refused_allocs);
	qgpu_event(QGPU_EVENT_MEMORY_REFUSED, pod->id, 0, size);
}

static const void *managed_close(void)
{
	return qgpu_probed_function(&probes[CLOSE].at_call);
}

/* A second address space is refused as by UVM, before its mappings could be counted in place of the first one's. */
static int charge_mapping(struct file *filp, struct vm_area_struct *vma, struct qgpu_pod *pod)
{
	struct qgpu_space space = qgpu_space_mapped(filp, current->mm, vma, NULL, managed_close());
	struct uvm_file *file;
	int ret = -ENOMEM;

	spin_lock(&files_lock);
	file = find_or_add(filp, pod);
	if (file && file->mappings && file->mm != current->mm)
		ret = -EOPNOTSUPP;
	else if (file)
		ret = charge(file, &space);
	if (!ret)
		file->mm = current->mm;
	spin_unlock(&files_lock);
	if (ret == -ENOMEM)
		refused(pod, vma->vm_end - vma->vm_start);
	return ret;
}

static void recount(struct file *filp)
{
	struct qgpu_space space = qgpu_space_mapped(filp, current->mm, NULL, NULL, managed_close());
	struct uvm_file *file;

	spin_lock(&files_lock);
	file = find(filp);
	if (file)
		charge(file, &space);
	spin_unlock(&files_lock);
}

/* A call that ends several mappings takes all of them out first: the charge stays until UVM has freed the last. */
static void recount_without(const struct vm_area_struct *vma)
{
	struct qgpu_space space = qgpu_space_mapped(vma->vm_file, vma->vm_mm, NULL, vma, managed_close());
	struct uvm_file *file;

	spin_lock(&files_lock);
	file = find(vma->vm_file);
	if (file) {
		file->managed -= min_t(u64, file->managed, vma->vm_end - vma->vm_start);
		if (file->managed <= space.managed)
			charge(file, &space);
	}
	spin_unlock(&files_lock);
}

/* Other mappings of the file end unseen. */
static void note_managed(struct file *filp, const struct vm_area_struct *vma)
{
	struct uvm_file *file;

	if (!qgpu_space_closed_by(vma, managed_close()))
		return;
	spin_lock(&files_lock);
	file = find(filp);
	if (file)
		file->managed += vma->vm_end - vma->vm_start;
	spin_unlock(&files_lock);
}

/* By the pointer that the kernel's mmap() uses. */
static int mmap_of_uvm(struct file *filp, struct vm_area_struct *vma)
{
	struct qgpu_pass pass;
	int ret;

	qgpu_pass_begin(&pass, &set);
	ret = filp->f_op->mmap(filp, vma);
	qgpu_pass_end(&pass);
	return ret;
}

/* The caller, the kernel's mmap(), holds mmap_lock. */
static int counted_mmap(struct file *filp, struct vm_area_struct *vma)
{
	int idx = srcu_read_lock(&inside), ret = 0;
	struct qgpu_pod *pod = limited_pod();
	bool charged;

	if (pod)
		ret = charge_mapping(filp, vma, pod);
	charged = pod && !ret;
	qgpu_pod_put(pod);
	if (!ret)
		ret = mmap_of_uvm(filp, vma);
	if (ret && charged)
		recount(filp);
	if (!ret && charged)
		note_managed(filp, vma);
	srcu_read_unlock(&inside, idx);
	return ret;
}

static int mmap_called(struct kprobe *probe, struct pt_regs *regs)
{
	const struct vm_area_struct *vma = (struct vm_area_struct *)regs_get_kernel_argument(regs, 1);
	struct qgpu_pod *pod;

	if (!qgpu_space_managed(vma) || qgpu_passes(&set))
		return 0;
	pod = limited_pod();
	if (!pod)
		return 0;
	qgpu_pod_put(pod);
	instruction_pointer_set(regs, (unsigned long)counted_mmap);
	return 1;
}

static bool is_known(struct file *filp)
{
	bool known;

	spin_lock(&files_lock);
	known = find(filp);
	spin_unlock(&files_lock);
	return known;
}

/* The address space of the mapping is torn down. By size: a mapping may have been split, and some end unseen. */
static void count_down(const struct vm_area_struct *vma)
{
	const struct qgpu_space none = {};
	struct uvm_file *file;

	spin_lock(&files_lock);
	file = find(vma->vm_file);
	if (file) {
		file->managed -= min_t(u64, file->managed, vma->vm_end - vma->vm_start);
		if (!file->managed)
			charge(file, &none);
	}
	spin_unlock(&files_lock);
}

/* Freeing what a mapping had on the card takes UVM up to seconds: until then it stays charged. */
static void counted_close(struct vm_area_struct *vma)
{
	int idx = srcu_read_lock(&inside);
	struct qgpu_pass pass;

	qgpu_pass_begin(&pass, &set);
	vma->vm_ops->close(vma);
	qgpu_pass_end(&pass);
	if (vma->vm_mm == current->mm)
		recount_without(vma);
	else
		count_down(vma);
	srcu_read_unlock(&inside, idx);
}

static int close_called(struct kprobe *probe, struct pt_regs *regs)
{
	const struct vm_area_struct *vma = (struct vm_area_struct *)regs_get_kernel_argument(regs, 0);

	if (!is_known(vma->vm_file) || qgpu_passes(&set))
		return 0;
	instruction_pointer_set(regs, (unsigned long)counted_close);
	return 1;
}

/* Charge page tables of the file. A reference; NULL: there is no room. */
static struct qgpu_tables *add_tables(struct file *filp, struct qgpu_pod *pod, u64 size)
{
	struct qgpu_tables *tables = NULL;
	struct uvm_file *file;

	spin_lock(&files_lock);
	file = find_or_add(filp, pod);
	if (file && !qgpu_tables_add(file->tables, size))
		tables = qgpu_tables_get(file->tables);
	spin_unlock(&files_lock);
	if (!tables)
		refused(pod, size);
	return tables;
}

/*
 * UVM's calls that map memory and need page tables: name(params, filp). params are UVM's own copy, and begin with base
 * and length. Tables without mapped memory are charged until the file is released.
 */
static int tables_called(struct kprobe *probe, struct pt_regs *regs)
{
	const u64 *params = (const u64 *)regs_get_kernel_argument(regs, 0);
	struct file *filp = (struct file *)regs_get_kernel_argument(regs, 1);
	struct qgpu_pod *pod = limited_pod();
	struct qgpu_tables *tables;

	if (!pod)
		return 0;
	tables = add_tables(filp, pod, qgpu_table_bytes(params[0], params[1]));
	qgpu_tables_put(tables);
	qgpu_pod_put(pod);
	if (tables)
		return 0;
	instruction_pointer_set(regs, (unsigned long)refuse_tables);
	return 1;
}

/* Nothing in UVM takes its address, so a CPU with IBT lets nobody call it by that. A static call is a direct one. */
typedef u32 (*map_external_t)(const u64 *params, struct file *filp);
DEFINE_STATIC_CALL(qgpu_map_external, refuse_tables);

/* The mapped memory has a duplicate, and the tables are charged with it. */
static noinline u32 counted_external(const u64 *params, struct file *filp)
{
	int idx = srcu_read_lock(&inside);
	u64 size = qgpu_table_bytes(params[0], params[1]);
	struct qgpu_pod *pod = limited_pod();
	struct qgpu_tables *tables = pod ? add_tables(filp, pod, size) : NULL;
	u32 status = NV_ERR_NO_MEMORY;
	struct qgpu_mapper mapper;

	if (!pod || tables) {
		qgpu_mapper_begin(&mapper, tables, size);
		status = static_call(qgpu_map_external)(params, filp);
		qgpu_mapper_end(&mapper);
	}
	qgpu_pod_put(pod);
	srcu_read_unlock(&inside, idx);
	return status;
}

static int external_called(struct kprobe *probe, struct pt_regs *regs)
{
	struct qgpu_pod *pod;

	if (qgpu_mapper_of_current())
		return 0;
	if (!READ_ONCE(callable))
		return tables_called(probe, regs);
	pod = limited_pod();
	if (!pod)
		return 0;
	qgpu_pod_put(pod);
	instruction_pointer_set(regs, (unsigned long)counted_external);
	return 1;
}

/* UVM frees the file's page tables here. */
static int counted_release(struct inode *inode, struct file *filp)
{
	int idx = srcu_read_lock(&inside), ret;
	struct qgpu_pass pass;
	struct uvm_file *file;

	qgpu_pass_begin(&pass, &set);
	ret = filp->f_op->release(inode, filp);
	qgpu_pass_end(&pass);
	spin_lock(&files_lock);
	file = find(filp);
	if (file)
		drop(file);
	spin_unlock(&files_lock);
	srcu_read_unlock(&inside, idx);
	return ret;
}

static int release_called(struct kprobe *probe, struct pt_regs *regs)
{
	if (!is_known((struct file *)regs_get_kernel_argument(regs, 1)) || qgpu_passes(&set))
		return 0;
	instruction_pointer_set(regs, (unsigned long)counted_release);
	return 1;
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

static struct qgpu_probe probes[NR_PROBES] = {
	[MMAP] = { .symbol = "nvidia_uvm:uvm_mmap_entry", .called = mmap_called, .redirects = true },
	[CLOSE] = { .symbol = "nvidia_uvm:uvm_vm_close_managed_entry", .called = close_called, .redirects = true },
	[RELEASE] = { .symbol = "nvidia_uvm:uvm_release_entry", .called = release_called, .redirects = true },
	[CREATE] = { .symbol = "nvidia_uvm:uvm_va_space_create", .called = create_called },
	[DYNAMIC] = {
		.symbol = "nvidia_uvm:uvm_api_map_dynamic_parallelism_region",
		.called = tables_called,
		.redirects = true,
	},
	[SPARSE] = { .symbol = "nvidia_uvm:uvm_api_map_external_sparse", .called = tables_called, .redirects = true },
	[SEMAPHORES] = { .symbol = "nvidia_uvm:uvm_api_alloc_semaphore_pool", .called = tables_called, .redirects = true },
	[EXTERNAL] = {
		.symbol = "nvidia_uvm:uvm_api_map_external_allocation",
		.called = external_called,
		.redirects = true,
	},
};

static struct qgpu_probes set = { "managed memory", probes, ARRAY_SIZE(probes) };

/* UVM exports nothing to ask for, but like every module it is in sysfs. */
static bool is_loaded(void)
{
	struct kobject *found = kset_find_obj(THIS_MODULE->mkobj.kobj.kset, "nvidia_uvm");

	kobject_put(found);
	return found;
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
	qgpu_probes_remove(&set);
	synchronize_srcu(&inside);
	synchronize_rcu_tasks();
	callable = false;
	drop_all();
}

/* If one of the probes cannot be placed, others have been there for a moment. */
static void place(void)
{
	lockdep_assert_held(&probes_lock);
	if (set.placed)
		return;
	if (qgpu_probes_place(&set)) {
		remove();
		return;
	}
	static_call_update(qgpu_map_external, (map_external_t)qgpu_probed_function(&probes[EXTERNAL].at_call));
	WRITE_ONCE(callable, true);
}

int qgpu_uvm_init(void)
{
	int ret = init_srcu_struct(&inside);

	if (ret)
		return ret;
	ret = qgpu_uvm_mem_init();
	if (ret)
		cleanup_srcu_struct(&inside);
	return ret;
}

void qgpu_uvm_uninit(void)
{
	qgpu_uvm_mem_uninit();
	cleanup_srcu_struct(&inside);
}

void qgpu_uvm_start(void)
{
	mutex_lock(&probes_lock);
	wanted = true;
	if (is_loaded())
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
	if (event != MODULE_STATE_LIVE)
		WRITE_ONCE(going, event == MODULE_STATE_GOING);
	if (event == MODULE_STATE_COMING && wanted)
		place();
	else if (event == MODULE_STATE_GOING)
		remove();
	mutex_unlock(&probes_lock);
}

bool qgpu_uvm_bounded(void)
{
	return qgpu_probes_work(&set);
}

bool qgpu_uvm_unbounded(void)
{
	return !qgpu_probes_work(&set) && !READ_ONCE(going) && is_loaded();
}

unsigned long qgpu_uvm_missed(void)
{
	return qgpu_probes_missed(&set);
}
