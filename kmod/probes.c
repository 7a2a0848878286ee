// SPDX-License-Identifier: GPL-2.0
/*
 * probes.c - kprobes on functions of the driver, placed all or none, and whether they still work. What they do is
 * decided in toctou.c, uvm.c and uvm_mem.c; what follows from probes that are missing, in probe_watch.c.
 *
 * Probes can be switched off behind their owner's back: debugfs' kprobes/enabled and the sysctl kernel.ftrace_enabled
 * disarm them, and no flag of theirs tells. So there are probes on two functions of this module too, one by ftrace and
 * one by breakpoint. qgpu_probes_try() calls both.
 *
 * Only a probe by ftrace reliably lets its handler redirect the call: the kernel may turn another one into a jump, which
 * ignores that. A probe with a post_handler has its function for itself (FTRACE_OPS_FL_IPMODIFY), so a live patch or a
 * BPF trampoline that would redirect it too is refused, or was there first and this module's probe is refused.
 */
#define pr_fmt(fmt) "qgpu: " fmt

#include <linux/hashtable.h>
#include <linux/mutex.h>
#include <linux/sched.h>
#include <linux/spinlock.h>

#include "probes.h"

static bool fire;
static unsigned int hits;		/* under try_lock */
static DEFINE_MUTEX(try_lock);

/* Read once by each, or the compiler knows what they return without calling them. */
static int canary_answer;

static noinline int canary_by_ftrace(void)
{
	return READ_ONCE(canary_answer);
}

static noinline notrace int canary_by_breakpoint(void)
{
	return READ_ONCE(canary_answer);
}

static int canary_redirected(void)
{
	return 1;
}

static int redirect(struct kprobe *probe, struct pt_regs *regs)
{
	instruction_pointer_set(regs, (unsigned long)canary_redirected);
	return 1;
}

static int hit(struct kprobe *probe, struct pt_regs *regs)
{
	hits++;
	return 0;
}

static void alone(struct kprobe *probe, struct pt_regs *regs, unsigned long flags)
{
}

static struct kprobe canaries[2];
static bool placed;

bool qgpu_probes_try(void)
{
	bool good = false;

	mutex_lock(&try_lock);
	if (placed) {
		hits = 0;
		good = canary_by_ftrace() == 1;
		canary_by_breakpoint();
		good &= READ_ONCE(hits) == 1;
	}
	WRITE_ONCE(fire, good);
	mutex_unlock(&try_lock);
	return good;
}

void qgpu_probes_init(void)
{
	canaries[0] = (struct kprobe){
		.addr = (kprobe_opcode_t *)canary_by_ftrace,
		.pre_handler = redirect,
		.post_handler = alone,
	};
	/*
	 * Without a post_handler the kernel turns it into a jump, and takes that back some jiffies after the end of the
	 * probe. If the module is gone by then the kernel forgets to, and refuses the next probe at this address
	 * (kill_optimized_kprobe() since 4fbd2f83fda0).
	 */
	canaries[1] = (struct kprobe){
		.addr = (kprobe_opcode_t *)canary_by_breakpoint,
		.pre_handler = hit,
		.post_handler = alone,
	};
	if (register_kprobe(&canaries[0]))
		return;
	if (!(canaries[0].flags & KPROBE_FLAG_FTRACE) || register_kprobe(&canaries[1]))
		unregister_kprobe(&canaries[0]);
	else
		placed = true;
}

void qgpu_probes_uninit(void)
{
	if (!placed)
		return;
	unregister_kprobe(&canaries[1]);
	unregister_kprobe(&canaries[0]);
	placed = false;
}

static DEFINE_SPINLOCK(passing_lock);	/* protects passing */
static DEFINE_HASHTABLE(passing, 12);	/* by task: a pod can have any number inside the driver */

