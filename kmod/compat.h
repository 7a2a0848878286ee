/* SPDX-License-Identifier: GPL-2.0 */
/*
 * compat.h - every difference between the kernels qgpu builds on, 5.10 to the newest, each with its version.
 * No other file of the module compares kernel versions.
 */
#ifndef _QGPU_COMPAT_H
#define _QGPU_COMPAT_H

#include <linux/freezer.h>
#include <linux/hrtimer.h>
#include <linux/kprobes.h>
#include <linux/kthread.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/ptrace.h>
#include <linux/sched.h>
#include <linux/version.h>
#include <linux/wait.h>

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

/* Why the module must not run on this kernel; NULL: it may. Which ones were tried: docs/kmod.md. */
static inline const char *qgpu_kernel_unfit(void)
{
#ifdef CONFIG_PREEMPT_RT
	return "PREEMPT_RT: its spinlocks sleep, and the handlers of probes must not";
#endif
	/* CONFIG_CFI since 6.18 */
#if defined(CONFIG_CFI_CLANG) || defined(CONFIG_CFI)
	return "kCFI: it ends calls to the driver through pointers whose types are not the driver's own";
#endif
	return NULL;
}

/* No kernel has a setter beside regs_get_kernel_argument(). */
#if defined(CONFIG_X86_64)
#define qgpu_set_argument_1(regs, value)	((regs)->si = (value))
#define qgpu_set_argument_2(regs, value)	((regs)->dx = (value))
#elif defined(CONFIG_ARM64)
#define qgpu_set_argument_1(regs, value)	((regs)->regs[1] = (value))
#define qgpu_set_argument_2(regs, value)	((regs)->regs[2] = (value))
#else
#error "qgpu is for x86-64; arm64 compiles, but lacks probes by ftrace, so limits are refused there"
#endif

/* Wait uninterruptibly, but let the machine sleep meanwhile. Since 6.1 (f5d39b020809) that is a state of the task. */
#ifdef TASK_FREEZABLE
#define qgpu_wait_freezable(wq, condition) \
	___wait_event(wq, condition, (TASK_IDLE | TASK_FREEZABLE), 0, 0, schedule())
#else
#define qgpu_wait_freezable(wq, condition) do { \
	freezer_do_not_count(); \
	wait_event(wq, condition); \
	freezer_count(); \
} while (0)
#endif

/* How long the current task has waited for a CPU in all; 0 where the kernel does not count that. */
static inline u64 qgpu_starved_ns(void)
{
#ifdef CONFIG_SCHED_INFO
	return current->sched_info.run_delay;
#else
	return 0;
#endif
}

/*
 * The function that a probe by ftrace is on. Since 5.18 (aebfd12521d9) the probe stands behind an instruction that marks
 * where indirect calls may lead.
 */
static inline void *qgpu_probed_function(const struct kprobe *probe)
{
#if defined(CONFIG_X86_64) && LINUX_VERSION_CODE >= KERNEL_VERSION(5, 18, 0)
	static const u8 endbr64[] = { 0xf3, 0x0f, 0x1e, 0xfa };
	u8 *before = (u8 *)probe->addr - sizeof(endbr64);

	if (!memcmp(before, endbr64, sizeof(endbr64)))
		return before;
#endif
	return probe->addr;
}

#ifndef __nocfi		/* 5.13 (cf68fffb66d6) */
#define __nocfi
#endif

#endif /* _QGPU_COMPAT_H */
