// SPDX-License-Identifier: GPL-2.0
/*
 * fault.c - what a driver or a card that fails does to its callers: wrong answers, late ones, none. Written to
 * /proc/driver/nvidia/faults, a line each; "clear" ends them all, and lets go of who is kept:
 *
 *	CALL STATUS COUNT EFFECT STALL
 *
 * CALL: whom it meets; see calls[]. STATUS: RM's, in hex; 0: as without a fault. COUNT: how often; 0: until cleared.
 * EFFECT: what is done all the same: 0 nothing, 1 all, 2 (gates) the first half. STALL: how long the call is kept
 * before, in ms, with all locks held, as RM keeps them; -1: until cleared; below: so many ms of polling, as RM polls.
 * Reading it says how many calls were met, by CALL.
 */
#include <linux/delay.h>
#include <linux/ktime.h>
#include <linux/proc_fs.h>
#include <linux/sched/clock.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/wait.h>

#include "sim.h"

#define FAULTS_MAX 16

static const struct {
	const char *name;
	u32 cmd;		/* of a kernel caller's control; 0: see meets() */
} calls[] = {
	{ "any" },		/* of the kernel's calls */
	{ "gate", NV2080_FIFO_DISABLE_CHANNELS },
	{ "close" },
	{ "open" },
	{ "slice", NVA06C_SET_TIMESLICE },
	{ "info", NV0000_CLIENT_GET_HANDLE_INFO },
	{ "subdevice", NV0080_GPU_FIND_SUBDEVICE_HANDLE },
	{ "preemption", NV2080_GR_SET_CTXSW_PREEMPTION_MODE },
	{ "copies", NV2080_CE_GET_CAPS_V2 },
	{ "pod" },		/* a process's call */
	{ "size", NV0041_GET_SURFACE_INFO },
};

enum { ANY, GATE, CLOSE, OPEN, POD = 9 };

struct fault {
	bool live;
	unsigned int call, count, effect;
	u32 status;
	int stall_ms;
};

static DEFINE_SPINLOCK(faults_lock);
static struct fault faults[FAULTS_MAX];
static unsigned int met[ARRAY_SIZE(calls)], cleared;
static DECLARE_WAIT_QUEUE_HEAD(kept);

static bool meets(const struct fault *fault, const struct nvos54 *control)
{
	const struct nv2080_disable_channels *gate;

	if (!fault->live)
		return false;
	if (!control)
		return fault->call == POD;
	if (fault->call == ANY)
		return true;
	if (fault->call != CLOSE && fault->call != OPEN)
		return calls[fault->call].cmd == control->cmd;
	gate = (void *)(uintptr_t)control->params;
	return control->cmd == NV2080_FIFO_DISABLE_CHANNELS && gate->disable == (fault->call == CLOSE);
}

static void keep(int stall_ms, unsigned int at)
{
	u64 until_ns = local_clock() - (s64)stall_ms * NSEC_PER_MSEC;

	if (stall_ms > 0)
		wait_event_timeout(kept, READ_ONCE(cleared) != at, msecs_to_jiffies(stall_ms));
	else if (stall_ms == -1)
		wait_event_idle(kept, READ_ONCE(cleared) != at);
	else
		while (stall_ms && local_clock() < until_ns && READ_ONCE(cleared) == at)
			cpu_relax();
}

u32 sim_fault(const struct nvos54 *control, unsigned int *effect)
{
	unsigned int i, at;
	struct fault taken = {};

	spin_lock(&faults_lock);
	at = cleared;
	for (i = 0; i < FAULTS_MAX && !taken.live; i++) {
		if (!meets(&faults[i], control))
			continue;
		taken = faults[i];
		met[taken.call]++;
		if (faults[i].count && !--faults[i].count)
			faults[i].live = false;
	}
	spin_unlock(&faults_lock);
	*effect = taken.status ? taken.effect : 1;
	keep(taken.stall_ms, at);
	return taken.status;
}

static int add(char *line)
{
	struct fault fault = { .live = true };
	char name[12];
	unsigned int i;

	if (sscanf(line, "%11s %x %u %u %d", name, &fault.status, &fault.count, &fault.effect, &fault.stall_ms) != 5)
		return -EINVAL;
	while (fault.call < ARRAY_SIZE(calls) && strcmp(calls[fault.call].name, name))
		fault.call++;
	if (fault.call == ARRAY_SIZE(calls))
		return -EINVAL;
	spin_lock(&faults_lock);
	for (i = 0; i < FAULTS_MAX && faults[i].live; i++)
		;
	if (i < FAULTS_MAX)
		faults[i] = fault;
	spin_unlock(&faults_lock);
	return i < FAULTS_MAX ? 0 : -ENOSPC;
}

static void clear(void)
{
	spin_lock(&faults_lock);
	memset(faults, 0, sizeof(faults));
	cleared++;
	spin_unlock(&faults_lock);
	wake_up_all(&kept);
}

static int take(char *text)
{
	char *line;
	int ret = 0;

	if (!strcmp(strim(text), "clear")) {
		clear();
		return 0;
	}
	while (!ret && (line = strsep(&text, "\n"))) {
		if (*line)
			ret = add(line);
	}
	return ret;
}

static int show(struct seq_file *seq, void *unused)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(calls); i++)
		seq_printf(seq, "%s %u\n", calls[i].name, met[i]);
	return 0;
}

static ssize_t faults_write(struct file *file, const char __user *from, size_t size, loff_t *pos)
{
	char *text = memdup_user_nul(from, min_t(size_t, size, 4096));
	int ret;

	if (IS_ERR(text))
		return PTR_ERR(text);
	ret = take(text);
	kfree(text);
	return ret ?: size;
}

static int faults_open(struct inode *inode, struct file *file)
{
	return single_open(file, show, NULL);
}

static const struct proc_ops faults_ops = {
	.proc_open = faults_open,
	.proc_read = seq_read,
	.proc_write = faults_write,
	.proc_lseek = seq_lseek,
	.proc_release = single_release,
};

void sim_fault_init(struct proc_dir_entry *folder)
{
	proc_create("faults", 0644, folder, &faults_ops);
}