void qgpu_pass_begin(struct qgpu_pass *pass, const void *key)
{
	pass->task = current;
	pass->key = key;
	spin_lock(&passing_lock);
	hash_add(passing, &pass->node, (unsigned long)current);
	spin_unlock(&passing_lock);
}

void qgpu_pass_end(struct qgpu_pass *pass)
{
	spin_lock(&passing_lock);
	hash_del(&pass->node);
	spin_unlock(&passing_lock);
}

struct qgpu_pass *qgpu_pass_of(const void *key)
{
	struct qgpu_pass *pass, *found = NULL;

	spin_lock(&passing_lock);
	hash_for_each_possible(passing, pass, node, (unsigned long)current) {
		if (pass->task == current && pass->key == key)
			found = pass;
	}
	spin_unlock(&passing_lock);
	return found;
}

static int place(struct qgpu_probe *probe)
{
	int ret;

	if (!probe->called) {
		probe->at_return = (struct kretprobe){
			.kp.symbol_name = probe->symbol,
			.entry_handler = probe->entered,
			.handler = probe->returned,
			.data_size = probe->data_size,
			.maxactive = probe->at_once,
		};
		return register_kretprobe(&probe->at_return);
	}
	probe->at_call = (struct kprobe){
		.symbol_name = probe->symbol,
		.pre_handler = probe->called,
		.post_handler = probe->redirects ? alone : NULL,
	};
	ret = register_kprobe(&probe->at_call);
	if (ret || !probe->redirects || probe->at_call.flags & KPROBE_FLAG_FTRACE)
		return ret;
	unregister_kprobe(&probe->at_call);
	synchronize_rcu_tasks();	/* it has been armed for a moment, see take_away() */
	return -EOPNOTSUPP;
}

static void take_away(struct qgpu_probes *set, int nr)
{
	while (nr--) {
		if (set->probes[nr].called)
			unregister_kprobe(&set->probes[nr].at_call);
		else
			unregister_kretprobe(&set->probes[nr].at_return);
	}
	synchronize_rcu_tasks();	/* whoever was redirected does not give up the CPU before it is there */
}

int qgpu_probes_place(struct qgpu_probes *set)
{
	int i, ret = 0;

	for (i = 0; i < set->nr && !ret; i++)
		ret = place(&set->probes[i]);
	if (!ret) {
		set->missed = 0;
		WRITE_ONCE(set->placed, true);
	} else {
		if (--i)
			take_away(set, i);
		if (ret != set->error)
			pr_warn("%s: cannot probe %s (%d)\n", set->what, set->probes[i].symbol, ret);
	}
	set->error = ret;
	return ret;
}

void qgpu_probes_remove(struct qgpu_probes *set)
{
	if (!set->placed)
		return;
	WRITE_ONCE(set->placed, false);
	take_away(set, set->nr);
}

static bool is_dead(const struct qgpu_probe *probe)
{
	const struct kprobe *kprobe = probe->called ? &probe->at_call : &probe->at_return.kp;

	return READ_ONCE(kprobe->flags) & (KPROBE_FLAG_GONE | KPROBE_FLAG_DISABLED);
}

bool qgpu_probes_work(const struct qgpu_probes *set)
{
	int i;

	if (!READ_ONCE(set->placed) || !READ_ONCE(fire))
		return false;
	for (i = 0; i < set->nr; i++) {
		if (is_dead(&set->probes[i]))
			return false;
	}
	return true;
}

/* Also those that another probe's handler ran into: the kernel runs no handler inside a handler. */
unsigned long qgpu_probes_missed(struct qgpu_probes *set)
{
	unsigned long missed = 0, before = set->missed;
	int i;

	for (i = 0; READ_ONCE(set->placed) && i < set->nr; i++) {
		const struct qgpu_probe *probe = &set->probes[i];

		missed += probe->called ? probe->at_call.nmissed :
					  probe->at_return.kp.nmissed + probe->at_return.nmissed;
	}
	set->missed = missed;
	return missed > before ? missed - before : 0;
}
