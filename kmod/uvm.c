// SPDX-License-Identifier: GPL-2.0
/*
 * uvm.c - bounds managed memory, by its address space: what a pod with a memory limit maps from /dev/nvidia-uvm is
 * charged in full, on every pGPU on which it has a limit, until it is unmapped. What does not fit is refused.
 *
 * UVM's table of operations is const and compared by address (uvm.c:uvm_file_is_nvidia_uvm), so its functions are
 * probed; these are the same from 535 to 595. A refused mmap goes on in refuse() instead of in UVM.
 *
 * The charge of a file is counted anew at each of its mmaps, from the mappings that are there, so what went unseen (an
 * mmap that failed, a mapping from before we came) does not add up. The caller holds mmap_lock for writing: they do not
 * change meanwhile.
 *
 * Going away: no handler runs once the probes are unregistered, but a task may have been sent to refuse() and not have
 * got there. It gives up the CPU of its own accord nowhere before it is back in the kernel, so synchronize_rcu_tasks()
 * waits for it.
 */
#include <linux/hashtable.h>
#include <linux/kprobes.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "compat.h"
#include "events.h"
#include "mem.h"
#include "pod.h"
#include "slice.h"
#include "uvm.h"

/* uvm_types.h */
#define UVM_INIT_FLAGS_DISABLE_HMM			0x1ul
#define UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE	0x2ul

/* A file of UVM's that a pod with a limit has mapped. */
struct uvm_file {
	struct hlist_node node;
	struct file *filp;
	struct qgpu_pod *pod;		/* a reference */
	u64 charged[QGPU_MAX_GPUS];
};

static DEFINE_SPINLOCK(files_lock);	/* protects files; mem_lock (mem.c) is taken inside */
static DEFINE_HASHTABLE(files, 6);

static DEFINE_MUTEX(probes_lock);	/* protects what follows */
static bool wanted, placed;

static bool is_limited(const struct qgpu_pod *pod, int gpu)
{
	return READ_ONCE(pod->shares[gpu].memory_limit) != U64_MAX;
}

/* The current task's pod if it has a limit anywhere; put it. */
static struct qgpu_pod *limited_pod(void)
{
	struct qgpu_pod *pod = qgpu_pod_of_current();
	int i, n = qgpu_gpu_count();

	for (i = 0; pod && i < n; i++) {
		if (is_limited(pod, i))
			return pod;
	}
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
	file->pod = qgpu_pod_get(pod);
	hash_add(files, &file->node, (unsigned long)filp);
	return file;
}

/* All or nothing, on every pGPU with a limit. */
static int charge(struct uvm_file *file, u64 size)
{
	u64 was[QGPU_MAX_GPUS];
	int i, n = qgpu_gpu_count();

	memcpy(was, file->charged, sizeof(was));
	for (i = 0; i < n; i++) {
		u64 due = is_limited(file->pod, i) ? size : 0;

		if (qgpu_mem_resize(file->pod, i, was[i], due))
			goto err_undo;
		file->charged[i] = due;
	}
	return 0;
err_undo:
	while (i--) {
		if (!qgpu_mem_resize(file->pod, i, file->charged[i], was[i]))
			file->charged[i] = was[i];
	}
	return -ENOMEM;
}

static void drop(struct uvm_file *file)
{
	int i;

	lockdep_assert_held(&files_lock);
	hash_del(&file->node);
	for (i = 0; i < QGPU_MAX_GPUS; i++) {
		if (file->charged[i])
			qgpu_mem_unreserve(file->pod, i, file->charged[i]);
	}
	qgpu_pod_put(file->pod);
	kfree(file);
}

/* uvm.c:uvm_mmap makes a managed range of nothing else. */
static bool may_be_managed(const struct vm_area_struct *vma)
{
	const unsigned long needed = VM_SHARED | VM_READ | VM_WRITE;

	return (vma->vm_flags & needed) == needed && vma->vm_start == vma->vm_pgoff << PAGE_SHIFT;
}

static u64 size_of(const struct vm_area_struct *vma)
{
	return vma->vm_end - vma->vm_start;
}

static int refuse(struct file *filp, struct vm_area_struct *vma)
{
	return -ENOMEM;
}

static int mmap_called(struct kprobe *probe, struct pt_regs *regs)
{
	struct file *filp = (struct file *)regs_get_kernel_argument(regs, 0);
	struct vm_area_struct *vma = (struct vm_area_struct *)regs_get_kernel_argument(regs, 1);
	struct qgpu_pod *pod = may_be_managed(vma) ? limited_pod() : NULL;
	struct uvm_file *file;
	int ret;

	if (!pod)
		return 0;
	spin_lock(&files_lock);
	file = find_or_add(filp, pod);
	ret = file ? charge(file, qgpu_mapped(current->mm, filp, vma) + size_of(vma)) : -ENOMEM;
	spin_unlock(&files_lock);
	if (ret) {
		atomic64_inc(&pod->refused_allocs);
		qgpu_event(QGPU_EVENT_MEMORY_REFUSED, pod->id, 0, size_of(vma));
		instruction_pointer_set(regs, (unsigned long)refuse);
	}
	qgpu_pod_put(pod);
	return ret != 0;
}

static int close_called(struct kprobe *probe, struct pt_regs *regs)
{
	const struct vm_area_struct *vma = (struct vm_area_struct *)regs_get_kernel_argument(regs, 0);
	struct uvm_file *file;
	int i;

	spin_lock(&files_lock);
	file = find(vma->vm_file);
	for (i = 0; file && i < QGPU_MAX_GPUS; i++) {
		u64 back = min(file->charged[i], size_of(vma));

		if (back)
			qgpu_mem_unreserve(file->pod, i, back);
		file->charged[i] -= back;
	}
	spin_unlock(&files_lock);
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

/* uvm_va_space_create(mapping, where, flags). HMM would bring ordinary memory to the card without a mapping. */
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

static const struct {
	const char *symbol;
	kprobe_pre_handler_t handler;
} hooks[] = {
	{ "nvidia_uvm:uvm_mmap_entry", mmap_called },
	{ "nvidia_uvm:uvm_vm_close_managed_entry", close_called },
	{ "nvidia_uvm:uvm_release_entry", release_called },
	{ "nvidia_uvm:uvm_va_space_create", create_called },
};

static struct kprobe probes[ARRAY_SIZE(hooks)];

static void take_away(int n)
{
	while (n--)
		unregister_kprobe(&probes[n]);
	synchronize_rcu_tasks();
}

/* Only a probe by ftrace is certain to let its handler send the call elsewhere: one by a jump would pass over that. */
static void place(void)
{
	int i;

	lockdep_assert_held(&probes_lock);
	for (i = 0; i < ARRAY_SIZE(hooks); i++) {
		probes[i] = (struct kprobe){ .symbol_name = hooks[i].symbol, .pre_handler = hooks[i].handler };
		if (register_kprobe(&probes[i])) {	/* the first: UVM is not there */
			if (i)
				take_away(i);
			return;
		}
	}
	if (probes[0].flags & KPROBE_FLAG_FTRACE)
		WRITE_ONCE(placed, true);
	else
		take_away(i);
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
	if (placed)
		take_away(ARRAY_SIZE(hooks));
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
