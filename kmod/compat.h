/* SPDX-License-Identifier: GPL-2.0 */
/*
 * compat.h - every difference between the kernels qgpu builds on, 5.10 to the newest, each with its version.
 * No other file of the module compares kernel versions.
 */
#ifndef _QGPU_COMPAT_H
#define _QGPU_COMPAT_H

#include <linux/hrtimer.h>
#include <linux/kthread.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/ptrace.h>
#include <linux/version.h>

/* Since 6.4 (ac3b43283923) a module's memory is an array by kind; before, one layout with sizes in order. */
static inline bool qgpu_in_writable_data(const struct module *mod, const void *at, size_t size)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 4, 0)
	const void *base = mod->mem[MOD_DATA].base;
	size_t length = mod->mem[MOD_DATA].size;
#else
	const void *base = mod->core_layout.base + mod->core_layout.ro_after_init_size;
	size_t length = mod->core_layout.size - mod->core_layout.ro_after_init_size;
#endif
	return at >= base && at + size <= base + length;
}

/* Since 6.13 (9bc273e3076f) hrtimer_setup() does what hrtimer_init() and an assignment did. */
static inline void qgpu_hrtimer_setup(struct hrtimer *timer, enum hrtimer_restart (*fn)(struct hrtimer *))
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
	hrtimer_setup(timer, fn, CLOCK_MONOTONIC, HRTIMER_MODE_ABS);
#else
	hrtimer_init(timer, CLOCK_MONOTONIC, HRTIMER_MODE_ABS);
	timer->function = fn;
#endif
}

/* Since 6.14 (b04e317b5226) kthread_create_worker() leaves the worker asleep and kthread_run_worker() starts it. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 14, 0)
#define qgpu_run_worker(name, ...)	kthread_run_worker(0, name, ##__VA_ARGS__)
#else
#define qgpu_run_worker(name, ...)	kthread_create_worker(0, name, ##__VA_ARGS__)
#endif

/* Since 6.1 (763ecb035029) mappings are in a tree; before, in a list. By address, ascending. Needs mmap_lock. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 1, 0)
#define qgpu_for_each_mapping(mm, vma) \
	for (VMA_ITERATOR(qgpu_each, mm, 0); ((vma) = vma_next(&qgpu_each)); )
#else
#define qgpu_for_each_mapping(mm, vma)	for ((vma) = (mm)->mmap; (vma); (vma) = (vma)->vm_next)
#endif

/* No kernel has a setter beside regs_get_kernel_argument(). */
static inline void qgpu_set_argument_2(struct pt_regs *regs, unsigned long value)
{
#ifdef CONFIG_X86_64
	regs->dx = value;
#else
	regs->regs[2] = value;
#endif
}

#endif /* _QGPU_COMPAT_H */
