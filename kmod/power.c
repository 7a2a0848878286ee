// SPDX-License-Identifier: GPL-2.0
/*
 * power.c - notices that the driver is put to sleep by itself, before the machine. nvidia-suspend.service writes to
 * /proc/driver/nvidia/suspend before systemd suspends, and so before pause.c hears of it. pause.c does what is to be
 * done.
 *
 * The write comes to nv_set_system_power_state() (nv.c), the same from 535 to 595. Where the kernel places a probe on it
 * by ftrace, the probe sends the call to a function of this module, which makes the call in its turn: by a static call,
 * see uvm.c. Elsewhere that service must not be used (docs/kmod.md), and the log says so.
 *
 * Going away: see uvm.c. Besides, a task may sleep in the driver's function and return to this module, so calls are
 * counted.
 */
#include <linux/kprobes.h>
#include <linux/rcupdate.h>
#include <linux/sched.h>
#include <linux/static_call.h>
#include <linux/wait.h>

#include "compat.h"
#include "nvrm.h"
#include "pause.h"
#include "power.h"
#include "rm.h"

/* nv.h: nv_power_state_t; what is below it are kinds of sleep */
#define NV_POWER_STATE_RUNNING 2

static u32 not_placed(int state, int depth)
{
	return NV_ERR_INVALID_STATE;
}

typedef u32 (*set_power_t)(int state, int depth);
DEFINE_STATIC_CALL(qgpu_driver_set_power, not_placed);

static atomic_t inside = ATOMIC_INIT(0);
static struct task_struct *passing;	/* the task whose call goes on to the driver, which lets in one at a time */
static bool asleep;			/* under power_lock */
static DEFINE_MUTEX(power_lock);
static bool placed;

static int called(struct kprobe *probe, struct pt_regs *regs);

static void after(struct kprobe *probe, struct pt_regs *regs, unsigned long flags)
{
}

static struct kprobe probe = {
	.symbol_name = "nvidia:nv_set_system_power_state",
	.pre_handler = called,
	.post_handler = after,	/* with one, nobody else redirects the function */
};

static void wake(void)
{
	qgpu_rm_sleep(false);
	qgpu_unpause(QGPU_PAUSE_DRIVER);
}

/* The driver's own has other types of the same size. */
static noinline u32 set_power(int state, int depth)
{
	bool sleeps = state != NV_POWER_STATE_RUNNING;
	u32 status = NV_ERR_INVALID_STATE;

	mutex_lock(&power_lock);
	if (!sleeps || asleep || !qgpu_sleep(QGPU_PAUSE_DRIVER)) {
		if (sleeps)
			qgpu_rm_sleep(true);
		WRITE_ONCE(passing, current);
		status = static_call(qgpu_driver_set_power)(state, depth);
		WRITE_ONCE(passing, NULL);
		if (status == NV_OK)
			asleep = sleeps;
		if (!asleep)
			wake();
	}
	mutex_unlock(&power_lock);
	if (atomic_dec_and_test(&inside))
		wake_up_var(&inside);
	return status;
}

static int called(struct kprobe *kprobe, struct pt_regs *regs)
{
	if (READ_ONCE(passing) == current || !READ_ONCE(placed))
		return 0;
	atomic_inc(&inside);
	instruction_pointer_set(regs, (unsigned long)set_power);
	return 1;
}
NOKPROBE_SYMBOL(called);

void qgpu_power_start(void)
{
	probe.flags = 0;
	probe.addr = NULL;
	if (!register_kprobe(&probe)) {
		if (probe.flags & KPROBE_FLAG_FTRACE) {
			static_call_update(qgpu_driver_set_power, (set_power_t)qgpu_probed_function(&probe));
			WRITE_ONCE(placed, true);
		} else {
			unregister_kprobe(&probe);
		}
	}
	if (!placed)
		pr_notice("qgpu: the driver's own suspend is not seen: use no nvidia-suspend.service\n");
}

void qgpu_power_stop(void)
{
	if (!placed)
		return;
	WRITE_ONCE(placed, false);
	unregister_kprobe(&probe);
	synchronize_rcu_tasks();
	wait_var_event(&inside, !atomic_read(&inside));
	synchronize_rcu_tasks();	/* until the last task has returned from here */
	asleep = false;
	wake();
}
